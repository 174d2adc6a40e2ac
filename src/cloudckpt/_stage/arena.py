"""A bounded set of reused buffers for copies on their way to or from a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from cloudckpt._threads import Condition


def cuda_in_use() -> bool:
    """Whether this process uses CUDA. Asking does not initialise it, which a CPU job must not pay for."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's


class Source(Protocol):
    """Where an arena's buffers come from. Buffers are ``uint8`` tensors of one dimension."""

    def idle(self, num_bytes: int, *, most_bytes: int) -> torch.Tensor | None:
        """One of `num_bytes` to `most_bytes` that is there already. Takes no time."""

    def new(self, num_bytes: int) -> torch.Tensor:
        """One of `num_bytes`."""

    def end(self, buffer: torch.Tensor) -> None:
        """It is not needed any more, for something else takes its place."""

    def keep(self, buffer: torch.Tensor) -> None:
        """It is not needed now, but another arena may need one."""


class Heap:
    """Buffers of ordinary memory, which nobody keeps."""

    def idle(self, num_bytes: int, *, most_bytes: int) -> torch.Tensor | None:  # noqa: ARG002  # there is none
        """See `Source`, as for the rest."""
        return None

    def new(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def end(self, buffer: torch.Tensor) -> None:
        pass

    def keep(self, buffer: torch.Tensor) -> None:
        pass


_HEAP = Heap()


class Arena:
    """Lends CPU buffers of a `source`, together never more than `budget_bytes` (a single larger one is lent alone).

    Buffers are kept and lent again, until it is closed. Safe to use from many threads; a thread must not hold two
    loans.
    """

    def __init__(self, *, budget_bytes: int, source: Source = _HEAP) -> None:
        self._budget_bytes = budget_bytes
        self._source = source
        self._changed = Condition()
        self._free: list[torch.Tensor] = []
        self._held_bytes = 0
        self._num_lent = 0
        self._is_closed = False

    @contextlib.contextmanager
    def lend(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """A ``uint8`` tensor of shape ``[num_bytes]``; waits until the budget has room for it."""
        buffer = self._take(num_bytes)
        try:
            yield buffer[:num_bytes]
        finally:
            with self._changed:
                self._free.append(buffer)
                self._num_lent -= 1
                self._changed.notify_all()
            if self._is_closed:
                self.close()

    def close(self) -> None:
        """Give its buffers back; those that are still lent follow when they are returned."""
        with self._changed:
            self._is_closed = True
            buffers, self._free = self._free, []
            self._held_bytes -= sum(map(len, buffers))
        for buffer in buffers:
            self._source.keep(buffer)

    def _take(self, num_bytes: int) -> torch.Tensor:
        with self._changed:
            while True:
                fitting = [i for i, buffer in enumerate(self._free) if len(buffer) >= num_bytes]
                if fitting:
                    smallest = min(fitting, key=lambda i: len(self._free[i]))
                    self._num_lent += 1
                    return self._free.pop(smallest)
                while self._free and self._held_bytes + num_bytes > self._budget_bytes:
                    dropped = self._free.pop(0)
                    self._held_bytes -= len(dropped)
                    self._source.end(dropped)
                if self._held_bytes + num_bytes <= self._budget_bytes or self._num_lent == 0:
                    room_bytes = max(self._budget_bytes - self._held_bytes, num_bytes)
                    kept = self._source.idle(num_bytes, most_bytes=room_bytes)
                    self._held_bytes += num_bytes if kept is None else len(kept)
                    self._num_lent += 1
                    break
                self._changed.wait()
        if kept is not None:
            return kept
        try:
            return self._source.new(num_bytes)
        except BaseException:
            with self._changed:
                self._held_bytes -= num_bytes
                self._num_lent -= 1
                self._changed.notify_all()
            raise
