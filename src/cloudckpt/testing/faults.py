"""Inject faults by rule into the calls of a store during a save or a load.

Rules choose calls by their number or by random numbers with a seed; nothing depends on time. The same seed injects the
same faults in any order of threads, and every injected error names the seed::

    faults = Faults(
        Rule(fault=Fails(TransientStoreError, carried_out=True), operations={"put"}, key=r"manifest"),
        Rule(fault=Fails(ThrottledError), probability=0.05, times=None),
        seed=7,
    )
    cloudckpt.save(state_dict, "s3://bucket/run", options=Options(advanced=AdvancedOptions(wrap_store=faults)))
    print(faults.num_injected)

`cloudckpt.testing.damage` breaks stored objects.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from cloudckpt.commit.attempts import ATTEMPT
from cloudckpt.errors import InterruptedReadError, StoreError
from cloudckpt.stores.base import (
    Call,
    ForwardingStore,
    Part,
    RequestRunner,
    Store,
    UploadedPart,
    Views,
    batches,
    num_bytes,
    run_once,
    skip_bytes,
)

__all__ = ["Call", "Fails", "Fault", "Faults", "FlippedBits", "Rule", "Tell", "TruncatedBody", "WrappedStore"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fails:
    """The call raises an error of `cloudckpt.errors`.

    - `TransientStoreError`: the server's error 500, or a broken connection
    - `ThrottledError`: 503 SlowDown
    - `StoreTimeoutError`: no answer in time; the fault does not wait
    - `AccessDeniedError`: 403
    - `ObjectNotFoundError`: 404 for an object, even if it exists
    - `ShortObjectError`: 416 for a range, even if the object has it
    """

    error: type[StoreError]
    """Class of the error."""
    carried_out: bool = False
    """If True, the store carries the call out first, so that its answer is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedBody:
    """The answer to a read ends early, with an `InterruptedReadError` that has the number of received bytes."""

    after_bytes: int | None = None
    """Number of the first bytes, at most all but one. None chooses it at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedBits:
    """A bit at a random place is damaged in transit.

    A read fills in damaged bytes. A write sends damaged bytes with the caller's checksum, and a store that verifies
    checksums refuses it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Calls a function in the caller's thread, for example to kill a process. The store carries the call out."""

    before: Callable[[Call], object] | None = None
    """Called before the store carries the call out."""
    after: Callable[[Call], object] | None = None
    """Called after the store has carried the call out without an error."""


Fault: TypeAlias = Fails | TruncatedBody | FlippedBits | Tell

_READS = frozenset({"read", "read_into"})
_EVERYTHING = Store.__abstractmethods__ - {"uri"} | {"probe", "list_parts", "copy_from", "copy_part", "free_bytes"}
_OPERATIONS: dict[type, frozenset[str]] = {TruncatedBody: _READS, FlippedBits: _READS | {"put", "upload_part"}}
"""The operations that a fault can happen to; all operations for any other fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fault, and the calls that it happens to.

    A rule counts every call that it matches, in the order of the calls, which threads can change. A random choice
    depends on the seed, the rule, the operation, the key, and the number of earlier calls of this operation on this
    key, but not on the random ids of attempts.

    Raises:
        ValueError: The fault cannot happen to these operations.
        TypeError: `fault` is a class, or `operations` is one string.

    """

    fault: Fault
    """A fault of this module, such as ``Fails(ThrottledError)``."""
    operations: Collection[str] | None = None
    """Names of methods of `Store`; None: all methods that the fault can happen to."""
    key: str = ""
    """Regular expression, searched for in the key."""
    skip: int = 0
    """Number of the first matches on which the rule does not act."""
    times: int | None = 1
    """Number of the next matches on which the rule acts; None: all of them."""
    each_key: bool = False
    """If True, each operation on each key is counted separately, so threads cannot change the order."""
    probability: float = 1.0
    """Fraction of these calls on which the rule acts."""

    def __post_init__(self) -> None:
        if not isinstance(self.fault, Fault):
            raise TypeError(f"fault is one of this module's, such as Fails(ThrottledError), not {self.fault!r}")
        if isinstance(self.operations, str):
            raise TypeError(f"operations are a collection of names: {{{self.operations!r}}}, not {self.operations!r}")
        if impossible := sorted(set(self.operations or ()) - self._possible_operations):
            raise ValueError(f"{type(self.fault).__name__} cannot happen to {impossible}")

    @property
    def _possible_operations(self) -> frozenset[str]:
        return _OPERATIONS.get(type(self.fault), _EVERYTHING)

    def matches(self, call: Call) -> bool:
        """Return True if the rule counts the call."""
        operations = self._possible_operations if self.operations is None else self.operations
        return call.operation in operations and re.search(self.key, call.key) is not None

    def acts_on(self, num_before: int) -> bool:
        """Return True if the rule acts on a match that follows `num_before` others."""
        return self.skip <= num_before and (self.times is None or num_before < self.skip + self.times)


