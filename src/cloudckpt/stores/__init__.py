"""Stores hold the objects of checkpoints. They know bytes and keys, and no tensors.

`SERVICES` in ``uri.py`` names the class of each store.
"""

from __future__ import annotations

import os
import pkgutil
from dataclasses import replace

from cloudckpt._this_process import refuse_in_fork
from cloudckpt.errors import InvalidOptionError
from cloudckpt.options import Options, require_options
from cloudckpt.stores.base import Store
from cloudckpt.uri import Location, parse_location

__all__ = ["Store", "open_store", "options_at"]


def open_store(uri: str | os.PathLike[str] | Location, options: Options) -> Store:
    """Return the store rooted at `uri`. Makes no request.

    Raises `InvalidURIError`, `InvalidOptionError` for an unknown storage option or for `options` or a `wrap_store` of
    another class, and `MissingDependencyError` if the store's package is not installed.
    """
    refuse_in_fork()
    options = require_options(options)
    store = _make_store(parse_location(uri), options)
    if options.advanced.wrap_store is None:
        return store
    wrapped = options.advanced.wrap_store(store)
    if not hasattr(wrapped, "capabilities"):
        raise InvalidOptionError(
            f"wrap_store must return a store, but it returned {wrapped!r:.80}: return the store that it is given, "
            "or one that stands for it"
        )
    return wrapped


def options_at(location: Location, given_for: Location, options: Options) -> Options:
    """Return options for `location`: the storage options are left out unless `given_for` is of the same kind."""
    return options if location.is_of_kind(given_for) else replace(options, storage_options={})


def _make_store(location: Location, options: Options) -> Store:
    service = location.service
    if options.storage_options and not service.takes_options:
        raise InvalidOptionError(
            f"{location.uri} takes no storage options, and {', '.join(sorted(options.storage_options))} would be "
            f"ignored: leave them out for files and memory."
        )
    # Each client is imported only if it is used: boto3 alone takes a quarter of a second.
    store: Store = pkgutil.resolve_name(service.store).at(location, options)
    return store
