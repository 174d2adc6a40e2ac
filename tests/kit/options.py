"""Build options from plain keywords, because most tests set small sizes of `AdvancedOptions`."""

from __future__ import annotations

import dataclasses
from typing import Any

from cloudckpt.options import AdvancedOptions, Options

_ADVANCED = frozenset(field.name for field in dataclasses.fields(AdvancedOptions))


def make_options(**settings: Any) -> Options:
    """Return options. Keywords that `AdvancedOptions` has are set there."""
    advanced = {name: settings.pop(name) for name in _ADVANCED & settings.keys()}
    return Options(advanced=AdvancedOptions(**advanced), **settings)
