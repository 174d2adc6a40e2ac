"""Host memory that is mapped once and used again: `SnapshotPool` for snapshots, `Arena` for the buffers of parts.

Snapshots with tensors of a GPU are pinned, and so are the buffers of a process that uses CUDA. torch's own pinned
memory is not used: it rounds sizes up to powers of two, and is never freed.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cloudckpt._torch_compat import has_other_users, new_shared_storage
from cloudckpt.errors import InvalidOptionError
from cloudckpt.io.boxes import join_ranges
from cloudckpt.options import MIB
from cloudckpt.tensors.addresses import LINE_BYTES, Placement, place_segments

_log = logging.getLogger("cloudckpt")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
_MAX_IDLE_BYTES = 512 * MIB  # the default of `Options.staging_bytes`


def is_cuda_in_use() -> bool:
    """Return True if this process has initialised CUDA. The call itself does not initialise it."""
    return bool(torch.cuda.is_initialized())


def empty_tensor(dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor without elements, to be set to other memory. Made directly, ``complex32`` would warn."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype)


class MemoryBlock:
    """One mapping of memory. The mapping lives as long as a tensor refers to it, even after `release`."""

    def __init__(self, num_bytes: int, *, shared: bool = False) -> None:
        self.num_bytes = num_bytes
        self._unpin_finalizer: weakref.finalize[..., Any] | None = None
        self._shared = _map_shared_memory(num_bytes) if shared else None
        self._memory = None if shared else mmap.mmap(-1, num_bytes)
        self._view: memoryview | None = None
        self._last_view: weakref.ref[memoryview] | None = None
        self.begin_lending()
        self.address = torch.frombuffer(self._view, dtype=torch.uint8).data_ptr()
        _request_huge_pages(self.address, num_bytes)

    def begin_lending(self) -> None:
        """Make the view of the memory to which the tensors of the next snapshot refer."""
        memory: Any = self._memory
        if self._shared is not None:
            memory = empty_tensor(torch.uint8).set_(self._shared).numpy()
        self._view = memoryview(memory)
        self._last_view = weakref.ref(self._view)

    @property
    def is_lent(self) -> bool:
        """True while a tensor of the last snapshot uses the memory.

        After this call, no tensor can be made until `begin_lending` is called again.
        """
        self._view = None  # it would count as a user
        if self._shared is not None:
            return has_other_users(self._shared)
        return self._last_view is not None and self._last_view() is not None

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the dtype and shape of the contiguous `like` at `offset`. Its storage is no larger.

        ``torch.save`` writes whole storages, and torch's writers copy a tensor whose storage is larger than itself.
        """
        size = like.size()
        flat: torch.Tensor = torch.frombuffer(self._view, dtype=like.dtype, count=size.numel(), offset=offset)
        return flat if len(size) == 1 else flat.view(size)

    def storage(self, offset: int, num_bytes: int, *, whole: bool) -> tuple[torch.UntypedStorage, int]:
        """Return a storage with the bytes from `offset` on, and the position of the first of them in it.

        With `whole`, in shared memory, it is the storage that torch shares with other processes by its descriptor.
        """
        if whole and self._shared is not None:
            return self._shared, offset
        line_offset = offset % LINE_BYTES  # elements stay aligned with the beginning of the storage
        begin, count = offset - line_offset, num_bytes + line_offset
        return torch.frombuffer(self._view, dtype=torch.uint8, count=count, offset=begin).untyped_storage(), line_offset

    def bytes_tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return the bytes ``[offset, offset + num_bytes)`` as a ``uint8`` tensor."""
        return torch.frombuffer(self._view, dtype=torch.uint8, count=num_bytes, offset=offset)

    @property
    def is_pinned(self) -> bool:
        """True if the memory is registered with CUDA."""
        return self._unpin_finalizer is not None and self._unpin_finalizer.alive

    def pin(self) -> bool:
        """Register the memory with CUDA, so that copies run at the link's rate beside other work.

        Return False, and log the reason, if CUDA refuses. Copies are slower then.
        """
        try:
            code = int(torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, _PORTABLE))
            problem = f"cudaHostRegister of {self.num_bytes} bytes failed with error {code}" if code else ""
        except RuntimeError as error:
            problem = str(error)
        if problem:
            _log.warning("Host memory is not pinned, so copies from the GPU are slower: %s. See ulimit -l.", problem)
            return False
        self._unpin_finalizer = weakref.finalize(self, _unpin, self.address, self.num_bytes, os.getpid())
        self._unpin_finalizer.atexit = False  # CUDA may have ended by then, and unpins everything itself
        return True

    def release_after_last_tensor(self) -> None:
        """Unpin and release the memory once no tensor refers to it. Memory must be unpinned before it is unmapped."""
        finalizer = weakref.finalize(self._view, self.release)  # tensors keep the view, and this keeps the memory
        finalizer.atexit = False
        self._view = None

    def release(self) -> None:
        """Unpin the memory, and give up this object's reference to it. The last tensor that uses it unmaps it."""
        if self._unpin_finalizer is not None:
            self._unpin_finalizer()
        self._view = self._shared = self._memory = None


