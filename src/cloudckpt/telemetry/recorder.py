"""Records where the time of a save or load goes: thread-seconds by phase, and a timeline if the options name a file."""

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

from cloudckpt.telemetry import watchers
from cloudckpt.telemetry.timeline import Timeline, Verb

_P = ParamSpec("_P")
_R = TypeVar("_R")
_THROUGHPUT_INTERVAL_NS = 100_000_000

Phase: TypeAlias = Literal["stage", "transfer"]

now_ns = time.monotonic_ns
"""The clock by which spans begin."""

_current = threading.local()


class Recorder:
    """Records one save or load of one rank. Safe to use from many threads.

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
        """Pickle no records: the copy begins anew."""
        return (Recorder, ()) if self.timeline is None else (_recorder_of, self.timeline.subject)

    def spent(self, phase: Phase, begun_ns: int) -> None:
        """Add the time since `begun_ns`, which this thread has spent on `phase`."""
        spent_ns = now_ns() - begun_ns
        with self._lock:
            self._spent_ns[phase] += spent_ns

    def seconds(self, phase: Phase) -> float:
        """Return the seconds that all threads have spent on `phase` so far."""
        return self._spent_ns[phase] / 1e9

    def span(self, name: str, begun_ns: int, *, key: str = "", **more: object) -> None:
        """Add a span to the timeline: this thread did `name` from `begun_ns` until now."""
        if self.timeline is not None:
            self.timeline.add("X", name, begun_ns, now_ns() - begun_ns, {"key": key, **more} if key else more)

    def instant(self, name: str, *, key: str = "", **more: object) -> None:
        """Add an instant to the timeline: `name` happened now, in this thread."""
        if self.timeline is not None:
            self.timeline.add("i", name, now_ns(), 0, {"key": key, **more} if key else more)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record this context as a span, and write the timeline at its end, also after an exception."""
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
        """Begin the timeline's file, and record the waits for other ranks in this thread from here on.

        Raises `InvalidOptionError` where the file cannot be written.
        """
        _current.recorder = self if self.timeline is not None else None
        if self.timeline is not None:
            self.timeline.open(rank)

    def body_begins(self, num_bytes: int) -> None:
        """Count `num_bytes` as in flight, in the timeline."""
        self._count(num_bytes, 0)

    def body_ends(self, num_bytes: int, *, moved_bytes: int) -> None:
        """Count `num_bytes` as no longer in flight, and `moved_bytes` of them as moved."""
        self._count(-num_bytes, moved_bytes)

    def flush(self) -> None:
        """Write the timeline so far; more can follow."""
        if self.timeline is not None:
            self.timeline.flush()

    def end(self) -> None:
        """Write the timeline at the end of the operation. Later waits in this thread belong to another operation."""
        self.flush()
        if getattr(_current, "recorder", None) is self:
            _current.recorder = None

    def _count(self, in_flight_bytes: int, moved_bytes: int) -> None:
        if self.timeline is None:
            return
        with self._lock:
            at_ns = now_ns()
            if self._in_flight_bytes == 0:
                self._sampled_ns = at_ns  # the pause before is no part of the throughput
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
            if total == 0:  # otherwise viewers draw the last value until the next request
                self.timeline.add("C", "throughput", at_ns + 1000, 0, {"MB/s": 0})


def meeting(meet: Callable[_P, _R]) -> Callable[_P, _R]:
    """Record the calls of a function that waits for other ranks in the timeline of their thread."""

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
    """Make the recorder of one save or load. If `trace` names a file, `Recorder.open` begins it."""
    return Recorder(None if trace is None else Timeline(trace, verb=verb, uri=uri), operation=operation)


def _recorder_of(trace: str | os.PathLike[str], verb: Verb, uri: str) -> Recorder:
    return new_recorder(trace, verb=verb, uri=uri)
