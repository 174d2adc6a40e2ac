"""When a call to a store is tried again: the one place that decides it."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cloudckpt import _forks
from cloudckpt._threads import Event
from cloudckpt._trace.recorder import Recorder, now_ns
from cloudckpt._trace.watchers import fields
from cloudckpt.errors import ChecksumRefusedError, CloudckptError, StoreError, ThrottledError, TransientStoreError

_T = TypeVar("_T")
_log = logging.getLogger("cloudckpt")

_FIRST_DELAY_S = 0.1
_FIRST_THROTTLED_DELAY_S = 0.5
_LONGEST_DELAY_S = 10.0
_FIRST_LOOK_DELAY_S = 0.1
NUM_LOOKS = 3
"""So many times in a row a store has to say that something is missing or damaged, before that is believed."""
_MOST_LOOKS = 9


class Retrier:
    """Runs calls, and runs them again after failures that may pass.

    Delays grow exponentially with full jitter (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
    A call is given up after `retries` repetitions or once `timeout_s` have gone by without progress. Safe to share
    between threads; `stop` ends every wait at once.
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
        self._retries = retries
        self._timeout_s = timeout_s
        self._on_retry = on_retry
        self._stopped = Event()
        self._refusal: BaseException | None = None
        self._lock = threading.Lock()
        self._num_retries = 0
        self._num_requests = 0
        _forks.watch(self)

    def after_fork(self) -> None:
        """In a child that was forked in the middle of it: the calls are the parent's to make."""
        self._lock, self._stopped = threading.Lock(), Event()
        self.stop(
            CloudckptError(
                "this process was forked in the middle of a call of cloudckpt's, which is its parent's and does not go "
                "on here. Begin another one"
            )
        )

    @property
    def num_retries(self) -> int:
        """Repetitions so far, over all calls."""
        return self._num_retries

    @property
    def num_requests(self) -> int:
        """Attempts so far, over all calls, the first of each included."""
        return self._num_requests

    def stop(self, refusal: BaseException | None = None) -> None:
        """Give up every call that would have to be tried again. From a `refusal` on, none begins: they raise it."""
        self._refusal = refusal or self._refusal
        self._stopped.set()

    def call(self, attempt: Callable[[], _T], *, made_progress: Callable[[], bool] = lambda: False) -> _T:
        """The result of `attempt`, which raises `StoreError` subclasses.

        What else it raises, of a `wrap_store` say, becomes a `StoreError` with the class in its text. This is the one
        place that all calls to stores pass through. A `MemoryError` stays one.
        `made_progress` is asked after a failure; where it says yes, patience starts anew.
        """
        begun_ns = now_ns()
        try:
            return self._tried(attempt, made_progress)
        finally:
            self.recorder.spent("transfer", begun_ns)

    def confirmed(
        self,
        look: Callable[[], _T],
        doubted: type[Exception] | tuple[type[Exception], ...],
        *,
        num_looks: int = NUM_LOOKS,
    ) -> _T:
        """The result of `look`. An error of the kinds `doubted` is raised only where so many looks in a row have it.

        For errors that say that something is missing or damaged, which each are only evidence. Between looks this
        waits, as `call` does between attempts. `look` makes its calls with `call`, so that all other errors are tried
        again there. Looks that go on to fail in different ways end with a `TransientStoreError`.
        """
        said: list[type[Exception]] = []
        while True:
            try:
                return look()
            except doubted as error:  # noqa: PERF203  # looks are rare, and requests
                said.append(type(error))
                if said[-num_looks:] == [type(error)] * num_looks:
                    raise
                if len(said) >= _MOST_LOOKS:
                    raise TransientStoreError(
                        f"the store contradicts itself: it gives other answers each time, the last of them: {error}",
                        key=getattr(error, "key", ""),
                        operation=getattr(error, "operation", ""),
                    ) from error
                _log.info("looking again, since this may be wrong: %s", error)
                if self._stopped.wait(_backoff_s(_FIRST_LOOK_DELAY_S, len(said))):
                    raise self._refusal or CloudckptError(
                        f"another call failed first, so this was not looked at again: {error}"
                    ) from error

    def _tried(self, attempt: Callable[[], _T], made_progress: Callable[[], bool]) -> _T:
        num_failures = 0
        deadline = time.monotonic() + self._timeout_s
        while True:
            if self._refusal is not None:
                raise self._refusal
            with self._lock:
                self._num_requests += 1
            try:
                return attempt()
            except (CloudckptError, MemoryError) as error:
                if not isinstance(error, (TransientStoreError, ChecksumRefusedError)):
                    raise
                if made_progress():
                    num_failures, deadline = 0, time.monotonic() + self._timeout_s
                num_failures += 1
                delay_s = _delay_s(error, num_failures)
                if num_failures > self._retries or time.monotonic() + delay_s >= deadline:
                    raise
                more = fields(event="retry", key=error.key, seconds=round(delay_s, 3), error=type(error).__name__)
                _log.info("trying again in %.2f s: %s", delay_s, error, extra=more)
                with self._lock:
                    self._num_retries += 1
                if self._on_retry is not None:
                    self._on_retry(error)
                begun_ns = now_ns()
                is_stopped = self._stopped.wait(delay_s)
                self.recorder.span("backoff", begun_ns, key=error.key, error=type(error).__name__)
                if is_stopped and self._refusal is None:
                    raise
            except Exception as error:
                raise StoreError(
                    f"the store failed with {type(error).__name__}: {error}", key="", operation=""
                ) from error


def _delay_s(error: StoreError, num_failures: int) -> float:
    return _backoff_s(_FIRST_THROTTLED_DELAY_S if isinstance(error, ThrottledError) else _FIRST_DELAY_S, num_failures)


def _backoff_s(first_s: float, num_failures: int) -> float:
    # Jitter spreads clients apart; nothing about it has to be unpredictable.
    return random.uniform(0.5, 1.0) * min(first_s * 2.0 ** (num_failures - 1), _LONGEST_DELAY_S)  # noqa: S311
