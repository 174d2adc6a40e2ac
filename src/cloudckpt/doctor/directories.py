"""Directories that are made on the way to a place that was only tried out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudckpt._uri import Location


@contextlib.contextmanager
def unmade_afterwards(location: Location) -> Iterator[None]:
    """Of `location` and what is above it, remove afterwards what was not there before, as far as it is empty.

    Does nothing on a store that has no directories.
    """
    missing = _missing(location) if location.scheme == "file" else []
    try:
        yield
    finally:
        for directory in missing:
            with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
                directory.rmdir()


def _missing(location: Location) -> list[Path]:
    """The deepest first."""
    path = Path(location.path)
    return [directory for directory in (path, *path.parents) if not directory.exists()]
