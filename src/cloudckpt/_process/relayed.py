"""A timeline whose events are drawn in another process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Literal

from cloudckpt._process.messages import Spans
from cloudckpt._trace.timeline import MAX_EVENTS, Timeline

_MOST_AT_ONCE = MAX_EVENTS // 10


class RelayedTimeline(Timeline):
    """Keeps events until they are taken. Both processes read one clock, the monotonic one of their machine."""

    def __init__(self, trace: str, *, verb: Literal["save", "load"], uri: str) -> None:
        super().__init__(trace, verb=verb, uri=uri)
        self._kept: Spans = []
        self._keeping = threading.Lock()

    def add(
        self, kind: Literal["X", "C", "i"], name: str, begun_ns: int, spent_ns: int, args: Mapping[str, object]
    ) -> None:
        thread = threading.current_thread()
        with self._keeping:
            if len(self._kept) < _MOST_AT_ONCE:
                self._kept.append((kind, name, begun_ns, spent_ns, (thread.ident or 0, thread.name), args))

    def flush(self) -> None:
        """There is no file here."""

    def taken(self) -> Spans:
        """All events since the last time."""
        with self._keeping:
            kept, self._kept = self._kept, []
        return kept
