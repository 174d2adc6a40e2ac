"""The segments that a load reads for other ranks too, and those that it receives from them."""

from __future__ import annotations

import bisect
import contextlib
import queue
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TypeAlias

from typing_extensions import Self

from cloudckpt._plan.reads import Request, Want
from cloudckpt._share.exchange import Exchange
from cloudckpt._share.plan import Segment
from cloudckpt._threads import Thread
from cloudckpt.stores.base import Views

Receive: TypeAlias = Callable[[Request, Callable[[Views], bool]], bool]
"""Fills a request's views with the given function. Returns False if the bytes did not come whole."""


class SharedSegments:
    """The segments of one load on one rank, each of which is one request; without an exchange there are none.

    A segment is declined if this rank does not want all of it after all: then each rank reads it itself.
    """

    def __init__(
        self,
        exchange: Exchange | None,
        wants: Sequence[Want],
        *,
        requests_for: Callable[[list[Want]], list[Request]],
    ) -> None:
        self.rest = list(wants)
        """The wants outside of all segments."""
        self.to_read: list[Request] = []
        """The segments that this rank reads for others."""
        self.num_bytes_missed = self.num_bytes_received = 0
        self._exchange = exchange
        self._published: dict[tuple[int, int], Segment] = {}
        self._received: dict[int, Request] = {}
        self._awaited: list[Segment] = []
        if exchange is None:
            return
        inside, self.rest = divide_wants(wants, exchange.segments)
        for segment in exchange.segments:
            members = inside.get(segment.number, [])
            requests = requests_for(members)
            where = (segment.object_index, segment.begin, segment.end)
            if [(request.object_index, request.begin, request.end) for request in requests] != [where]:
                exchange.decline(segment)
                self.rest += members
            elif exchange.reads(segment):
                self._published[segment.object_index, segment.begin] = segment
                self.to_read += requests
            else:
                self._received[segment.number] = requests[0]
                self._awaited.append(segment)

    @property
    def to_receive(self) -> list[Request]:
        """The segments that other ranks read."""
        return list(self._received.values())

    @property
    def ring_bytes(self) -> int:
        """Memory for the bytes that other ranks have not copied yet."""
        return self._exchange.ring_bytes if self._exchange is not None else 0

    @contextlib.contextmanager
    def publishing(self, request: Request) -> Iterator[Callable[[Views], None]]:
        """Yields the function to call with the request's bytes, once they are there and checked."""
        segment = self._published.get((request.object_index, request.begin))
        if segment is None or self._exchange is None:
            yield lambda _: None
            return
        with self._exchange.reserve(segment) as publish:
            yield publish

    def stop(self) -> None:
        """Tell the other ranks, after a failure, that nothing comes from this one."""
        if self._exchange is not None:
            self._exchange.stop()

    def each_done(
        self,
        requests: Sequence[Request],
        *,
        read: Callable[[Sequence[Request]], Generator[Request, None, None]],
        receive: Receive,
    ) -> Generator[Request, None, None]:
        """Yield `requests` and `to_receive`, each once it is done. Read those that other ranks did not bring."""
        if self._exchange is None:
            yield from read(requests)
            return
        with _Receiver(self._exchange, self._awaited, self._received, receive) as receiver:
            with contextlib.closing(read(requests)) as done:
                for request in done:
                    yield request
                    yield from receiver.received(wait=False)
            yield from receiver.received(wait=True)
        self.num_bytes_received = receiver.num_bytes
        self.num_bytes_missed = sum(request.num_bytes for request in receiver.missed)
        if receiver.missed:
            yield from read(receiver.missed)


class _Receiver:
    """Receives the segments of other ranks in a thread, while the load reads. A context, which joins the thread."""

    def __init__(
        self, exchange: Exchange, segments: Sequence[Segment], requests: Mapping[int, Request], receive: Receive
    ) -> None:
        self.missed: list[Request] = []
        """The segments that did not come."""
        self.num_bytes = 0
        self._exchange, self._segments, self._requests, self._receive = exchange, segments, requests, receive
        self._is_running = True
        self._done: queue.SimpleQueue[Request | BaseException | None] = queue.SimpleQueue()
        self._thread = Thread(self._run, name="cloudckpt-share", daemon=False)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._exchange.stop()
        self._thread.join()

    def received(self, *, wait: bool) -> Iterator[Request]:
        """Yield those that have come since the last call; with `wait`, all."""
        while self._is_running:
            try:
                done = self._done.get(block=wait)
            except queue.Empty:
                return
            if done is None:
                self._is_running = False
            elif isinstance(done, BaseException):
                raise done
            else:
                yield done

    def _run(self) -> None:
        try:
            for segment, copy in self._exchange.arrivals(self._segments):
                request = self._requests[segment.number]
                if copy is not None and self._receive(request, copy):
                    self.num_bytes += request.num_bytes
                    self._done.put(request)
                else:
                    self.missed.append(request)
        except BaseException as error:  # noqa: BLE001  # the main thread raises it
            self._done.put(error)
        self._done.put(None)


def divide_wants(wants: Sequence[Want], segments: Sequence[Segment]) -> tuple[dict[int, list[Want]], list[Want]]:
    """Cut `wants` into the parts in each of the `segments`, by their number, and the parts in none.

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
