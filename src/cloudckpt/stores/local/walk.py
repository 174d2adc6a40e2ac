"""Listing a directory's objects, and what unfinished uploads left in it."""

# ruff: noqa: PTH113, PTH208
# (pathlib has no names for half of the calls here, and rewrites the paths that it is given)

from __future__ import annotations

import errno
import os
import re
import stat
from typing import TYPE_CHECKING

from cloudckpt.stores.local.durable import TEMP_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# What stands for the name of an object whose writer died before it had created the file.
UNNAMED = "unnamed"
_HUB_SNAPSHOT = re.compile(r"(.*/(?:models|datasets|spaces)--[^/]+)/snapshots/", re.DOTALL)
_OF_THE_FILE_SYSTEM = "lost+found"
"""Lies where a file system is mounted, and is root's alone."""


Denied = dict[str, PermissionError]
"""Why directories below the one where a walk begins could not be looked into, by their keys with a slash."""


def files(root: str, prefix: str, denied: Denied) -> Iterator[tuple[str, os.stat_result]]:
    """Key and status of every file whose key starts with `prefix`. What vanishes meanwhile is left out.

    Where it may not look, that is in `denied` afterwards, and all else was given.
    """
    for directory, entries in _directories(root, start=prefix.rpartition("/")[0], prefix=prefix, denied=denied):
        yield from _files_in(root, directory, entries, prefix, denied)


def _files_in(
    root: str, directory: str, entries: Sequence[os.DirEntry[str]], prefix: str, denied: Denied
) -> Iterator[tuple[str, os.stat_result]]:
    """Those of one directory, of which `entries` are a first reading.

    A directory is not read atomically: what has come in place of a file that vanished may be missing. So the directory
    is read again until no name that is new has vanished.
    """
    seen = set[str]()
    has_vanished = True
    while has_vanished:
        has_vanished = False
        for entry in entries:
            key = f"{directory}{entry.name}"
            if not key.startswith(prefix) or entry.name in seen:
                continue
            seen.add(entry.name)
            try:
                status = _object_status(entry, root)
                has_vanished |= status is None and _was_file(entry)
            except PermissionError as error:  # it may list the directory, and no more
                denied[directory] = error
                continue
            if status:
                yield key, status
        if has_vanished:
            try:
                entries = _entries(f"{root}/{directory}")
            except FileNotFoundError:
                return


def directories_with_files(root: str) -> Iterator[str]:
    """The names of the directories directly under `root` that hold at least one file at any depth, or perhaps do."""
    for _, entries in _directories(root, start="", prefix="", denied={}, depth=1):
        for entry in entries:
            if _is_object_directory(entry) and _holds_files(root, entry.name):
                yield entry.name


def _holds_files(root: str, name: str) -> bool:
    """Also where it may not be known: whoever then looks into it hears why, and all others can be looked at."""
    denied: Denied = {}
    return next(files(root, f"{name}/", denied), None) is not None or bool(denied)


def uploads(root: str, prefix: str, denied: Denied) -> Iterator[tuple[str, str, os.stat_result]]:
    """Key, upload id and status (of the time it began) of every unfinished upload. `denied` is as for `files`."""
    for directory, entries in _directories(root, start=prefix.rpartition("/")[0], prefix=prefix, denied=denied):
        for hidden in entries:
            if not hidden.name.startswith(TEMP_PREFIX) or not hidden.is_dir(follow_symlinks=False):
                continue
            try:
                names = os.listdir(hidden.path)
                status = hidden.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except PermissionError as error:
                denied[directory] = error
                continue
            key = f"{directory}{names[0] if names else UNNAMED}"
            if key.startswith(prefix):
                yield key, hidden.name[len(TEMP_PREFIX) :], status


def _directories(
    root: str, *, start: str, prefix: str, denied: Denied, depth: int | None = None
) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """The key prefix (with its slash) and entries of each directory that can hold keys starting with `prefix`."""
    pending = [(f"{start}/" if start else "", 1)]
    while pending:
        directory, level = pending.pop()
        try:
            entries = _entries(f"{root}/{directory}")
        except FileNotFoundError:
            continue
        except PermissionError as error:
            if directory.rstrip("/").rpartition("/")[2] == _OF_THE_FILE_SYSTEM:
                continue
            if not directory:
                raise  # whoever may not look must not be told that nothing is there
            denied[directory] = error
            continue
        except NotADirectoryError:
            if directory and not os.path.isfile(root):
                continue
            raise
        yield directory, entries
        if depth is None or level < depth:
            pending += [
                (key, level + 1)
                for entry in entries
                if _is_object_directory(entry)
                and ((key := f"{directory}{entry.name}/").startswith(prefix) or prefix.startswith(key))
            ]


def _entries(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as scan:
        return list(scan)


def _was_file(entry: os.DirEntry[str]) -> bool:
    """By what the directory said; a file system that says nothing may have meant one."""
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
        raise  # whoever may not look must not be told that nothing is there
    return status if stat.S_ISREG(status.st_mode) else None


def may_be_followed(path: str, root: str) -> bool:
    """Return whether a link below `root` may lead to `path`; both absolute and free of links.

    A snapshot in Hugging Face's cache (``models--…/snapshots/<revision>/``) is made of links to files in the ``blobs/``
    of the same model: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    snapshot = _HUB_SNAPSHOT.match(f"{root}/")
    return is_within(path, root) or (snapshot is not None and path.rpartition("/")[0] == f"{snapshot[1]}/blobs")


def is_within(path: str, root: str) -> bool:
    """Whether `path` is `root` or below it; both absolute and free of links."""
    return path == root or path.startswith(root.rstrip("/") + "/")
