"""The one background save that a process has in flight, its outcome, and the memory that such saves keep."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import multiprocessing.util
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt._this_process import is_forked, refuse_in_fork
from cloudckpt.background.handle import AsyncSave
from cloudckpt.background.process import end_process
from cloudckpt.background.stager import PinnedStager
from cloudckpt.dcp.ranks.collectives import begin_call
from cloudckpt.dcp.ranks.failures import SaveOrLoadError, causes_of, failure_of
from cloudckpt.errors import SaveInFlightError, make_picklable
from cloudckpt.tensors.host_memory import PINNED
from cloudckpt.uri import redact

EXIT_CODE = 120
"""Exit code of a program that did not ask for its last save's failure. Python uses it for errors at its own end."""


class _Slot:
    """Holds the one background save, its thread and the memory of saves. Threads begin saves one after the other."""

    def __init__(self) -> None:
        self.beginning = threading.Lock()
        """Held while a save is begun: from the look for a save in flight until the new save is in `handle`."""
        self.beginner: int | None = None
        """The thread that holds `beginning`."""
        self.handle: AsyncSave | None = None
        """The save in flight, or one that failed and whose failure no caller has got."""
        self.thread: threading.Thread | None = None
        """The thread of the last save."""
        self.stagers: dict[bool, PinnedStager] = {}
        """The memory for copies: one for saves by thread (False), one that torch's process shares (True)."""
        self.lock = threading.RLock()  # a signal handler may run while its own thread holds it
        self.is_exit_watched = False

    @contextlib.contextmanager
    def exclude_other_threads(self, timeout: float | None, error: BaseException) -> Iterator[None]:
        """Let no other thread begin a save in this context. Raises `error` after `timeout` seconds.

        Raises `SaveInFlightError` if the wait would never end.
        """
        if self.beginner == threading.get_ident():
            raise SaveInFlightError(
                "this thread is still beginning a background save, so no other was begun, and nothing was freed. "
                "Begin one when async_save has returned",
                uri="",
            )
        if self.thread is threading.current_thread():
            if self.handle is not None and not self.handle.done():
                raise SaveInFlightError(
                    f"this is the thread that saves to {self.handle.uri}, which cannot wait for its own end: nothing "
                    "was begun or freed",
                    uri=self.handle.uri,
                )
            timeout = 0  # the next save waits for the end of this thread
            error = SaveInFlightError("another thread begins a background save: nothing was begun or freed", uri="")
        if not self.beginning.acquire(timeout=-1 if timeout is None else timeout):
            raise error
        self.beginner = threading.get_ident()
        try:
            yield
        finally:
            self.beginner = None
            self.beginning.release()

    def join(self) -> None:
        """Wait for the thread of a save that has ended."""
        thread = self.thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()


_slot = _Slot()


def find_unreported() -> AsyncSave | None:
    """Return the background save that is in flight, or whose failure no caller has got."""
    handle = _slot.handle
    if handle is None or not handle.done():
        return handle
    return None if _unreported_failure(handle) is None else handle


@contextlib.contextmanager
def exclusive_begin(
    in_flight: Literal["wait", "raise"], *, find_busy_rank: Callable[[str | None], tuple[int, str] | None]
) -> Iterator[None]:
    """Let no other thread begin a save in this context. The caller calls `wait_for_previous` in it.

    With ``"raise"``, raises `SaveInFlightError` if `find_busy_rank` returns a rank and the URI of its save. That
    function takes the URI of this rank's save in flight, or None. Either all ranks raise, or none does.
    """
    refuse_in_fork()
    refusal = SaveInFlightError(
        "another thread is still beginning a background save, so no other was begun. "
        "Begin one when async_save has returned",
        uri="",
    )
    with _slot.exclude_other_threads(0 if in_flight == "raise" else None, refusal):
        if in_flight == "raise":
            _refuse_if_in_flight(find_busy_rank)
        yield


def _refuse_if_in_flight(find_busy_rank: Callable[[str | None], tuple[int, str] | None]) -> None:
    own_save = _slot.handle
    is_own = own_save is not None and not own_save.done()
    conflict = find_busy_rank(own_save.uri if own_save is not None and is_own else None)
    if conflict is not None:
        rank, uri = conflict
        where = "" if is_own else f" on rank {rank}"
        raise SaveInFlightError(
            f"the background save to {uri} is still running{where}, so no other was begun. Wait for its handle or "
            "cancel it, or let async_save wait (Options.async_in_flight)",
            uri=uri,
        )


def find_busy_rank(
    own_uri: str | None, process_group: dist.ProcessGroup | None, *, uri: str, timeout_s: float
) -> tuple[int, str] | None:
    """Return the first rank with a save in flight, and the save's URI; None if no rank has one.

    `own_uri` is the URI of this rank's save in flight, or None. All ranks call this, and get the same answer. It has
    connections of its own, because the save in flight uses others. Raises `RankLostError` if not all ranks come.
    """
    uri = redact(uri)
    try:
        call = begin_call(process_group, "asking", doing="beginning to save", uri=uri, timeout_s=timeout_s)
        if call is None:
            return None if own_uri is None else (0, own_uri)
        with call.ending():
            answers = call.all_gather_object(own_uri)
    except CheckpointException as error:
        raise failure_of(error, subject=f"saving {uri}", is_alone=False) from None
    return next(((rank, answer) for rank, answer in enumerate(answers) if answer is not None), None)


def wait_for_previous() -> None:
    """Wait for the end of the background save in flight, if there is one.

    Two saves on one process group at a time would mix up their collectives.
    """
    refuse_in_fork()
    if _slot.handle is not None:
        _slot.handle.committed.wait()
    _slot.join()


