"""Host memory that snapshots are laid into, one after the other."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from cloudckpt._plan.placing import LINE_BYTES, Placing, place
from cloudckpt._stage.arena import cuda_in_use
from cloudckpt.errors import UnsupportedOperationError

_log = logging.getLogger("cloudckpt")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


def nothing_of(dtype: torch.dtype) -> torch.Tensor:
    """A tensor without elements, to be set to host memory; torch would warn of making one of ``complex32`` at once."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype)


class Block:
    """Memory of its own, of `num_bytes`, which lives for as long as a storage refers to it, whatever becomes of it."""

    def __init__(self, num_bytes: int, *, shared: bool) -> None:
        self.num_bytes = num_bytes
        self.descriptor: int | None = None
        """Of the shared memory that it is, until it is closed."""
        self._undo: list[weakref.finalize[..., Any]] = []  # also where nobody calls `release`
        self._whole: torch.UntypedStorage | None
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._memory: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._lent: weakref.ref[Any] | None = None
        if shared:
            self._whole = self._shared()
            self.address = self._whole.data_ptr()
            _ask_for_huge_pages(self.address, num_bytes)
            self.lend_anew()
        else:
            self._whole = None
            self._memory = mmap.mmap(-1, num_bytes)
            with contextlib.suppress(AttributeError, OSError):  # not every system has them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self.lend_anew()
            self.address = torch.frombuffer(self._view, dtype=torch.uint8).data_ptr()

    def _shared(self) -> torch.UntypedStorage:
        descriptor = os.memfd_create("cloudckpt-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, self.num_bytes)
            # torch knows such a storage as shared, and hands its descriptor to other processes.
            whole: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, self.num_bytes)  # type: ignore[attr-defined]  # noqa: SLF001  # torch's own way to open one
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self._undo.append(weakref.finalize(self, os.close, descriptor))
        return whole

    @property
    def is_lent(self) -> bool:
        """Whether there is still a tensor of what was lent since `lend_anew`."""
        self._view = None
        if self._whole is not None:
            num_used = torch._C._storage_Use_Count(self._whole._cdata)  # noqa: SLF001  # no other way to ask
            return num_used > 1 + len(self._typed)
        return self._lent is not None and self._lent() is not None

    def lend_anew(self) -> None:
        """Begin to lend it for another snapshot."""
        if self._whole is None:
            assert self._memory is not None  # noqa: S101  # it is not used any more once it is released
            self._view = memoryview(self._memory)
            self._lent = weakref.ref(self._view)
        else:
            whole: Any = nothing_of(torch.uint8).set_(self._whole).numpy()
            self._view = memoryview(whole)

    def tensor(self, offset: int, like: torch.Tensor, *, as_whole: bool = False) -> torch.Tensor:
        """One like `like`, which is contiguous, at `offset`, which is aligned for it.

        Its storage has no more than its bytes: whoever saves it by its storage, as ``torch.save`` does, relies on that,
        and torch's own writers copy it otherwise. But `as_whole`, in shared memory, it is what torch shares with other
        processes: all of it.
        """
        dtype, size = like.dtype, like.size()
        if as_whole and self._whole is not None:
            if dtype not in self._typed:
                self._typed[dtype] = nothing_of(dtype).set_(self._whole)
            return self._typed[dtype].as_strided(size, like.stride(), offset // dtype.itemsize)
        flat: torch.Tensor = torch.frombuffer(self._view, dtype=dtype, count=size.numel(), offset=offset)
        return flat if len(size) == 1 else flat.view(size)

    def storage(self, offset: int, num_bytes: int, *, as_whole: bool = False) -> tuple[torch.UntypedStorage, int]:
        """A storage with the bytes from `offset` on, and where in it they begin. `as_whole`: see `tensor`."""
        if as_whole and self._whole is not None:
            return self._whole, offset
        beyond = offset % LINE_BYTES  # what lies in it is aligned as in its own memory, and offsets are whole elements
        flat = torch.frombuffer(self._view, dtype=torch.uint8, count=num_bytes + beyond, offset=offset - beyond)
        return flat.untyped_storage(), beyond

    @property
    def is_pinned(self) -> bool:
        """Whether it is registered with CUDA."""
        return any(undo.alive for undo in self._undo if not undo.atexit)

    def pin(self) -> None:
        """Register it with CUDA, so that copies from a GPU run at the link's rate beside other work."""
        error = int(torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, _PORTABLE))  # type: ignore[no-untyped-call]  # torch's
        if error:
            raise OSError(f"cudaHostRegister of {self.num_bytes} bytes failed with error {error}")
        undo = weakref.finalize(self, _unpin, self.address, self.num_bytes, os.getpid())
        undo.atexit = False  # CUDA may have ended by then, and takes it along
        self._undo.append(undo)

    def release(self) -> None:
        """Let go of it: it is freed with the last tensor that refers to it, at once where there is none."""
        for undo in reversed(self._undo):
            undo()
        self.descriptor = None
        self._typed = {}
        self._view = self._whole = self._memory = None

    def forget(self) -> None:
        """Let go of it, and leave it pinned: in a forked child, which must not touch CUDA."""
        for undo in self._undo:
            if not undo.atexit:
                undo.detach()
        self.release()


