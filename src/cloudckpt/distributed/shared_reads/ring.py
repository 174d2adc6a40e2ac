"""The shared memory of one rank, which other ranks of the same machine read.

It is a memfd: a file in memory without a name that a killed process could leave behind. The kernel frees it with the
last process that has it open. Another process of the same user opens it as ``/proc/<pid>/fd/<number>``.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloudckpt.stores.base import Views

_RING_OFFSET_BYTES = 1 << 30
"""Offset of the ring in the file; the state of each segment is before it. Only pages that are written take memory."""
_STATE_BYTES = 16
MAX_SEGMENTS = (_RING_OFFSET_BYTES - mmap.PAGESIZE) // _STATE_BYTES

UNKNOWN, READY, FAILED, RECEIVED = range(4)
"""States of a segment. In its reader's memory: not read yet, in the ring, each rank must read it itself. In a
receiver's memory: UNKNOWN until it needs the bytes no more, then RECEIVED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingAddress:
    """Address at which other processes of the machine find the shared memory of a rank."""

    process: str
    """The owner, as `own_process` identifies it."""
    file_number: int
    file_identity: tuple[int, int]
    """Device and inode: the number may be that of another file by the time that it is opened."""

    @property
    def machine(self) -> str:
        """Equal for processes that can open each other's memory."""
        return self.process.partition(":")[2].partition(":")[2]


class SharedMemoryRing:
    """The states of all segments of a load, and a ring with the bytes of some. Only its owner writes to it."""

    def __init__(self, file_number: int) -> None:
        self._file_number = file_number
        self._memory: mmap.mmap | None = None
        self._states: Any = None
        self._positions: Any = None
        self._ring: Any = None
        self._allocated_bytes: dict[int, int] = {}
        """Bytes of allocated memory, by position in the ring."""

    @classmethod
    def create(cls) -> SharedMemoryRing | None:
        """Create this rank's memory, without pages yet. Returns None where the system has no memfd."""
        if not hasattr(os, "memfd_create") or own_process() == "-":
            return None
        try:
            return cls(os.memfd_create("cloudckpt", os.MFD_CLOEXEC))
        except OSError:
            return None

    @classmethod
    def attach(cls, address: RingAddress) -> SharedMemoryRing:
        """Open another rank's memory. Raises `OSError` if that is not possible, or not any more."""
        path = f"/proc/{address.process.partition(':')[0]}/fd/{address.file_number}"
        # The file is checked before it is opened, as to open another kind of file may block, and after, as the number
        # may have become another file's in between.
        if has_ended(address.process) or _identity(Path(path).stat()) != address.file_identity:
            raise OSError(errno.ESTALE, "the other rank has closed its shared memory")
        file_number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if _identity(os.fstat(file_number)) != address.file_identity:
            os.close(file_number)
            raise OSError(errno.ESTALE, "the other rank has closed its shared memory")
        return cls(file_number)

    @property
    def address(self) -> RingAddress:
        """Return the address at which other ranks find it."""
        identity = _identity(os.fstat(self._file_number))
        return RingAddress(process=own_process(), file_number=self._file_number, file_identity=identity)

    def map(self, num_segments: int, *, ring_bytes: int) -> None:
        """Map it for a load. The owner and all who attach pass the same values.

        Raises `OSError` if there is no memory for it.
        """
        size_bytes = mmap.PAGESIZE + num_segments * _STATE_BYTES
        # Ranks map it in any order: each makes the file as large, and none makes it smaller.
        os.posix_fallocate(self._file_number, 0, size_bytes)
        os.ftruncate(self._file_number, _RING_OFFSET_BYTES + ring_bytes)
        self._memory = mmap.mmap(self._file_number, size_bytes)
        ring = mmap.mmap(self._file_number, ring_bytes, offset=_RING_OFFSET_BYTES)
        self._ring = np.frombuffer(ring, dtype=np.uint8)  # which keeps the mapping
        words = np.frombuffer(self._memory, dtype=np.int64, offset=mmap.PAGESIZE)
        self._states, self._positions = words[:num_segments], words[num_segments:]

    def state(self, number: int) -> int:
        """The state of a segment."""
        return int(self._states[number])

    def states(self, numbers: Any) -> Any:
        """The states of several segments, as an array."""
        return self._states[numbers]

    def set_state(self, number: int, state: int) -> None:
        """Set the state of a segment, for the other ranks to see."""
        self._states[number] = state

    def count_known(self) -> int:
        """Count the segments whose state is known. The count grows while the owner makes progress."""
        return int(np.count_nonzero(self._states)) if self._states is not None else 0

    @property
    def has_left(self) -> bool:
        """True if the owner publishes and receives nothing any more."""
        return self._memory is not None and self._memory[0] != 0

    def leave(self) -> None:
        """Tell the other ranks that the owner publishes and receives nothing any more."""
        if self._memory is None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file_number, b"\1", 0)  # the other ranks may map what the owner never did
        else:
            self._memory[0] = 1

    def write(self, number: int, views: Views, *, position: int) -> None:
        """Copy a segment's bytes to `position` in the ring, and then set its state to READY.

        Raises `OSError` if there is no memory for them.
        """
        num_bytes = sum(map(len, views))
        if self._allocated_bytes.get(position, 0) < num_bytes:
            # A page that the system cannot provide would end the process when it is touched.
            os.posix_fallocate(self._file_number, _RING_OFFSET_BYTES + position, num_bytes)
            self._allocated_bytes[position] = num_bytes
        end = position
        for view in views:
            self._ring[end : end + len(view)] = np.frombuffer(view, dtype=np.uint8)
            end += len(view)
        self._positions[number] = position
        self._states[number] = READY

    def read(self, number: int, views: Views) -> bool:
        """Fill `views` with a segment's bytes. Returns False if the owner has reused their place meanwhile."""
        position = int(self._positions[number])
        for view in views:
            np.frombuffer(view, dtype=np.uint8)[:] = self._ring[position : position + len(view)]
            position += len(view)
        return self.state(number) == READY

    def close(self) -> None:
        """Unmap and close it. The kernel frees the memory once all ranks have."""
        file_number, self._file_number = self._file_number, -1
        if file_number < 0:
            return
        self._states = self._positions = self._ring = None
        memory, self._memory = self._memory, None
        if memory is not None:
            with contextlib.suppress(BufferError):  # a thread that nobody joined still reads it
                memory.close()
        os.close(file_number)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def own_process() -> str:
    """Identify this process for others on the same machine; "-" if the system cannot."""
    pid = os.getpid()
    started = _state_and_start_of(pid)
    return f"{pid}:{started[1]}:{_process_namespace()}" if started is not None and _process_namespace() else "-"


def has_ended(process: str) -> bool:
    """True if the process that `own_process` identified is known to be gone; False if it is on another machine."""
    pid, _, rest = process.partition(":")
    start, _, namespace = rest.partition(":")
    if not namespace or namespace != _process_namespace():
        return False
    found = _state_and_start_of(int(pid))
    return found is None or found[0] in "ZX" or found[1] != start


def _state_and_start_of(pid: int) -> tuple[str, str] | None:
    try:
        # The name before it, in brackets, may hold anything (https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html).
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


@functools.cache
def _process_namespace() -> str:
    """Identify the boot and the container in which process numbers are unique; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""
