"""Memory that ranks of one machine share: what has become of each segment, and the bytes of those on their way.

It has no name that could be left behind: a file in memory, which goes with the last process that has it open, and
which another process of the same user opens by way of its owner's open files.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloudckpt._ranks.signs import has_ended, own_process
from cloudckpt.stores.base import Views

_RING_AT = 1 << 30
"""Where the bytes begin; all before is for what is said of them. Memory is taken only for what is written."""
BYTES_PER_SEGMENT = 16
MOST_SEGMENTS = (_RING_AT - mmap.PAGESIZE) // BYTES_PER_SEGMENT

UNKNOWN, READY, FAILED, TAKEN = range(4)
"""Of a segment, on its reader's board: not read yet; there; to be read by each for itself. On a taker's: taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where ranks on the same machine find a board."""

    process: str
    """As `own_process` says."""
    file: int
    identity: tuple[int, int]
    """Of that file: its number may be another's by the time that it is opened."""

    @property
    def machine(self) -> str:
        """The same for processes that can open each other's boards."""
        return self.process.partition(":")[2].partition(":")[2]


class Board:
    """One rank's board: its owner alone writes to it."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._memory: mmap.mmap | None = None
        self._states: Any = None
        self._places: Any = None
        self._ring: Any = None
        self._num_there: dict[int, int] = {}
        """Bytes that there is memory for, by place."""

    @classmethod
    def new(cls) -> Board | None:
        """An empty one; None where the system has no such files."""
        if not hasattr(os, "memfd_create") or own_process() == "-":
            return None
        try:
            return cls(os.memfd_create("cloudckpt", os.MFD_CLOEXEC))
        except OSError:
            return None

    @classmethod
    def at(cls, address: Address) -> Board:
        """Another rank's. Raises `OSError` where it cannot be opened, or is not there any more."""
        pid = address.process.partition(":")[0]
        path = f"/proc/{pid}/fd/{address.file}"
        # Looked at before it is opened, which may block or do something, and after, for it may have changed meanwhile.
        if has_ended(address.process) or _identity(Path(path).stat()) != address.identity:
            raise OSError(errno.ESTALE, "the other rank has closed its board")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if _identity(os.fstat(file)) != address.identity:
            os.close(file)
            raise OSError(errno.ESTALE, "the other rank has closed its board")
        return cls(file)

    @property
    def address(self) -> Address:
        return Address(process=own_process(), file=self._file, identity=_identity(os.fstat(self._file)))

    def open(self, num_segments: int, *, ring_bytes: int) -> None:
        """For a load of so many segments, whose bytes are in a ring of that size on their way.

        All who open it have to say the same. Raises `OSError` where there is no memory for it.
        """
        size_bytes = mmap.PAGESIZE + num_segments * BYTES_PER_SEGMENT
        # Its owner and those who take from it come in any order: each makes it as large, and none makes it smaller.
        os.posix_fallocate(self._file, 0, size_bytes)
        os.ftruncate(self._file, _RING_AT + ring_bytes)
        self._memory = mmap.mmap(self._file, size_bytes)
        ring = mmap.mmap(self._file, ring_bytes, offset=_RING_AT)
        self._ring = np.frombuffer(ring, dtype=np.uint8)  # which keeps it
        words = np.frombuffer(self._memory, dtype=np.int64, offset=mmap.PAGESIZE)
        self._states, self._places = words[:num_segments], words[num_segments:]

    def state(self, number: int) -> int:
        return int(self._states[number])

    def states(self, numbers: Any) -> Any:
        """Of several segments, as arrays."""
        return self._states[numbers]

    def num_known(self) -> int:
        """It grows while the owner makes progress."""
        return int(np.count_nonzero(self._states)) if self._states is not None else 0

    def set_state(self, number: int, state: int) -> None:
        self._states[number] = state

    @property
    def has_left(self) -> bool:
        """Whether the owner takes and hands on nothing any more."""
        return self._memory is not None and self._memory[0] != 0

    def leave(self) -> None:
        if self._memory is None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, b"\1", 0)  # the others may have planned what this rank never came to
        else:
            self._memory[0] = 1

    def write(self, number: int, views: Views, *, place: int) -> None:
        """Put the segment's bytes at `place`, and only then say that they are there.

        Raises `OSError` where there is no memory for them.
        """
        num_bytes = sum(map(len, views))
        if self._num_there.get(place, 0) < num_bytes:
            # To touch memory that the system cannot give would end the process.
            os.posix_fallocate(self._file, _RING_AT + place, num_bytes)
            self._num_there[place] = num_bytes
        position = place
        for view in views:
            self._ring[position : position + len(view)] = np.frombuffer(view, dtype=np.uint8)
            position += len(view)
        self._places[number] = place
        self._states[number] = READY

    def written(self, place: int, num_bytes: int) -> memoryview:
        """What lies at `place`."""
        return memoryview(self._ring[place : place + num_bytes])

    def read(self, number: int, views: Views) -> bool:
        """Fill `views` with the segment's bytes; False where they were given up meanwhile."""
        position = int(self._places[number])
        for view in views:
            np.frombuffer(view, dtype=np.uint8)[:] = self._ring[position : position + len(view)]
            position += len(view)
        return self.state(number) == READY

    def close(self) -> None:
        file, self._file = self._file, -1
        if file < 0:
            return
        self._states = self._places = self._ring = None
        memory, self._memory = self._memory, None
        if memory is not None:
            with contextlib.suppress(BufferError):  # a thread that was not waited for still looks at it
                memory.close()
        os.close(file)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