@contextlib.contextmanager
def earlier_failure() -> Iterator[BaseException | None]:
    """Yield the failure of the previous background save that no caller has got, for all ranks to raise.

    If an exception with this failure leaves the context, the failure counts as reported.
    """
    previous = _slot.handle
    error = _unreported_failure(previous)
    try:
        yield error
    except CheckpointException as raised:
        if error is not None:
            is_reported = raised is error or str(error) in map(str, causes_of(raised))
            set_in_flight(previous) if previous is not None and not is_reported else forget(previous)
        raise


def _unreported_failure(handle: AsyncSave | None) -> BaseException | None:
    if handle is None or not handle.done() or handle.committed.is_reported:
        return None
    error = handle.committed.failure()
    if error is None or handle.cancelled():
        return None
    if isinstance(error, CheckpointException) and any(isinstance(cause, SaveOrLoadError) for cause in causes_of(error)):
        return None  # another rank's earlier failure, which all ranks have raised already
    subject = f"the background save to {handle.uri}"
    is_alone = not isinstance(error, SaveOrLoadError) or error.is_alone
    if not isinstance(error, CheckpointException):
        cause = make_picklable(error) if isinstance(error, Exception) else error
        error = CheckpointException("save", {0: (cause, traceback.extract_tb(error.__traceback__))})
    return failure_of(error, subject=subject, is_alone=is_alone)


def set_in_flight(handle: AsyncSave, thread: threading.Thread | None = None) -> None:
    """Make `handle`, which `thread` runs, the save in flight."""
    with _slot.lock:
        _slot.handle, _slot.thread = handle, thread
        if not _slot.is_exit_watched:
            # Processes of multiprocessing end without the calls that atexit has registered.
            multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)
            _slot.is_exit_watched = True


def forget(handle: AsyncSave | None) -> None:
    """Forget the save, whose outcome was reported."""
    with _slot.lock:
        if _slot.handle is handle:
            _slot.handle = None


def stager_of_process(*, is_shared: bool) -> PinnedStager:
    """Return the stager of this process, which keeps its memory from save to save."""
    with _slot.lock:
        if is_shared not in _slot.stagers:
            _slot.stagers[is_shared] = PinnedStager(shared=is_shared)
        return _slot.stagers[is_shared]


def close(timeout: float | None = None) -> None:
    """Wait for the background save in flight, free the memory that saves keep, and end torch's background process.

    Also waits while another thread begins a save. You can call `close` again, and later saves allocate memory anew. A
    script that ends without this call loses nothing: the interpreter completes the save in flight, and frees
    the memory.

    Args:
        timeout: Seconds to wait. None waits for ever.

    Raises:
        CheckpointException: The last save failed, and no caller has asked its handle for the failure.
        TimeoutError: The save has not ended within `timeout`. Nothing is freed.
        SaveInFlightError: The calling thread itself is beginning or running a save.

    Example::

        cloudckpt.async_save("s3://bucket/run/step-100", model=model)
        cloudckpt.close()

    """
    refuse_in_fork()
    ends_at_s = None if timeout is None else time.monotonic() + timeout
    refusal = TimeoutError(f"another thread has not begun its background save within {timeout} s; it continues")
    with _slot.exclude_other_threads(None if timeout is None else max(0.0, timeout), refusal):
        _end(timeout, within_s=None if ends_at_s is None else max(0.0, ends_at_s - time.monotonic()))


def _end(timeout: float | None, *, within_s: float | None) -> None:
    previous = _slot.handle
    if previous is not None and not previous.committed.wait(within_s):
        raise TimeoutError(f"the background save to {previous.uri} has not ended within {timeout} s; it continues")
    _slot.join()
    with _slot.lock:
        stagers, _slot.stagers = list(_slot.stagers.values()), {}
    for stager in stagers:
        stager.close()
    end_process()
    PINNED.close()
    error = _unreported_failure(previous)
    forget(previous)
    if error is not None:
        raise error


class _FailingAtTheEnd:
    """Replaces a standard stream at the end of the interpreter, so that the process ends with `EXIT_CODE`.

    The interpreter flushes the standard streams after all exit handlers, and ends with this code if a flush fails
    (documentation of ``sys.exit``). ``os._exit`` would skip the other handlers, and lose the buffers of open files.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys._getframe().f_back is None:  # noqa: SLF001  # the interpreter itself calls; a program calls from a frame
            raise OSError("a background save failed")


def _end_process_of_multiprocessing() -> None:
    """Make a process of multiprocessing end with `EXIT_CODE`. Such a process ends without the handlers of atexit."""
    if sys.exc_info()[1] is None:  # or it fails already
        raise SystemExit(EXIT_CODE)


def _at_exit() -> None:
    if is_forked():
        return
    handle = _slot.handle
    try:
        _end(None, within_s=None)
    except BaseException as error:  # no caller is left to raise it to
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException as hook_error:  # its context is the error, which is thus printed as well
            sys.__excepthook__(type(hook_error), hook_error, hook_error.__traceback__)
        if handle is None or sys.stderr is None or not isinstance(error, CheckpointException):
            return
        sys.stderr.write(
            f"cloudckpt: the last background save, to {handle.uri}, failed, and the program did not ask for its "
            f"outcome: exit code {EXIT_CODE}. Call cloudckpt.close() or handle.result() at the end to handle it\n"
        )
        if multiprocessing.process.parent_process() is None:
            sys.stderr = _FailingAtTheEnd(sys.stderr)
        else:  # after all other finalizers
            multiprocessing.util.Finalize(None, _end_process_of_multiprocessing, exitpriority=-1_000_000)


atexit.register(_at_exit)