def _map_shared_memory(num_bytes: int) -> torch.UntypedStorage:
    """Map a memfd as a storage that torch shares with other processes. It takes no space of /dev/shm."""
    descriptor = os.memfd_create("cloudckpt-snapshot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        return new_shared_storage(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _request_huge_pages(address: int, num_bytes: int) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))  # an error costs speed


def _unpin(address: int, num_bytes: int, process_id: int) -> None:
    if process_id != os.getpid():
        return  # a forked child must not call CUDA
    error = int(torch.cuda.cudart().cudaHostUnregister(address))
    if error:
        _log.warning("Unpinning %d bytes of host memory failed with CUDA error %d.", num_bytes, error)


class SnapshotPool:
    """The blocks of memory that hold one snapshot after the other.

    If a snapshot does not fit, the pool adds one block for the rest. If a block would then be unused, because tensors
    have grown, one new block replaces all blocks. `close` frees the memory.
    """

    def __init__(self, *, shared: bool) -> None:
        if shared and not hasattr(os, "memfd_create"):
            raise InvalidOptionError(
                "This system has no memfd_create, so snapshots cannot be shared with another process. Save in a thread"
            )
        self.is_shared = shared
        self._blocks: list[MemoryBlock] = []
        self._lent_blocks: list[MemoryBlock] = []
        """Blocks that tensors of an earlier snapshot still use."""
        self._can_pin = True

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in (*self._blocks, *self._lent_blocks))

    @property
    def blocks(self) -> Sequence[MemoryBlock]:
        """The blocks of the present snapshot, as its `Placement` numbers them."""
        return self._blocks

    def place(self, segments: Sequence[tuple[int, int]], *, reuse_lent: bool) -> Placement:
        """Place segments of ``(address, num_bytes)`` in blocks, and map the memory that is missing.

        Uses blocks that still have tensors only with `reuse_lent`. Raises `MemoryError` if there is no more memory; the
        pool stays usable.
        """
        blocks = [*self._blocks, *self._lent_blocks]
        self._blocks = [block for block in blocks if reuse_lent or not block.is_lent]
        self._lent_blocks = [block for block in blocks if block not in self._blocks]
        sizes_bytes = [block.num_bytes for block in self._blocks]
        placement = place_segments(segments, sizes_bytes)
        if placement.new_block_bytes:
            has_unused_block = len(set(placement.blocks)) <= len(sizes_bytes)
            if has_unused_block or sum(sizes_bytes) > sum(num_bytes for _, num_bytes in segments):
                placement = place_segments(segments, [])
                too_small, self._blocks = self._blocks, []
                for block in too_small:
                    block.release()
            self._blocks.append(self._new_block(placement.new_block_bytes))
        for block in self._blocks:
            block.begin_lending()
        return placement

    def _new_block(self, num_bytes: int) -> MemoryBlock:
        try:
            return MemoryBlock(num_bytes, shared=self.is_shared)
        except OSError as error:
            raise MemoryError(f"A snapshot needs {num_bytes} more bytes of host memory: {error}") from error

    def pin(self) -> None:
        """Pin the blocks of the present snapshot, if CUDA is in use. A snapshot that cannot be pinned is slower."""
        for block in self._blocks if is_cuda_in_use() else ():
            if self._can_pin and not block.is_pinned:
                self._can_pin = block.pin()

    def close(self) -> None:
        """Release all memory. The pool can be used again, and begins anew."""
        blocks = [*self._blocks, *self._lent_blocks]
        self._blocks, self._lent_blocks = [], []
        for block in blocks:
            block.release()


