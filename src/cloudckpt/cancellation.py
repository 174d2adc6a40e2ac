"""The state that a save and its handle share: its progress, and the decision to cancel or to commit it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

from cloudckpt._messages import name_ranks
from cloudckpt._this_process import OfThisProcess
from cloudckpt.errors import SaveCancelledError
from cloudckpt.report import SavePhase, SaveProgress


class Cancellation(OfThisProcess):
    """Decides once, under one lock, if one save on one rank is cancelled or committed. Safe to use from any thread."""

    def __init__(self, uri: str = "", *, rank: int = 0) -> None:
        self._uri = uri
        self._rank = rank
        self._cancelled: Future[None] = Future()
        self._lock = threading.RLock()  # a signal handler may run while its own thread holds it
        self._phase: SavePhase = "staging"
        self._cancelled_by: frozenset[int] = frozenset()
        self._is_sealed = False
        self.is_committing = False
        """True if this rank makes the commit, and has begun to."""
        self._stop: Callable[[SaveCancelledError], None] | None = None
        self._total_bytes = 0
        self._uploaded_bytes = 0

    def progress(self, *, staged_bytes: int) -> SaveProgress:
        with self._lock:
            return SaveProgress(
                phase=self._phase,
                staged_bytes=staged_bytes,
                uploaded_bytes=self._uploaded_bytes,
                total_bytes=max(self._total_bytes, self._uploaded_bytes),
            )

    def cancel(self, ranks: Iterable[int] = ()) -> bool:
        """Cancel the save on behalf of `ranks`; by default of this rank.

        Returns True if the save certainly ends without a commit, and False after `seal`, which rules out a cancellation
        by this rank.
        """
        with self._lock:
            if self._is_sealed:
                return False
            self._cancelled_by |= frozenset(ranks or (self._rank,))
            stop = self._stop
            if not self._cancelled.done():
                self._cancelled.set_result(None)
        if stop is not None:
            stop(self._error())
        return True

    def check(self) -> None:
        """Raise `SaveCancelledError` if the save is cancelled."""
        if self._cancelled_by:
            raise self._error()

    def wait_for(self, future: Future[None]) -> None:
        """Wait until `future` is done or the save is cancelled."""
        concurrent.futures.wait([future, self._cancelled], return_when=concurrent.futures.FIRST_COMPLETED)

    def enter(self, phase: SavePhase, *, total_bytes: int | None = None) -> None:
        """Note that `phase` begins. Raises `SaveCancelledError` if the save is cancelled."""
        with self._lock:
            if not self._cancelled_by:
                self._phase = phase
            if phase == "planning":  # also of another try, after one that had come to its commit
                self._is_sealed = self.is_committing = False
            if total_bytes is not None:
                self._total_bytes, self._uploaded_bytes = total_bytes, 0  # another try of the save sends all again
        self.check()

    def seal(self, *, commits: bool) -> None:
        """Rule out that this rank cancels the save from here on. Raises `SaveCancelledError` if it is cancelled.

        The coordinator (`commits`) calls this before the commit. Another rank calls it after it has written its data.
        """
        with self._lock:
            self._is_sealed = not self._cancelled_by
            if self._is_sealed:
                self._phase, self.is_committing = "committing", commits
        self.check()

    def end(self, phase: SavePhase) -> None:
        """Note that the save has ended in `phase`."""
        with self._lock:
            self._is_sealed, self._stop = True, None
            self._phase = phase
            if phase == "committed":
                self._total_bytes = self._uploaded_bytes

    def count_uploaded(self, num_bytes: int) -> None:
        with self._lock:
            self._uploaded_bytes += num_bytes

    @contextlib.contextmanager
    def stopping(self, stop: Callable[[SaveCancelledError], None]) -> Iterator[None]:
        """Call `stop`, in any thread, if the save is cancelled in this context.

        After a cancellation, `SaveCancelledError` replaces any exception that leaves the context.
        """
        with self._lock:
            self._stop = stop
        self.check()
        try:
            yield
        except Exception:
            self.check()
            raise
        finally:
            with self._lock:
                self._stop = None
        self.check()

    def _error(self) -> SaveCancelledError:
        ranks = tuple(sorted(self._cancelled_by))
        return SaveCancelledError(
            f"the save to {self._uri} was cancelled by {name_ranks(ranks)} before its commit: nothing of it is visible",
            uri=self._uri,
            ranks=ranks,
        )
