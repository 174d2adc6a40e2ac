"""A store in front of another one, which draws each call in the timeline."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from cloudckpt.errors import InterruptedReadError
from cloudckpt.stores.base import Call, ForwardingStore, Store
from cloudckpt.telemetry.timeline import Recorder, now_ns

_T = TypeVar("_T")
_WITH_BODY = ("put", "upload_part", "read_into")


class TracedStore(ForwardingStore):
    """Passes every call on to `inner`, and records a span for it, with key, bytes, try and error."""

    def __init__(self, inner: Store, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder
        self._last = threading.local()

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        recorder, moved_bytes = self._recorder, 0
        # What is tried again is tried in the same thread, with no other call in between.
        failed, num_failures = getattr(self._last, "failed", (None, 0))
        num_tries = num_failures + 1 if failed == call else 1
        details: dict[str, object] = {"try": num_tries}
        if call.part_number is not None:
            details["part"] = call.part_number
        if call.offset_bytes is not None:
            details["offset"] = call.offset_bytes
        begun_ns = now_ns()
        has_body = call.operation in _WITH_BODY
        if has_body:
            recorder.body_begins(call.num_bytes)
        try:
            result = action()
            moved_bytes = call.num_bytes
            num_failures = 0
        except BaseException as error:
            num_failures = num_tries
            details["error"] = type(error).__name__
            if isinstance(error, InterruptedReadError):
                moved_bytes = error.received_bytes
            raise
        else:
            return result
        finally:
            self._last.failed = (call, num_failures)
            if has_body:
                recorder.body_ends(call.num_bytes, moved_bytes=moved_bytes)
                details["bytes"] = moved_bytes
            recorder.span(call.operation, begun_ns, key=call.key, **details)

    def around_listing(self, call: Call, action: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        """The first page is a span; what asks for later ones works on the earlier ones in between."""
        entries = action()
        yield from self.around(call, lambda: list(itertools.islice(entries, 1)))
        yield from entries
