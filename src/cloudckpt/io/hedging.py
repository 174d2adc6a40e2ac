"""Limit the requests in flight, and repeat a request that takes far longer than its peers.

See ``docs/design/014-concurrency-and-tails.md``.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from cloudckpt._this_process import is_forked
from cloudckpt.errors import ObjectNotFoundError, StoreError, StoreTimeoutError, ThrottledError, TransientStoreError
from cloudckpt.options import DEFAULT_CONNECTIONS
from cloudckpt.stores.base import FoundPart, Part, Store, UploadedPart, Views, copy_into, num_bytes
from cloudckpt.stores.http_clients import CallScope

_T = TypeVar("_T")
Kind: TypeAlias = Literal["upload", "download"]

MIN_PATIENCE_S = 2.0
"""A request that takes less is not worth a second one."""
_MAX_CONNECTIONS_PER_HOST = 128
_CALM_S = 30.0
"""No request is repeated for this long after the store has asked to slow down."""
_MAX_HEDGES_AT_ONCE = 4
_STRAGGLER_FACTOR = 3.0
_MIN_PEERS = 4
_MAX_PEERS = 64
MIN_HEDGES = 2
_REQUESTS_PER_HEDGE = 20
_WATCH_EVERY_S = 0.5  # each call waits for the GIL, and makes a training loop wait


def choose_connections(connections: int | None, *, ranks_of_host: int) -> int:
    """Return `connections` if the user has set it; otherwise 16, or less if the ranks of one host share 128."""
    if connections is not None:
        return connections
    return min(DEFAULT_CONNECTIONS, max(_MAX_CONNECTIONS_PER_HOST // max(ranks_of_host, 1), 1))


def max_hedges(num_requests: int) -> int:
    """Return how many of `num_requests` may be repeated: one in twenty, and at least `MIN_HEDGES`."""
    return max(num_requests // _REQUESTS_PER_HEDGE, MIN_HEDGES)


class ConcurrencyLimit:
    """The number of requests that may be in flight: additive increase, multiplicative decrease.

    The limit begins at `max_connections`. It halves when the store asks to slow down, when a request times out, and
    when one could not be made (`StoreError.is_unsent`). Failures of requests that were in flight together halve it only
    once. It rises by one, up to `max_connections`, after as many successes as it allows requests. It is never below 1.
    Not thread-safe: `Hedger` locks it.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self.current = max_connections
        self._decreased_s = float("-inf")
        self._num_successes = 0

    def decrease(self, *, begun_s: float, now_s: float) -> None:
        """Halve the limit after a request that began at `begun_s` was refused or timed out. Times are of one clock."""
        if begun_s <= self._decreased_s:
            return  # the last decrease answers this request, too
        self.current = max(self.current // 2, 1)
        self._decreased_s = now_s
        self._num_successes = 0

    def record_success(self, *, begun_s: float) -> None:
        """Count a request that began at `begun_s` and succeeded; raise the limit by one after enough of them."""
        if self.current == self._max_connections or begun_s <= self._decreased_s:
            return
        self._num_successes += 1
        if self._num_successes >= self.current:
            self.current += 1
            self._num_successes = 0


class PeerTimes:
    """The times that the last requests of one kind took, by size. Not thread-safe: `Hedger` locks it."""

    def __init__(self) -> None:
        self._durations: deque[tuple[int, float]] = deque(maxlen=_MAX_PEERS)

    def add(self, *, num_bytes: int, duration_s: float) -> None:
        """Record a request that succeeded."""
        self._durations.append((num_bytes, duration_s))

    def patience_s(self, num_bytes: int) -> float | None:
        """Return the time after which a request for `num_bytes` is a straggler; None if it has too few peers.

        The peers of a request have half to twice its size.
        """
        durations_s = [
            duration_s
            for size_bytes, duration_s in self._durations
            if num_bytes <= 2 * size_bytes and size_bytes <= 2 * num_bytes
        ]
        if len(durations_s) < _MIN_PEERS:
            return None
        return max(_STRAGGLER_FACTOR * statistics.median(durations_s), MIN_PATIENCE_S)


@dataclass(slots=True, kw_only=True, eq=False)
class HedgedRequest(Generic[_T]):
    """One request in flight, and its hedge: the second request, if there is one."""

    kind: Kind
    name: Hashable
    """The same however often the client repeats the request. A name is hedged at most once."""
    num_bytes: int
    hedge_bytes: int
    """The memory that the hedge uses."""
    send_hedge: Callable[[], _T]
    begun_s: float
    scope: CallScope = field(default_factory=CallScope)
    hedge_scope: CallScope = field(default_factory=CallScope)
    hedge_has_ended: threading.Event | None = None
    """None if there is no hedge."""
    hedge_result: _T | None = None
    result: _T | None = None
    """The result that the context's body has set, or that of the hedge if the first request has failed."""


class Hedger:
    """Send a second request if one takes far longer than its peers, and use the first answer of the two.

    Peers are the last requests of the same kind and of about the same size. `upload_part` and `read_into` make
    requests. `watch` finds stragglers among the requests in flight, and repeats each in a thread of its own.
    `watching` calls `watch` twice a second. Safe to share between threads.

    - A request is repeated at most once, and only if its connection is known, so that it can be closed.
    - The loser is the request whose answer is not used. The hedger closes its connection. The caller continues only
      once the loser has ended, since the loser must not use memory that the caller has released. This wait takes at
      most as long as a new connection.
    - At most four second requests run at a time. At most one in twenty requests is repeated, or two of fewer than
      forty (`max_hedges`).
    - After the store has asked to slow down, nothing is repeated for `_CALM_S`.

    Args:
        limit: The limit of requests in flight. The hedger informs it of the end of each request.
        budget_bytes: The memory that second requests may use in all.
        on_hedge: Called for each second request, in the thread that watches.
        clock: Returns seconds since any fixed moment.

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
        self.configured_connections = limit.current
        """The most requests that may ever be in flight."""
        self._get_max_connections: Callable[[], int] = lambda: self.configured_connections
        self._on_hedge = on_hedge
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._running: set[HedgedRequest[Any]] = set()
        self._peers: defaultdict[Kind, PeerTimes] = defaultdict(PeerTimes)
        self._hedged: set[Hashable] = set()
        self._num_requests = 0
        self._num_running_hedges = 0
        self._hedge_bytes = 0
        self._calm_until_s = 0.0

    @property
    def num_hedges(self) -> int:
        """Requests that were made a second time."""
        return len(self._hedged)

    def limit_connections(self, get_max_connections: Callable[[], int]) -> None:
        """Allow at most as many requests in flight as `get_max_connections` returns. Its answers may change."""
        self._get_max_connections = get_max_connections

    @property
    def max_connections(self) -> int:
        """The most requests that may be in flight now if the store slows nothing down."""
        return self._get_max_connections()

    def connections_now(self) -> int:
        """Return how many requests may be in flight now."""
        return min(self._limit.current, self._get_max_connections())

    @contextlib.contextmanager
    def request(
        self, kind: Kind, name: Hashable, *, num_bytes: int, hedge_bytes: int, send_hedge: Callable[[], _T]
    ) -> Iterator[HedgedRequest[_T]]:
        """Make a request that raises `StoreError` in this context. The arguments are fields of `HedgedRequest`.

        `send_hedge` makes the same request, in another thread; it must not return None. If it succeeds and the first
        request fails, the context suppresses the error, and `HedgedRequest.result` is its result.
        """
        with self._lock:
            request = HedgedRequest(
                kind=kind,
                name=name,
                num_bytes=num_bytes,
                hedge_bytes=hedge_bytes,
                send_hedge=send_hedge,
                begun_s=self._clock(),
            )
            self._num_requests += 1
            self._running.add(request)
        try:
            with request.scope:
                yield request
        except BaseException as error:
            if not self._settle(request, error):
                raise
        else:
            self._settle(request, None)

    def _settle(self, request: HedgedRequest[Any], failure: BaseException | None) -> bool:
        """End the loser, and record the outcome. Return True if only the hedge succeeded."""
        with self._lock:
            self._running.remove(request)
        has_ended = request.hedge_has_ended  # final: `watch` repeats only what is in `_running`
        try:
            if has_ended is not None:
                try:
                    if not isinstance(failure, TransientStoreError):  # else the hedge may still succeed
                        request.hedge_scope.cancel()
                finally:
                    has_ended.wait()
            if failure is None or request.hedge_result is not None:
                self._record_success(request)
            elif isinstance(failure, ThrottledError):
                self._slow_down(request.begun_s)
            elif isinstance(failure, StoreTimeoutError) or getattr(failure, "is_unsent", False):
                with self._lock:
                    self._limit.decrease(begun_s=request.begun_s, now_s=self._clock())
            if failure is None or request.hedge_result is None:
                return False
            request.result = request.hedge_result
            return True
        finally:
            if has_ended is not None:
                with self._lock:
                    self._num_running_hedges -= 1
                    self._hedge_bytes -= request.hedge_bytes

    def upload_part(
        self, store: Store, key: str, upload_id: str, part: Part, views: Views, *, crc32c: int
    ) -> UploadedPart:
        """Upload a part, hedged.

        Both requests send the same bytes, so it does not matter which of them the store carries out last. If their
        tokens differ, `complete_multipart` asks the store which part it has.
        """

        def upload_again() -> UploadedPart:
            return store.upload_part(key, upload_id, part, views, crc32c=crc32c)

        name = _name_part(key, upload_id, part)
        with self.request("upload", name, num_bytes=part.size_bytes, hedge_bytes=0, send_hedge=upload_again) as request:
            request.result = store.upload_part(key, upload_id, part, views, crc32c=crc32c)
        assert request.result is not None  # noqa: S101  # or the context has raised
        return request.result

    def read_into(self, store: Store, key: str, offset_bytes: int, views: Views) -> None:
        """Read a range, hedged. The second request reads into memory of its own. If it wins, its bytes are copied."""
        size_bytes = num_bytes(views)

        def read_again() -> memoryview:
            content = memoryview(bytearray(size_bytes))
            store.read_into(key, offset_bytes, [content])
            return content

        name = ("download", key, offset_bytes + size_bytes)  # the end stays where it is when a read is resumed
        with self.request(
            "download", name, num_bytes=size_bytes, hedge_bytes=size_bytes, send_hedge=read_again
        ) as request:
            store.read_into(key, offset_bytes, views)
        if request.result is not None:
            copy_into(views, request.result)

    def complete_multipart(self, store: Store, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> None:
        """Complete an upload, some of whose parts may have been sent twice."""
        try:
            store.complete_multipart(key, upload_id, parts)
        except StoreError as error:
            sent_twice = [uploaded for uploaded in parts if _name_part(key, upload_id, uploaded.part) in self._hedged]
            if not sent_twice or isinstance(error, TransientStoreError | ObjectNotFoundError):
                raise
            # If the service holds the encryption's key, equal parts have different ETags, and the store may have
            # carried out last a request that was given up.
            try:
                stored_parts = list(store.list_parts(key, upload_id))
            except StoreError:  # a listing may not be permitted, and the first error says more
                raise error from None
            latest = [
                _with_stored_token(uploaded, stored_parts) if uploaded in sent_twice else uploaded for uploaded in parts
            ]
            if latest == list(parts):
                raise
            store.complete_multipart(key, upload_id, latest)

    def watching(self, *, daemon: bool = False) -> AbstractContextManager[None]:
        """Call `watch` twice a second, in a thread of its own, while the context is open."""
        return _Watch(self.watch, daemon=daemon)

    def watch(self) -> None:
        """Repeat the requests that are far slower than their peers."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._calm_until_s:
                return
            num_before = len(self._hedged)
            for request in sorted(self._running, key=lambda request: request.begun_s):
                if self._is_straggler(request, now_s) and self._is_affordable(request):
                    self._start_hedge(request)
            num_more = len(self._hedged) - num_before
        for _ in range(num_more):  # without the lock: the function is the user's
            self._on_hedge()

    def _is_straggler(self, request: HedgedRequest[Any], now_s: float) -> bool:
        patience_s = self._peers[request.kind].patience_s(request.num_bytes)
        return patience_s is not None and now_s - request.begun_s > patience_s and request.scope.is_cancellable

    def _is_affordable(self, request: HedgedRequest[Any]) -> bool:
        return (
            request.hedge_has_ended is None
            and request.name not in self._hedged
            and len(self._hedged) < max_hedges(self._num_requests)
            and self._num_running_hedges < _MAX_HEDGES_AT_ONCE
            and self._hedge_bytes + request.hedge_bytes <= self._budget_bytes
        )

    def _start_hedge(self, request: HedgedRequest[Any]) -> None:
        has_ended = threading.Event()
        arguments = (request, has_ended)
        thread = threading.Thread(target=self._run_hedge, args=arguments, name="cloudckpt-hedge", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the system's limit, or the interpreter ends
            return
        request.hedge_has_ended = has_ended
        self._hedged.add(request.name)
        self._num_running_hedges += 1
        self._hedge_bytes += request.hedge_bytes

    def _run_hedge(self, request: HedgedRequest[Any], has_ended: threading.Event) -> None:
        begun_s = self._clock()
        try:
            with request.hedge_scope:
                request.hedge_result = request.send_hedge()
        except ThrottledError:
            self._slow_down(begun_s)
        except BaseException:  # noqa: BLE001, S110  # the first request continues as if there were no hedge
            pass
        else:
            request.scope.cancel()
        finally:
            has_ended.set()

    def _record_success(self, request: HedgedRequest[Any]) -> None:
        with self._lock:
            ended_s = self._clock()
            self._limit.record_success(begun_s=request.begun_s)
            self._peers[request.kind].add(num_bytes=request.num_bytes, duration_s=ended_s - request.begun_s)

    def _slow_down(self, begun_s: float) -> None:
        with self._lock:
            now_s = self._clock()
            self._limit.decrease(begun_s=begun_s, now_s=now_s)
            self._calm_until_s = now_s + _CALM_S


class _Watch(AbstractContextManager[None]):
    """Calls `watch` in a thread of its own.

    This context is not a generator. An unfinished generator runs its ``finally`` when it is collected; for a file that
    is never closed, at the end of the process. The watch thread is stopped by then, so Python 3.13 would wait for ever.
    """

    def __init__(self, watch: Callable[[], None], *, daemon: bool) -> None:
        self._watch = watch
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_watch, name="cloudckpt-watch", daemon=daemon)

    def _keep_watch(self) -> None:
        while not self._has_ended.wait(_WATCH_EVERY_S):
            self._watch()

    def __enter__(self) -> None:
        try:
            # If no more threads can be started, no request is repeated.
            with contextlib.suppress(RuntimeError):
                self._thread.start()
        except BaseException:
            self._has_ended.set()
            raise

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        if self._thread.ident is not None and not is_forked():
            self._thread.join()


def _name_part(key: str, upload_id: str, part: Part) -> tuple[str, str, str, int]:
    return ("upload", key, upload_id, part.number)


def _with_stored_token(uploaded: UploadedPart, stored_parts: Sequence[FoundPart]) -> UploadedPart:
    """Return `uploaded` with the token of the store's part, if the store's part certainly has the same bytes."""
    for part in stored_parts:
        if (part.number, part.size_bytes, part.crc32c) == (
            uploaded.part.number,
            uploaded.part.size_bytes,
            uploaded.crc32c,
        ):
            return replace(uploaded, token=part.token)
    return uploaded
