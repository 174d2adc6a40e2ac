"""Saves beside training: one at a time in a process, in a thread that the interpreter waits for at its exit.

See ``docs/design/017-background-saves.md``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter

from cloudckpt._async import AsyncSave
from cloudckpt._background.adopted import Adopted
from cloudckpt._failures import carried, causes_of, rank_in
from cloudckpt._group import Call, accompanied
from cloudckpt._process.host import upload_process
from cloudckpt._saved import SavedMetadata
from cloudckpt._saving import RefusingPlanner, saved
from cloudckpt._stage.pinned import PINNED
from cloudckpt._stage.stager import PinnedStager
from cloudckpt._stage.staging import Staging
from cloudckpt._steering import Steering
from cloudckpt.errors import SaveInFlightError, portable
from cloudckpt.writer import ObjectStoreWriter

_lock = threading.Lock()
_latest: AsyncSave | None = None
"""The save in flight, or one that failed without anybody having asked."""
_thread: threading.Thread | None = None
_stagers: dict[bool, PinnedStager] = {}
"""The memory for copies: one of the process's own, and one that it shares with another."""
_left_behind: list[Any] = []


def _forget_after_fork() -> None:
    """A child has none of its parent's threads, so none of its saves will ever end there."""
    global _lock, _latest, _thread  # noqa: PLW0603  # as above
    _lock = threading.Lock()
    _latest = _thread = None
    _left_behind.extend(_stagers.values())  # their memory is the parent's: not even to be freed here
    _stagers.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def latest() -> AsyncSave | None:
    """The background save that is in flight, or that has failed without anybody having asked."""
    with _lock:
        handle = _latest
    if handle is None or not handle.done():
        return handle
    return None if _untold(handle) is None else handle


def await_turn(in_flight: Literal["wait", "raise"] = "wait") -> None:
    """Until the background save in flight, if there is one, has ended; or raise `SaveInFlightError`.

    Two saves on one process group at a time would mix up their collectives.
    """
    with _lock:
        previous = _latest
        thread = _thread
    if previous is None or previous.done():
        _join(thread)
        return
    if in_flight == "raise":
        raise SaveInFlightError(
            f"the background save to {previous.uri} is still running, so no other was begun. Wait for its handle or "
            "cancel it, or let async_save wait (Options.async_in_flight)",
            uri=previous.uri,
        )
    wait([previous.committed])
    _join(thread)


def _join(thread: threading.Thread | None) -> None:
    """Its save has ended, so it is about to."""
    if thread is not None and thread.is_alive() and thread is not threading.current_thread():
        thread.join()


@contextlib.contextmanager
def earlier_failure() -> Iterator[BaseException | None]:
    """What a background save failed with that nobody has asked for: to be raised on all ranks before anything else.

    It counts as known once what this context raises holds it.
    """
    with _lock:
        previous = _latest
    error = _untold(previous)
    try:
        yield error
    except CheckpointException as raised:
        if error is not None:
            is_told = raised is error or str(error) in map(str, causes_of(raised))
            keep(previous) if previous is not None and not is_told else _forget(previous)
        raise


def _untold(handle: AsyncSave | None) -> BaseException | None:
    if handle is None or not handle.done() or handle.committed.is_known:
        return None
    error = handle.committed.failure()
    if error is None or handle.cancelled():
        return None
    if isinstance(error, CheckpointException) and any(isinstance(at, CheckpointException) for at in causes_of(error)):
        return None  # it is another rank's earlier failure, which must not go back and forth between the ranks
    what = f"an earlier background save to {handle.uri}, whose handle nobody had asked,"
    if not isinstance(error, CheckpointException):
        # In the form in which DCP reports failures.
        cause = portable(error) if isinstance(error, Exception) else error
        error = CheckpointException("save", {0: (cause, traceback.extract_tb(error.__traceback__))})
    return carried(error, what=what)


def _forget(handle: AsyncSave | None) -> None:
    global _latest  # noqa: PLW0603  # one save at a time, per process
    with _lock:
        if _latest is handle:
            _latest = None


def close(timeout: float | None = None) -> None:
    """Wait for the background save in flight, free the memory that saves keep, and end the upload process.

    Raises the failure of the last one if nobody has asked its handle for it, and `TimeoutError`, with nothing freed,
    where it has not ended within `timeout` seconds. Can be called again, and saving goes on to work: it begins anew.
    A script that ends without it loses nothing: the interpreter completes the save in flight, and frees everything.
    """
    with _lock:
        previous, thread = _latest, _thread
    if previous is not None and wait([previous.committed], timeout).not_done:
        raise TimeoutError(f"the background save to {previous.uri} has not ended within {timeout} s; it goes on")
    _join(thread)
    with _lock:
        stagers = list(_stagers.values())
        _stagers.clear()
    for stager in stagers:
        stager.close()
    upload_process().close()
    PINNED.close()
    error = _untold(previous)
    _forget(previous)
    if error is not None:
        raise error


def _at_exit() -> None:
    try:
        close()
    except BaseException as error:  # noqa: BLE001  # nobody is left to whom it could be raised
        sys.excepthook(type(error), error, error.__traceback__)


atexit.register(_at_exit)