class Faults:
    """Wraps stores for `AdvancedOptions.wrap_store`. All opened stores share these rules and their counts.

    The first rule that is due for a call acts; all rules that match count it. A pickled copy in another process, such
    as a spawned rank, has the same rules and seed and counts from the beginning. Safe for use by several threads.

    Args:
        *rules: Rules, of which the first that is due acts.
        seed: Seed of all random choices.

    """

    def __init__(self, *rules: Rule, seed: int = 0) -> None:
        self.rules = rules
        self.seed = seed
        self._lock = threading.Lock()
        self._num_alike: Counter[tuple[str, str]] = Counter()
        self._num_matched: Counter[tuple[Any, ...]] = Counter()
        self._num_injected: Counter[str] = Counter()
        self._num_calls: Counter[str] = Counter()

    def __call__(self, store: Store) -> FaultyStore:
        """Wrap `store` with these faults."""
        return FaultyStore(store, decide=self._decide)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Faults, seed=self.seed), self.rules

    @property
    def num_injected(self) -> dict[str, int]:
        """Number of injected faults, by the name of the error's or fault's class."""
        with self._lock:
            return dict(self._num_injected)

    @property
    def num_calls(self) -> dict[str, int]:
        """Number of calls by operation."""
        with self._lock:
            return dict(self._num_calls)

    def _decide(self, call: Call) -> _Due | None:
        alike = (call.operation, without_attempts(call.key))
        due: _Due | None = None
        with self._lock:
            self._num_calls[call.operation] += 1
            self._num_alike[alike] += 1
            nth = self._num_alike[alike]
            for index, rule in enumerate(self.rules):
                if not rule.matches(call):
                    continue
                counted = (index, *alike) if rule.each_key else (index,)
                self._num_matched[counted] += 1
                if due is not None or not rule.acts_on(self._num_matched[counted] - 1):
                    continue
                event = (self.seed, index, *alike, nth)
                if draw("acts", event) >= rule.probability:
                    continue
                why = f"by rule {index} with seed {self.seed}, at call {nth} of {call.operation} on this key"
                due = _Due(fault=rule.fault, position=draw("place", event), why=why)
                kind = rule.fault.error if isinstance(rule.fault, Fails) else type(rule.fault)
                self._num_injected[kind.__name__] += 1
        return due


def without_attempts(text: str) -> str:
    """Replace the random ids of attempts in `text`."""
    return ATTEMPT.sub("*", text)


