"""The one background save that a process has in flight, what became of it, and the memory that such saves keep."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._api.failures import carried, causes_of
from cloudckpt._background.handle import AsyncSave
from cloudckpt._forks import in_child
from cloudckpt._process.host import upload_process
from cloudckpt._stage.pinned import PINNED
from cloudckpt._stage.stager import PinnedStager
from cloudckpt.errors import SaveInFlightError, portable

_lock = threading.RLock()  # a signal's handler may come while its own thread holds it
_beginning = threading.RLock()
"""Held while a save is begun: from finding none in flight until the new one is. It knows itself who holds it."""
_latest: AsyncSave | None = None
"""The save in flight, or one that failed without anybody having asked."""
_thread: threading.Thread | None = None
_stagers: dict[bool, PinnedStager] = {}
"""The memory for copies: one of the process's own, and one that it shares with another."""
_left_behind: list[Any] = []
_is_exit_watched = False


@in_child
def _forget_after_fork() -> None:
    """A child has none of its parent's threads, so none of its saves will ever end there."""
    global _lock, _beginning, _latest, _thread, _is_exit_watched  # noqa: PLW0603  # as above
    _lock, _beginning = threading.RLock(), threading.RLock()
    _latest = _thread = None
    _is_exit_watched = False
    _left_behind.extend(_stagers.values())  # their memory is the parent's: not even to be freed here
    _stagers.clear()


def latest() -> AsyncSave | None:
    """The background save that is in flight, or that has failed without anybody having asked."""
    with _lock:
        handle = _latest
    if handle is None or not handle.done():
        return handle
    return None if _untold(handle) is None else handle


@contextlib.contextmanager
def turn(
    in_flight: Literal["wait", "raise"], *, first_with: Callable[[str | None], tuple[int, str] | None]
) -> Iterator[None]:
    """In this context no other thread begins a save, whose copy would go to the same memory. `await_turn` in it.

    With ``"raise"``, raises `SaveInFlightError` instead of waiting: where `first_with`, which is told where the save of
    this rank goes that is in flight, says that a rank has one. All ranks do then, or none.
    """
    _refuse_within_own()
    try:
        if not _taken(0.0 if in_flight == "raise" else None):
            raise SaveInFlightError(
                "another thread is still beginning a background save, so no other was begun. "
                "Begin one when async_save has returned",
                uri="",
            )
        if in_flight == "raise":
            _refuse_beside_another(first_with)
        yield
    finally:
        try:  # noqa: SIM105  # before anything is called, where an interrupt would keep the lock
            _beginning.release()
        except RuntimeError:  # it was not acquired
            pass


def _refuse_within_own() -> None:
    """By a signal handler, or an object that is asked for its state."""
    if _beginning._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # as Python's conditions ask
        raise SaveInFlightError(
            "this thread is still beginning a background save, so no other was begun, and nothing was freed. "
            "Begin one when async_save has returned",
            uri="",
        )


def _taken(within_s: float | None) -> bool:
    """Whether this thread holds `_beginning` now."""
    if not _is_waited_for_here():
        return _beginning.acquire(timeout=-1 if within_s is None else within_s)
    if not _beginning.acquire(blocking=False):
        raise SaveInFlightError(
            "another thread begins a background save, and waits for this one, which has made the save before, to "
            "end: nothing was begun or freed here",
            uri="",
        )
    return True


def _is_waited_for_here() -> bool:
    """Whether this is the thread of the last save, in a callback: whoever begins the next one waits for it to end.

    Raises `SaveInFlightError` where that save is still going on.
    """
    with _lock:
        previous, thread = _latest, _thread
    if thread is not threading.current_thread():
        return False
    if previous is not None and not previous.done():
        raise SaveInFlightError(
            f"this is the thread that saves to {previous.uri}, which cannot wait for its own end: nothing was begun or "
            "freed",
            uri=previous.uri,
        )
    return True


def _refuse_beside_another(first_with: Callable[[str | None], tuple[int, str] | None]) -> None:
    with _lock:
        mine = _latest
    is_in_flight = mine is not None and not mine.done()
    found = first_with(mine.uri if mine is not None and is_in_flight else None)
    if found is not None:
        rank, uri = found
        where = "" if is_in_flight else f" on rank {rank}"
        raise SaveInFlightError(
            f"the background save to {uri} is still running{where}, so no other was begun. Wait for its handle or "
            "cancel it, or let async_save wait (Options.async_in_flight)",
            uri=uri,
        )


def await_turn() -> None:
    """Until the background save in flight, if there is one, has ended.

    Two saves on one process group at a time would mix up their collectives.
    """
    with _lock:
        previous = _latest
        thread = _thread
    if previous is None or previous.done():
        _join(thread)
        return
    previous.committed.wait()
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
    Waits, too, while another thread begins a save; raises `SaveInFlightError` where this very thread is about to,
    or makes the save.
    """
    ends_at_s = None if timeout is None else time.monotonic() + timeout
    _refuse_within_own()
    try:
        if not _taken(None if timeout is None else max(0.0, timeout)):
            raise TimeoutError(f"another thread has not begun its background save within {timeout} s; it goes on")
        _end(timeout, within_s=None if ends_at_s is None else max(0.0, ends_at_s - time.monotonic()))
    finally:
        try:  # noqa: SIM105  # as above
            _beginning.release()
        except RuntimeError:  # as above
            pass


def _end(timeout: float | None, *, within_s: float | None) -> None:
    with _lock:
        previous, thread = _latest, _thread
    if previous is not None and not previous.committed.wait(within_s):
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
        _end(None, within_s=None)  # whoever still begins a save is a thread that the interpreter does not wait for
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
