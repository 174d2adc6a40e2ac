"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(
    package: str, names_by_module: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` for the module `package` (PEP 562).

    Importing torch takes seconds. A command that lists checkpoints or prints its help need not wait for that.

    Args:
        package: ``__name__`` of the module that gets the names.
        names_by_module: For each defining module, its names, separated by spaces.

    """
    module_of = {name: module for module, names in names_by_module.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in module_of:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[package])  # for Python's own suggestion
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *module_of})
