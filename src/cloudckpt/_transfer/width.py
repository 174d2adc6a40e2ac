"""How many requests should be in flight: a decision from what requests took, without a clock or a thread of its own.

See ``docs/design/014-concurrency-and-tails.md``.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from cloudckpt.options import FIRST_CONNECTIONS, MOST_CONNECTIONS

_MOST_PER_HOST = 128
_DOUBLING = 2.0
_PROBING = 1.25
_LEAST_GAIN = 0.5
"""Of what would be gained if every request stayed as fast as it was."""
_SHORTEST_ROUND_S = 0.25
"""What is shorter says more of connections that are opened, and of other work of the machine, than of the line."""
_SHORTEST_HOLD = 4
_LONGEST_HOLD = 64
_SHORTEST_LIFT = 32
_LONGEST_LIFT = 512
_FEWEST_TIMEOUTS = 2
_TOO_MANY_TIMEOUTS = 4
"""One in so many of the requests in flight, and at least `_FEWEST_TIMEOUTS`: fewer are connections that died."""
_MOST_KNOWN = 256


class Bounds(NamedTuple):
    """Of a width."""

    first: int
    most: int


def bounds_of(connections: int | None, *, ranks_of_host: int, is_remote: bool) -> Bounds:
    """`connections` as they are, if the caller says how many; else a share of what the ranks of one host may use.

    What is not reached over a network gets no faster by more requests than there are to begin with.
    """
    if connections is not None:
        return Bounds(first=connections, most=connections)
    share = max(_MOST_PER_HOST // max(ranks_of_host, 1), 1)
    first = min(FIRST_CONNECTIONS, share)
    return Bounds(first=first, most=max(min(MOST_CONNECTIONS, share), first) if is_remote else first)


class Width:
    """The number of requests to have in flight, as a climber that goes up only where that pays.

    It judges in rounds: what the requests that began in a round took, on average for each byte, times the width, is
    the round's throughput. From `Bounds.first`, or `begin_at`, it doubles, for as long as a wider round gains at least
    half of what it would if every request stayed as fast; a step that does not is taken back, and after a while, which
    gets longer with each failure, a smaller one is tried. Where the store asks to slow down, it halves, once for all
    requests that were under way, and does not come back to where it was for a while, which gets longer too. Where a
    quarter of the requests in flight time out before the others have made a round, it halves as well: a server that
    leaves waiting what it has no time for says nothing else. Not safe to share between threads by itself.
    """

    def __init__(self, bounds: Bounds, *, begin_at: int | None = None) -> None:
        self._bounds = bounds
        self.width = bounds.first if begin_at is None else min(max(begin_at, 1), bounds.most)
        self._before: tuple[int, float] | None = None
        """Width and throughput, while a step up is on trial."""
        self._factor = _DOUBLING
        self._hold = _SHORTEST_HOLD
        self._num_rounds_to_hold = 0
        self._ceiling = bounds.most
        """Below where the store last asked to slow down."""
        self._lift = _SHORTEST_LIFT
        self._num_rounds_to_lift = 0
        self._stepped_back_s = 0.0
        self._round_begun_s = self._spent_s = 0.0
        self._first_begun_s = math.inf
        """Of what is counted in this round."""
        self._num_requests = self._num_bytes = self._num_timeouts = 0

    @property
    def settled(self) -> int:
        """The width, or, while a wider one is on trial, what it was before."""
        return self.width if self._before is None else self._before[0]

    def done(self, *, begun_s: float, ended_s: float, num_bytes: int) -> None:
        """A request came to a good end. Times are of one clock."""
        if begun_s < self._round_begun_s:  # part of it ran at another width
            return
        self._num_requests += 1
        self._num_bytes += num_bytes
        self._spent_s += ended_s - begun_s
        self._first_begun_s = min(self._first_begun_s, begun_s)
        if self._num_requests >= (self.width + 1) // 2 and ended_s - self._first_begun_s >= _SHORTEST_ROUND_S:
            self._end_round(ended_s)

    def throttled(self, *, begun_s: float, ended_s: float) -> None:
        """The store asked to slow down."""
        if begun_s < self._stepped_back_s:
            return  # it is part of what the last step back was for
        self._ceiling = max(self.width - 1, 1)
        self._num_rounds_to_lift = self._lift
        self._lift = min(self._lift * 2, _LONGEST_LIFT)
        self._step_back(ended_s)
        self._factor = _PROBING
        self._num_rounds_to_hold = _SHORTEST_HOLD

    def timed_out(self, *, begun_s: float, ended_s: float) -> None:
        """A request was given up because nothing moved."""
        if begun_s < self._stepped_back_s:
            return
        self._num_timeouts += 1
        if self._num_timeouts < max(self.width // _TOO_MANY_TIMEOUTS, _FEWEST_TIMEOUTS):
            return
        self._step_back(ended_s)
        self._factor = _DOUBLING  # nobody has asked for less: what was cut off for a while comes back soon
        self._num_rounds_to_hold = self._hold
        self._hold = min(self._hold * 2, _LONGEST_HOLD)

    def _step_back(self, now_s: float) -> None:
        self.width = max(self.width // 2, 1)
        self._before = None
        self._begin_round(now_s)
        self._stepped_back_s = now_s

    def _end_round(self, now_s: float) -> None:
        throughput = self.width * self._num_bytes / max(self._spent_s, 1e-9)
        if self._before is not None:
            width, earlier = self._before
            self._before = None
            gain = throughput / max(earlier, 1e-9) - 1
            if self.width > self._bounds.first and gain < _LEAST_GAIN * (self.width / width - 1):
                self.width, self._factor = width, _PROBING
                self._num_rounds_to_hold = self._hold
                self._hold = min(self._hold * 2, _LONGEST_HOLD)
            else:
                self._hold = _SHORTEST_HOLD
        if self._num_rounds_to_lift:
            self._num_rounds_to_lift -= 1
        else:
            self._ceiling = self._bounds.most
        if self._num_rounds_to_hold:
            self._num_rounds_to_hold -= 1
        elif self.width < self._ceiling:
            self._before = self.width, throughput
            self.width = min(max(int(self.width * self._factor), self.width + 1), self._ceiling)
        self._begin_round(now_s)

    def _begin_round(self, now_s: float) -> None:
        self._round_begun_s = now_s
        self._first_begun_s = math.inf
        self._num_requests = self._num_bytes = self._num_timeouts = 0
        self._spent_s = 0.0


class KnownWidths:
    """What widths were come to, of the stores that this process used last, so that the next save or load begins there.

    Safe to share between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._widths: OrderedDict[Hashable, int] = OrderedDict()

    def of(self, store: Hashable) -> int | None:
        """None for a store that is not known."""
        with self._lock:
            return self._widths.get(store)

    def note(self, store: Hashable, width: int) -> None:
        """`width` is what was come to last."""
        with self._lock:
            self._widths[store] = width
            self._widths.move_to_end(store)
            if len(self._widths) > _MOST_KNOWN:
                self._widths.popitem(last=False)
