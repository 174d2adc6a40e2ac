"""The body of an upload: a file over memory views that hands out the memory itself."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cloudckpt.stores.base import Views

_FIRST_SEND_BYTES = 256 * 1024
_LEAST_SEND_BYTES = 64 * 1024
_MOST_SEND_BYTES = 4 * 1024 * 1024
_JOIN_BELOW_BYTES = 256 * 1024
_JOIN_TO_BYTES = 1024 * 1024
_QUICK_S = 0.25
_SLOW_S = 1.0


class ViewsBody:
    """What HTTP libraries take for a file opened for reading; no byte of a large view is ever copied.

    ``read(n)`` takes `n` for a mere hint: HTTP libraries ask for 16 to 128 KiB and would make thousands of
    calls of a part. It hands out slices of the views instead, and joins neighbouring small views, since a
    checkpoint of many small tensors would otherwise go out in as many small packets.

    The HTTP library gives each piece a fixed time to leave. Pieces shrink where they leave slowly, so that
    this time bounds a stall and not a slow line.
    """

    def __init__(self, views: Views, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._views = [view for view in views if view.nbytes]
        self._size_bytes = sum(view.nbytes for view in self._views)
        self._clock = clock
        self._send_bytes = _FIRST_SEND_BYTES
        self._index = 0
        self._within_bytes = 0
        self._position_bytes = 0
        self._handed_out_at: float | None = None

    def __len__(self) -> int:
        return self._size_bytes

    def read(self, _size_hint: int | None = -1, /) -> memoryview | bytes:
        """The next piece; empty at the end. Of any size: `_size_hint` is not followed."""
        self._adapt_to_pace()
        if self._index == len(self._views):
            return b""
        if self._views[self._index].nbytes - self._within_bytes >= _JOIN_BELOW_BYTES:
            piece = self._take(self._send_bytes)
            self._position_bytes += piece.nbytes
            return piece
        pieces = [self._take(_JOIN_BELOW_BYTES)]
        joined_bytes = pieces[0].nbytes
        most_bytes = min(_JOIN_TO_BYTES, self._send_bytes)
        while self._index < len(self._views):
            next_bytes = self._views[self._index].nbytes
            if next_bytes >= _JOIN_BELOW_BYTES or joined_bytes + next_bytes > most_bytes:
                break
            pieces.append(self._take(next_bytes))
            joined_bytes += next_bytes
        self._position_bytes += joined_bytes
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def tell(self) -> int:
        """Bytes handed out so far."""
        return self._position_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset`, as any file does."""
        bases_bytes = {io.SEEK_SET: 0, io.SEEK_CUR: self._position_bytes, io.SEEK_END: self._size_bytes}
        if whence not in bases_bytes:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence!r}")
        target_bytes = min(max(bases_bytes[whence] + offset, 0), self._size_bytes)
        self._rewind()
        self._position_bytes = target_bytes
        while self._index < len(self._views) and target_bytes >= self._views[self._index].nbytes:
            target_bytes -= self._views[self._index].nbytes
            self._index += 1
        self._within_bytes = target_bytes
        return self._position_bytes

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def _rewind(self) -> None:
        self._index = 0
        self._within_bytes = 0
        self._position_bytes = 0
        self._handed_out_at = None

    def _take(self, most_bytes: int) -> memoryview:
        view = self._views[self._index]
        start = self._within_bytes
        stop = min(start + most_bytes, view.nbytes)
        if stop == view.nbytes:
            self._index += 1
            self._within_bytes = 0
        else:
            self._within_bytes = stop
        return view[start:stop]

    def _adapt_to_pace(self) -> None:
        now = self._clock()
        if self._handed_out_at is not None:
            elapsed_s = now - self._handed_out_at
            if elapsed_s < _QUICK_S:
                self._send_bytes = min(self._send_bytes * 2, _MOST_SEND_BYTES)
            elif elapsed_s > _SLOW_S:
                self._send_bytes = max(self._send_bytes // 2, _LEAST_SEND_BYTES)
        self._handed_out_at = now
