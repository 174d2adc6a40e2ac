"""Where the time of a save or load goes: thread-seconds by phase, and a timeline of all that happened if asked for.

The timeline is a file in the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), which https://ui.perfetto.dev and
chrome://tracing open: a process for each rank, a lane for each thread, spans in it, counters above.
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

_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger("cloudckpt")

MAX_EVENTS = 500_000
"""Of one timeline, some 100 MB; what comes after them is counted and left out."""
_MAX_BUFFERED_EVENTS = 10_000
_THROUGHPUT_INTERVAL_NS = 100_000_000

Phase: TypeAlias = Literal["stage", "transfer"]
Verb: TypeAlias = Literal["save", "load"]

now_ns = time.monotonic_ns
"""When a span begins."""

_current = threading.local()
_json = functools.partial(json.dumps, default=str)  # whatever a caller's value is, it must not fail a save


class Recorder:
    """What one rank does in one save or load. Safe to use from many threads.

    Without a timeline, a span costs a reading of the clock and an addition.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline
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


def new_recorder(trace: str | os.PathLike[str] | None, *, verb: Verb, uri: str) -> Recorder:
    """For one save or load. Its timeline, if `trace` names a file, begins now, and its file with `Recorder.open`."""
    return Recorder(None if trace is None else Timeline(trace, verb=verb, uri=uri))


def _recorder_of(trace: str | os.PathLike[str], verb: Verb, uri: str) -> Recorder:
    return new_recorder(trace, verb=verb, uri=uri)


def trace_path(trace: str | os.PathLike[str], *, rank: int, verb: Verb) -> Path:
    """A rank's file; where the name has no ``{rank}``, rank 0 gets ``trace.json`` and rank 1 ``trace.1.json``."""
    name = os.fspath(trace).replace("{verb}", verb)
    path = Path(name.replace("{rank}", str(rank)))
    return path if rank == 0 or "{rank}" in name else path.with_name(f"{path.stem}.{rank}{path.suffix}")


class _Event(NamedTuple):
    """As it waits to be written; of all tuples the cheapest."""

    kind: Literal["X", "C", "i"]
    """A span, a counter's new value, or an instant: the format's phases."""
    name: str
    begun_ns: int
    spent_ns: int
    lane: int
    args: Mapping[str, object]


class Timeline:
    """Events on their way to a file. Holds few of them in memory, and no more than `MAX_EVENTS` in the file.

    After `open` nothing here raises: a timeline that cannot be written is logged, and ends.
    """

    def __init__(self, trace: str | os.PathLike[str], *, verb: Verb, uri: str) -> None:
        self.subject: tuple[str | os.PathLike[str], Verb, str] = (trace, verb, uri)
        self._trace, self._verb, self._uri = self.subject
        # Lanes of several ranks lie beside each other only on a clock that they share.
        self._epoch_ns = time.time_ns() - now_ns()
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
        """Begin the file. Raises `InvalidOptionError` where there cannot be one."""
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
            self._write()

    def add(
        self, kind: Literal["X", "C", "i"], name: str, begun_ns: int, spent_ns: int, args: Mapping[str, object]
    ) -> None:
        """One event of this thread."""
        thread = threading.current_thread()
        with self._lock:
            if self._has_failed or self._num_events >= MAX_EVENTS:
                self._num_left_out += 1
                return
            lane = self._lanes.setdefault((thread.ident or 0, thread.name), len(self._lanes))
            self._num_events += 1
            self._buffer.append(_Event(kind, name, begun_ns, spent_ns, lane, args))
            if len(self._buffer) >= _MAX_BUFFERED_EVENTS and self._path is not None:
                self._write()

    def flush(self) -> None:
        """Make the file whole, with all events so far."""
        with self._lock:
            if self._path is not None and (self._buffer or self._num_left_out):
                self._write()

    def _write(self) -> None:
        assert self._path is not None  # noqa: S101  # both callers looked
        events = [self._encoded(event) for event in self._buffer]
        self._buffer.clear()
        if self._has_failed:
            return
        # Every time with an end, which the next events overwrite: the file is valid even if the process is killed.
        tail = {"displayTimeUnit": "ms", "otherData": self._about()}
        ending = ",\n".join(_json(event) for event in self._names())
        text = "".join(_json(event) + ",\n" for event in events)
        try:
            with self._path.open("r+b") as file:
                file.seek(self._end_bytes)
                if self._end_bytes == 0:
                    text = '{"traceEvents": [\n' + text
                file.write(text.encode())
                self._end_bytes = file.tell()
                file.write(f"{ending}\n], {_json(tail)[1:]}\n".encode())
                file.truncate()
        except OSError as error:
            self._has_failed = True
            _log.warning("the trace %s ends here, it cannot be written any more: %s", self._path, error)

    def _encoded(self, event: _Event) -> dict[str, Any]:
        begin_us = (self._epoch_ns + event.begun_ns) // 1000
        encoded: dict[str, Any] = {"ph": event.kind, "name": event.name, "cat": self._verb, "ts": begin_us}
        encoded |= {"pid": self._rank, "tid": event.lane, "args": event.args}
        if event.kind == "X":
            # Whole microseconds at both ends, or what nests by the clock would not in the file.
            encoded["dur"] = (self._epoch_ns + event.begun_ns + event.spent_ns) // 1000 - begin_us
        elif event.kind == "i":
            encoded["s"] = "t"
        return encoded

    def _names(self) -> list[dict[str, Any]]:
        """What the viewers show beside the lanes."""
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
            "rank": self._rank,
            "os_pid": os.getpid(),
            "num_events": self._num_events,
            "num_events_left_out": self._num_left_out,
        }
