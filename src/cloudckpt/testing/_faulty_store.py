"""A store to which faults happen; which ones, somebody else decides."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cloudckpt.errors import (
    AccessDeniedError,
    InterruptedReadError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.stores._body import crc32c_of, num_bytes, without_first
from cloudckpt.stores.base import ObjectInfo, Part, Store, Tried, UploadedPart, Views, once
from cloudckpt.testing._draw import Draw
from cloudckpt.testing._fault_kinds import (
    Absent,
    BrokenConnection,
    Denied,
    Fault,
    FlippedBits,
    LaggingList,
    ServerError,
    Short,
    SlowDown,
    StalledBody,
    Tell,
    TimedOut,
    TruncatedBody,
)
from cloudckpt.testing.wrapping import Call, WrappedStore

_T = TypeVar("_T")
_REMEMBERED_WRITES = 1000


_ERRORS: dict[type, tuple[type[StoreError], str]] = {
    ServerError: (TransientStoreError, "500 InternalError"),
    SlowDown: (ThrottledError, "503 SlowDown"),
    TimedOut: (StoreTimeoutError, "no answer in time"),
    Denied: (AccessDeniedError, "403 AccessDenied"),
    Absent: (ObjectNotFoundError, "404 NoSuchKey"),
    Short: (ShortObjectError, "416 InvalidRange"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What happens to one call."""

    fault: Fault
    draw: Draw
    why: str
    """For the error: the rule, the seed, and which call it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    key: str
    before: ObjectInfo | None
    at_call: int


class History:
    """The latest writes of one place, so that a listing can do without them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: deque[_Write] = deque(maxlen=_REMEMBERED_WRITES)
        self._num_calls = 0

    def count(self) -> None:
        """One more call, of any kind."""
        with self._lock:
            self._num_calls += 1

    def note(self, key: str, before: ObjectInfo | None) -> None:
        """A write of `key`, and what was there before it."""
        with self._lock:
            self._writes.append(_Write(key=key, before=before, at_call=self._num_calls))

    def undone(self, infos: Iterable[ObjectInfo], prefix: str, lag: LaggingList) -> list[ObjectInfo]:
        """What a listing of `infos` was before the latest writes."""
        with self._lock:
            writes, now = list(self._writes), self._num_calls
        found = {info.key: info for info in infos}
        for num_later, write in enumerate(reversed(writes)):
            is_late = num_later < lag.num_writes or write.at_call >= now - lag.num_calls
            if not is_late:
                break
            if not write.key.startswith(prefix):
                continue
            found.pop(write.key, None)
            if write.before is not None:
                found[write.key] = write.before
        return list(found.values())


