"""A bounded set of reused buffers for copies on their way to or from a store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


def cuda_in_use() -> bool:
    """Whether this process uses CUDA. Asking does not initialise it, which a CPU job must not pay for."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's


class Arena:
    """Lends CPU buffers, together never more than `budget_bytes` (a single larger one is lent alone).

    Buffers are kept and lent again. Pinned where `pinned`, so that copies from and to a GPU run at the link's rate.
    Safe to use from many threads; a thread must not hold two loans.
    """

    def __init__(self, *, budget_bytes: int, pinned: bool) -> None:
        self._budget_bytes = budget_bytes
        self._pinned = pinned
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._held_bytes = 0
        self._num_lent = 0

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

    def _take(self, num_bytes: int) -> torch.Tensor:
        with self._changed:
            while True:
                fitting = [i for i, buffer in enumerate(self._free) if len(buffer) >= num_bytes]
                if fitting:
                    smallest = min(fitting, key=lambda i: len(self._free[i]))
                    self._num_lent += 1
                    return self._free.pop(smallest)
                while self._free and self._held_bytes + num_bytes > self._budget_bytes:
                    self._held_bytes -= len(self._free.pop(0))
                if self._held_bytes + num_bytes <= self._budget_bytes or self._num_lent == 0:
                    self._held_bytes += num_bytes
                    self._num_lent += 1
                    break
                self._changed.wait()
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        except BaseException:
            with self._changed:
                self._held_bytes -= num_bytes
                self._num_lent -= 1
                self._changed.notify_all()
            raise
