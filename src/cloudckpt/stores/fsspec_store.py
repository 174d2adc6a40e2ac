"""Objects in any file system of fsspec, and its errors as those of a store."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NoReturn

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from cloudckpt._messages import TOO_MANY_FILES
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CloudckptError,
    CredentialsError,
    InvalidOptionError,
    MissingDependencyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.options import MIB, Options
from cloudckpt.stores.base import (
    Capabilities,
    Limits,
    ObjectInfo,
    Part,
    Store,
    UploadedPart,
    UploadInfo,
    Views,
    batches,
    check_crc32c,
    check_key,
    check_size,
    copy_into,
    crc32c_of,
    num_bytes,
)
from cloudckpt.stores.http_errors import STATUSES, is_out_of_files, mask
from cloudckpt.stores.local.store import ERRNO_TABLE
from cloudckpt.uri import Location

Filesystem = Any  # fsspec.spec.AbstractFileSystem, whose methods have no types

ATOMIC_SCHEMES = ("az", "abfs", "abfss")
"""The schemes whose ``pipe_file`` makes an object visible whole or not at all, and takes ``overwrite=False`` as the
condition of a create-if-absent: Put Blob, and Put Block List above 64 MiB, with If-None-Match."""
_CHUNK_BYTES = 16 * MIB
_WHOLE_BYTES = 32 * MIB  # up to here one joined copy is cheaper than a file object
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_VERSION_NAMES = ("generation", "ETag", "etag", "blob_id")  # the last one of Hugging Face's hub


class FsspecStore(Store):
    """A folder of an fsspec file system.

    - Objects are written whole, by one stream; there are no multipart uploads.
    - A write that fails is discarded if the file system can, and else its object is removed. Nothing half-written is
      ever completed, not even by Python's garbage collector.
    - fsspec promises no create-if-absent: only `ATOMIC_SCHEMES` have it.
    - Only the file system's own timeouts bound a wait; they are among its `storage_options`.
    """

    limits = Limits(min_part_bytes=1, max_part_bytes=1 << 40, max_parts=1, max_put_bytes=1 << 40)

    def __init__(self, location: Location, *, storage_options: Mapping[str, Any]) -> None:
        with _importing(location.scheme):
            kind: type[Filesystem] = fsspec.get_filesystem_class(location.scheme)
        self._location = location
        self._kind = kind
        # Host, port and user of the URI are options of the file system.
        self._options = {**kind._get_kwargs_from_urls(location.uri), **storage_options}  # as fsspec itself does
        self._root = str(kind._strip_protocol(location.uri)).rstrip("/")
        self._lock = threading.Lock()
        self._shared: Filesystem = None
        self._thread_state = threading.local()
        self._is_atomic = location.scheme in ATOMIC_SCHEMES
        can_create = self._is_atomic and "overwrite" in inspect.signature(kind._pipe_file).parameters
        self.capabilities = Capabilities(conditional_create=can_create, multipart=False, verifies_crc32c=False)

    @classmethod
    def at(cls, location: Location, options: Options) -> FsspecStore:
        """Return the store at `location`."""
        return cls(location, storage_options=options.storage_options)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(FsspecStore, storage_options=self._options), (self._location,)

    @property
    def uri(self) -> str:
        return self._location.uri

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        with self._requiring_root(key), self._call("put", key) as (filesystem, path):
            check_crc32c(self, key, "put", expected=crc32c, actual=crc32c_of(views))
            if if_absent and not self.capabilities.conditional_create:
                problem = (
                    "this file system cannot create an object only if it is absent. Use s3://, gs:// or a path, or "
                    "accept Options(commit='unconditional')."
                )
                raise self.error(UnsupportedOperationError, "put", key, problem)
            if if_absent:
                filesystem.pipe_file(path, b"".join(views), overwrite=False)
            elif self._is_atomic and num_bytes(views) <= _WHOLE_BYTES:
                filesystem.pipe_file(path, b"".join(views))
            else:
                # An asynchronous file system is an object store, where this would at most make a bucket.
                if not self._kind.async_impl:
                    filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
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
            wanted = f"the range from {offset_bytes} to {offset_bytes + num_bytes(views)}"
            problem = f"the object ends {wanted_bytes - len(body)} bytes before the end of {wanted}."
            raise self.error(ShortObjectError, "read_into", key, problem)
        copy_into(views, body)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        with self._call("read", key) as (filesystem, path):
            size_bytes = _size(self._file_info(filesystem, key, path))
            # One byte more than allowed: the object may have grown since it was measured.
            body = bytes(filesystem.cat_file(path, start=0, end=min(size_bytes, max_bytes) + 1)) if size_bytes else b""
            if len(body) < min(size_bytes, max_bytes):
                self._check_whole(filesystem, key, path, "read", len(body))
        check_size(self, key, max(size_bytes, len(body)), max_bytes=max_bytes)
        return body

    def head(self, key: str) -> ObjectInfo:
        with self._call("head", key) as (filesystem, path):
            return _object_info(key, self._file_info(filesystem, key, path))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._call("list", prefix, is_key=False) as (filesystem, _):
            folder = prefix.rpartition("/")[0]
            infos = _find(filesystem, f"{self._root}/{folder}" if folder else self._root or "/")
        for path, info in infos.items():
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

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        self._refuse_multipart("upload_part", key)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        self._refuse_multipart("complete_multipart", key)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Do nothing: no upload can be open."""

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        """Yield nothing: no upload can be open."""
        return iter(())

    @contextlib.contextmanager
    def _requiring_root(self, key: str) -> Iterator[None]:
        try:
            yield
        except ObjectNotFoundError as error:  # a write needs only the bucket or folder above the key
            problem = (
                "its bucket or folder does not exist, or these credentials may not see it. Create it, or correct its "
                "name."
            )
            raise self.error(BucketNotFoundError, "put", key, problem) from error

    @contextlib.contextmanager
    def _call(self, operation: str, key: str, *, is_key: bool = True) -> Iterator[tuple[Filesystem, str]]:
        if is_key:
            check_key(self, key, operation)
        with translating(self.url(key), operation, self._options):
            filesystem = self._get_filesystem()
            filesystem.invalidate_cache()
            yield filesystem, f"{self._root}/{key}"

    def _get_filesystem(self) -> Filesystem:
        """Return the instance of all threads if it is asynchronous, else that of this thread.

        Most synchronous file systems hold one connection, which two threads cannot share.
        """
        if not self._kind.async_impl:
            if not hasattr(self._thread_state, "instance"):
                self._thread_state.instance = self._make_filesystem()
            return self._thread_state.instance
        with self._lock:
            if self._shared is None:
                self._shared = self._make_filesystem()
            return self._shared

    def _make_filesystem(self) -> Filesystem:
        """Make an instance that shares nothing with other users of fsspec, and caches no listings if it can."""
        options = {**self._options, "skip_instance_cache": True}
        parameters = inspect.signature(self._kind.__init__).parameters.values()
        if any(item.kind is item.VAR_KEYWORD or item.name == "use_listings_cache" for item in parameters):
            options["use_listings_cache"] = False
        with _importing(self._location.scheme):  # some file systems import their package only now
            try:
                return self._kind(**options)
            except (TypeError, ValueError) as error:
                if _kind(error) is not StoreError:
                    raise
                text = _text_of(error, self._options).rstrip(".!")
                raise InvalidOptionError(
                    f"{self.uri}: {self._kind.__name__} refuses its options: {text}. Pass what it needs in "
                    "Options.storage_options, or in a shell by --storage-option NAME=VALUE"
                ) from error

    def _file_info(self, filesystem: Filesystem, key: str, path: str) -> Mapping[str, Any]:
        info: Mapping[str, Any] = filesystem.info(path)
        if info.get("type") == "directory":
            raise self.error(ObjectNotFoundError, "head", key, "this is a directory, not an object.")
        return info

    def _check_whole(self, filesystem: Filesystem, key: str, path: str, operation: str, end_bytes: int) -> None:
        """Raise `TransientStoreError` if the object does not end at `end_bytes`, where a read has ended."""
        size_bytes = _size(self._file_info(filesystem, key, path))
        if size_bytes > end_bytes:
            problem = f"the answer ended at byte {end_bytes:,} of {size_bytes:,}. Try again."
            raise self.error(TransientStoreError, operation, key, problem)

    def _refuse_multipart(self, operation: str, key: str) -> NoReturn:
        problem = "there are no multipart uploads through fsspec; put the object whole."
        raise self.error(UnsupportedOperationError, operation, key, problem)