def staged_with(stager: AsyncStager | None, entries: dict[str, Any], *, is_shared: bool) -> Staging | Adopted:
    """A copy of `entries`, or the beginning of one; what goes wrong is its outcome. None: in the process's own pool."""
    try:
        return Adopted.of(stager, entries) if stager is not None else own_stager(is_shared=is_shared).begin(entries)
    except Exception as error:  # noqa: BLE001  # it is the save's failure, which all ranks have to learn of
        return Adopted.failed(error)


def own_stager(*, is_shared: bool) -> PinnedStager:
    """That of this process, which keeps its memory from save to save."""
    with _lock:
        if is_shared not in _stagers:
            _stagers[is_shared] = PinnedStager(shared=is_shared)
        return _stagers[is_shared]


def keep(handle: AsyncSave, thread: threading.Thread | None = None) -> None:
    """From now on it is the save in flight."""
    global _latest, _thread  # of the process
    with _lock:
        _latest, _thread = handle, thread


@dataclass(slots=True, kw_only=True)
class BackgroundSave:
    """One save, after what it saves was given to a stager."""

    staging: Staging | Adopted | None
    writer: StorageWriter
    in_process: bool
    planner: SavePlanner | None
    call: Call | None
    process_group: dist.ProcessGroup | None
    no_dist: bool
    use_collectives: bool
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Taken once: by the thread that makes the save, or by who found that it could not begin."""

    def begin(self, *, is_overlapped: bool) -> AsyncSave:
        """Save in a thread of its own; return once all is staged, or at once if that is not to be waited for.

        Raises what the save came to where staging has failed by then.
        """
        staging = self.staging
        assert staging is not None  # noqa: S101  # it has not run yet
        is_ours = isinstance(self.writer, ObjectStoreWriter)
        uri = str(getattr(self.writer, "checkpoint_id", "the checkpoint"))
        steering = Steering(uri, rank=rank_in(self.process_group, no_dist=self.no_dist))
        tell_others = None
        if self.call is not None:
            self.call.meetings.on_cancelled = steering.cancel
            tell_others = self.call.meetings.cancel
        handle = AsyncSave(uri, steering=steering if is_ours else None, staging=staging, tell_others=tell_others)
        thread = threading.Thread(target=self._run, args=(handle, steering), name="cloudckpt-async", daemon=False)
        keep(handle, thread)
        try:
            thread.start()
            if is_overlapped and not staging.completed.done():
                return handle
            wait([staging.completed])
        except BaseException:  # nobody gets the handle, so there must be no save
            if self.turn.acquire(blocking=False):
                _forget(handle)
                if self.call is not None:
                    self.call.end(has_left=True)
            else:
                handle.cancel()
            raise
        if staging.completed.exception() is not None and (error := handle.exception()) is not None:
            raise error
        return handle

    def _run(self, handle: AsyncSave, steering: Steering) -> None:
        staging = self.staging
        assert staging is not None  # noqa: S101  # as above
        outcome: SavedMetadata | BaseException
        if not self.turn.acquire(blocking=False):
            return  # whoever started this thread was interrupted, and has seen to it that nobody waits
        try:
            outcome = self._saved(staging, steering)
        except BaseException as error:  # noqa: BLE001  # whoever waits must learn of it
            traceback.clear_frames(error.__traceback__)  # they hold the copy, and the error would hold them
            outcome = error
            if isinstance(error, CheckpointException):
                error.__traceback__ = None  # it says itself where it comes from, and this frame would go on for it
        wait([staging.completed])  # until then the memory is written to
        staging.state_dict = {}  # else its tensors live until the next one
        self.staging = self.planner = None
        handle.end(outcome)
        if not isinstance(outcome, BaseException) or handle.cancelled():
            _forget(handle)
        del outcome  # whose traceback holds this frame

    def _saved(self, staging: Staging | Adopted, steering: Steering) -> SavedMetadata:
        writer, planner = self.writer, self.planner
        ours = writer if isinstance(writer, ObjectStoreWriter) else None
        snapshot = None
        try:
            if isinstance(staging, Staging) and ours is not None and planner is None and not ours.has_transforms:
                snapshot = staging  # only its bytes are looked at, each once it is there
            else:
                wait([staging.completed, steering.cancelled], return_when=FIRST_COMPLETED)
            steering.check()
            if staging.completed.done():
                staging.completed.result()
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # all ranks have to learn of it
            planner = RefusingPlanner(portable(error) if isinstance(error, Exception) else error)
        if ours is not None:
            ours.steer(steering, snapshot)
            if self.in_process:
                ours.run_in(upload_process(), staging if isinstance(staging, Staging) else None)
        try:
            return saved(
                lambda: staging.state_dict,
                writer,
                planner=planner,
                company=_company(self.call, self.process_group),
                process_group=self.process_group,
                no_dist=self.no_dist,
                use_collectives=self.use_collectives,
            )
        finally:
            if self.call is not None:
                self.call.meetings.on_cancelled = None
            if ours is not None:
                ours.steer(None)
                ours.run_in(None)


@contextlib.contextmanager
def _company(call: Call | None, group: dist.ProcessGroup | None) -> Iterator[dist.ProcessGroup | None]:
    with accompanied(call):
        yield group
