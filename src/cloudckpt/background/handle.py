"""The handle of a save in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol, TypeVar

from cloudckpt._display import noting_interrupt, pairs_to_html
from cloudckpt._this_process import OfThisProcess, refuse_in_fork
from cloudckpt._workers import logging_failures
from cloudckpt.cancellation import Cancellation
from cloudckpt.dcp.save_and_load import SavedMetadata
from cloudckpt.errors import SaveCancelledError
from cloudckpt.report import SaveProgress, SaveReport

_T = TypeVar("_T")
_LOOP_WAKEUP_S = 0.25


class SnapshotProgress(Protocol):
    """A snapshot of a state dict, complete or being made."""

    @property
    def completed(self) -> Future[None]:
        """Done when all bytes are copied."""

    @property
    def copied_bytes(self) -> int:
        """The number of bytes that are copied so far."""


class _HandleFuture(OfThisProcess, Future[_T]):
    """A future whose callbacks cannot end the thread that sets it."""

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        super().add_done_callback(functools.partial(_call_and_log, fn))


def _call_and_log(callback: Callable[[Future[_T]], object], future: Future[_T]) -> None:
    with logging_failures("a callback of a background save's future failed"):
        callback(future)


class Outcome(_HandleFuture[SavedMetadata]):
    """A future that remembers whether a caller has got its result or its exception."""

    def __init__(self) -> None:
        super().__init__()
        self._is_reported = False
        self._waiting_threads: set[int] = set()
        """The threads in `exception`. After the end of the save, they still have to wake up."""

    @property
    def is_reported(self) -> bool:
        """True if a caller has got the outcome, or waits for it."""
        return self._is_reported or bool(self._waiting_threads)

    def result(self, timeout: float | None = None) -> SavedMetadata:
        self.exception(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        thread = threading.get_ident()
        self._waiting_threads.add(thread)
        try:
            error = super().exception(timeout)
            self._is_reported = True
            return error
        finally:
            self._waiting_threads.discard(thread)

    def failure(self) -> BaseException | None:
        """Return the exception of a future that is done. This does not report it to a caller."""
        return super().exception(0)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end. Returns False after `timeout` seconds. This does not report the outcome to a caller."""
        return bool(concurrent.futures.wait([self], timeout).done)


