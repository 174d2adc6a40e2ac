"""The client of a store: it counts calls, and decides when one is retried or its answer confirmed.

- A *retry* repeats a call that failed and may succeed the next time (`StoreClient.call`, `Retries`).
- A *confirmation* repeats a call that was answered, if one wrong answer would hide a checkpoint or give it up: "it is
  absent", "it is damaged" (`StoreClient.confirm`, `Confirmation`). One try of a confirmation is a *look*.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from typing_extensions import ParamSpec

from cloudckpt import _this_process
from cloudckpt._workers import num_cores_of_rank, ranks_of_host
from cloudckpt.errors import (
    ChecksumRefusedError,
    CloudckptError,
    InterruptedReadError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.events import log_fields
from cloudckpt.io.hedging import ConcurrencyLimit, Hedger, choose_connections
from cloudckpt.options import DEFAULT_CONNECTIONS, Options
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Call, ForwardingStore, FoundPart, ObjectInfo, Store, UploadInfo
from cloudckpt.telemetry.timeline import Recorder, now_ns
from cloudckpt.uri import Location, parse_location

_T = TypeVar("_T")
_P = ParamSpec("_P")
_log = logging.getLogger("cloudckpt")

_FIRST_DELAY_S = 0.1
_FIRST_THROTTLED_DELAY_S = 0.5
_MAX_DELAY_S = 10.0
FIRST_LOOK_DELAY_S = 0.1
_MAX_LOOK_DELAY_S = 3.2
NUM_LOOKS_AT_DAMAGE = 3
"""Looks in a row that must end with one error before it is raised: damage, or missing data that a manifest names."""
NUM_LOOKS_AT_ABSENCE = 2
"""Looks in a row that must have one result before it is returned: nothing exists, or something has changed."""
MAX_LOOKS = 16
"""After so many looks without agreement, the store contradicts itself, or its content changes all the time."""
_MIN_FILE_THREADS = 2  # while one waits for its device, another can copy
_MAX_FILE_THREADS = 8
_WITH_BODY = ("put", "upload_part", "read_into")


class Clock:
    """A client's source of time and of random numbers."""

    def monotonic(self) -> float:
        """Return seconds since any fixed moment."""
        return time.monotonic()

    def wait(self, stopped: threading.Event, delay_s: float) -> bool:
        """Wait for `delay_s` seconds. Returns True at once when `stopped` is set."""
        return stopped.wait(delay_s)

    def jitter(self) -> float:
        """Return a random factor of a delay, from 0.5 to 1."""
        # Jitter spreads clients apart; nothing about it has to be unpredictable.
        return random.uniform(0.5, 1.0)  # noqa: S311


SYSTEM_CLOCK = Clock()


@dataclass(slots=True, kw_only=True, eq=False)
class _SharedState:
    """The state that the clients of several stores share: how to repeat calls, and how many were made."""

    retries: int
    timeout_s: float
    on_retry: Callable[[StoreError], None] | None
    clock: Clock
    num_requests: int = field(init=False, default=0)
    num_retries: int = field(init=False, default=0)
    num_ended: int = field(init=False, default=0)
    stopped: threading.Event = field(init=False, default_factory=threading.Event)
    refusal: BaseException | None = field(init=False, default=None)
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)


