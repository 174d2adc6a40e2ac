"""The oracle: a checkpoint is one value, or none, and each operation takes effect at one instant.

That is linearizability (Herlihy and Wing, 1990), decided by trying every order, as Wing and Gong do (1993).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple


class Operation(NamedTuple):
    """One that succeeded, or that may have (`is_certain` is false) at any time from `begun_at` to `ended_at`."""

    kind: str
    """``save``, ``overwrite``, ``delete``, ``read`` or ``refused``."""
    value: int | None
    """The value that was saved or read; None for nothing."""
    begun_at: float
    ended_at: float = math.inf
    is_certain: bool = True


def can_have_happened(operations: Sequence[Operation]) -> bool:
    """Return True if there is an order, true to time, in which each finds what it found."""

    @functools.cache
    def search(left: frozenset[Operation], value: int | None) -> bool:
        if not any(operation.is_certain for operation in left):
            return True
        latest = min(operation.ended_at for operation in left if operation.is_certain)
        return any(
            search(frozenset(other for other in left - {next_} if other.ended_at > next_.begun_at), after)
            for next_ in left
            if next_.begun_at < latest
            for after in _after(next_, value)
        )

    return search(frozenset(operations), None)


def _after(operation: Operation, value: int | None) -> list[int | None]:
    """Return what is there after it, where it can be next; else nothing."""
    possible = {
        "save": value is None,
        "overwrite": True,
        "delete": True,
        "read": value == operation.value,
        "refused": value is not None,
    }[operation.kind]
    changes = operation.kind in ("save", "overwrite", "delete")
    return [operation.value if changes else value] if possible else []
