"""Files that appear whole and stay, and listings of them.

A file is written in a hidden directory of its own, beside the place where it will appear. So it is on the same file
system; the directory is not empty, and cannot be pruned under a writer; and the object's name can be read from it, so
that the remains of a crash can be listed.
"""

# ruff: noqa: PTH102, PTH105, PTH106, PTH108, PTH112, PTH113, PTH114, PTH116, PTH120, PTH208
# (pathlib has no names for half of the calls here, and rewrites the paths that it is given)

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence

from cloudckpt.errors import UnsupportedOperationError
from cloudckpt.stores.base import Views, batches, crc32c_of, skip_bytes

TEMP_PREFIX = ".cloudckpt-tmp."

# Small enough to be in cache still when the kernel copies what the checksum has just read.
_BATCH_BYTES = 1 << 20
_IOV_MAX: int = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 16
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_FSYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS})
_MKDIR_TRIES = 100

_UNNAMED = "unnamed"
"""The name of an object whose writer died before it had created the file."""
_HUB_SNAPSHOT = re.compile(r"(.*/(?:models|datasets|spaces)--[^/]+)/snapshots/", re.DOTALL)
_LOST_AND_FOUND = "lost+found"
"""A directory at the root of a file system, for the user root alone."""


def temp_path(path: str, upload_id: str) -> str:
    """Return the path of the upload's bytes until they appear at `path`."""
    directory, name = os.path.split(path)
    return f"{directory}/{TEMP_PREFIX}{upload_id}/{name}"


