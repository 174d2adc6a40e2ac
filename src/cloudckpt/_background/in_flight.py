"""The one background save that a process has in flight, what became of it, and the memory that such saves keep."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any, Literal

from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._async import AsyncSave
from cloudckpt._failures import carried, causes_of
from cloudckpt._process.host import upload_process
from cloudckpt._stage.pinned import PINNED
from cloudckpt._stage.stager import PinnedStager
from cloudckpt.errors import SaveInFlightError, portable

_lock = threading.Lock()
_beginning = threading.Lock()
"""Held while a save is begun: from finding none in flight until the new one is."""
_beginner: int | None = None
"""The thread that holds it."""
_latest: AsyncSave | None = None
"""The save in flight, or one that failed without anybody having asked."""
_thread: threading.Thread | None = None
_stagers: dict[bool, PinnedStager] = {}
"""The memory for copies: one of the process's own, and one that it shares with another."""
_left_behind: list[Any] = []
_is_exit_watched = False


def _forget_after_fork() -> None:
    """A child has none of its parent's threads, so none of its saves will ever end there."""
    global _lock, _beginning, _beginner, _latest, _thread, _is_exit_watched  # noqa: PLW0603  # as above
    _lock, _beginning = threading.Lock(), threading.Lock()
    _beginner = _latest = _thread = None
    _is_exit_watched = False
    _left_behind.extend(_stagers.values())  # their memory is the parent's: not even to be freed here
    _stagers.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget_after_fork)


def latest() -> AsyncSave | None:
    """The background save that is in flight, or that has failed without anybody having asked."""
    with _lock:
        handle = _latest
    if handle is None or not handle.done():
        return handle
    return None if _untold(handle) is None else handle


@contextlib.contextmanager
def turn(in_flight: Literal["wait", "raise"]) -> Iterator[None]:
    """As `await_turn`; and in this context no other thread begins a save, whose copy would go to the same memory."""
    global _beginner  # noqa: PLW0603  # of the process
    # By a signal handler, or an object that is asked for its state.
    is_own = _beginning.locked() and _beginner == threading.get_ident()
    if is_own or (in_flight == "raise" and _beginning.locked()):
        raise SaveInFlightError(
            f"{'this' if is_own else 'another'} thread is still beginning a background save, so no other was begun. "
            "Begin one when async_save has returned",
            uri="",
        )
    with _beginning:
        try:
            _beginner = threading.get_ident()
            await_turn(in_flight)
            yield
        finally:
            _beginner = None


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
            keep(previous) if previous is not None and not is_told else forget(previous)
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


def forget(handle: AsyncSave | None) -> None:
    """Nobody needs to know of it any more."""
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
    forget(previous)
    if error is not None:
        raise error


def _at_exit() -> None:
    try:
        close()
    except BaseException as error:  # noqa: BLE001  # nobody is left to whom it could be raised
        sys.excepthook(type(error), error, error.__traceback__)


atexit.register(_at_exit)


def own_stager(*, is_shared: bool) -> PinnedStager:
    """That of this process, which keeps its memory from save to save."""
    with _lock:
        if is_shared not in _stagers:
            _stagers[is_shared] = PinnedStager(shared=is_shared)
        return _stagers[is_shared]


def keep(handle: AsyncSave, thread: threading.Thread | None = None) -> None:
    """From now on it is the save in flight."""
    global _latest, _thread, _is_exit_watched  # noqa: PLW0603  # of the process
    with _lock:
        _latest, _thread = handle, thread
        if not _is_exit_watched:
            # Processes of multiprocessing end without what atexit knows of.
            multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)
            _is_exit_watched = True
