"""Decide how many requests may be in flight, without a clock or a thread of its own.

See ``docs/design/014-concurrency-and-tails.md``.
"""

from __future__ import annotations

from cloudckpt.options import DEFAULT_CONNECTIONS

_MOST_PER_HOST = 128


def connections_of_rank(connections: int | None, *, ranks_of_host: int) -> int:
    """`connections` if the user has set it; otherwise 16, or less where the ranks of one host share 128."""
    if connections is not None:
        return connections
    return min(DEFAULT_CONNECTIONS, max(_MOST_PER_HOST // max(ranks_of_host, 1), 1))


class ConcurrencyLimit:
    """The number of requests that may be in flight: additive increase, multiplicative decrease.

    It begins at `most`, and halves when the store asks to slow down or a request times out, once for all requests that
    were under way then. After as many successes as it allows requests, it rises by one, up to `most`. It is never below
    1. Not safe to share between threads by itself.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.current = most
        self._decreased_s = float("-inf")
        self._num_successes = 0

    def decrease(self, *, begun_s: float, now_s: float) -> None:
        """Halve the limit after a request that began at `begun_s` was refused or timed out. Times are of one clock."""
        if begun_s <= self._decreased_s:
            return  # the last decrease answers this request, too
        self.current = max(self.current // 2, 1)
        self._decreased_s = now_s
        self._num_successes = 0

    def record_success(self, *, begun_s: float) -> None:
        """Count a request that began at `begun_s` and succeeded; raise the limit by one after enough of them."""
        if self.current == self._most or begun_s <= self._decreased_s:
            return
        self._num_successes += 1
        if self._num_successes >= self.current:
            self.current += 1
            self._num_successes = 0
