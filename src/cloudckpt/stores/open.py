"""Open the store of a location. "Adding a store" in ``CONTRIBUTING.md`` lists all places that a new store needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudckpt._this_process import refuse_in_fork
from cloudckpt.errors import InvalidOptionError
from cloudckpt.options import DEFAULT_CONNECTIONS, Options
from cloudckpt.uri import Location, parse_location

if TYPE_CHECKING:
    import os

    from cloudckpt.stores.base import Store


def open_store(uri: str | os.PathLike[str] | Location, options: Options) -> Store:
    """The store rooted at `uri`. Nothing is contacted before its first call.

    Raises `InvalidURIError`, `InvalidOptionError` for a storage option that the store does not have or `options` or a
    `wrap_store` that are none, and `MissingDependencyError` where its package is not installed.
    """
    refuse_in_fork()
    if not isinstance(options, Options):  # type checkers see it; a notebook does not
        raise InvalidOptionError(
            f"options must be a cloudckpt.Options, not {type(options).__name__}: Options(retries=3)"
        )
    store = _opened(parse_location(uri), options)
    if options.advanced.wrap_store is None:
        return store
    wrapped = options.advanced.wrap_store(store)
    if not hasattr(wrapped, "capabilities"):
        raise InvalidOptionError(
            f"wrap_store must return a store, but it returned {wrapped!r:.80}: give back the store that it is given, "
            "or one that stands for it"
        )
    return wrapped


def _opened(location: Location, options: Options) -> Store:
    # Each client is imported only by whoever uses it: boto3 alone takes a quarter of a second.
    if location.scheme in ("s3", "gs"):
        from cloudckpt.stores.gcs import GCSStore
        from cloudckpt.stores.s3 import S3Store

        make = S3Store if location.scheme == "s3" else GCSStore
        return make(
            location.authority,
            location.path,
            storage_options=options.storage_options,
            timeout_s=options.timeout_s,
            connections=options.connections or DEFAULT_CONNECTIONS,
        )
    if location.scheme == "file":
        from cloudckpt.stores.local import LocalStore

        _refuse_storage_options(location, options)
        return LocalStore(location.path)
    if location.scheme == "memory":
        from cloudckpt.stores.memory import MemoryStore

        _refuse_storage_options(location, options)
        return MemoryStore(location.authority, location.path)
    from cloudckpt.stores.fsspec_store import FsspecStore

    return FsspecStore(location, storage_options=options.storage_options)


def _refuse_storage_options(location: Location, options: Options) -> None:
    if options.storage_options and not location.takes_options:
        raise InvalidOptionError(
            f"{location.uri} takes no storage options, and {', '.join(sorted(options.storage_options))} would be "
            f"ignored: leave them out for files and memory."
        )