@contextlib.contextmanager
def _importing(scheme: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(f"{scheme}:// needs a package that is not installed: {error}") from error


def _find(filesystem: Filesystem, path: str) -> Mapping[str, Mapping[str, Any]]:
    """Return every file under `path`, by its path. Raises if a directory cannot be listed.

    fsspec's own `find` leaves such a directory out without an error. A file system's own `find` is used if it has one.
    """
    kind = type(filesystem)
    if (kind._find is AsyncFileSystem._find) if kind.async_impl else (kind.find is AbstractFileSystem.find):
        return dict(_walk(filesystem, path))
    try:
        infos = filesystem.find(path, detail=True)
    except FileNotFoundError as error:
        if _is_absence_error(error):
            return {}
        raise
    # adlfs returns an empty list if the folder is an object.
    return infos if isinstance(infos, Mapping) else {}


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
        if isinstance(error, FileNotFoundError) and not _is_absence_error(error):
            raise
        return []
    return entries


def _size(info: Mapping[str, Any]) -> int:
    return int(info["size"])


def _object_info(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    large = info.get("lfs") or {}  # of Hugging Face's hub, which tells the SHA-256 of such a file
    version = next((str(found) for name in _VERSION_NAMES if (found := large.get("sha256") or info.get(name))), "")
    written_at = _modified_at(info)
    # An object of this moment is never old enough for gc.
    modified_at = datetime.now(tz=timezone.utc) if written_at is None else written_at
    return ObjectInfo(
        key=key, size_bytes=_size(info), modified_at=modified_at, version=version, has_time=written_at is not None
    )


def _modified_at(info: Mapping[str, Any]) -> datetime | None:
    """Return the time of the write; None if the file system does not report it."""
    for name in _TIME_NAMES:
        value = info.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return value.astimezone(timezone.utc) if value.tzinfo else value.replace(tzinfo=timezone.utc)
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, tz=timezone.utc)
    return None


def _stream(filesystem: Filesystem, path: str, views: Views) -> None:
    """Write through a file object that publishes nothing on its own, then commit it; on any failure, discard it."""
    existed = _exists(filesystem, path)
    # Without autocommit, close() does not complete the upload, neither below nor in the garbage collector. Some file
    # systems ignore the setting and complete it: `_discard` also removes the object.
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
        _discard(filesystem, file, new_path=None if existed else path)
        raise


def _exists(filesystem: Filesystem, path: str) -> bool:
    # fsspec's own `exists` takes every error for absence, and a failed write removes an object that was absent before.
    try:
        filesystem.info(path)
    except FileNotFoundError as error:
        if _is_absence_error(error):
            return False
        raise
    return True


def _discard(filesystem: Filesystem, file: Any, *, new_path: str | None) -> None:
    # A failure here must not hide the error that led here; gc removes the remains.
    with contextlib.suppress(Exception):
        file.discard()
    # A buffered file whose destructor finds it open sends its last block, and some complete the object with it.
    with contextlib.suppress(Exception):
        file.closed = True
    if new_path is not None:
        with contextlib.suppress(Exception):
            filesystem.rm_file(new_path)


_STATUS_TABLE: dict[int, type[StoreError]] = {
    **{status: rule.error for status, rule in STATUSES.items()},
    400: StoreError,
    401: CredentialsError,
    408: StoreTimeoutError,
    410: ObjectNotFoundError,
    500: TransientStoreError,
    502: TransientStoreError,
    503: ThrottledError,
    504: StoreTimeoutError,
}

# By name, so that a lookup imports nothing.
_BEFORE_STATUS_TABLE: dict[str, type[StoreError]] = {
    "azure.core.exceptions.ResourceExistsError": ObjectExistsError,  # with the status 409, as transient errors
}
_CLASS_TABLE: dict[str, type[StoreError]] = {
    "aiohttp.client_exceptions.ClientConnectionError": TransientStoreError,
    "aiohttp.client_exceptions.ClientPayloadError": TransientStoreError,
    "aiohttp.client_exceptions.ClientResponseError": TransientStoreError,
    "asyncio.exceptions.TimeoutError": StoreTimeoutError,
    "azure.core.exceptions.ClientAuthenticationError": CredentialsError,
    "azure.core.exceptions.ServiceRequestError": TransientStoreError,
    "azure.core.exceptions.ServiceResponseError": TransientStoreError,
    "builtins.ConnectionError": TransientStoreError,
    "builtins.EOFError": TransientStoreError,
    "builtins.FileExistsError": ObjectExistsError,
    "builtins.FileNotFoundError": ObjectNotFoundError,
    "builtins.NotImplementedError": UnsupportedOperationError,
    "builtins.PermissionError": AccessDeniedError,
    "builtins.TimeoutError": StoreTimeoutError,
    "ftplib.error_temp": TransientStoreError,
    "google.auth.exceptions.GoogleAuthError": CredentialsError,
    "http.client.HTTPException": TransientStoreError,
    "json.decoder.JSONDecodeError": TransientStoreError,
    "paramiko.ssh_exception.AuthenticationException": CredentialsError,
    "paramiko.ssh_exception.SSHException": TransientStoreError,
    "requests.exceptions.ChunkedEncodingError": TransientStoreError,
    "requests.exceptions.ConnectionError": TransientStoreError,
    "requests.exceptions.ContentDecodingError": TransientStoreError,
    "requests.exceptions.Timeout": StoreTimeoutError,
    "ssl.SSLError": TransientStoreError,
    "urllib3.exceptions.HTTPError": TransientStoreError,
    "xml.etree.ElementTree.ParseError": TransientStoreError,
}
# Behind a `FileNotFoundError`, these say no more than it does: a name that is in no table, no listing, no folder.
_ABSENCE_CLASSES = ("builtins.LookupError", "builtins.StopIteration", "ftplib.error_perm")

_ADVICE: dict[type[StoreError], str] = {
    AccessDeniedError: "Grant these credentials that operation.",
    CredentialsError: "Configure the client's credentials, or renew them.",
    UnsupportedOperationError: "This file system cannot do that: use another.",
}
_SECRET_WORDS = ("secret", "password", "passwd", "token", "key", "credential", "connection_string", "sas", "cookie")
_PATH_ENDINGS = ("file", "filename", "path")  # key_filename=/home/… is no secret, and paths like it are in error texts


def translate(error: Exception, *, key: str, operation: str, options: Mapping[str, Any]) -> StoreError:
    """Return `error` as a `StoreError`, without the values of `options` that may be secret."""
    kind = _kind(error)
    text = _text_of(error, options)
    if is_out_of_files(error):
        kind, advice = TransientStoreError, TOO_MANY_FILES
    else:
        advice = _ADVICE.get(kind, "")
    failure = kind(f"{operation} {key}: {text}. {advice}".rstrip(), key=key, operation=operation)
    failure.is_unsent = advice is TOO_MANY_FILES
    return failure


def _text_of(error: Exception, options: Mapping[str, Any]) -> str:
    return mask(" ".join(str(error).split()), _secrets(options)) or type(error).__name__


@contextlib.contextmanager
def translating(key: str, operation: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Translate every exception of the block into a `StoreError`."""
    try:
        yield
    except CloudckptError:
        raise
    except Exception as error:
        raise translate(error, key=key, operation=operation, options=options) from error


def _is_absence_error(error: FileNotFoundError) -> bool:
    """Return True if `error` says that nothing exists, and not that something failed on the way to it."""
    return _kind(error) is ObjectNotFoundError


def _kind(error: BaseException) -> type[StoreError]:
    names = [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__]
    for name in names:
        if name in _BEFORE_STATUS_TABLE:
            return _BEFORE_STATUS_TABLE[name]
    for status in _statuses(error):
        # gcsfs keeps it as text at times
        if isinstance(status, (int, str)) and str(status).isdigit() and int(status) in _STATUS_TABLE:
            return _STATUS_TABLE[int(status)]
    # An error with a number is the operating system's. A context, unlike a cause, may be unrelated.
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and error.errno is None and cause is not None:
        is_absence = any(f"{base.__module__}.{base.__qualname__}" in _ABSENCE_CLASSES for base in type(cause).__mro__)
        return ObjectNotFoundError if is_absence else _kind(cause)
    for name in names:
        if name in _CLASS_TABLE:
            return _CLASS_TABLE[name]
    if isinstance(error, OSError):
        return TransientStoreError if error.errno is None else ERRNO_TABLE.get(error.errno, (StoreError,))[0]
    return StoreError


def _statuses(error: BaseException) -> Iterator[object]:
    response = getattr(error, "response", None)
    for bearer in (error, response):
        yield from (getattr(bearer, attribute, None) for attribute in ("status", "status_code", "code"))


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        is_secret = any(word in name.lower() for word in _SECRET_WORDS) and not name.lower().endswith(_PATH_ENDINGS)
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and is_secret:
            yield value
