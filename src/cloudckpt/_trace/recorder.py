"""Where the time of a save or load goes: thread-seconds by phase, and a timeline of all that happened if asked for."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias, TypeVar

from typing_extensions import ParamSpec

from cloudckpt._trace import watchers
from cloudckpt._trace.timeline import Timeline, Verb

_P = ParamSpec("_P")
_R = TypeVar("_R")
_THROUGHPUT_INTERVAL_NS = 100_000_000

Phase: TypeAlias = Literal["stage", "transfer"]

now_ns = time.monotonic_ns
"""When a span begins."""

_current = threading.local()


class Recorder:
    """What one rank does in one save or load. Safe to use from many threads.

    Without a timeline, a span costs a reading of the clock and an addition.
    """

    def __init__(self, timeline: Timeline | None = None, *, operation: str = "") -> None:
        self.timeline = timeline
        self.operation = operation
        self._lock = threading.Lock()
        self._spent_ns: Counter[Phase] = Counter()
        self._in_flight_bytes = 0
        self._moved_bytes = 0
        self._sampled_ns = now_ns()

    def __reduce__(self) -> tuple[Callable[..., Recorder], tuple[object, ...]]:
        """What has been recorded stays in its process; the copy begins anew."""
        return (Recorder, ()) if self.timeline is None else (_recorder_of, self.timeline.subject)

    def spent(self, phase: Phase, begun_ns: int) -> None:
        """Count the time since `begun_ns`, which this thread has spent on it."""
        spent_ns = now_ns() - begun_ns
        with self._lock:
            self._spent_ns[phase] += spent_ns

    def seconds(self, phase: Phase) -> float:
        """Of all threads, so far."""
        return self._spent_ns[phase] / 1e9

    def span(self, name: str, begun_ns: int, *, key: str = "", **more: object) -> None:
        """For the timeline: this thread did `name` from `begun_ns` until now."""
        if self.timeline is not None:
            self.timeline.add("X", name, begun_ns, now_ns() - begun_ns, {"key": key, **more} if key else more)

    def instant(self, name: str, *, key: str = "", **more: object) -> None:
        """For the timeline: `name` happened now, in this thread."""
        if self.timeline is not None:
            self.timeline.add("i", name, now_ns(), 0, {"key": key, **more} if key else more)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A span for what is done in this context, and then all so far in the timeline's file, whatever came of it."""
        begun_ns, more = now_ns(), {}
        try:
            with watchers.step(self.operation, name):
                yield
        except BaseException as error:
            more = {"error": type(error).__name__}
            raise
        finally:
            self.span(name, begun_ns, **more)
            self.flush()

    def open(self, rank: int) -> None:
        """Begin the timeline's file, and give it the meetings of ranks in this thread from here on.

        Raises `InvalidOptionError` where the file cannot be written.
        """
        _current.recorder = self if self.timeline is not None else None
        if self.timeline is not None:
            self.timeline.open(rank)

    def body_begins(self, num_bytes: int) -> None:
        """For the timeline's counters: so many bytes are on their way now."""
        self._count(num_bytes, 0)

    def body_ends(self, num_bytes: int, *, moved_bytes: int) -> None:
        """They are not any more, and so many of them have arrived."""
        self._count(-num_bytes, moved_bytes)

    def flush(self) -> None:
        """Write what there is of the timeline; more can follow."""
        if self.timeline is not None:
            self.timeline.flush()

    def end(self) -> None:
        """`flush`, at the end of the operation: what ranks do later in this thread belongs to another."""
        self.flush()
        if getattr(_current, "recorder", None) is self:
            _current.recorder = None

    def _count(self, in_flight_bytes: int, moved_bytes: int) -> None:
        if self.timeline is None:
            return
        with self._lock:
            at_ns = now_ns()
            if self._in_flight_bytes == 0:
                self._sampled_ns = at_ns  # the pause before it says nothing of the throughput
            self._in_flight_bytes += in_flight_bytes
            self._moved_bytes += moved_bytes
            total = self._in_flight_bytes
            elapsed_ns = at_ns - self._sampled_ns
            bytes_per_s = None
            if elapsed_ns >= _THROUGHPUT_INTERVAL_NS or total == 0:
                bytes_per_s = round(self._moved_bytes * 1e9 / max(elapsed_ns, 1))
                self._moved_bytes, self._sampled_ns = 0, at_ns
            self.timeline.add("C", "bytes in flight", at_ns, 0, {"bytes": total})
            if bytes_per_s is not None:
                self.timeline.add("C", "throughput", at_ns, 0, {"MB/s": round(bytes_per_s / 1e6, 3)})
            if total == 0:  # or the viewers draw the last value until the next request
                self.timeline.add("C", "throughput", at_ns + 1000, 0, {"MB/s": 0})


def meeting(meet: Callable[_P, _R]) -> Callable[_P, _R]:
    """Draws what waits for the other ranks in the timeline that follows its thread."""

    @functools.wraps(meet)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        recorder: Recorder | None = getattr(_current, "recorder", None)
        begun_ns = now_ns()
        try:
            return meet(*args, **kwargs)
        finally:
            if recorder is not None:
                recorder.span("meeting", begun_ns)

    return drawn


def new_recorder(trace: str | os.PathLike[str] | None, *, verb: Verb, uri: str, operation: str = "") -> Recorder:
    """For one save or load. Its timeline, if `trace` names a file, begins now, and its file with `Recorder.open`."""
    return Recorder(None if trace is None else Timeline(trace, verb=verb, uri=uri), operation=operation)


def _recorder_of(trace: str | os.PathLike[str], verb: Verb, uri: str) -> Recorder:
    return new_recorder(trace, verb=verb, uri=uri)
