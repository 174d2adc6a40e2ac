"""The handle of a save in the background."""

from __future__ import annotations

import concurrent.futures
import os
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol, TypeVar

from cloudckpt import _forks
from cloudckpt._api.saved import SavedMetadata
from cloudckpt._steering import Steering
from cloudckpt._threads import Future
from cloudckpt.errors import SaveCancelledError, SaveInFlightError
from cloudckpt.report import SaveProgress, SaveReport

_T = TypeVar("_T")


class Staged(Protocol):
    """A copy of a state dict, or one that is being made."""

    completed: Future[None]

    @property
    def copied_bytes(self) -> int:
        """So far."""


class _Asking:
    pass


class Outcome(Future[SavedMetadata]):
    """A future that knows whether anybody has asked for what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self._is_known = False
        self._asking = weakref.WeakSet[_Asking]()
        """One for each call that waits for it, and may not have woken since it is there. It goes with that call."""

    @property
    def is_known(self) -> bool:
        """Whether somebody has got what it holds, or is about to."""
        return self._is_known or bool(self._asking)

    def result(self, timeout: float | None = None) -> SavedMetadata:
        self.exception(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        asking = _Asking()
        self._asking.add(asking)
        try:
            error = super().exception(timeout)
            self._is_known = True
            return error
        finally:
            self._asking.discard(asking)

    def failure(self) -> BaseException | None:
        """As `exception`, for one that is done, and without taking note."""
        return super().exception(0)


class AsyncSave:
    """A save that runs in the background, as one rank sees it.

    A failure that nobody gets from here, by `result`, `exception` or `committed`, is raised by the next `save` or
    `async_save` of this process, by `cloudckpt.close`, or written to stderr when the interpreter exits. That the save
    was cancelled is no failure in this sense.
    """

    def __init__(
        self, uri: str, *, steering: Steering | None, staging: Staged, tell_others: Callable[[], None] | None = None
    ) -> None:
        self.staged: Future[None] = Future()
        """Done when the state dict has been copied: from here on the model may change."""
        self.committed: Outcome = Outcome()
        """Done when the checkpoint exists; holds what `cloudckpt.save` returns, or its failure."""
        self.uri = uri
        """Where it is saved to."""
        for future in (self.staged, self.committed):
            future.set_running_or_notify_cancel()  # its own `cancel` would end nothing: ours does
        self._can_be_cancelled = steering is not None
        self._steering = steering or Steering(uri)
        self._staging: Staged | None = staging
        self._staged_bytes = 0
        self._tell_others = tell_others
        staging.completed.add_done_callback(self._staging_ended)
        _forks.watch(self)

    def after_fork(self) -> None:
        """In a child, which can neither wait for the save nor end it."""
        self._staging = self._tell_others = None
        self._steering.after_fork()
        for future in (self.staged, self.committed):
            _forks.leave(future, self._is_the_parents)

    def result(self, timeout: float | None = None) -> SavedMetadata:
        """Wait until the checkpoint is committed. Raises what `cloudckpt.save` would, or `TimeoutError`."""
        return _waited(self.committed, self.committed.result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the failure, or None."""
        return _waited(self.committed, self.committed.exception, timeout)

    def done(self) -> bool:
        """Whether it has ended, in either way."""
        return self.committed.done()

    def cancel(self) -> bool:
        """End the save without a checkpoint, on all ranks; whichever of them asks. Whether that is what becomes of it.

        No part and no retry begins any more on this rank; the others follow within seconds. Each rank waits for its
        requests in flight, aborts its uploads and removes its objects (unless `Options.resume`); then its handle holds
        a `SaveCancelledError` that names the ranks which cancelled; or what it was just failing with by itself.

        False where it is too late, because the commit has begun: then the save ends as if nobody had asked. A rank
        that has sent its part, and is not the one that commits, waits here to learn which it is. Always False for
        writers that are not cloudckpt's and for saves by torch's own process.
        """
        if self.done() or not self._can_be_cancelled:
            return self.cancelled()
        tell_others = self._tell_others
        is_certain = self._steering.cancel()
        if tell_others is not None:
            tell_others()
        if is_certain or self._steering.is_committing:
            return is_certain
        self.committed.wait()
        return self.cancelled()

    def cancelled(self) -> bool:
        """Whether it has ended because a rank cancelled it."""
        return self.done() and isinstance(self.committed.failure(), SaveCancelledError)

    @property
    def progress(self) -> SaveProgress:
        """How far it is on this rank."""
        staging = self._staging
        staged_bytes = self._staged_bytes if staging is None else staging.copied_bytes
        return self._steering.progress(staged_bytes=staged_bytes)

    @property
    def report(self) -> SaveReport | None:
        """The report of this rank, once committed; None before, and for a save by torch's own process."""
        if not self.done() or self.committed.failure() is not None:
            return None
        return self.committed.result().report

    def _is_the_parents(self) -> SaveInFlightError:
        return SaveInFlightError(
            f"the background save to {self.uri} is that of process {os.getppid()}, from which this one was forked "
            "while it ran: only there can it be waited for. Whether it is committed by now, `latest` says",
            uri=self.uri,
        )

    def _staging_ended(self, staging: concurrent.futures.Future[None]) -> None:
        error = staging.exception()
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)

    def end(self, outcome: SavedMetadata | BaseException) -> None:
        """For whoever runs the save, once."""
        staging, self._staging = self._staging, None  # the copy is not the handle's to keep
        self._staged_bytes = 0 if staging is None else staging.copied_bytes
        self._tell_others = None
        if not isinstance(outcome, BaseException):
            self._steering.end("committed")
            self.committed.set_result(outcome)
            return
        if isinstance(outcome, SaveCancelledError):
            self._steering.end("cancelled")
        else:
            self._steering.end("failed")
        self.committed.set_exception(outcome)


def _waited(future: Outcome, ask: Callable[[float | None], _T], timeout: float | None) -> _T:
    try:
        return ask(timeout)
    except FutureTimeoutError as error:  # a class of its own before Python 3.11
        if future.done():
            raise  # the save's own failure
        raise TimeoutError(f"the save has not ended within {timeout} s; it goes on") from error
