"""The faults that can be injected, and the store that injects them."""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from cloudckpt.commit.attempts import ATTEMPT
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
from cloudckpt.testing.wrapping import Call, WrappedStore


def is_number(value: object) -> bool:
    """Return True if `value` is a number and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object, *, least: int) -> bool:
    """Return True if `value` is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_after_bytes(fault: TruncatedBody | StalledBody) -> None:
    if fault.after_bytes is not None and not is_count(fault.after_bytes, least=0):
        raise ValueError(
            f"{type(fault).__name__}: after_bytes must be a whole number from 0 on, or None, not {fault.after_bytes!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerError:
    """500: a `TransientStoreError`. With `carried_out`, the store carries the call out nevertheless."""

    carried_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDown:
    """503 SlowDown: a `ThrottledError`. The call is not carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """No answer in time: a `StoreTimeoutError`, without waiting. With `carried_out`, the store carries the call out."""

    carried_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenConnection:
    """The connection is reset before the call is carried out; with `carried_out` after it, so the answer is lost."""

    carried_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedBody:
    """The answer to a read ends early: the first bytes are filled in, and an `InterruptedReadError` has their number.

    It ends after `after_bytes`, and always before the last byte; ``None`` chooses the place at random.
    """

    after_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_after_bytes(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledBody:
    """The answer to a read stalls for `stall_s` of real time and then ends early, as with `TruncatedBody`.

    `Faults.release` ends the stall. If no byte was received, the error is a `StoreTimeoutError`.
    """

    stall_s: float
    after_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_after_bytes(self)
        if not is_number(self.stall_s) or not 0 <= self.stall_s < math.inf:
            raise ValueError(f"StalledBody: stall_s must be a finite number from 0 on, not {self.stall_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedBits:
    """Bits are damaged in transit, at random places.

    A read fills in damaged bytes. A write sends damaged bytes with the caller's checksum, and a store that verifies
    checksums refuses it. With ``noticed=False`` the checksum is that of the damaged bytes, and they are stored.
    """

    num_bits: int = 1
    noticed: bool = True

    def __post_init__(self) -> None:
        if not is_count(self.num_bits, least=1):
            raise ValueError(f"FlippedBits: num_bits must be a whole number from 1 on, not {self.num_bits!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """403: an `AccessDeniedError`. The call is not carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """404 for an object, even if it exists: an `ObjectNotFoundError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """416 for a range, even if the object has it: a `ShortObjectError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingList:
    """A listing lacks the latest writes that this process made through the same `Faults`.

    It shows the state before the last `num_writes` writes (puts, completions, copies, deletions), and before all writes
    among the last `num_calls` calls of any kind.
    """

    num_writes: int = 0
    num_calls: int = 0

    def __post_init__(self) -> None:
        for name in ("num_writes", "num_calls"):
            if not is_count(getattr(self, name), least=0):
                raise ValueError(f"LaggingList: {name} must be a whole number from 0 on, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Calls a function in the caller's thread, for example to kill a process, and carries the call out."""

    before: Callable[[Call], object] | None = None
    after: Callable[[Call], object] | None = None
    """Called after the store has carried the call out without an error."""

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"Tell: {name} is a function that takes a Call, not {function!r}")


Fault: TypeAlias = (
    ServerError
    | SlowDown
    | TimedOut
    | BrokenConnection
    | TruncatedBody
    | StalledBody
    | FlippedBits
    | Denied
    | Absent
    | Short
    | LaggingList
    | Tell
)

READS = frozenset({"read", "read_into"})
WRITES = frozenset({"put", "upload_part"})
EVERYTHING = READS | WRITES | {
    "abort_multipart",
    "complete_multipart",
    "copy_from",
    "create_multipart",
    "delete",
    "head",
    "list",
    "list_directories",
    "list_parts",
    "list_uploads",
    "probe",
}  # fmt: skip


def operations_of(fault: Fault) -> frozenset[str]:
    """Return the operations that `fault` can happen to."""
    if isinstance(fault, TruncatedBody | StalledBody):
        return READS
    if isinstance(fault, FlippedBits):
        return READS | WRITES
    if isinstance(fault, Absent):
        return READS | {"head"}
    if isinstance(fault, Short):
        return frozenset({"read_into"})
    return frozenset({"list"}) if isinstance(fault, LaggingList) else EVERYTHING


def without_attempts(text: str) -> str:
    """Replace the random ids of attempts in `text`."""
    return ATTEMPT.sub("*", text)


class Draw:
    """Random numbers for one event; equal `names` give equal numbers in any process."""

    def __init__(self, *names: object) -> None:
        self._names = names

    def fraction(self, what: str) -> float:
        """Return a number from 0 (included) to 1 (excluded)."""
        return self._bits(what) / 2.0**53

    def below(self, bound: int, what: str) -> int:
        """Return a whole number from 0 (included) to `bound` (excluded)."""
        return self._bits(what) % bound

    def _bits(self, what: str) -> int:
        # Python's own hash differs from process to process.
        digest = hashlib.blake2b(repr((*self._names, what)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 11


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
    """A fault that happens to one call."""

    fault: Fault
    draw: Draw
    why: str
    """Text for the error: the rule, the seed, and the number of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    key: str
    before: ObjectInfo | None
    at_call: int


class History:
    """The latest writes below one root, so that a listing can leave them out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: deque[_Write] = deque(maxlen=_REMEMBERED_WRITES)
        self._num_calls = 0

    def count(self) -> None:
        """Count a call of any kind."""
        with self._lock:
            self._num_calls += 1

    def note(self, key: str, before: ObjectInfo | None) -> None:
        """Record a write of `key`, and the object before it."""
        with self._lock:
            self._writes.append(_Write(key=key, before=before, at_call=self._num_calls))

    def undone(self, infos: Iterable[ObjectInfo], prefix: str, lag: LaggingList) -> list[ObjectInfo]:
        """Return the listing `infos` as it was before the latest writes."""
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
    """Injects the faults that `decide` returns; `released` ends stalls, and `history` is for lagging lists."""

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
        write = functools.partial(self.inner.put, key, sent, crc32c=checksum, if_absent=if_absent)
        self._written(key, lambda: self._carried_out(call, write, due))

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        call = Call(operation="upload_part", key=key, num_bytes=num_bytes(views))
        due = self._next(call)
        sent, checksum = _sent(views, crc32c, due)
        return self._carried_out(call, lambda: self.inner.upload_part(key, upload_id, part, sent, crc32c=checksum), due)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        self._written(key, lambda: super(FaultyStore, self).complete_multipart(key, upload_id, parts))

    def copy_from(self, source_url: str, target_key: str, *, tried: Tried = once) -> int | None:
        found: list[int | None] = []
        copy = functools.partial(super().copy_from, source_url, target_key, tried=tried)
        self._written(target_key, lambda: found.append(copy()))
        return found[0]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._written(key, functools.partial(super().delete, [key]))

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        call = Call(operation="read_into", key=key, num_bytes=num_bytes(views))
        due = self._next(call)
        if due is not None and isinstance(due.fault, TruncatedBody | StalledBody):
            received_bytes = _received(due, call.num_bytes)
            # The store fills in the first bytes, and raises its own error for an object that is shorter.
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
        """Run `write` and record it in the history, if there is one."""
        if self._history is None:
            write()
            return
        before = self._info(key)
        try:
            write()
        finally:
            # The write may be carried out even if it raises an error.
            if self._info(key) != before:
                self._history.note(key, before)

    def _info(self, key: str) -> ObjectInfo | None:
        try:
            return self.inner.head(key)
        except ObjectNotFoundError:
            return None


def _received(due: Due, size_bytes: int) -> int:
    """Return the number of bytes that are received; never the whole body."""
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
    """Return the body that is sent to the store, and its checksum."""
    if due is None or not isinstance(due.fault, FlippedBits) or not num_bytes(views):
        return views, crc32c
    damaged = [memoryview(bytearray(b"".join(views)))]
    _flip(damaged, due)
    return damaged, crc32c if due.fault.noticed else crc32c_of(damaged)


def _flip(views: Views, due: Due) -> None:
    num_bits = num_bytes(views) * 8
    wanted = min(getattr(due.fault, "num_bits", 0), num_bits)
    flipped: set[int] = set()  # flipping a bit twice would restore it
    for number in range(wanted):
        bit = due.draw.below(num_bits, f"bit {number}")
        while bit in flipped:
            bit = (bit + 1) % num_bits
        flipped.add(bit)
        without_first(views, bit // 8)[0][0] ^= 1 << (bit % 8)