def draw(name: str, event: tuple[object, ...]) -> float:
    """Return a random number in ``[0, 1)``, equal in any process for equal arguments."""
    # Python's own hash differs from process to process.
    digest = hashlib.blake2b(repr((event, name)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """A fault that happens to one call."""

    fault: Fault
    position: float
    """The position in the body, as a fraction of its size, at which a fault without a given position happens."""
    why: str
    """Text for the error: the rule, the seed, and the number of the call."""

    @property
    def flips_bits(self) -> bool:
        """True if the body of the call is damaged in transit."""
        return isinstance(self.fault, FlippedBits)


class WrappedStore(ForwardingStore):
    """Passes each call to `inner` and has its capabilities and limits; subclasses override `around`.

    A deletion of several keys becomes one call for each key, so that it can fail between two of them. A listing is
    complete before its first entry is returned. A copy by the service is one call, however many requests it takes, and
    is retried as a whole.
    """

    def around_listing(self, call: Call, action: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        yield from self.around(call, lambda: [*action()])

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.around(Call(operation="delete", key=key), functools.partial(self.inner.delete, [key]))

    def copy_from(self, source_url: str, target_key: str, *, run: RequestRunner = run_once) -> int | None:
        call = Call(operation="copy_from", key=target_key)
        return run(lambda: self.around(call, lambda: self.inner.copy_from(source_url, target_key)))


class FaultyStore(WrappedStore):
    """Injects the faults that `decide` returns."""

    def __init__(self, inner: Store, *, decide: Callable[[Call], _Due | None]) -> None:
        super().__init__(inner)
        self._decide = decide

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        return self._carry_out(call, action, self._decide(call))

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        call = Call(operation="put", key=key, num_bytes=num_bytes(views))
        due = self._decide(call)
        sent = _damage_copy(views, due)
        self._carry_out(call, lambda: self.inner.put(key, sent, crc32c=crc32c, if_absent=if_absent), due)

    def upload_part(self, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int) -> UploadedPart:
        call = Call(operation="upload_part", key=key, num_bytes=num_bytes(views))
        due = self._decide(call)
        sent = _damage_copy(views, due)
        return self._carry_out(call, lambda: self.inner.upload_part(key, upload_id, part, sent, crc32c=crc32c), due)

    def read_into(self, key: str, offset_bytes: int, views: Views) -> None:
        call = Call(operation="read_into", key=key, num_bytes=num_bytes(views))
        due = self._decide(call)
        if due is not None and isinstance(due.fault, TruncatedBody):
            received_bytes = _received(due.fault, due.position, call.num_bytes)
            # The store fills in the first bytes, and raises its own error for an object that is shorter.
            if received_bytes:
                first_bytes = next(batches(views, max_bytes=received_bytes, max_views=len(views)))
                self.inner.read_into(key, offset_bytes, first_bytes)
            raise self._truncation(call, due, received_bytes)
        self._carry_out(call, lambda: self.inner.read_into(key, offset_bytes, views), due)
        if due is not None and due.flips_bits:
            _flip_bit(views, due.position)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        call = Call(operation="read", key=key)
        due = self._decide(call)
        body = self._carry_out(call, lambda: self.inner.read(key, max_bytes=max_bytes), due)
        if due is not None and isinstance(due.fault, TruncatedBody):
            raise self._truncation(call, due, _received(due.fault, due.position, len(body)))
        return b"".join(_damage_copy([memoryview(body)], due))

    def _carry_out(self, call: Call, action: Callable[[], _T], due: _Due | None) -> _T:
        fault = None if due is None else due.fault
        if isinstance(fault, Tell) and fault.before is not None:
            fault.before(call)
        if due is not None and isinstance(fault, Fails):
            if fault.carried_out:
                action()
            raise self._error(fault.error, call, due, "the call failed")
        result = action()
        if isinstance(fault, Tell) and fault.after is not None:
            fault.after(call)
        return result

    def _truncation(self, call: Call, due: _Due, received_bytes: int) -> StoreError:
        words = f"the answer ended after {received_bytes} bytes"
        return self._error(InterruptedReadError, call, due, words, received_bytes=received_bytes)

    def _error(self, kind: type[StoreError], call: Call, due: _Due, words: str, **attributes: Any) -> StoreError:
        url = self.url(call.key)
        return kind(f"{url}: {words} (injected {due.why})", key=url, operation=call.operation, **attributes)


def _received(fault: TruncatedBody, position: float, size_bytes: int) -> int:
    """Return the number of received bytes: always less than the whole body."""
    after_bytes = int(position * size_bytes) if fault.after_bytes is None else fault.after_bytes
    return max(min(after_bytes, size_bytes - 1), 0)


def _damage_copy(views: Views, due: _Due | None) -> Views:
    """Return the body to send: `views`, or a damaged copy."""
    if due is None or not due.flips_bits or not num_bytes(views):
        return views
    damaged = [memoryview(bytearray(b"".join(views)))]
    _flip_bit(damaged, due.position)
    return damaged


def _flip_bit(views: Views, position: float) -> None:
    bit = int(position * num_bytes(views) * 8)
    if remaining := skip_bytes(views, bit // 8):
        remaining[0][0] ^= 1 << (bit % 8)