def create_temp(path: str, *, root: str) -> str:
    """Create an empty temporary file for `path`, with the directories it needs, and return the id to find it by."""
    directory = os.path.dirname(path)
    upload_id = uuid.uuid4().hex
    temp = temp_path(path, upload_id)
    for num_tries in itertools.count(1):
        try:
            _make_directories(directory, root=root)
            os.mkdir(os.path.dirname(temp))
            break
        except FileNotFoundError as error:
            # Another process that deletes the last object of the directory prunes it, between the two calls.
            if num_tries == _MKDIR_TRIES:  # the file system allows none, as /proc does
                raise PermissionError(errno.EPERM, "No directory can be made", error.filename) from error
    try:
        os.close(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except BaseException:
        discard(temp)
        raise
    return upload_id


def write_at(file: int, offset_bytes: int, views: Views) -> int:
    """Write `views` at `offset_bytes`. Returns the CRC32C of the bytes on their way into the kernel."""
    crc32c = 0
    for batch in batches(views, max_bytes=_BATCH_BYTES, max_views=_IOV_MAX):
        crc32c = crc32c_of(batch, crc32c)
        remaining = batch
        while remaining:
            num_written = os.pwritev(file, remaining, offset_bytes)
            offset_bytes += num_written
            remaining = skip_bytes(remaining, num_written)
    return crc32c


def read_at(file: int, offset_bytes: int, views: Views) -> int:
    """Fill `views` from `offset_bytes` on. Returns fewer bytes than they hold only if the file ends."""
    num_read = 0
    for batch in batches(views, max_bytes=1 << 30, max_views=_IOV_MAX):
        remaining = batch
        while remaining:
            num_new = os.preadv(file, remaining, offset_bytes + num_read)
            if num_new == 0:
                return num_read
            num_read += num_new
            remaining = skip_bytes(remaining, num_new)
    return num_read


def flush(temp: str) -> None:
    """Make the bytes of `temp` durable."""
    with open_file(temp, os.O_RDONLY) as file:
        os.fsync(file)


def make_visible(temp: str, path: str, *, if_absent: bool) -> None:
    """Make the file `temp`, finished and flushed, appear at `path` at once. `make_durable` makes it durable."""
    if if_absent:
        _link(temp, path)
    else:
        os.replace(temp, path)


def make_durable(temp: str, path: str, *, root: str) -> None:
    """Make the file durable that `make_visible` made appear at `path`. `temp` is gone afterwards."""
    with contextlib.suppress(OSError):  # the object exists; the rest of the temporary one is only garbage
        discard(temp)
    # From the object upwards: a directory's entry is what makes everything below it reachable after a crash.
    directory = os.path.dirname(path)
    while True:
        # If it is gone, another process has removed the object already, and the directory with it.
        with contextlib.suppress(FileNotFoundError):
            fsync_directory(directory)
        if directory == root:
            return
        directory = os.path.dirname(directory)


def discard(temp: str) -> None:
    """Remove a temporary file and its hidden directory, if they exist."""
    hidden = os.path.dirname(temp)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(hidden):
            os.unlink(f"{hidden}/{name}")
        os.rmdir(hidden)


def prune(directory: str, *, root: str) -> None:
    """Remove `directory` and those above it, up to but without `root`, while they are empty."""
    while directory.startswith(root.rstrip("/") + "/"):
        try:
            os.rmdir(directory)
        except OSError:
            # Not empty, or removed already, or another user's. No reader sees an empty directory.
            return
        directory = os.path.dirname(directory)


def existing_parent(directory: str) -> str:
    """Return `directory`, or the nearest one above it that exists."""
    while not os.path.isdir(directory) and directory != (parent := os.path.dirname(directory)):
        directory = parent
    return directory


def links_work(directory: str) -> bool:
    """Try the exclusive link that create-if-absent needs, in `directory`. Returns True if it works.

    Returns True if nothing can be written too: the error of the next write says more.
    """
    directory = existing_parent(directory)
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


@contextlib.contextmanager
def open_object(path: str) -> Iterator[int]:
    """Open a regular file for reading; anything else is no object."""
    # Without O_NONBLOCK, opening a named pipe would wait for its writer for ever.
    with open_file(path, os.O_RDONLY | os.O_NONBLOCK) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise FileNotFoundError(errno.ENOENT, "This is not a regular file", path)
        yield file


@contextlib.contextmanager
def open_file(path: str, flags: int) -> Iterator[int]:
    """Open a file, until the end of the block."""
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
    """Make the entries of a directory durable, if its file system can."""
    with open_file(path, os.O_RDONLY | os.O_DIRECTORY) as directory:
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno not in _NO_FSYNC:
                raise


def _link(temp: str, path: str) -> None:
    try:
        os.link(temp, path, follow_symlinks=False)
    except FileExistsError:
        # Over NFS the answer to a link that worked can be lost, and the client's second try finds the first. The count
        # of links shows it (open(2), under O_EXCL).
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
    """Make directories like ``os.makedirs``. Those outside `root` are durable; `make_visible` makes those within."""
    missing: list[str] = []
    above = directory
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    if not os.path.isdir(above) and os.path.lexists(above):  # else another process has just removed it
        reason = "This is a dangling symbolic link" if os.path.islink(above) else os.strerror(errno.ENOTDIR)
        raise NotADirectoryError(errno.ENOTDIR, reason, above)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        if len(path) <= len(root):
            fsync_directory(os.path.dirname(path))


def list_files(root: str, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield key and status of every file whose key starts with `prefix`, without those that vanish meanwhile."""
    for directory, entries in _directories(root, prefix):
        yield from _files_in(root, directory, entries, prefix)


def _files_in(
    root: str, directory: str, entries: Sequence[os.DirEntry[str]], prefix: str
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of one directory, beginning with `entries`, a first reading of it.

    A directory is not read atomically: if a listed file has vanished, the file that replaced it may be missing. So the
    directory is read again until no new name has vanished.
    """
    names_seen = set[str]()
    has_vanished = True
    while has_vanished:
        has_vanished = False
        for entry in entries:
            key = f"{directory}{entry.name}"
            if not key.startswith(prefix) or entry.name in names_seen:
                continue
            names_seen.add(entry.name)
            status = _object_status(entry, root)
            has_vanished |= status is None and _was_file(entry)
            if status:
                yield key, status
        if has_vanished:
            try:
                entries = _entries(f"{root}/{directory}")
            except FileNotFoundError:
                return


def list_directories(root: str) -> Iterator[str]:
    """Yield the names of the directories directly under `root` that hold at least one file at any depth, or may do."""
    try:
        entries = _entries(root)
    except FileNotFoundError:
        return
    for entry in entries:
        if _is_object_directory(entry):
            try:
                is_empty = next(list_files(root, f"{entry.name}/"), None) is None
            except PermissionError:
                is_empty = False  # a listing of the directory raises the reason
            if not is_empty:
                yield entry.name


def list_uploads(root: str, prefix: str) -> Iterator[tuple[str, str, os.stat_result, int]]:
    """Yield key, upload id, status (of its begin) and size of every unfinished upload."""
    for directory, entries in _directories(root, prefix):
        for hidden in entries:
            if not hidden.name.startswith(TEMP_PREFIX) or not hidden.is_dir(follow_symlinks=False):
                continue
            try:
                names = os.listdir(hidden.path)
                status = hidden.stat(follow_symlinks=False)
                size_bytes = sum(os.lstat(f"{hidden.path}/{name}").st_size for name in names)
            except FileNotFoundError:
                continue
            key = f"{directory}{names[0] if names else _UNNAMED}"
            if key.startswith(prefix):
                yield key, hidden.name[len(TEMP_PREFIX) :], status, size_bytes


def _directories(root: str, prefix: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yield the key prefix (with its slash) and the entries of each directory that can hold keys with `prefix`."""
    pending = [prefix[: prefix.rfind("/") + 1]]
    while pending:
        directory = pending.pop()
        try:
            entries = _entries(f"{root}/{directory}")
        except FileNotFoundError:
            continue
        except PermissionError:
            if directory.rstrip("/").rpartition("/")[2] == _LOST_AND_FOUND:
                continue
            raise  # a denied look is no absence
        except NotADirectoryError:
            if directory and not os.path.isfile(root):
                continue
            raise
        yield directory, entries
        for entry in entries:
            key = f"{directory}{entry.name}/"
            if _is_object_directory(entry) and (key.startswith(prefix) or prefix.startswith(key)):
                pending.append(key)


def _entries(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as scan:
        return list(scan)


def _was_file(entry: os.DirEntry[str]) -> bool:
    """Return True if the entry is a file by its directory, or of unknown type."""
    return not (entry.name.startswith(TEMP_PREFIX) or entry.is_symlink() or entry.is_dir(follow_symlinks=False))


def _is_object_directory(entry: os.DirEntry[str]) -> bool:
    # A linked directory could lead out of the root, or back into it.
    return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(TEMP_PREFIX)


def _object_status(entry: os.DirEntry[str], root: str) -> os.stat_result | None:
    try:
        if entry.is_symlink() and not may_be_followed(os.path.realpath(entry.path), os.path.realpath(root)):
            return None
        status = entry.stat()
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or a link to nowhere
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise  # a denied look is no absence
    return status if stat.S_ISREG(status.st_mode) else None


def may_be_followed(path: str, root: str) -> bool:
    """Return True if a link below `root` may lead to `path`; both absolute and free of links.

    A snapshot in Hugging Face's cache (``models--…/snapshots/<revision>/``) is made of links to files in the ``blobs/``
    of the same model: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    snapshot = _HUB_SNAPSHOT.match(f"{root}/")
    is_within = path == root or path.startswith(root.rstrip("/") + "/")
    return is_within or (snapshot is not None and path.rpartition("/")[0] == f"{snapshot[1]}/blobs")
