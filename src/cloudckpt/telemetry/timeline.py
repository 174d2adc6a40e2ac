"""Record where the time of a save or load is spent: thread-seconds by phase, and a timeline if the options name a file.

The timeline of a rank is a file in the Trace Event Format,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, which https://ui.perfetto.dev and
chrome://tracing open. It has a process for each rank, a lane for each thread, spans in it, counters above.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from typing_extensions import ParamSpec

from cloudckpt.errors import InvalidOptionError
from cloudckpt.report import Place
from cloudckpt.telemetry import subscribers

_P = ParamSpec("_P")
_R = TypeVar("_R")
_THROUGHPUT_INTERVAL_NS = 100_000_000

Phase: TypeAlias = Literal["stage", "transfer"]

now_ns = time.monotonic_ns
"""The clock by which spans begin."""

_current = threading.local()

_log = logging.getLogger("cloudckpt")

MAX_EVENTS = 500_000
"""The most events of one timeline, some 100 MB. Later ones are counted and left out."""
MAX_BUFFERED_EVENTS = 10_000

Verb: TypeAlias = Literal["save", "load"]

_json = functools.partial(json.dumps, default=str)  # no value of a caller may fail a save


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
        """Pickle no records: the copy begins without any."""
        if self.timeline is None:
            return Recorder, ()
        trace, verb, uri, place = self.timeline.subject
        return functools.partial(new_recorder, trace, verb=verb, uri=uri, place=place), ()

    def add_time_since(self, phase: Phase, begun_ns: int) -> None:
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

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record this context as a span, and write the timeline at its end, also after an exception."""
        begun_ns, more = now_ns(), {}
        try:
            with subscribers.step(self.operation, name):
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

    def flush(self) -> None:
        """Write the timeline so far; more can follow."""
        if self.timeline is not None:
            self.timeline.flush()

    def end(self) -> None:
        """Write the timeline at the end of the operation. Later waits in this thread belong to another operation."""
        self.flush()
        if getattr(_current, "recorder", None) is self:
            _current.recorder = None

    def add_bytes(self, in_flight_bytes: int, *, moved_bytes: int = 0) -> None:
        """Add to the bytes in flight, and to those that have moved, in the timeline."""
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


def records_waits(meet: Callable[_P, _R]) -> Callable[_P, _R]:
    """Record each call of a function that waits for other ranks as a span in the timeline of the calling thread."""

    @functools.wraps(meet)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        recorder: Recorder | None = getattr(_current, "recorder", None)
        begun_ns = now_ns()
        try:
            return meet(*args, **kwargs)
        finally:
            if recorder is not None:
                recorder.span("meeting", begun_ns)

    return call


def new_recorder(
    trace: str | os.PathLike[str] | None, *, verb: Verb, uri: str, place: Place, operation: str = ""
) -> Recorder:
    """Make the recorder of one save or load. If `trace` names a file, `Recorder.open` begins it."""
    return Recorder(None if trace is None else Timeline(trace, verb=verb, uri=uri, place=place), operation=operation)


def trace_path(trace: str | os.PathLike[str], *, rank: int, verb: Verb) -> Path:
    """Return a rank's file. Without ``{rank}`` in the name, rank 0 gets ``trace.json`` and rank 1 ``trace.1.json``."""
    name = os.fspath(trace).replace("{verb}", verb)
    path = Path(name.replace("{rank}", str(rank)))
    return path if rank == 0 or "{rank}" in name else path.with_name(f"{path.stem}.{rank}{path.suffix}")


class _Event(NamedTuple):
    """An event that waits to be written. A tuple, because there are many."""

    kind: Literal["X", "C"]
    """A span, or a counter's new value: the format's phases."""
    name: str
    begun_ns: int
    spent_ns: int
    lane: int
    args: Mapping[str, object]


