"""Try calls to a store again: the one place that decides when, how often and how long."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from typing_extensions import ParamSpec, Self

from cloudckpt import _this_process
from cloudckpt.errors import (
    ChecksumRefusedError,
    CloudckptError,
    InterruptedReadError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.telemetry import fields
from cloudckpt.telemetry.timeline import Recorder, now_ns

_T = TypeVar("_T")
_P = ParamSpec("_P")
_log = logging.getLogger("cloudckpt")

_FIRST_DELAY_S = 0.1
_FIRST_THROTTLED_DELAY_S = 0.5
_LONGEST_DELAY_S = 10.0
_FIRST_LOOK_DELAY_S = 0.1
NUM_LOOKS = 3
"""A store must say so many times in a row that something is missing or damaged before that is believed."""
_MOST_LOOKS = 9


class Retrier:
    """Run calls, and run them again after failures that may pass.

    Delays grow exponentially with full jitter (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
    A call is given up after `retries` repetitions or once `timeout_s` have gone by without progress. Attempts of which
    no request was made (`StoreError.is_unsent`) do not count as repetitions, and the progress of another call is
    theirs: it may have released what they lack. Safe to share between threads; `stop` ends every wait at once.
    """

    def __init__(
        self,
        *,
        retries: int,
        timeout_s: float,
        on_retry: Callable[[StoreError], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder if recorder is not None else Recorder()
        self.num_retries = 0
        """Repetitions so far, over all calls."""
        self.num_requests = 0
        """Attempts so far, over all calls, the first of each included."""
        self.num_ended = 0
        """Calls that have ended so far, in whichever way."""
        self.retries = retries
        self.timeout_s = timeout_s
        self._on_retry = on_retry
        self._stopped = threading.Event()
        self._refusal: BaseException | None = None
        self._lock = threading.Lock()

    def stop(self, refusal: BaseException | None = None) -> None:
        """Give up every call that would have to be tried again. From a `refusal` on, none begins: they raise it."""
        self._refusal = refusal or self._refusal
        self._stopped.set()

    def call(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return the result of ``function(*args, **kwargs)``, which raises `StoreError` subclasses.

        All calls to stores pass through here, or through `Attempts`.
        """
        with Attempts(self) as attempts:
            while True:
                attempts.begin()
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    if not attempts.wait_after(error):
                        raise

    def collect(self, function: Callable[_P, Iterable[_T]], /, *args: _P.args, **kwargs: _P.kwargs) -> list[_T]:
        """Return all items of a listing. A listing that breaks off starts anew, within the rules of `call`."""

        def collect_all() -> list[_T]:
            return list(function(*args, **kwargs))

        return self.call(collect_all)

    def confirm(
        self,
        look: Callable[[], _T],
        doubted: type[Exception] | tuple[type[Exception], ...],
        *,
        num_looks: int = NUM_LOOKS,
    ) -> _T:
        """Return the result of `look`. Errors of the kinds `doubted` are raised once confirmed: see `Confirmation`.

        `look` makes its calls with `call`, so that all other errors are tried again there.
        """
        confirmation = Confirmation(self, num_looks=num_looks)
        while True:
            try:
                return look()
            except doubted as error:  # noqa: PERF203  # looks are rare, and requests
                if not confirmation.wait_after(error):
                    raise

    def count_request(self) -> None:
        """Count an attempt that begins. Raises the refusal that `stop` was called with."""
        if self._refusal is not None:
            raise self._refusal
        with self._lock:
            self.num_requests += 1

    def count_end(self) -> None:
        """Count a call that has ended."""
        with self._lock:
            self.num_ended += 1

    def wait(self, error: StoreError, delay_s: float) -> bool:
        """Report a retry, and wait before it. False if `stop` was called without a refusal."""
        more = fields(event="retry", key=error.key, seconds=round(delay_s, 3), error=type(error).__name__)
        _log.info("trying again in %.2f s: %s", delay_s, error, extra=more)
        with self._lock:
            self.num_retries += 1
        if self._on_retry is not None:
            self._on_retry(error)
        begun_ns = now_ns()
        is_stopped = self._stopped.wait(delay_s)
        self.recorder.span("backoff", begun_ns, key=error.key, error=type(error).__name__)
        return not is_stopped or self._refusal is not None

    def wait_to_look(self, error: Exception, delay_s: float) -> None:
        """Wait before the next look. Raises the refusal, or `CloudckptError`, if `stop` was called."""
        if self._stopped.wait(delay_s):
            raise self._refusal or CloudckptError(
                f"another call failed first, so this was not looked at again: {error}"
            ) from error


class Attempts:
    """The attempts at one call, as a context, for callers that have to act between two of them."""

    def __init__(self, retrier: Retrier) -> None:
        _this_process.refuse_in_fork()
        self._retrier = retrier
        self._begun_ns = now_ns()
        self.renew()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._retrier.recorder.spent("transfer", self._begun_ns)
        self._retrier.count_end()

    def renew(self) -> None:
        """Forget the failures so far, after progress."""
        self._num_failures = self._num_unsent = 0
        self._num_ended = self._retrier.num_ended
        self._deadline_s = time.monotonic() + self._retrier.timeout_s

    def begin(self) -> None:
        """Count an attempt. Raises the refusal that the retrier was stopped with."""
        self._retrier.count_request()

    def wait_after(self, error: Exception) -> bool:
        """Wait before the next attempt. False if `error` is final, and to be raised.

        An exception that is none of cloudckpt's, of a `wrap_store` for example, becomes a `StoreError` with the class
        in its text, and is raised here; a `MemoryError` stays one. A range read of which bytes have arrived counts as
        progress.
        """
        if not isinstance(error, (TransientStoreError, ChecksumRefusedError)):
            if isinstance(error, (CloudckptError, MemoryError)):
                return False
            raise StoreError(f"the store failed with {type(error).__name__}: {error}", key="", operation="") from error
        has_progressed = isinstance(error, InterruptedReadError) and error.received_bytes > 0
        if has_progressed or (error.is_unsent and self._num_ended != self._retrier.num_ended):
            self.renew()
        if error.is_unsent:
            self._num_unsent += 1
        else:
            self._num_failures += 1
        delay_s = _delay_s(error, self._num_failures + self._num_unsent)
        if self._num_failures > self._retrier.retries or time.monotonic() + delay_s >= self._deadline_s:
            return False
        return self._retrier.wait(error, delay_s)


class Confirmation:
    """Looks again at something that may be missing or damaged: each error is only evidence.

    An error is believed once so many looks in a row have the same kind of error. Looks that go on to fail in different
    ways end with a `TransientStoreError`.
    """

    def __init__(self, retrier: Retrier, *, num_looks: int = NUM_LOOKS) -> None:
        self._retrier = retrier
        self._num_looks = num_looks
        self._kinds: list[type[Exception]] = []

    def wait_after(self, error: Exception) -> bool:
        """Wait before the next look. False if `error` is confirmed, and to be raised."""
        self._kinds.append(type(error))
        if self._kinds[-self._num_looks :] == [type(error)] * self._num_looks:
            return False
        if len(self._kinds) >= _MOST_LOOKS:
            raise TransientStoreError(
                f"the store contradicts itself: its answers differ each time. The last one: {error}",
                key=getattr(error, "key", ""),
                operation=getattr(error, "operation", ""),
            ) from error
        _log.info("looking again, since this may be wrong: %s", error)
        self._retrier.wait_to_look(error, _backoff_s(_FIRST_LOOK_DELAY_S, len(self._kinds)))
        return True


def _delay_s(error: StoreError, num_failures: int) -> float:
    return _backoff_s(_FIRST_THROTTLED_DELAY_S if isinstance(error, ThrottledError) else _FIRST_DELAY_S, num_failures)


def _backoff_s(first_s: float, num_failures: int) -> float:
    # Jitter spreads clients apart; nothing about it has to be unpredictable.
    return random.uniform(0.5, 1.0) * min(first_s * 2.0 ** (num_failures - 1), _LONGEST_DELAY_S)  # noqa: S311
