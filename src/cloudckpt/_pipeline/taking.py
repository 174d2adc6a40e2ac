"""The taking of what other ranks read, beside a load's own reads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TypeAlias

from typing_extensions import Self

from cloudckpt._plan.reads import Request
from cloudckpt._share.plan import Segment
from cloudckpt._threads import Thread
from cloudckpt.stores.base import Views

Take: TypeAlias = Callable[[Request, Callable[[Views], bool]], bool]
"""Fills a request's views by what it is given; whether the bytes came whole."""
Arrivals: TypeAlias = Iterator[tuple[Segment, Callable[[Views], bool] | None]]


class Taker:
    """Takes what arrives, each of `arrivals` in a thread of its own. Used as a context, which ends when all have.

    `stop` is called if the context ends with an error, and has to end `arrivals`.
    """

    def __init__(
        self, arrivals: Sequence[Arrivals], requests: Mapping[int, Request], take: Take, *, stop: Callable[[], None]
    ) -> None:
        self.missed: list[Request] = []
        """What did not come."""
        self._requests, self._take, self._stop = requests, take, stop
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_running = len(arrivals)
        self._done: queue.SimpleQueue[Request | BaseException | None] = queue.SimpleQueue()
        self._threads = [Thread(self._run, some, name="cloudckpt-share", daemon=False) for some in arrivals]

    @property
    def num_bytes(self) -> int:
        """Of what has come."""
        return self._num_bytes

    def __enter__(self) -> Self:
        started: list[Thread] = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
        except BaseException:  # the system's limit: nobody else would end those that run
            self._stop()
            for thread in started:
                thread.join()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop()
        for thread in self._threads:
            thread.join()

    def taken(self, *, wait: bool) -> Iterator[Request]:
        """Those that have come since; `wait` for all."""
        while self._num_running:
            try:
                done = self._done.get(block=wait)
            except queue.Empty:
                return
            if done is None:
                self._num_running -= 1
            elif isinstance(done, BaseException):
                raise done
            else:
                yield done

    def _run(self, arrivals: Arrivals) -> None:
        try:
            for segment, fill in arrivals:
                request = self._requests[segment.number]
                if fill is not None and self._take(request, fill):
                    with self._lock:
                        self._num_bytes += request.num_bytes
                    self._done.put(request)
                else:
                    with self._lock:
                        self.missed.append(request)
        except BaseException as error:  # noqa: BLE001  # it is raised again where it can be handled
            self._done.put(error)
        self._done.put(None)