class PinnedBuffers:
    """Pinned buffers that outlive a save or load, because pinning takes longer than copying.

    Keeps at most `_MAX_IDLE_BYTES` for the next save or load. Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[torch.Tensor] = []
        self._can_pin = True

    @property
    def num_bytes(self) -> int:
        """The size of the buffers that are kept."""
        with self._lock:
            return sum(map(len, self._idle))

    def take(self, *, max_bytes: int) -> list[torch.Tensor]:
        """Return kept buffers of at most `max_bytes` in all."""
        with self._lock:
            num_taken = _count_within(self._idle, max_bytes)
            taken, self._idle = self._idle[:num_taken], self._idle[num_taken:]
        return taken

    def new(self, num_bytes: int) -> torch.Tensor:
        """Return a new ``uint8`` buffer, pinned if possible. The last reference frees it."""
        if self._can_pin:
            block = MemoryBlock(num_bytes)
            self._can_pin = block.pin()
            if self._can_pin:
                buffer = block.bytes_tensor(0, num_bytes)
                block.release_after_last_tensor()
                return buffer
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def keep(self, buffers: Sequence[torch.Tensor]) -> None:
        """Keep buffers that `new` or `take` returned, within the bound, for the next save or load."""
        with self._lock:
            if self._can_pin:
                both = [*self._idle, *buffers]
                self._idle = both[: _count_within(both, _MAX_IDLE_BYTES)]

    def close(self) -> None:
        """Free the buffers that are kept."""
        self.take(max_bytes=_MAX_IDLE_BYTES)


def _count_within(buffers: Sequence[torch.Tensor], max_bytes: int) -> int:
    """Return how many of the first buffers have at most `max_bytes` in all."""
    return bisect.bisect_right(list(itertools.accumulate(map(len, buffers))), max_bytes)


PINNED = PinnedBuffers()
"""The pinned buffers of this process."""


class _Buffer:
    """A buffer of an arena, and its free ranges."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.free = [(0, len(memory))]

    @property
    def is_unused(self) -> bool:
        return self.free == [(0, len(self.memory))]

    def take(self, free: tuple[int, int], num_bytes: int) -> tuple[int, int]:
        """Take the beginning of a free range, rounded up so that the next loan is aligned."""
        begin, end = free
        cut = min(-(-(begin + num_bytes) // LINE_BYTES) * LINE_BYTES, end)
        self.free.remove(free)
        if cut < end:
            bisect.insort(self.free, (cut, end))
        return begin, cut

    def give_back(self, begin: int, end: int) -> None:
        if begin < end:
            self.free = join_ranges(sorted([*self.free, (begin, end)]))


@dataclass(slots=True, eq=False)
class _LoanRequest:
    """A thread that asks for memory, and the range that it gets."""

    num_bytes: int
    is_granted: threading.Event = field(default_factory=threading.Event)
    buffer: _Buffer | None = None
    """The buffer with the lent range; None if the thread has to make one of `num_bytes`."""
    begin: int = 0
    end: int = 0


class Arena:
    """Lends CPU buffers to threads, at most `budget_bytes` in all. Lends a larger buffer only while it lends no other.

    Waiting threads get memory in the order in which they came. A thread must not hold two loans, since it could wait
    for itself. The arena uses buffers again until it is closed. Safe to share between threads.

    Args:
        budget_bytes: Most bytes that the buffers have in all.
        pinned: Source of kept and new buffers, which get the arena's buffers at `close`. None stands for ordinary
            memory.

    """

    def __init__(self, *, budget_bytes: int, pinned: PinnedBuffers | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._pinned = pinned
        self._lock = threading.Lock()
        self._waiting: deque[_LoanRequest] = deque()
        self._buffers = [] if pinned is None else [*map(_Buffer, pinned.take(max_bytes=budget_bytes))]
        self._buffer_bytes = sum(len(buffer.memory) for buffer in self._buffers)
        self._num_lent = 0
        self._is_closed = False

    @contextlib.contextmanager
    def lend(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """Lend a ``uint8`` tensor of shape ``[num_bytes]``. Waits until the budget has room for it."""
        request = _LoanRequest(num_bytes)
        try:
            buffer = self._await(request)
            yield buffer.memory[request.begin : request.begin + num_bytes]
        finally:
            self._end(request)

    def close(self) -> None:
        """Give the buffers back to `pinned`. Buffers that are still lent follow at the end of their loans."""
        with self._lock:
            self._is_closed = True
            unused = self._remove_unused()
        if self._pinned is not None:
            self._pinned.keep([buffer.memory for buffer in unused])

    def _await(self, request: _LoanRequest) -> _Buffer:
        with self._lock:
            self._waiting.append(request)
            self._serve()
        request.is_granted.wait()
        if request.buffer is None:
            pinned, num_bytes = self._pinned, request.num_bytes
            memory = (
                torch.empty(num_bytes, dtype=torch.uint8, device="cpu") if pinned is None else pinned.new(num_bytes)
            )
            buffer = _Buffer(memory)
            request.begin, request.end = buffer.take((0, num_bytes), num_bytes)
            with self._lock:
                self._buffers.append(buffer)
                request.buffer = buffer
        return request.buffer

    def _end(self, request: _LoanRequest) -> None:
        with self._lock:
            if not request.is_granted.is_set():  # interrupted while it waited
                self._waiting.remove(request)
            else:
                self._num_lent -= 1
                if request.buffer is None:  # none could be made
                    self._buffer_bytes -= request.num_bytes
                else:
                    request.buffer.give_back(request.begin, request.end)
            self._serve()
        if self._is_closed:
            self.close()

    def _serve(self) -> None:
        """Give free memory to the waiting threads, in the order in which they came."""
        while self._waiting and self._find_memory(self._waiting[0]):
            self._num_lent += 1
            self._waiting.popleft().is_granted.set()

    def _find_memory(self, request: _LoanRequest) -> bool:
        fitting = [
            (high - low, number, (low, high))
            for number, buffer in enumerate(self._buffers)
            for low, high in buffer.free
            if high - low >= request.num_bytes
        ]
        if fitting:
            _, number, free = min(fitting)
            request.buffer = self._buffers[number]
            request.begin, request.end = request.buffer.take(free, request.num_bytes)
            return True
        if self._buffer_bytes + request.num_bytes > self._budget_bytes:
            self._remove_unused(until_bytes=self._budget_bytes - request.num_bytes)
        if self._buffer_bytes + request.num_bytes > self._budget_bytes and self._num_lent:
            return False
        self._buffer_bytes += request.num_bytes
        return True

    def _remove_unused(self, *, until_bytes: int = 0) -> list[_Buffer]:
        """Remove buffers without loans, until the arena holds at most `until_bytes`."""
        removed = []
        for buffer in [buffer for buffer in self._buffers if buffer.is_unused]:
            if self._buffer_bytes > until_bytes:
                self._buffers.remove(buffer)
                self._buffer_bytes -= len(buffer.memory)
                removed.append(buffer)
        return removed


def new_arena(*, budget_bytes: int) -> Arena:
    """Return an arena, of pinned buffers if this process uses CUDA. The caller closes it."""
    return Arena(budget_bytes=budget_bytes, pinned=PINNED if is_cuda_in_use() else None)
