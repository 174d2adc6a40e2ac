"""When a request is a straggler: a decision from what requests of its kind and size took."""

from __future__ import annotations

import statistics
from collections import deque

LEAST_S = 2.0
"""Nothing that takes less is worth a second request."""
_TIMES_SLOWER = 3.0
_LEAST_PEERS = 4
_MOST_PEERS = 64
_LEAST_ALLOWED = 2
_ONE_IN = 20


class Peers:
    """What the last requests of one kind took, by their size. Not safe to share between threads by itself."""

    def __init__(self) -> None:
        self._took: deque[tuple[int, float]] = deque(maxlen=_MOST_PEERS)

    def add(self, *, num_bytes: int, took_s: float) -> None:
        """One of them came to a good end."""
        self._took.append((num_bytes, took_s))

    def patience_s(self, num_bytes: int) -> float | None:
        """After how long a request for `num_bytes` is far slower than its peers; None where too few are known.

        Its peers are of half to twice its size.
        """
        took = [
            took_s for size_bytes, took_s in self._took if num_bytes <= 2 * size_bytes and size_bytes <= 2 * num_bytes
        ]
        if len(took) < _LEAST_PEERS:
            return None
        return max(_TIMES_SLOWER * statistics.median(took), LEAST_S)


def hedges_allowed(num_requests: int) -> int:
    """How many of `num_requests` may be made twice: a few, and of many one in twenty."""
    return max(num_requests // _ONE_IN, _LEAST_ALLOWED)