class AsyncSave(OfThisProcess):
    """A save that runs in the background, as one rank sees it. `async_save` returns it.

    If no caller gets a failure from `result`, `exception` or `committed`, this process's next `save`, `async_save` or
    `cloudckpt.close` raises it. If there is no such call, the interpreter writes the failure to stderr at its exit, and
    the exit code is 120. Cancelling is no failure.

    Example::

        handle = cloudckpt.async_save("s3://bucket/run/step-100", model=model)
        handle.staged.result()  # from here on the model may change
        print(handle.result().report, handle.progress)

    """

    def __init__(
        self,
        uri: str,
        *,
        cancellation: Cancellation,
        can_be_cancelled: bool,
        snapshot: SnapshotProgress,
        cancel_others: Callable[[], None] | None = None,
    ) -> None:
        self.staged: Future[None] = _HandleFuture()
        """Done when the state dict is copied: from here on the model may change."""
        self.committed: Outcome = Outcome()
        """Done when the checkpoint exists; holds the result of `cloudckpt.save`, or its failure."""
        self.uri = uri
        """URI of the checkpoint."""
        for future in (self.staged, self.committed):
            future.set_running_or_notify_cancel()  # disables `Future.cancel`, which would not end the save
        self._can_be_cancelled = can_be_cancelled
        self._cancellation = cancellation
        self._snapshot: SnapshotProgress | None = snapshot
        self._staged_bytes = 0
        self._tell_others = cancel_others
        self._continuing = f"the save to {uri} continues in the background, and result() waits for it"
        snapshot.completed.add_done_callback(self._end_staging)

    def __repr__(self) -> str:
        return f"<AsyncSave to {self.uri}: {self.progress.phase}>"

    def _repr_html_(self) -> str:
        error = self.committed.failure() if self.done() else None
        values = {"uri": self.uri, **dataclasses.asdict(self.progress), "error": error, "report": self.report}
        return pairs_to_html("AsyncSave", values)

    def __await__(self) -> Generator[Any, None, SavedMetadata]:
        """Wait in asyncio's event loop, as `result` does in a thread. A task that is cancelled ends only its wait."""
        refuse_in_fork()
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> SavedMetadata:
        committed = asyncio.wrap_future(self.committed)
        with noting_interrupt(self._continuing, asyncio.CancelledError):  # a notebook's interrupt cancels the task
            try:
                while not committed.done():  # ipykernel 7 notes an interrupt once the loop wakes up
                    await asyncio.wait([committed], timeout=_LOOP_WAKEUP_S)
            finally:
                committed.cancel()  # no caller will ask for its failure
        return committed.result()

    def result(self, timeout: float | None = None) -> SavedMetadata:
        """Wait until the checkpoint is committed.

        Args:
            timeout: Seconds to wait. None waits for ever.

        Returns:
            torch's metadata of the checkpoint, with this rank's report, as from `cloudckpt.save`.

        Raises:
            CheckpointException: The save failed, as in `cloudckpt.save`.
            TimeoutError: The save has not ended within `timeout`, and continues.

        """
        with noting_interrupt(self._continuing):
            return _wait_for(self.committed, self.committed.result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended.

        Args:
            timeout: Seconds to wait. None waits for ever.

        Returns:
            The failure, or None.

        Raises:
            TimeoutError: The save has not ended within `timeout`, and continues.

        """
        with noting_interrupt(self._continuing):
            return _wait_for(self.committed, self.committed.exception, timeout)

    def done(self) -> bool:
        """Return True if the save has ended, in either way."""
        return self.committed.done()

    def cancel(self) -> bool:
        """End the save without a checkpoint on all ranks. Any rank can call this.

        This rank begins no other part and no retry; the others follow within seconds. Each rank waits for its requests
        in flight, aborts its uploads and removes its objects. Then its handle holds a `SaveCancelledError` that names
        the ranks which cancelled, or an earlier error that ended the save. A rank that has sent all of its data, and is
        not the coordinator, waits here for the end of the save.

        Returns:
            True if the save is cancelled. False if its commit has begun: the save continues. Always False for saves by
            torch's process.

        """
        refuse_in_fork()
        if self.done() or not self._can_be_cancelled:
            return self.cancelled()
        cancel_others = self._tell_others
        is_certain = self._cancellation.cancel()
        if cancel_others is not None:
            cancel_others()
        if is_certain or self._cancellation.is_committing:
            return is_certain
        self.committed.wait()
        return self.cancelled()

    def cancelled(self) -> bool:
        """Return True if the save has ended because a rank cancelled it."""
        return self.done() and isinstance(self.committed.failure(), SaveCancelledError)

    @property
    def progress(self) -> SaveProgress:
        """Progress of the save on this rank."""
        snapshot = self._snapshot
        staged_bytes = self._staged_bytes if snapshot is None else snapshot.copied_bytes
        return self._cancellation.progress(staged_bytes=staged_bytes)

    @property
    def report(self) -> SaveReport | None:
        """Report of this rank, once committed; None before, and for a save by torch's process."""
        if not self.done() or self.committed.failure() is not None:
            return None
        return self.committed.result().report

    def _end_staging(self, completed: concurrent.futures.Future[None]) -> None:
        error = completed.exception()
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)

    def end(self, outcome: SavedMetadata | BaseException) -> None:
        """Set the outcome. The thread that runs the save calls this once."""
        snapshot, self._snapshot = self._snapshot, None  # the handle must not keep the copy alive
        self._staged_bytes = 0 if snapshot is None else snapshot.copied_bytes
        self._tell_others = None
        if not isinstance(outcome, BaseException):
            if outcome.report is not None:
                self.uri = outcome.report.uri  # that of the root, if the fast place of a manager has failed
            self._cancellation.end("committed")
            self.committed.set_result(outcome)
            return
        if isinstance(outcome, SaveCancelledError):
            self._cancellation.end("cancelled")
        else:
            self._cancellation.end("failed")
        self.committed.set_exception(outcome)


def _wait_for(future: Outcome, get: Callable[[float | None], _T], timeout: float | None) -> _T:
    refuse_in_fork()
    try:
        return get(timeout)
    except FutureTimeoutError as error:  # a class of its own before Python 3.11
        if future.done():
            raise  # the save's own failure
        raise TimeoutError(f"the save has not ended within {timeout} s; it continues") from error