class Timeline:
    """Writes events to a file. Holds few of them in memory, and at most `MAX_EVENTS` in the file.

    The clock is `time.monotonic_ns`. After `open` nothing here raises: if the file cannot be written, that is logged,
    and the timeline ends.
    """

    def __init__(self, trace: str | os.PathLike[str], *, verb: Verb, uri: str, place: Place) -> None:
        self.subject: tuple[str | os.PathLike[str], Verb, str, Place] = (trace, verb, uri, place)
        self._trace, self._verb, self._uri, self._place = self.subject
        # The files of several ranks can be viewed together only on a clock that they share.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._lock = threading.Lock()
        self._buffer: list[_Event] = []
        self._lanes: dict[tuple[int, str], int] = {}
        self._num_events = 0
        self._num_left_out = 0
        self._path: Path | None = None
        self._rank = 0
        self._end_bytes = 0
        self._has_failed = False

    def open(self, rank: int) -> None:
        """Begin the file. Raises `InvalidOptionError` if it cannot be written."""
        with self._lock:
            if self._path is not None:
                return
            try:
                path = trace_path(self._trace, rank=rank, verb=self._verb)
                path.write_bytes(b"")
            except (OSError, ValueError) as error:  # a path that has no name has no suffix either
                why = error.strerror if isinstance(error, OSError) else type(error).__name__
                raise InvalidOptionError(
                    f"Options: trace must be a file that can be written, not {os.fspath(self._trace)!r} ({why}). "
                    f"Nothing was begun at {self._uri}"
                ) from error
            self._path, self._rank = path, rank
            self._write(path)

    def add(self, kind: Literal["X", "C"], name: str, begun_ns: int, spent_ns: int, args: Mapping[str, object]) -> None:
        """Add one event of this thread."""
        thread = threading.current_thread()
        with self._lock:
            if self._has_failed or self._num_events >= MAX_EVENTS:
                self._num_left_out += 1
                return
            lane = self._lanes.setdefault((thread.ident or 0, thread.name), len(self._lanes))
            self._num_events += 1
            self._buffer.append(_Event(kind, name, begun_ns, spent_ns, lane, args))
            if len(self._buffer) >= MAX_BUFFERED_EVENTS and self._path is not None:
                self._write(self._path)

    def flush(self) -> None:
        """Write all events so far, so that the file is complete."""
        with self._lock:
            if self._path is not None and (self._buffer or self._num_left_out):
                self._write(self._path)

    def _write(self, path: Path) -> None:
        events = [self._encode(event) for event in self._buffer]
        self._buffer.clear()
        if self._has_failed:
            return
        # Each write ends the file, and the next one overwrites that end: it is valid even if the process is killed.
        tail = {"displayTimeUnit": "ms", "otherData": self._about()}
        ending = ",\n".join(_json(event) for event in self._names())
        text = "".join(_json(event) + ",\n" for event in events)
        try:
            with path.open("r+b") as file:
                file.seek(self._end_bytes)
                if self._end_bytes == 0:
                    text = '{"traceEvents": [\n' + text
                file.write(text.encode())
                self._end_bytes = file.tell()
                file.write(f"{ending}\n], {_json(tail)[1:]}\n".encode())
                file.truncate()
        except OSError as error:
            self._has_failed = True
            _log.warning("the trace %s ends here, it cannot be written any more: %s", path, error)

    def _encode(self, event: _Event) -> dict[str, Any]:
        begin_us = (self._epoch_ns + event.begun_ns) // 1000
        encoded: dict[str, Any] = {"ph": event.kind, "name": event.name, "cat": self._verb, "ts": begin_us}
        encoded |= {"pid": self._rank, "tid": event.lane, "args": event.args}
        if event.kind == "X":
            # Both ends are whole microseconds, otherwise spans that nest by the clock would not nest in the file.
            encoded["dur"] = (self._epoch_ns + event.begun_ns + event.spent_ns) // 1000 - begin_us
        return encoded

    def _names(self) -> list[dict[str, Any]]:
        """Return the names that viewers show beside the lanes."""
        names = [
            {
                "ph": "M",
                "name": "process_name",
                "pid": self._rank,
                "args": {"name": f"{self._verb} {self._uri}, rank {self._rank}"},
            }
        ]
        for (_, name), lane in self._lanes.items():
            common = {"ph": "M", "pid": self._rank, "tid": lane}
            names.append({**common, "name": "thread_name", "args": {"name": name}})
            names.append({**common, "name": "thread_sort_index", "args": {"sort_index": lane}})
        return names

    def _about(self) -> dict[str, Any]:
        return {
            "program": "cloudckpt",
            "verb": self._verb,
            "uri": self._uri,
            "place": self._place,
            "rank": self._rank,
            "os_pid": os.getpid(),
            "num_events": self._num_events,
            "num_events_left_out": self._num_left_out,
        }
