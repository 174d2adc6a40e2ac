"""Objects as files: atomic by link and rename, durable by fsync."""

# ruff: noqa: PTH100, PTH108, PTH112, PTH116, PTH120
# (pathlib has no names for half of the calls here, and rewrites the paths that it is given)

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timezone

from cloudckpt._messages import TOO_MANY_FILES
from cloudckpt.errors import (
    AccessDeniedError,
    CloudckptError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.options import Options
from cloudckpt.stores.base import (
    Capabilities,
    Limits,
    ObjectInfo,
    Part,
    Store,
    UploadedPart,
    UploadInfo,
    Views,
    check_crc32c,
    check_key,
    check_size,
    num_bytes,
    sort_parts,
)
from cloudckpt.stores.local import files
from cloudckpt.uri import Location

ERRNO_TABLE: dict[int, tuple[type[StoreError], str]] = {
    errno.ENOENT: (ObjectNotFoundError, "There is no such object."),
    errno.EEXIST: (ObjectExistsError, "An object exists there already."),
    errno.ENOTDIR: (
        StoreError,
        (
            "A file is where a directory is needed: choose another path. To make a checkpoint of a file of weights: "
            "`cloudckpt import FILE TARGET`, with `--format torch` for one of torch.save."
        ),
    ),
    # A refusal: nothing was written, and a commit that meets it is known not to have happened.
    errno.EISDIR: (
        UnsupportedOperationError,
        "A directory is where a file is needed: remove it, or choose another path.",
    ),
    errno.ENAMETOOLONG: (StoreError, "The path is longer than the file system allows: choose a shorter one."),
    errno.EACCES: (AccessDeniedError, "Grant this user access to the directory, or choose another path."),
    errno.EPERM: (AccessDeniedError, "Grant this user access to the directory, or choose another path."),
    errno.EROFS: (AccessDeniedError, "The file system is mounted read-only: choose another path."),
    errno.ENOSPC: (StoreError, "The file system is full: free some space, then save again."),
    errno.EDQUOT: (StoreError, "This user's quota is used up: free some space, then save again."),
    errno.EFBIG: (StoreError, "The file is larger than the file system or a limit (ulimit -f) allows."),
    errno.EIO: (StoreError, "The device failed: look at the kernel's log, and save elsewhere."),
    errno.EOPNOTSUPP: (UnsupportedOperationError, "The file system has no such operation."),
    errno.ENOSYS: (UnsupportedOperationError, "The file system has no such operation."),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), (TransientStoreError, TOO_MANY_FILES)),
    errno.ETIMEDOUT: (StoreTimeoutError, "The file system's server did not answer in time."),
    **dict.fromkeys(
        (errno.ENOMEM, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOLCK),
        (TransientStoreError, "The system is busy."),
    ),
    **dict.fromkeys(
        (
            *(errno.ESTALE, errno.EREMOTEIO, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
            *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE),
        ),
        (TransientStoreError, "The file system's server failed or cannot be reached."),
    ),
}
"""Any other number is a plain `StoreError`: another try does not help."""
_NO_EFFECT_ERRNOS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMLINK, errno.ENAMETOOLONG),
        *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS),
    }
)
"""The errors with which ``link`` and ``rename`` say that they did nothing (link(2), rename(2)).

After any other error the file may have appeared: a server's answer may be lost.
"""