class FaultyStore(WrappedStore):
    """Asks `decide` about each call. A stall lasts until `released`; listings can lag where there is a `history`."""

    def __init__(
        self,
        inner: Store,
        *,
        decide: Callable[[Call], Due | None],
        released: threading.Event,
        history: History | None,
    ) -> None:
        super().__init__(inner)
        self._decide = decide
        self._released = released
        self._history = history

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        return self._carried_out(call, action, self._next(call))

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        call = Call(operation="put", key=key, num_bytes=num_bytes(views))
        due = self._next(call)
        sent, checksum = _sent(views, crc32c, due)
        write = lambda: self.inner.put(key, sent, crc32c=checksum, if_absent=if_absent)  # noqa: E731
        self._written(key, lambda: self._carried_out(call, write, due))

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        call = Call(operation="upload_part", key=key, num_bytes=num_bytes(views))
        due = self._next(call)
        sent, checksum = _sent(views, crc32c, due)
        return self._carried_out(call, lambda: self.inner.upload_part(key, upload_id, part, sent, crc32c=checksum), due)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        self._written(key, lambda: super(FaultyStore, self).complete_multipart(key, upload_id, parts))

    def copy(self, source_key: str, target_key: str) -> None:
        self._written(target_key, lambda: super(FaultyStore, self).copy(source_key, target_key))

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        found: list[int | None] = []
        copy = lambda: found.append(super(FaultyStore, self).copy_from(source_url, target_key, tried=tried))  # noqa: E731
        self._written(target_key, copy)
        return found[0]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._written(key, lambda key=key: super(FaultyStore, self).delete([key]))  # type: ignore[misc]  # mypy cannot see the default

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        call = Call(operation="read_into", key=key, num_bytes=num_bytes(views))
        due = self._next(call)
        if due is not None and isinstance(due.fault, TruncatedBody | StalledBody):
            received_bytes = _received(due, call.num_bytes)
            # What comes is real, and so is the error of an object that ends before it.
            if received_bytes:
                self.inner.read_into(key, offset_bytes, _first(views, received_bytes))
            raise self._broken_off(call, due, received_bytes)
        self._carried_out(call, lambda: self.inner.read_into(key, offset_bytes, views), due)
        if due is not None and isinstance(due.fault, FlippedBits):
            _flip(views, due)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        call = Call(operation="read", key=key)
        due = self._next(call)
        body = self._carried_out(call, lambda: self.inner.read(key, max_bytes=max_bytes), due)
        if due is not None and isinstance(due.fault, TruncatedBody | StalledBody):
            raise self._broken_off(call, due, _received(due, len(body)))
        if due is not None and isinstance(due.fault, FlippedBits):
            damaged = bytearray(body)
            _flip([memoryview(damaged)], due)
            return bytes(damaged)
        return body

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        call = Call(operation="list", key=prefix)
        due = self._next(call)
        infos = self._carried_out(call, lambda: [*self.inner.list(prefix)], due)
        if due is not None and isinstance(due.fault, LaggingList) and self._history is not None:
            infos = self._history.undone(infos, prefix, due.fault)
        yield from infos

    def _next(self, call: Call) -> Due | None:
        if self._history is not None:
            self._history.count()
        return self._decide(call)

    def _carried_out(self, call: Call, action: Callable[[], _T], due: Due | None) -> _T:
        if due is None:
            return action()
        fault = due.fault
        if isinstance(fault, Tell) and fault.before is not None:
            fault.before(call)
        error = self._error_of(call, due)
        if error is not None and not getattr(fault, "carried_out", False):
            raise error
        result = action()
        if error is not None:
            raise error
        if isinstance(fault, Tell) and fault.after is not None:
            fault.after(call)
        return result

    def _error_of(self, call: Call, due: Due) -> StoreError | None:
        if isinstance(due.fault, BrokenConnection):
            what = "the connection was reset " + ("before the answer" if due.fault.carried_out else "on the way there")
            return self._error(TransientStoreError, call, due, what)
        found = _ERRORS.get(type(due.fault))
        return None if found is None else self._error(found[0], call, due, found[1])

    def _broken_off(self, call: Call, due: Due, received_bytes: int) -> StoreError:
        what = f"the answer broke off after {received_bytes} bytes"
        if isinstance(due.fault, StalledBody):
            self._released.wait(due.fault.stall_s)
            if not received_bytes:
                return self._error(StoreTimeoutError, call, due, f"nothing came for {due.fault.stall_s:g} s")
            what = f"the answer stalled for {due.fault.stall_s:g} s after {received_bytes} bytes"
        return self._error(InterruptedReadError, call, due, what, received_bytes=received_bytes)

    def _error(self, cls: type[StoreError], call: Call, due: Due, what: str, **attributes: Any) -> StoreError:
        url = self.url(call.key)
        return cls(f"{url}: {what} (injected {due.why})", key=url, operation=call.operation, **attributes)

    def _written(self, key: str, write: Callable[[], object]) -> None:
        """Have the history know what was there before, where it is kept."""
        if self._history is None:
            write()
            return
        before = self._info(key)
        try:
            write()
        finally:
            # An error does not tell whether it was carried out.
            if self._info(key) != before:
                self._history.note(key, before)

    def _info(self, key: str) -> ObjectInfo | None:
        try:
            return self.inner.head(key)
        except ObjectNotFoundError:
            return None


def _received(due: Due, size_bytes: int) -> int:
    """How much of a body comes; never all of it."""
    after_bytes = getattr(due.fault, "after_bytes", None)
    if after_bytes is None:
        after_bytes = due.draw.below(max(size_bytes, 1), "bytes")
    return max(min(after_bytes, size_bytes - 1), 0)


def _first(views: Views, size_bytes: int) -> list[memoryview]:
    taken: list[memoryview] = []
    for view in views:
        if size_bytes <= 0:
            break
        taken.append(view[:size_bytes])
        size_bytes -= view.nbytes
    return taken


def _sent(views: Views, crc32c: int, due: Due | None) -> tuple[Views, int]:
    """What of a body reaches the store, and the checksum that comes with it."""
    if due is None or not isinstance(due.fault, FlippedBits) or not num_bytes(views):
        return views, crc32c
    damaged = [memoryview(bytearray(b"".join(views)))]
    _flip(damaged, due)
    return damaged, crc32c if due.fault.noticed else crc32c_of(damaged)


def _flip(views: Views, due: Due) -> None:
    num_bits = num_bytes(views) * 8
    wanted = min(getattr(due.fault, "num_bits", 0), num_bits)
    flipped: set[int] = set()  # twice the same would be none
    for number in range(wanted):
        bit = due.draw.below(num_bits, f"bit {number}")
        while bit in flipped:
            bit = (bit + 1) % num_bits
        flipped.add(bit)
        without_first(views, bit // 8)[0][0] ^= 1 << (bit % 8)
