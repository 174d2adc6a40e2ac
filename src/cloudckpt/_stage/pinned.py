"""Pinned buffers for copies from and to a GPU, which are used again from one save or load to the next."""

from __future__ import annotations

import logging
import threading

import torch

from cloudckpt._forks import in_child
from cloudckpt._stage.arena import Arena, cuda_in_use
from cloudckpt._stage.memory import Block
from cloudckpt.options import MIB

_log = logging.getLogger("cloudckpt")

_MOST_IDLE_BYTES = 512 * MIB  # as much as a save stages at once


class PinnedBuffers:
    """A `Source` of pinned memory. Safe to use from many threads.

    torch's own pinned memory is of powers of two, and stays for as long as the process. Of this, up to
    `most_idle_bytes` are kept for whoever comes next, because pinning takes longer than a copy; the rest is freed as
    soon as it is not used, and what is kept makes room where other sizes are needed.
    """

    def __init__(self, *, most_idle_bytes: int = _MOST_IDLE_BYTES) -> None:
        self._most_idle_bytes = most_idle_bytes
        self._lock = threading.Lock()
        self._blocks: dict[int, Block] = {}
        self._idle: list[torch.Tensor] = []
        self._can_pin = True

    @property
    def num_bytes(self) -> int:
        """Of all that is pinned here, be it lent or idle."""
        with self._lock:
            return sum(block.num_bytes for block in self._blocks.values())

    def idle(self, num_bytes: int, *, most_bytes: int) -> torch.Tensor | None:
        """See `Source`, as for the rest."""
        with self._lock:
            fitting = [buffer for buffer in self._idle if num_bytes <= len(buffer) <= most_bytes]
            if not fitting:
                return None
            smallest = min(fitting, key=len)
            self._idle = [buffer for buffer in self._idle if buffer is not smallest]
            return smallest

    def new(self, num_bytes: int) -> torch.Tensor:
        if not self._can_pin:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self._make_room(num_bytes)
        block = Block(num_bytes, shared=False)
        try:
            block.pin()
        except (OSError, RuntimeError) as error:
            self._can_pin = False
            _log.warning("buffers are not pinned, and copies from and to the GPU are slower: %s (see ulimit -l)", error)
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        buffer = _whole(block)
        with self._lock:
            self._blocks[buffer.data_ptr()] = block
        return buffer

    def end(self, buffer: torch.Tensor) -> None:
        with self._lock:
            block = self._blocks.pop(buffer.data_ptr(), None)
        if block is not None:
            block.release()

    def keep(self, buffer: torch.Tensor) -> None:
        with self._lock:
            is_ours = buffer.data_ptr() in self._blocks
            if is_ours and sum(map(len, self._idle)) + len(buffer) <= self._most_idle_bytes:
                self._idle.append(buffer)
                return
        self.end(buffer)

    def close(self) -> None:
        """Free what is idle."""
        with self._lock:
            buffers, self._idle = self._idle, []
        for buffer in buffers:
            self.end(buffer)

    def forget(self) -> None:
        """In a forked child, which must not touch CUDA."""
        self._lock = threading.Lock()
        for block in self._blocks.values():
            block.forget()
        self._blocks, self._idle = {}, []

    def _make_room(self, num_bytes: int) -> None:
        """None of those that are idle fits, so that they would only come on top."""
        while num_bytes > 0:
            with self._lock:
                if not self._idle:
                    return
                buffer = self._idle.pop(0)
            num_bytes -= len(buffer)
            self.end(buffer)


def _whole(block: Block) -> torch.Tensor:
    storage, offset = block.storage(0, block.num_bytes)
    flat: torch.Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.set_(storage, offset, (block.num_bytes,), (1,))


PINNED = PinnedBuffers()
"""Of this process."""

in_child(PINNED.forget)


def new_arena(*, budget_bytes: int) -> Arena:
    """One of pinned buffers, where this process uses CUDA. Close it."""
    return Arena(budget_bytes=budget_bytes, source=PINNED) if cuda_in_use() else Arena(budget_bytes=budget_bytes)
