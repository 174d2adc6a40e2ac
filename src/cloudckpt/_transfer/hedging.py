"""Requests that take far longer than their peers are made once more, and the first to end counts.

See ``docs/design/014-concurrency-and-tails.md``.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, Literal, TypeAlias, TypeVar

from cloudckpt._threads import Event
from cloudckpt._transfer.concurrency import ConcurrencyLimit
from cloudckpt._transfer.peers import Peers, hedges_allowed
from cloudckpt.errors import StoreTimeoutError, ThrottledError, TransientStoreError
from cloudckpt.stores._calls import CallScope

_T = TypeVar("_T")
Kind: TypeAlias = Literal["upload", "download"]

_CALM_S = 30.0
"""After the store has asked to slow down, nothing is asked twice for so long."""
_MOST_AT_ONCE = 4


class _Hedge(Generic[_T]):
    """The second request."""

    def __init__(self) -> None:
        self.scope = CallScope()
        self.has_ended = Event()
        self.take: Callable[[], _T] | None = None
        """Gives the result; None if it has failed, or not ended yet."""


class _Call(Generic[_T]):
    """The first request, while it is under way."""

    def __init__(
        self, kind: Kind, name: Hashable, *, num_bytes: int, held_bytes: int, second: Callable[[], Callable[[], _T]]
    ) -> None:
        self.kind: Kind = kind
        self.name = name
        self.num_bytes = num_bytes
        self.held_bytes = held_bytes
        self.second = second
        self.begun_s = 0.0
        self.scope = CallScope()
        self.hedge: _Hedge[_T] | None = None


class Hedger:
    """Make requests, tell `limit` how they end, and make stragglers again, each no more than once.

    `watch` looks for stragglers; somebody has to call it, again and again. Only a request whose connection can be
    closed is made twice, since whichever of the two loses is ended before its caller goes on: so no loser sends from,
    or writes into, memory that its caller has let go of, and a thread waits for one no longer than a new connection
    may take. Second requests hold no more than `budget_bytes`. `on_hedge` is told of each second request, in the thread
    that watches. Safe to share between threads.
    """

    def __init__(
        self,
        limit: ConcurrencyLimit,
        *,
        budget_bytes: int,
        on_hedge: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._on_hedge = on_hedge
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._running: set[_Call[object]] = set()
        self._peers: defaultdict[Kind, Peers] = defaultdict(Peers)
        self._hedged: set[Hashable] = set()
        self._num_requests = 0
        self._num_at_once = 0
        self._held_bytes = 0
        self._calm_until_s = 0.0

    @property
    def num_hedges(self) -> int:
        """Requests that were made a second time."""
        return len(self._hedged)

    def was_hedged(self, name: Hashable) -> bool:
        """Whether the request `name` was made a second time."""
        return name in self._hedged

    def connections(self) -> int:
        """Return how many requests may be in flight now."""
        return self._limit.current

    def call(
        self,
        kind: Kind,
        name: Hashable,
        first: Callable[[], _T],
        *,
        num_bytes: int,
        held_bytes: int,
        second: Callable[[], Callable[[], _T]],
    ) -> _T:
        """The result of `first`; or, where that has become a straggler, what `second` gave first.

        Both raise `StoreError`. `second` runs in another thread, holds `held_bytes`, and gives a function that this
        thread takes the result by. `name` is the request's, however often it is tried.
        """
        call = _Call(kind, name, num_bytes=num_bytes, held_bytes=held_bytes, second=second)
        failure: BaseException | None = None
        with self._lock:
            call.begun_s = self._clock()
            self._num_requests += 1
            self._running.add(call)  # type: ignore[arg-type]  # whatever its result is, it is not looked at there
        try:
            with call.scope:
                result = first()
        except BaseException as error:  # noqa: BLE001  # it is raised again unless the second request has succeeded
            failure = error
        with self._lock:
            self._running.remove(call)  # type: ignore[arg-type]
        hedge = call.hedge
        try:
            if hedge is not None:
                try:
                    if not isinstance(failure, TransientStoreError):
                        hedge.scope.cancel()
                finally:
                    hedge.has_ended.wait()
            if failure is None:
                self._succeeded(call)
                return result
            if hedge is not None and hedge.take is not None:
                self._succeeded(call)
                return hedge.take()
            if isinstance(failure, ThrottledError):
                self._slow_down(call.begun_s)
            elif isinstance(failure, StoreTimeoutError):
                with self._lock:
                    self._limit.decrease(begun_s=call.begun_s, now_s=self._clock())
            raise failure
        finally:
            del failure  # which holds this frame, and what it holds
            if hedge is not None:
                with self._lock:
                    self._num_at_once -= 1
                    self._held_bytes -= call.held_bytes

    def watch(self) -> None:
        """Have those requests made again that are far slower than their peers."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._calm_until_s:
                return
            num_before = len(self._hedged)
            for call in sorted(self._running, key=lambda call: call.begun_s):
                if self._is_straggler(call, now_s) and self._is_affordable(call):
                    self._hedge(call)
            num_more = len(self._hedged) - num_before
        for _ in range(num_more):  # without the lock: it is the user's own code
            self._on_hedge()

    def _is_straggler(self, call: _Call[object], now_s: float) -> bool:
        patience_s = self._peers[call.kind].patience_s(call.num_bytes)
        return patience_s is not None and now_s - call.begun_s > patience_s and call.scope.is_cancellable

    def _is_affordable(self, call: _Call[object]) -> bool:
        return (
            call.hedge is None
            and call.name not in self._hedged
            and len(self._hedged) < hedges_allowed(self._num_requests)
            and self._num_at_once < _MOST_AT_ONCE
            and self._held_bytes + call.held_bytes <= self._budget_bytes
        )

    def _hedge(self, call: _Call[object]) -> None:
        hedge: _Hedge[object] = _Hedge()
        thread = threading.Thread(target=self._make_again, args=(call, hedge), name="cloudckpt-hedge", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the system's limit, or the interpreter ends
            return
        call.hedge = hedge
        self._hedged.add(call.name)
        self._num_at_once += 1
        self._held_bytes += call.held_bytes

    def _make_again(self, call: _Call[object], hedge: _Hedge[object]) -> None:
        begun_s = self._clock()
        try:
            with hedge.scope:
                hedge.take = call.second()
        except ThrottledError:
            self._slow_down(begun_s)
        except Exception:  # noqa: BLE001, S110  # the first request goes on as if there had been no other
            pass
        else:
            call.scope.cancel()
        finally:
            hedge.has_ended.set()

    def _succeeded(self, call: _Call[_T]) -> None:
        with self._lock:
            ended_s = self._clock()
            self._limit.record_success(begun_s=call.begun_s)
            self._peers[call.kind].add(num_bytes=call.num_bytes, took_s=ended_s - call.begun_s)

    def _slow_down(self, begun_s: float) -> None:
        with self._lock:
            now_s = self._clock()
            self._limit.decrease(begun_s=begun_s, now_s=now_s)
            self._calm_until_s = now_s + _CALM_S