def _unpin(address: int, num_bytes: int, process: int) -> None:
    if process != os.getpid():
        return  # a forked child, in which nobody said so
    error = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]  # torch's
    if error:
        _log.warning("unpinning %d bytes of snapshot memory failed with CUDA error %d", num_bytes, error)


class Pool:
    """Blocks that snapshots are laid into; it grows by what is missing, and frees nothing before `close`.

    What no longer fits, because every tensor has grown, is given up when other memory has taken its place.
    """

    def __init__(self, *, shared: bool) -> None:
        if shared and not hasattr(os, "memfd_create"):
            raise UnsupportedOperationError(
                "this system has no memfd_create: snapshots cannot be shared with another process here; use threads",
                key="memfd",
                operation="memfd_create",
            )
        self._shared = shared
        self._blocks: list[Block] = []
        self._held: list[Block] = []
        self._pins = True

    @property
    def num_bytes(self) -> int:
        """Of all memory that it has."""
        return sum(block.num_bytes for block in (*self._blocks, *self._held))

    @property
    def blocks(self) -> Sequence[Block]:
        """Those of the present snapshot, as its `Placing` numbers them."""
        return self._blocks

    def lay_out(self, segments: Sequence[tuple[int, int]], *, reuse_lent: bool) -> Placing:
        """Places for segments of ``(address, num_bytes)``, as `place` gives them; all blocks are there.

        Blocks of which there are still tensors are used again only if `reuse_lent`. Raises `MemoryError`, and can be
        used further, where there is no more memory.
        """
        blocks = [*self._blocks, *self._held]
        free = [block for block in blocks if reuse_lent or not block.is_lent]
        placing = place(segments, [block.num_bytes for block in free])
        if placing.new_block_bytes:
            used = set(placing.blocks)
            if sum(block.num_bytes for block in free) > sum(num_bytes for _, num_bytes in segments):
                # Too small each, though together they would do: one that fits takes the place of all.
                placing, used = place(segments, []), set()
            kept = [number for number in range(len(free)) if number in used]
            self._held = [block for block in blocks if block not in free]
            self._blocks = [free[number] for number in kept]
            for number in set(range(len(free))) - used:
                free[number].release()
            self._blocks.append(self._made(placing.new_block_bytes))
            numbers = {number: position for position, number in enumerate(kept)}
            blocks_of = [numbers.get(number, len(kept)) for number in placing.blocks]
            placing = dataclasses.replace(placing, blocks=blocks_of)
        else:
            self._held = [block for block in blocks if block not in free]
            self._blocks = free
        for block in self._blocks:
            block.lend_anew()
        return placing

    def _made(self, num_bytes: int) -> Block:
        try:
            return Block(num_bytes, shared=self._shared)
        except OSError as error:
            raise MemoryError(f"no memory for {num_bytes} more bytes of a snapshot: {error}") from error

    def pin(self) -> None:
        """Pin all blocks of the present snapshot, where CUDA is in use; what cannot be pinned is slower, no more."""
        if not (self._pins and cuda_in_use()):
            return
        for block in self._blocks:
            if block.is_pinned:
                continue
            try:
                block.pin()
            except (OSError, RuntimeError) as error:
                self._pins = False
                _log.warning("snapshots are not pinned, and copies from the GPU are slower: %s (see ulimit -l)", error)
                return

    def close(self) -> None:
        """Give up all memory. It can be used again, and then begins anew."""
        blocks = [*self._blocks, *self._held]
        self._blocks, self._held = [], []
        for block in blocks:
            block.release()


def _ask_for_huge_pages(address: int, num_bytes: int) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))  # in vain elsewhere
