"""Objects in any file system of fsspec."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from typing import Any, NoReturn

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from cloudckpt.errors import (
    BucketNotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.options import MIB
from cloudckpt.stores._body import batches, check_crc32c, check_key, crc32c_of, num_bytes
from cloudckpt.stores.base import Capabilities, Limits, ObjectInfo, Part, Store, UploadedPart, UploadInfo, Views
from cloudckpt.stores.fsspec_backends import (
    Create,
    Filesystem,
    Instances,
    Source,
    backend_of,
    says_absence,
    translated,
)
from cloudckpt.uri import Location

_LIMITS = Limits(min_part_bytes=1, max_part_bytes=1 << 40, max_parts=1, max_put_bytes=1 << 40)
_CHUNK_BYTES = 16 * MIB
_WHOLE_BYTES = 32 * MIB  # up to here one joined copy is cheaper than a file object
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_VERSION_NAMES = ("generation", "ETag", "etag")
_MEMORY_LOCK = threading.RLock()


class FsspecStore(Store):
    """A folder of an fsspec file system: the name of a protocol, or an instance to take the settings from.

    - Objects are written whole, by one stream; there are no multipart uploads.
    - A write that fails is discarded if the file system can, and else its object is removed. Nothing half-written is
      ever completed, not by the garbage collector either.
    - Create-if-absent works for ``az`` and ``abfs`` (adlfs) and, within one process, for fsspec's own ``memory``. Other
      protocols declare none.
    - Only the file system's own timeouts bound a wait; they are among its `storage_options`.
    """

    limits = _LIMITS

    def __init__(
        self,
        filesystem: Filesystem,  # or the name of a protocol
        root: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        uri: str | None = None,
    ) -> None:
        source = (
            Source.of_protocol(filesystem, storage_options or {})
            if isinstance(filesystem, str)
            else Source.of_instance(filesystem)
        )
        self._instances = Instances(source)
        self._backend = backend_of(source.kind)
        self._root = str(source.kind._strip_protocol(root)).rstrip("/")  # noqa: SLF001  # how fsspec's own callers do
        protocol = source.kind.protocol if isinstance(source.kind.protocol, str) else source.kind.protocol[0]
        self._uri = uri or f"{protocol}://{self._root}"
        self.capabilities = Capabilities(
            conditional_create=self._backend.create is not Create.NO, multipart=False, verifies_crc32c=False
        )

    @classmethod
    def from_location(cls, location: Location, *, storage_options: Mapping[str, Any]) -> FsspecStore:
        """Return the store at a URI. Host, port and user of the URI become options of the file system."""
        kind = Source.of_protocol(location.scheme, {}).kind
        options = {**kind._get_kwargs_from_urls(location.uri), **storage_options}  # noqa: SLF001
        return cls(location.scheme, location.uri, storage_options=options, uri=location.uri)

    @property
    def uri(self) -> str:
        return self._uri

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        with self._needs_root("put", key), self._call("put", key) as (filesystem, path):
            check_crc32c(self, key, "put", expected=crc32c, actual=crc32c_of(views))
            if not self._backend.pipes_whole:
                _make_parents(filesystem, path)
            if if_absent:
                self._create(filesystem, key, path, b"".join(views))
            elif self._backend.pipes_whole and (self._backend.locked or num_bytes(views) <= _WHOLE_BYTES):
                filesystem.pipe_file(path, b"".join(views))
            else:
                _stream(filesystem, path, views)

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        wanted_bytes = num_bytes(views)
        with self._call("read_into", key) as (filesystem, path):
            if wanted_bytes:
                body = memoryview(filesystem.cat_file(path, start=offset_bytes, end=offset_bytes + wanted_bytes))
            else:
                body = memoryview(b"")
                wanted_bytes = max(0, offset_bytes - _size(self._file_info(filesystem, key, path)))
            if len(body) < num_bytes(views):
                self._check_whole(filesystem, key, path, "read_into", offset_bytes + len(body))
        if len(body) < wanted_bytes:
            raise ShortObjectError(
                f"{self.url(key)} ends {wanted_bytes - len(body)} bytes before the end of the range from "
                f"{offset_bytes} to {offset_bytes + num_bytes(views)}.",
                key=self.url(key),
                operation="read_into",
            )
        begin = 0
        for view in views:
            view[:] = body[begin : begin + view.nbytes]
            begin += view.nbytes

    def read(self, key: str, *, max_bytes: int) -> bytes:
        with self._call("read", key) as (filesystem, path):
            size_bytes = _size(self._file_info(filesystem, key, path))
            # One byte more than allowed: the object may have grown since it was measured.
            body = bytes(filesystem.cat_file(path, start=0, end=min(size_bytes, max_bytes) + 1)) if size_bytes else b""
            if len(body) < min(size_bytes, max_bytes):
                self._check_whole(filesystem, key, path, "read", len(body))
        if max(size_bytes, len(body)) > max_bytes:
            raise StoreError(
                f"{self.url(key)} has {max(size_bytes, len(body))} bytes, more than the {max_bytes} allowed.",
                key=self.url(key),
                operation="read",
            )
        return body

    def head(self, key: str) -> ObjectInfo:
        with self._call("head", key) as (filesystem, path):
            return _object_info(key, self._file_info(filesystem, key, path))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._call("list", prefix, is_key=False) as (filesystem, _):
            folder = prefix.rpartition("/")[0]
            found = _find(filesystem, f"{self._root}/{folder}" if folder else self._root or "/")
        for path, info in found.items():
            key = str(path)[len(self._root) + 1 :]
            if str(path).startswith(f"{self._root}/") and key.startswith(prefix) and info.get("type") != "directory":
                yield _object_info(key, info)

    def list_directories(self) -> Iterator[str]:
        with self._call("list_directories", "", is_key=False) as (filesystem, _):
            entries = _entries(filesystem, self._root or "/")
            directories = [str(entry["name"]).rstrip("/") for entry in entries if entry["type"] == "directory"]
            # Real directories can be empty.
            names = [path.rpartition("/")[2] for path in directories if any(True for _ in _walk(filesystem, path))]
        yield from names

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(ObjectNotFoundError), self._call("delete", key) as (filesystem, path):
                try:
                    filesystem.rm_file(path)
                except Exception:
                    if not filesystem.isdir(path):  # a directory is no object
                        raise

    def create_multipart(self, key: str) -> str:
        self._refuse_multipart("create_multipart", key)

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:  # noqa: ARG002
        self._refuse_multipart("upload_part", key)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:  # noqa: ARG002
        self._refuse_multipart("complete_multipart", key)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Do nothing: no upload can be open."""

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:  # noqa: ARG002
        """Yield nothing: no upload can be open."""
        return iter(())

    def _create(self, filesystem: Filesystem, key: str, path: str, body: bytes) -> None:
        if self._backend.create is Create.OVERWRITE:
            filesystem.pipe_file(path, body, overwrite=False)
        elif self._backend.create is Create.LOCK:
            if filesystem.exists(path):
                raise ObjectExistsError(
                    f"An object exists at {self.url(key)} already.", key=self.url(key), operation="put"
                )
            filesystem.pipe_file(path, body)
        else:
            raise UnsupportedOperationError(
                f"{self.url(key)}: this file system cannot create an object only if it is absent. Use s3://, gs:// or "
                f"a path, or accept Options(commit='unconditional').",
                key=self.url(key),
                operation="put",
            )

    @contextlib.contextmanager
    def _needs_root(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except ObjectNotFoundError as error:  # a write can only miss what is above the key
            raise BucketNotFoundError(
                f"{operation} {self.url(key)}: its bucket or folder does not exist, or these credentials may not see "
                f"it. Create it, or correct its name.",
                key=self.url(key),
                operation=operation,
            ) from error

    @contextlib.contextmanager
    def _call(self, operation: str, key: str, *, is_key: bool = True) -> Iterator[tuple[Filesystem, str]]:
        if is_key:
            check_key(self, key, operation)
        lock: AbstractContextManager[Any] = _MEMORY_LOCK if self._backend.locked else contextlib.nullcontext()
        with translated(self.url(key), operation, self._instances.source.options), lock:
            filesystem = self._instances.get()
            filesystem.invalidate_cache()
            yield filesystem, self._path(key)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _file_info(self, filesystem: Filesystem, key: str, path: str) -> Mapping[str, Any]:
        info: Mapping[str, Any] = filesystem.info(path)
        if info.get("type") == "directory":
            raise ObjectNotFoundError(
                f"{self.url(key)} is a directory, not an object.", key=self.url(key), operation="head"
            )
        return info

    def _check_whole(self, filesystem: Filesystem, key: str, path: str, operation: str, end_bytes: int) -> None:
        """Raise `TransientStoreError` if the object does not end at `end_bytes`, at which a read has ended."""
        size_bytes = _size(self._file_info(filesystem, key, path))
        if size_bytes > end_bytes:
            raise TransientStoreError(
                f"{operation} {self.url(key)}: the answer ended at byte {end_bytes:,} of {size_bytes:,}. Try again.",
                key=self.url(key),
                operation=operation,
            )

    def _refuse_multipart(self, operation: str, key: str) -> NoReturn:
        raise UnsupportedOperationError(
            f"{self.url(key)}: there are no multipart uploads through fsspec; put the object whole.",
            key=self.url(key),
            operation=operation,
        )


def _find(filesystem: Filesystem, path: str) -> Mapping[str, Mapping[str, Any]]:
    """Return every file under `path`, by its path. Raises if a directory cannot be listed.

    fsspec's own `find` leaves such a directory out without an error. A file system's own `find` is used if it has one.
    """
    kind = type(filesystem)
    if (kind._find is AsyncFileSystem._find) if kind.async_impl else (kind.find is AbstractFileSystem.find):  # noqa: SLF001
        return dict(_walk(filesystem, path))
    try:
        found = filesystem.find(path, detail=True)
    except FileNotFoundError as error:
        if says_absence(error):
            return {}
        raise
    # adlfs returns an empty list if the folder is an object.
    return found if isinstance(found, Mapping) else {}


def _walk(filesystem: Filesystem, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    pending = [path.rstrip("/") or "/"]
    while pending:
        directory = pending.pop()
        for entry in _entries(filesystem, directory):
            name = str(entry["name"])
            if entry["type"] != "directory":
                yield name, entry
            elif name.rstrip("/") != directory:
                pending.append(name.rstrip("/"))


def _entries(filesystem: Filesystem, path: str) -> Sequence[Mapping[str, Any]]:
    """Return the entries of the directory `path`; none if it does not exist."""
    try:
        entries: Sequence[Mapping[str, Any]] = filesystem.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, FileNotFoundError) and not says_absence(error):
            raise
        return []
    return entries


def _size(info: Mapping[str, Any]) -> int:
    return int(info["size"])


def _object_info(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    version = next((str(info[name]) for name in _VERSION_NAMES if info.get(name)), "")
    return ObjectInfo(key=key, size_bytes=_size(info), modified_at=_modified_at(info), version=version)


def _modified_at(info: Mapping[str, Any]) -> datetime:
    for name in _TIME_NAMES:
        value = info.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, tz=timezone.utc)
    # Unknown, so never old enough for gc.
    return datetime.now(tz=timezone.utc)


def _stream(filesystem: Filesystem, path: str, views: Views) -> None:
    """Write through a file object that publishes nothing on its own, then commit it; on any failure, discard it."""
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
    # A failure here must not hide the error that led here; gc removes what is left.
    with contextlib.suppress(Exception):
        file.discard()
    # A buffered file whose destructor finds it open sends its last block, and some complete the object with it.
    with contextlib.suppress(Exception):
        file.closed = True
    if fresh_path is not None:
        with contextlib.suppress(Exception):
            filesystem.rm_file(fresh_path)


def _make_parents(filesystem: Filesystem, path: str) -> None:
    """Create the directories above `path`, if the file system has directories."""
    # Asynchronous file systems are object stores, where "making directories" would at most make a bucket.
    if not filesystem.async_impl:
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
