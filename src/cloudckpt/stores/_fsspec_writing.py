"""Writing through fsspec's file objects without ever completing half an object."""

from __future__ import annotations

import contextlib
from typing import Any

from cloudckpt.options import MIB
from cloudckpt.stores._body import batches
from cloudckpt.stores._fsspec_backends import Filesystem
from cloudckpt.stores._fsspec_errors import says_absence
from cloudckpt.stores.base import Views

_CHUNK_BYTES = 16 * MIB


def stream(filesystem: Filesystem, path: str, views: Views) -> None:
    """Write through a file object that publishes nothing by itself, then commit it; on any failure, discard it."""
    existed = _exists(filesystem, path)
    # Without autocommit, close() does not complete the upload, neither below nor in the garbage collector; it does for
    # file systems that ignore the setting, hence what _discard does besides.
    file = filesystem.open(path, "wb", autocommit=False)
    # fsspec keeps every such file for its transaction to commit, although none is under way.
    with contextlib.suppress(ValueError):
        filesystem.transaction.files.remove(file)
    try:
        for batch in batches(views, max_bytes=_CHUNK_BYTES, max_views=1):
            file.write(batch[0])
        file.close()
        if commit := getattr(file, "commit", None):
            commit()
    except BaseException:
        _discard(filesystem, file, None if existed else path)
        raise


def _exists(filesystem: Filesystem, path: str) -> bool:
    # fsspec's own `exists` takes every error for absence, and what is absent is removed again where the write fails.
    try:
        filesystem.info(path)
    except FileNotFoundError as error:
        if says_absence(error):
            return False
        raise
    return True


def _discard(filesystem: Filesystem, file: Any, fresh_path: str | None) -> None:
    # Whatever fails here must not hide the error that led here; what is left is what gc is for.
    with contextlib.suppress(Exception):
        file.discard()
    # A buffered file whose destructor finds it open sends its last block, and some complete the object with it.
    with contextlib.suppress(Exception):
        file.closed = True
    if fresh_path is not None:
        with contextlib.suppress(Exception):
            filesystem.rm_file(fresh_path)


def make_parents(filesystem: Filesystem, path: str) -> None:
    """Create the directories above `path`, where the file system has any."""
    # Asynchronous file systems are object stores, where "making directories" would at most make a bucket.
    if not filesystem.async_impl:
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
