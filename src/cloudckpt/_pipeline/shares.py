"""What a load reads for other ranks too, and what it takes from them."""

from __future__ import annotations

import bisect
import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence

from cloudckpt._pipeline.taking import Take, Taker
from cloudckpt._plan.reads import Request, Want
from cloudckpt._share.exchange import Exchange
from cloudckpt._share.plan import Segment
from cloudckpt.stores.base import Views


class Shares:
    """The segments of one load on one rank, each of which is one request; with no exchange there are none.

    A segment that this rank turns out not to want as it was planned is left out: then each rank reads it for itself.
    """

    def __init__(
        self,
        exchange: Exchange | None,
        wants: Sequence[Want],
        *,
        requests_for: Callable[[list[Want]], list[Request]],
    ) -> None:
        self.rest = list(wants)
        """What no segment brings."""
        self.num_bytes_missed = self.num_bytes_taken = 0
        self._exchange = exchange
        self._handed_on: dict[tuple[int, int], Segment] = {}
        self._taken: dict[int, Request] = {}
        self._segments: list[Segment] = []
        self._relayed: list[Segment] = []
        self._first_tries: set[int] = set()
        """Of segments that another machine reads: this rank reads those that do not come."""
        self.to_read: list[Request] = []
        if exchange is None:
            return
        inside, self.rest = divided(wants, exchange.segments)
        for segment in exchange.segments:
            members = inside.get(segment.number, [])
            requests = requests_for(members)
            where = (segment.object_index, segment.begin, segment.end)
            if [(request.object_index, request.begin, request.end) for request in requests] != [where]:
                exchange.decline(segment)
                self.rest += members
            elif exchange.hands_on(segment):
                self._handed_on[segment.object_index, segment.begin] = segment
                if exchange.relays(segment) and exchange.inlet is not None:
                    self._taken[segment.number] = requests[0]
                    self._relayed.append(segment)
                    self._first_tries.add(segment.number)
                else:
                    self.to_read += requests
            else:
                self._taken[segment.number] = requests[0]
                self._segments.append(segment)

    @property
    def to_take(self) -> list[Request]:
        """What other ranks read."""
        return list(self._taken.values())

    @property
    def ring_bytes(self) -> int:
        """How much memory the bytes take that are on their way to others."""
        return self._exchange.ring_bytes if self._exchange is not None else 0

    @contextlib.contextmanager
    def handing_on(self, request: Request) -> Iterator[Callable[[Views], None]]:
        """What to call with the request's bytes, once they are there and checked."""
        segment = self._handed_on.get((request.object_index, request.begin))
        if segment is None or self._exchange is None:
            yield lambda _: None
            return
        with self._exchange.place_for(segment, is_last_try=segment.number not in self._first_tries) as hand_on:
            yield hand_on

    def stop(self) -> None:
        """After a failure: no other rank need wait for this one."""
        if self._exchange is not None:
            self._exchange.stop()

    def each_done(
        self,
        requests: Sequence[Request],
        *,
        read: Callable[[Sequence[Request]], Generator[Request, None, None]],
        take: Take,
    ) -> Generator[Request, None, None]:
        """All of `requests` and `to_take`, each once it is done; what others do not bring after all is read, too."""
        exchange = self._exchange
        if exchange is None:
            yield from read(requests)
            return
        arrivals = [exchange.arrivals(self._segments)] if self._segments else []
        relays = exchange.inlet.lanes(self._relayed) if exchange.inlet is not None else []
        with (
            Taker(arrivals, self._taken, take, stop=exchange.stop) as taker,
            Taker(relays, self._taken, take, stop=exchange.stop) as relayer,
        ):
            with contextlib.closing(read(requests)) as done:
                for request in done:
                    yield request
                    yield from relayer.taken(wait=False)
                    yield from taker.taken(wait=False)
            # Whoever waits for ranks of its own machine has first done all that they may be waiting for.
            yield from relayer.taken(wait=True)
            self._first_tries.clear()
            if relayer.missed:
                yield from read(relayer.missed)
            yield from taker.taken(wait=True)
        self.num_bytes_taken = taker.num_bytes + relayer.num_bytes
        self.num_bytes_missed = sum(request.num_bytes for request in [*taker.missed, *relayer.missed])
        if taker.missed:
            yield from read(taker.missed)


def divided(wants: Sequence[Want], segments: Sequence[Segment]) -> tuple[dict[int, list[Want]], list[Want]]:
    """The parts of `wants` in each of the `segments`, by their number, and what lies in none.

    `segments` rise and do not overlap.
    """
    begins = [(segment.object_index, segment.begin) for segment in segments]
    inside: defaultdict[int, list[Want]] = defaultdict(list)
    rest: list[Want] = []
    for want in wants:
        reached = want.begin
        index = max(bisect.bisect_right(begins, (want.object_index, want.begin)) - 1, 0)
        while index < len(segments) and begins[index] < (want.object_index, want.end):
            segment = segments[index]
            index += 1
            low, high = max(segment.begin, reached), min(segment.end, want.end)
            if segment.object_index != want.object_index or low >= high:
                continue
            if reached < low:
                rest.append(want._replace(begin=reached, end=low))
            inside[segment.number].append(want._replace(begin=low, end=high))
            reached = high
        if reached < want.end:
            rest.append(want._replace(begin=reached))
    return inside, rest