class LocalStore(Store):
    """A directory, which need not exist yet; writes create it.

    - A file is written in a hidden sibling directory and fsync'ed; then one ``link`` (which fails if a file exists) or
      one ``rename`` makes it appear, and the directories are fsync'ed.
    - The CRC32C of the bytes is checked on their way into the kernel, 1 MiB at a time; a file is not read back.
    - A listing fails at a directory that it may not read, with an error that names it.
    - Symbolic links: the root may be one. Below it, listings do not descend into linked directories, and a link that
      leads out of the root is refused, unless it is one of a snapshot in Hugging Face's cache to its ``blobs/``.
    - `probe` tries a hard link on the file system itself, once.
    - The file system's own timeouts hold; a hard-mounted NFS whose server is gone blocks for ever.
    """

    capabilities = Capabilities(
        conditional_create=True,
        multipart=True,
        verifies_crc32c=True,
        parallel_parts=False,  # Linux holds a file's lock during each write to it
        is_near=True,
        has_hidden_uploads=True,
    )
    limits = Limits(min_part_bytes=1, max_part_bytes=1 << 40, max_parts=1 << 20, max_put_bytes=1 << 50)

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))

    @classmethod
    def at(cls, location: Location, _options: Options) -> LocalStore:
        """Return the store at `location`."""
        return cls(location.path)

    def __reduce__(self) -> tuple[type[LocalStore], tuple[str]]:
        return LocalStore, (self._root,)

    def probe(self) -> Capabilities:
        """Try the hard link that create-if-absent needs, which not every file system has."""
        return self._probed

    @functools.cached_property
    def _probed(self) -> Capabilities:
        return dataclasses.replace(self.capabilities, conditional_create=files.links_work(self._root))

    @property
    def uri(self) -> str:
        return self._root

    def url(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}" if key else self._root

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        path = self._writable_path("put", key)
        with translating(path, "put"):
            with translating(path, "put", had_no_effect=True):
                temp = files.temp_path(path, files.create_temp(path, root=self._root))
            try:
                with translating(path, "put", had_no_effect=True):
                    self._write("put", key, temp, 0, views, crc32c=crc32c)
                    files.flush(temp)
                with translating(path, "put", refusals=_NO_EFFECT_ERRNOS):
                    files.make_visible(temp, path, if_absent=if_absent)
                files.make_durable(temp, path, root=self._root)
            except BaseException:
                self._discard(temp, path)
                raise

    def create_multipart(self, key: str) -> str:
        path = self._writable_path("create_multipart", key)
        with translating(path, "create_multipart"):
            return files.create_temp(path, root=self._root)

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        path, temp = self._upload_paths("upload_part", key, upload_id)
        if num_bytes(views) != part.size_bytes:
            problem = f"part {part.number} has {num_bytes(views)} bytes where {part.size_bytes} were announced."
            raise self.error(StoreError, "upload_part", key, problem)
        with translating(path, "upload_part"):
            self._write("upload_part", key, temp, part.offset_bytes, views, crc32c=crc32c)
        return UploadedPart(part=part, token=f"{crc32c:08x}", crc32c=crc32c)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        path, temp = self._upload_paths("complete_multipart", key, upload_id)
        expected_bytes = sum(uploaded.part.size_bytes for uploaded in sort_parts(self, key, list(parts)))
        with translating(path, "complete_multipart"):
            size_bytes = os.stat(temp).st_size
            if size_bytes != expected_bytes:
                written = f"the upload's parts have {expected_bytes} bytes, but {size_bytes} were written"
                raise self.error(StoreError, "complete_multipart", key, f"{written}. Nothing was completed.")
            files.flush(temp)
            files.make_visible(temp, path, if_absent=False)
            files.make_durable(temp, path, root=self._root)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        path, temp = self._upload_paths("abort_multipart", key, upload_id)
        with translating(path, "abort_multipart"):
            self._discard(temp, path)

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        path = self._readable_path("read_into", key)
        with translating(path, "read_into"), files.open_object(path) as file:
            num_read = files.read_at(file, offset_bytes, views)
            size_bytes = os.fstat(file).st_size
        if num_read < num_bytes(views):
            wanted = f"the range from {offset_bytes} to {offset_bytes + num_bytes(views)}"
            problem = f"the file has {size_bytes} bytes, too few for {wanted}."
            raise self.error(ShortObjectError, "read_into", key, problem)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        path = self._readable_path("read", key)
        with translating(path, "read"), files.open_object(path) as file:
            size_bytes = os.fstat(file).st_size
            check_size(self, key, size_bytes, max_bytes=max_bytes)
            body = bytearray(size_bytes)
            num_read = files.read_at(file, 0, [memoryview(body)])
        return bytes(memoryview(body)[:num_read])

    def head(self, key: str) -> ObjectInfo:
        path = self._readable_path("head", key)
        with translating(path, "head"), files.open_object(path) as file:
            return _info(key, os.fstat(file))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with translating(self.url(prefix), "list"):
            for key, status in files.list_files(self._root, prefix):
                yield _info(key, status)

    def list_directories(self) -> Iterator[str]:
        with translating(self._root, "list_directories"):
            yield from files.list_directories(self._root)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._writable_path("delete", key)
            with translating(path, "delete"):
                try:
                    os.unlink(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError:
                    if os.path.isdir(path):  # EISDIR on Linux, EPERM by POSIX: no object, so nothing to remove
                        continue
                    raise
                files.prune(os.path.dirname(path), root=self._root)

    def free_bytes(self) -> int | None:
        with translating(self._root, "free_bytes"):
            free = os.statvfs(files.existing_parent(self._root))
        return free.f_bavail * free.f_frsize

    def list_uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        with translating(self.url(prefix), "list_uploads"):
            for key, upload_id, status, size_bytes in files.list_uploads(self._root, prefix):
                yield UploadInfo(key=key, upload_id=upload_id, started_at=_time(status), size_bytes=size_bytes)

    def _write(self, operation: str, key: str, temp: str, offset_bytes: int, views: Views, *, crc32c: int) -> None:
        with files.open_file(temp, os.O_WRONLY) as file:
            actual = files.write_at(file, offset_bytes, views)
        check_crc32c(self, key, operation, expected=crc32c, actual=actual)

    def _discard(self, temp: str, path: str) -> None:
        files.discard(temp)
        files.prune(os.path.dirname(path), root=self._root)

    def _readable_path(self, operation: str, key: str) -> str:
        check_key(self, key, operation)
        path = self.url(key)
        self._refuse_escape(operation, key, path)
        return path

    def _writable_path(self, operation: str, key: str) -> str:
        check_key(self, key, operation)
        path = self.url(key)
        if f"/{files.TEMP_PREFIX}" in f"/{key}":
            problem = f"names that begin with {files.TEMP_PREFIX!r} are kept for unfinished uploads."
            raise self.error(StoreError, operation, key, problem)
        # Link, rename and unlink act on a link itself, so only the folders above it can lead elsewhere.
        self._refuse_escape(operation, key, os.path.dirname(path))
        return path

    def _upload_paths(self, operation: str, key: str, upload_id: str) -> tuple[str, str]:
        path = self._writable_path(operation, key)
        if not upload_id.isalnum():
            raise self.error(ObjectNotFoundError, operation, key, f"there is no upload {upload_id!r} here.")
        return path, files.temp_path(path, upload_id)

    def _refuse_escape(self, operation: str, key: str, path: str) -> None:
        target = os.path.realpath(path)
        if not files.may_be_followed(target, os.path.realpath(self._root)):
            problem = (
                f"it leads out of {self._root} by a symbolic link, to {target}. Pass the real path as the checkpoint's "
                "location, or replace the link by what it points to."
            )
            raise self.error(StoreError, operation, key, problem)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    changed_at = datetime.fromtimestamp(max(status.st_mtime, status.st_ctime), tz=timezone.utc)
    # Not by the inode's number: file systems in user space give a file another one while it stays as it is.
    version = f"{status.st_mtime_ns}-{status.st_ctime_ns}"
    return ObjectInfo(
        key=key, size_bytes=status.st_size, modified_at=_time(status), changed_at=changed_at, version=version
    )


def _time(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime, tz=timezone.utc)


def translate(error: OSError, *, key: str, operation: str) -> StoreError:
    """Return `error` as a `StoreError`. `key` is the full path of the object."""
    kind, advice = ERRNO_TABLE.get(error.errno or 0, (StoreError, ""))
    reason = error.strerror or type(error).__name__
    # The path that failed may be a directory above the object, or below the listed one: the user has to look at it.
    failed = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else key
    is_another = key.startswith(f"{failed}/") or failed.startswith(f"{key.rstrip('/')}/")
    where = f" (at {failed.rstrip('/')})" if is_another else ""
    failure = kind(f"{operation} {key}: {reason}{where}. {advice}".rstrip(), key=key, operation=operation)
    failure.is_unsent = advice is TOO_MANY_FILES
    return failure


@contextlib.contextmanager
def translating(
    key: str, operation: str, *, had_no_effect: bool = False, refusals: Collection[int] = ()
) -> Iterator[None]:
    """Translate an `OSError` of the block.

    Pass `had_no_effect` if others can see no effect of the block. After an error with a number in `refusals`, they
    cannot either.
    """
    try:
        yield
    except CloudckptError:  # StoreTimeoutError is an OSError too
        raise
    except OSError as error:
        failure = translate(error, key=key, operation=operation)
        failure.had_no_effect = had_no_effect or error.errno in refusals
        try:
            raise failure from error
        finally:
            del failure  # its traceback holds this frame: a cycle otherwise, with the state dict of the caller in it
