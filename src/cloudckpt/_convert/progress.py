"""How far something is, for whoever wants to show it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

OnProgress: TypeAlias = Callable[[int, int], None]
"""Told how many bytes are done, of how many. By any thread, one call at a time; the first number never falls."""


class Progress:
    """Counts bytes from many threads."""

    def __init__(self, on_progress: OnProgress | None, *, total_bytes: int = 0) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = total_bytes

    @property
    def done_bytes(self) -> int:
        """So far."""
        return self._done_bytes

    def expect(self, num_bytes: int) -> None:
        """`num_bytes` more are to be done."""
        with self._lock:
            self._total_bytes += num_bytes
            self._tell()

    def add(self, num_bytes: int) -> None:
        """`num_bytes` more are done."""
        with self._lock:
            self._done_bytes += num_bytes
            self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(min(self._done_bytes, self._total_bytes), self._total_bytes)
