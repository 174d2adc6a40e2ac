"""Writes a timeline of one rank to a file in the Trace Event Format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, which https://ui.perfetto.dev and
chrome://tracing open. It has a process for each rank, a lane for each thread, spans in it, counters above.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from cloudckpt.errors import InvalidOptionError

_log = logging.getLogger("cloudckpt")

MAX_EVENTS = 500_000
"""The most events of one timeline, some 100 MB. Later ones are counted and left out."""
_MAX_BUFFERED_EVENTS = 10_000

Verb: TypeAlias = Literal["save", "load"]

_json = functools.partial(json.dumps, default=str)  # no value of a caller may fail a save


def trace_path(trace: str | os.PathLike[str], *, rank: int, verb: Verb) -> Path:
    """Return a rank's file. Without ``{rank}`` in the name, rank 0 gets ``trace.json`` and rank 1 ``trace.1.json``."""
    name = os.fspath(trace).replace("{verb}", verb)
    path = Path(name.replace("{rank}", str(rank)))
    return path if rank == 0 or "{rank}" in name else path.with_name(f"{path.stem}.{rank}{path.suffix}")


class _Event(NamedTuple):
    """An event that waits to be written. A tuple, because there are many."""

    kind: Literal["X", "C", "i"]
    """A span, a counter's new value, or an instant: the format's phases."""
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

    def __init__(self, trace: str | os.PathLike[str], *, verb: Verb, uri: str) -> None:
        self.subject: tuple[str | os.PathLike[str], Verb, str] = (trace, verb, uri)
        self._trace, self._verb, self._uri = self.subject
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
            self._write()

    def add(
        self, kind: Literal["X", "C", "i"], name: str, begun_ns: int, spent_ns: int, args: Mapping[str, object]
    ) -> None:
        """Add one event of this thread."""
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
        """Write all events so far, so that the file is complete."""
        with self._lock:
            if self._path is not None and (self._buffer or self._num_left_out):
                self._write()

    def _write(self) -> None:
        assert self._path is not None  # noqa: S101  # both callers looked
        events = [self._encoded(event) for event in self._buffer]
        self._buffer.clear()
        if self._has_failed:
            return
        # Each write ends the file, and the next one overwrites that end: it is valid even if the process is killed.
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
            # Both ends are whole microseconds, otherwise spans that nest by the clock would not nest in the file.
            encoded["dur"] = (self._epoch_ns + event.begun_ns + event.spent_ns) // 1000 - begin_us
        elif event.kind == "i":
            encoded["s"] = "t"
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
            "rank": self._rank,
            "os_pid": os.getpid(),
            "num_events": self._num_events,
            "num_events_left_out": self._num_left_out,
        }
