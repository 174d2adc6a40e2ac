"""Writing files so that they appear whole and stay: temporary files, fsync, exclusive links.

A file is written in a hidden directory of its own, a sibling of where it will appear. That keeps it on the same file
system; it keeps the directory alive, since one that is not empty cannot be pruned under a writer; and the object's
name can be read off it, so that what a crash left behind can be listed.
"""

# ruff: noqa: PTH102, PTH105, PTH106, PTH108, PTH112, PTH114, PTH116, PTH120, PTH208
# (pathlib has no names for half of the calls here, and rewrites the paths that it is given)

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from typing import TYPE_CHECKING

from cloudckpt.errors import UnsupportedOperationError
from cloudckpt.stores._body import batches, without_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cloudckpt.stores.base import Views

TEMP_PREFIX = ".cloudckpt-tmp."

# Small enough to be in cache still when the kernel copies what the checksum has just read.
_BATCH_BYTES = 1 << 20
_IOV_MAX: int = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 16
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_FSYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS})
_MKDIR_TRIES = 100


def temp_path(path: str, upload_id: str) -> str:
    """Where the bytes of the upload lie until they appear at `path`."""
    directory, name = os.path.split(path)
    return f"{directory}/{TEMP_PREFIX}{upload_id}/{name}"


def create_temp(path: str, *, root: str) -> str:
    """Create an empty temporary file for `path`, with the directories it needs, and return the id to find it by."""
    directory = os.path.dirname(path)
    upload_id = uuid.uuid4().hex
    temp = temp_path(path, upload_id)
    tries_left = _MKDIR_TRIES
    while True:
        try:
            _make_directories(directory, root=root)
            os.mkdir(os.path.dirname(temp))
            break
        except FileNotFoundError as error:
            # Somebody who deletes the last object of the directory prunes it, between our two calls.
            tries_left -= 1
            if not tries_left:  # so it is the file system, as in /proc, and no object is what lacks
                raise PermissionError(errno.EPERM, "No directory can be made", error.filename) from error
    try:
        os.close(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except BaseException:
        discard(temp)
        raise
    return upload_id


def write_at(file: int, offset_bytes: int, views: Views, *, seen: Callable[[list[memoryview]], None]) -> None:
    """Write `views` at `offset_bytes`, calling `seen` with each batch of them just before it is written."""
    for batch in batches(views, max_bytes=_BATCH_BYTES, max_views=_IOV_MAX):
        seen(batch)
        left = batch
        while left:
            num_written = os.pwritev(file, left, offset_bytes)
            offset_bytes += num_written
            left = without_first(left, num_written)


def read_at(file: int, offset_bytes: int, views: Views) -> int:
    """Fill `views` from `offset_bytes` on; fewer bytes than they hold are returned only where the file ends."""
    num_read = 0
    for batch in batches(views, max_bytes=1 << 30, max_views=_IOV_MAX):
        left = batch
        while left:
            num_new = os.preadv(file, left, offset_bytes + num_read)
            if num_new == 0:
                return num_read
            num_read += num_new
            left = without_first(left, num_new)
    return num_read


def flush(temp: str) -> None:
    """Make what was written to `temp` durable."""
    with opened(temp, os.O_RDONLY) as file:
        os.fsync(file)


def publish(temp: str, path: str, *, root: str, if_absent: bool) -> None:
    """Make the file `temp`, finished and flushed, appear at `path` at once, and durably. `temp` is gone afterwards."""
    if if_absent:
        _link(temp, path)
    else:
        os.replace(temp, path)
    with contextlib.suppress(OSError):  # the object is there; what is left of the temporary one is only garbage
        discard(temp)
    # From the object upwards: a directory's entry is what makes everything below it reachable after a crash.
    directory = os.path.dirname(path)
    while True:
        # Gone means that somebody removed the object already, and the directory with it.
        with contextlib.suppress(FileNotFoundError):
            fsync_directory(directory)
        if directory == root:
            return
        directory = os.path.dirname(directory)


def discard(temp: str) -> None:
    """Remove a temporary file and its hidden directory; what is gone already is no error."""
    hidden = os.path.dirname(temp)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(hidden):
            os.unlink(f"{hidden}/{name}")
        os.rmdir(hidden)


def prune(directory: str, *, root: str) -> None:
    """Remove `directory` and those above it, up to but without `root`, as far as they are empty."""
    while directory.startswith(root.rstrip("/") + "/"):
        try:
            os.rmdir(directory)
        except OSError:
            # Not empty, or somebody else was faster, or not ours to remove. No reader sees an empty directory.
            return
        directory = os.path.dirname(directory)


def links_work(directory: str) -> bool:
    """Whether `directory`'s file system has the exclusive link that create-if-absent needs, by trying it there.

    True where nothing can be written: what comes next will say so better.
    """
    while not os.path.isdir(directory):
        if directory == (parent := os.path.dirname(directory)):
            return True
        directory = parent
    hidden = f"{directory}/{TEMP_PREFIX}{uuid.uuid4().hex}"
    try:
        os.mkdir(hidden)
    except OSError:
        return True
    try:
        os.close(os.open(f"{hidden}/a", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.link(f"{hidden}/a", f"{hidden}/b")
    except OSError as error:
        return error.errno not in _NO_LINKS
    finally:
        with contextlib.suppress(OSError):
            discard(f"{hidden}/a")
    return True


def copy_contents(source: int, target: int) -> None:
    """Copy a whole file, within the kernel (and as a reflink) where it can."""
    offset_bytes = 0
    if hasattr(os, "copy_file_range"):
        with contextlib.suppress(OSError):  # no such call here, or not between these two: the loop below can
            while num_copied := os.copy_file_range(source, target, 1 << 30, offset_bytes, offset_bytes):
                offset_bytes += num_copied
    while chunk := os.pread(source, _BATCH_BYTES, offset_bytes):
        write_at(target, offset_bytes, [memoryview(chunk)], seen=lambda _: None)
        offset_bytes += len(chunk)


@contextlib.contextmanager
def opened_object(path: str) -> Iterator[int]:
    """A descriptor to read a regular file from; anything else that lies there is no object."""
    # Opening a named pipe would wait for its writer, for ever, but for O_NONBLOCK.
    with opened(path, os.O_RDONLY | os.O_NONBLOCK) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise FileNotFoundError(errno.ENOENT, "What lies there is not a regular file", path)
        yield file


@contextlib.contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A file descriptor, closed at the end of the block."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.islink(path):
            reason = f"A symbolic link leads to {os.path.realpath(path)}, which does not exist"
            raise FileNotFoundError(errno.ENOENT, reason, path) from None
        raise
    try:
        yield file
    finally:
        os.close(file)


def fsync_directory(path: str) -> None:
    """Make the entries of a directory durable, where its file system can."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as directory:
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno not in _NO_FSYNC:
                raise


def _link(temp: str, path: str) -> None:
    try:
        os.link(temp, path, follow_symlinks=False)
    except FileExistsError:
        # Over NFS the answer to a link that did work can be lost, and the client's second try finds the first: the
        # count of links tells (open(2), under O_EXCL).
        if os.stat(temp).st_nlink == 2:  # noqa: PLR2004  # the temporary name and the object's
            return
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise UnsupportedOperationError(
            f"The file system of {path} has no hard links ({os.strerror(error.errno)}), so nothing can be created "
            f"there only if it is absent. Choose another file system, or accept Options(commit='unconditional').",
            key=path,
            operation="put",
        ) from error


def _make_directories(directory: str, *, root: str) -> None:
    """Like ``os.makedirs``, but each new directory outside `root` is durable, as those within are once published."""
    missing: list[str] = []
    above = directory
    while not _is_directory(above):
        missing.append(above)
        above = os.path.dirname(above)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        if len(path) <= len(root):
            fsync_directory(os.path.dirname(path))


def _is_directory(path: str) -> bool:
    """False where nothing lies; raises where something else does. One look, for others create directories meanwhile."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise NotADirectoryError(errno.ENOTDIR, "A dangling symbolic link lies there", path) from None
        return False
    except NotADirectoryError:  # because of something above, which the next look names
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    return True