class StoreClient:
    """Calls one store. Safe to share between threads; `stop` ends every wait at once.

    The client repeats a call after a failure that may pass. Delays grow exponentially, with jitter of half of each
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/). It gives a call up after `retries`
    repetitions, or after `timeout_s` without progress. A try that made no request (`StoreError.is_unsent`) does not
    count as a repetition, for example if the process may open no more files. The time of such a call begins anew when
    another call ends, which may have closed files.

    `head` and `read` return None for an object that is absent, after `confirm` has confirmed it. A listing is not
    confirmed: its callers pass it to `confirm` where it matters.

    Args:
        store: The store.
        retries: Repetitions of a call.
        timeout_s: Seconds without progress after which a call is given up.
        on_retry: Called with the failure before each repetition.
        recorder: Records times.
        hedger: Bounds the transfers in flight, and repeats stragglers while it watches. By default, it only bounds.
        open_parent: Opens the store of the folder that holds this one, for hints. None if there is none.
        clock: The source of time and of random numbers.

    """

    def __init__(
        self,
        store: Store,
        *,
        retries: int,
        timeout_s: float,
        on_retry: Callable[[StoreError], None] | None = None,
        recorder: Recorder | None = None,
        hedger: Hedger | None = None,
        open_parent: Callable[[], Store] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.store = store
        self.open_parent = open_parent
        self.hedger = hedger or Hedger(ConcurrencyLimit(DEFAULT_CONNECTIONS), budget_bytes=0)
        self.recorder = recorder if recorder is not None else Recorder()
        self.shared = _SharedState(retries=retries, timeout_s=timeout_s, on_retry=on_retry, clock=clock or SYSTEM_CLOCK)

    def at(self, store: Store) -> StoreClient:
        """Return a client of another store. `stop` stops both, and both count into the same numbers."""
        client = copy.copy(self)
        client.store = store
        return client

    def unstopped_copy(self) -> StoreClient:
        """Return a client of the same store that makes calls although this one was stopped. It counts them apart."""
        client = copy.copy(self)
        client.shared = replace(self.shared)
        return client

    @property
    def num_requests(self) -> int:
        """Tries so far, over all calls, including the first of each and hedges."""
        return self.shared.num_requests + self.hedger.num_hedges

    @property
    def num_retries(self) -> int:
        """Repetitions so far, over all calls."""
        return self.shared.num_retries

    def stop(self, refusal: BaseException | None = None) -> None:
        """Repeat no call any more: a call that fails, or waits after a failure, raises its failure.

        With a `refusal`, no call makes a request any more: each raises the refusal in place of its next try.
        """
        self.shared.refusal = refusal or self.shared.refusal  # before the event: a call that wakes reads it
        self.shared.stopped.set()

    @property
    def uri(self) -> str:
        """The store's root."""
        return self.store.uri

    def url(self, key: str) -> str:
        """Return the full address of `key`, for messages."""
        return self.store.url(key)

    def call(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return the result of ``function(*args, **kwargs)``, which makes a request and raises `StoreError`."""
        retries = Retries(self)
        while True:
            with retries:
                return function(*args, **kwargs)

    def head(self, key: str) -> ObjectInfo | None:
        """Return size and time of the object at `key`, or None."""
        return self._find(lambda: self.store.head(key))

    def require(self, key: str) -> ObjectInfo:
        """Return size and time of the object at `key`. Raises the store's own `ObjectNotFoundError`, once confirmed."""
        return self.confirm(lambda: self.call(self.store.head, key), errors=ObjectNotFoundError)

    def read(self, key: str, *, max_bytes: int) -> bytes | None:
        """Return the whole object at `key`, or None. Raises `StoreError` if it is larger than `max_bytes`."""
        return self._find(lambda: self.store.read(key, max_bytes=max_bytes))

    def _find(self, request: Callable[[], _T]) -> _T | None:
        def look() -> _T | None:
            try:
                return self.call(request)
            except ObjectNotFoundError:
                return None

        return self.confirm(look, unconfirmed=lambda result: result is None)

    def list(self, prefix: str = "", *, max_results: int | None = None) -> Sequence[ObjectInfo]:
        """List the objects whose keys start with `prefix`, or the first `max_results`. The listing may lag.

        A listing that breaks off starts anew.
        """
        return self.call(lambda: list(itertools.islice(self.store.list(prefix), max_results)))

    def list_uploads(self, prefix: str = "", *, max_results: int | None = None) -> Sequence[UploadInfo]:
        """List the unfinished uploads whose keys start with `prefix`, or the first `max_results`."""
        return self.call(lambda: list(itertools.islice(self.store.list_uploads(prefix), max_results)))

    def list_parts(self, key: str, upload_id: str) -> Sequence[FoundPart]:
        """List the parts of an unfinished upload."""
        return self.call(lambda: list(self.store.list_parts(key, upload_id)))

    def list_directories(self) -> Sequence[str]:
        """List the folders directly in the store. The listing may lag."""
        return self.call(lambda: list(self.store.list_directories()))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove the objects at `keys`, in the order given."""
        self.call(self.store.delete, keys)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Drop an unfinished upload and its parts."""
        self.call(self.store.abort_multipart, key, upload_id)

    def create_multipart(self, key: str) -> str:
        """Begin a multipart upload and return its id."""
        return self.call(self.store.create_multipart, key)

    def confirm(
        self,
        look: Callable[[], _T],
        *,
        unconfirmed: Callable[[_T], Hashable] = lambda _: None,
        errors: type[Exception] | tuple[type[Exception], ...] = (),
        changing: Callable[[], Exception] | None = None,
    ) -> _T:
        """Call `look` until its outcome is certain. Return its result, or raise its error.

        An outcome is certain at once, unless `unconfirmed` or `errors` says that it must be confirmed. Then a result is
        certain if two looks in a row agree (`NUM_LOOKS_AT_ABSENCE`), and an error if three do (`NUM_LOOKS_AT_DAMAGE`).
        A single look can be wrong: a proxy, a cache or a listing that lags can answer wrongly, and a job can commit or
        remove something while the look runs.

        Args:
            look: Makes its requests with this client, which retries failures.
            unconfirmed: Takes a result. Returns a falsy value if the result is certain, and otherwise a value on which
                two looks in a row must agree.
            errors: Classes of the errors that must be confirmed. The client waits before the look after such an error.
            changing: Makes the error to raise if no looks agree.

        Raises:
            TransientStoreError: No looks agree, and there is no `changing`.

        """
        confirmation = Confirmation(self, changing=changing)
        while True:
            try:
                result = look()
            except errors as error:  # noqa: PERF203  # looks are rare, and requests
                if confirmation.confirm_or_wait(type(error).__name__, error):
                    raise
            else:
                evidence = unconfirmed(result)
                if not evidence or confirmation.confirm_or_wait(evidence):
                    return result


def open_client(
    uri: str | os.PathLike[str] | Location,
    options: Options,
    *,
    on_retry: Callable[[StoreError], None] | None = None,
    on_hedge: Callable[[], None] = lambda: None,
    recorder: Recorder | None = None,
) -> StoreClient:
    """Return a client of the store at `uri`. Makes no request. Raises the errors of `open_store`.

    `on_retry` is called with the failure before each repetition, and `on_hedge` for each request that is repeated as a
    straggler.
    """
    location = parse_location(uri)
    store = open_store(location, options)
    if recorder is not None and recorder.timeline is not None:
        store = TracedStore(store, recorder)
    connections = options.connections
    if connections is None and location.local_path is not None:  # the CPU copies a file's bytes
        connections = min(max(num_cores_of_rank(), _MIN_FILE_THREADS), _MAX_FILE_THREADS)
    return StoreClient(
        store,
        retries=options.retries,
        timeout_s=options.timeout_s,
        on_retry=on_retry,
        recorder=recorder,
        hedger=Hedger(
            ConcurrencyLimit(choose_connections(connections, ranks_of_host=ranks_of_host())),
            budget_bytes=choose_hedge_bytes(options),
            on_hedge=on_hedge,
        ),
        open_parent=functools.partial(open_store, location.parent, options) if location.name else None,
    )


def choose_hedge_bytes(options: Options) -> int:
    """Return how much of a load's memory second requests may use: 0 if only a few requests fit into the memory."""
    return options.read_bytes // 4 if options.read_bytes >= 4 * options.advanced.request_bytes else 0


class Retries:
    """The tries of one call.

    The object is the context of each try, in a loop that the successful try leaves::

        retries = Retries(client)
        while True:
            with retries:
                return request()

    After a failure that may pass, the context waits, and suppresses the failure, so that the loop makes the next try.
    It raises a failure that is final, or after which no try is left.
    """

    def __init__(self, client: StoreClient) -> None:
        _this_process.refuse_in_fork()
        self._client, self.shared = client, client.shared
        self.renew()

    def __enter__(self) -> None:
        """Count a try. Raises the refusal that the client was stopped with."""
        if self.shared.refusal is not None:
            raise self.shared.refusal
        with self.shared.lock:
            self.shared.num_requests += 1
        self._begun_ns = now_ns()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        has_ended = True
        try:
            has_ended = not isinstance(error, Exception) or not self._wait_after(error)
        finally:
            self._client.recorder.add_time_since("transfer", self._begun_ns)
            if has_ended:
                with self.shared.lock:
                    self.shared.num_ended += 1
        return not has_ended

    def renew(self) -> None:
        """Forget the failures so far, after progress."""
        self._num_failures = self._num_unsent = 0
        self._num_ended = self.shared.num_ended
        self._deadline_s = self.shared.clock.monotonic() + self.shared.timeout_s

    def _wait_after(self, error: Exception) -> bool:
        """Wait before the next try, and return True. Return False if `error` is final: the context then raises it.

        An exception that is not cloudckpt's, of a `wrap_store` for example, is raised as a `StoreError` with its class
        in the text, except for a `MemoryError`. A ranged read that broke off after at least one byte counts as
        progress: its retries start anew.
        """
        if not isinstance(error, (TransientStoreError, ChecksumRefusedError)):
            if isinstance(error, (CloudckptError, MemoryError)):
                return False
            raise StoreError(f"the store failed with {type(error).__name__}: {error}", key="", operation="") from error
        shared = self.shared
        has_progressed = isinstance(error, InterruptedReadError) and error.received_bytes > 0
        if has_progressed or (error.is_unsent and self._num_ended != shared.num_ended):
            self.renew()
        if error.is_unsent:
            self._num_unsent += 1
        else:
            self._num_failures += 1
        first_s = _FIRST_THROTTLED_DELAY_S if isinstance(error, ThrottledError) else _FIRST_DELAY_S
        num_failures = self._num_failures + self._num_unsent
        delay_s = shared.clock.jitter() * min(first_s * 2.0 ** (num_failures - 1), _MAX_DELAY_S)
        if self._num_failures > shared.retries or shared.clock.monotonic() + delay_s >= self._deadline_s:
            return False
        return self._wait(error, delay_s)

    def _wait(self, error: StoreError, delay_s: float) -> bool:
        shared = self.shared
        if shared.stopped.is_set() and shared.refusal is None:
            return False
        more = log_fields(event="retry", key=error.key, seconds=round(delay_s, 3), error=type(error).__name__)
        _log.info("trying again in %.2f s: %s", delay_s, error, extra=more)
        with shared.lock:
            shared.num_retries += 1
        if shared.on_retry is not None:
            shared.on_retry(error)
        begun_ns = now_ns()
        is_stopped = shared.clock.wait(shared.stopped, delay_s)
        self._client.recorder.span("backoff", begun_ns, key=error.key, error=type(error).__name__)
        return not is_stopped or shared.refusal is not None


class Confirmation:
    """The evidence of the looks so far. `StoreClient.confirm` has the rule.

    A caller that continues where the last try stopped cannot be a `look`: it makes its own loop around
    `confirm_or_wait`.
    """

    def __init__(self, client: StoreClient, *, changing: Callable[[], Exception] | None = None) -> None:
        self.shared = client.shared
        self._changing = changing
        self._evidence: list[Hashable] = []

    def confirm_or_wait(self, evidence: Hashable, error: Exception | None = None) -> bool:
        """Record the evidence of a look. Return True if the last looks agree, and False if another one must follow.

        After an `error`, wait before returning False, and raise if the client was stopped. Raises if `MAX_LOOKS` looks
        do not agree.
        """
        self._evidence.append(evidence)
        num_looks = NUM_LOOKS_AT_ABSENCE if error is None else NUM_LOOKS_AT_DAMAGE
        if self._evidence[-num_looks:] == [evidence] * num_looks:
            return True
        if len(self._evidence) >= MAX_LOOKS:
            if self._changing is not None:
                raise self._changing() from error
            raise TransientStoreError(
                f"the store contradicts itself: its answers differ each time. The last one: {error or evidence}",
                key=getattr(error, "key", ""),
                operation=getattr(error, "operation", ""),
            ) from error
        if error is not None:
            _log.info("looking again, since this may be wrong: %s", error)
            longest_s = min(FIRST_LOOK_DELAY_S * 2.0 ** (len(self._evidence) - 1), _MAX_LOOK_DELAY_S)
            if self.shared.clock.wait(self.shared.stopped, self.shared.clock.jitter() * longest_s):
                raise self.shared.refusal or CloudckptError(
                    f"another call failed first, so this was not looked at again: {error}"
                ) from error
        return False


class TracedStore(ForwardingStore):
    """Passes every call on to `inner`, and records a span for it, with key, bytes, try and error."""

    def __init__(self, inner: Store, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder
        self._last = threading.local()

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        recorder, moved_bytes = self._recorder, 0
        # A call is repeated in the same thread. Only a HEAD after a read of absence comes in between.
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
            recorder.add_bytes(call.num_bytes)
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
                recorder.add_bytes(-call.num_bytes, moved_bytes=moved_bytes)
                details["bytes"] = moved_bytes
            recorder.span(call.operation, begun_ns, key=call.key, **details)

    def around_listing(self, call: Call, action: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        """Record a span for the first page alone. Between later pages, the caller works on the earlier ones."""
        entries = action()
        yield from self.around(call, lambda: list(itertools.islice(entries, 1)))
        yield from entries
