"""What a save and whoever waits for it tell each other: how far it is, and whether it is to go on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from cloudckpt._threads import Future
from cloudckpt.errors import SaveCancelledError
from cloudckpt.report import SavePhase, SaveProgress

_LOOK_EVERY_S = 1.0


class Steering:
    """Of one save on one rank. Safe to use from any thread.

    Whether the save is cancelled or its commit begins is decided under one lock, once: what `cancel` said stays true.
    """

    def __init__(self, uri: str = "", *, rank: int = 0) -> None:
        self._uri = uri
        self._rank = rank
        self.cancelled: Future[None] = Future()
        """Done once the save is cancelled."""
        self._lock = threading.RLock()  # a signal's handler may come while its own thread holds it
        self._phase: SavePhase = "staging"
        self._cancelled_by: frozenset[int] = frozenset()
        self._is_decided = False
        self.is_committing = False
        """Whether this rank makes the commit, and has begun to."""
        self._stop: Callable[[SaveCancelledError], None] | None = None
        self._total_bytes = 0
        self._uploaded_bytes = 0

    def after_fork(self) -> None:
        """In a child, where there is nothing to steer: the save is its parent's."""
        self._lock = threading.RLock()
        self._is_decided, self._stop = True, None

    def progress(self, *, staged_bytes: int) -> SaveProgress:
        """As it is now."""
        with self._lock:
            return SaveProgress(
                phase=self._phase,
                staged_bytes=staged_bytes,
                uploaded_bytes=self._uploaded_bytes,
                total_bytes=max(self._total_bytes, self._uploaded_bytes),
            )

    def cancel(self, ranks: Iterable[int] = ()) -> bool:
        """Whether the save certainly ends without a commit, by the wish of `ranks`, or of this one.

        False once this rank has consented to the commit: then it is not this rank that decides any more.
        """
        with self._lock:
            if self._is_decided:
                return False
            self._cancelled_by |= frozenset(ranks or (self._rank,))
            stop = self._stop
            if not self.cancelled.done():
                self.cancelled.set_result(None)
        if stop is not None:
            stop(self._error())
        return True

    def check(self) -> None:
        """Raise `SaveCancelledError` if the save is cancelled."""
        if self._cancelled_by:
            raise self._error()

    def wait_for(self, future: concurrent.futures.Future[None]) -> None:
        """Until it is done, or the save is cancelled. Not for the main thread."""
        while not concurrent.futures.wait(
            [future, self.cancelled],
            timeout=_LOOK_EVERY_S,  # an interrupt may end who cancels before that is told
            return_when=concurrent.futures.FIRST_COMPLETED,
        ).done:
            pass

    def enter(self, phase: SavePhase, *, total_bytes: int | None = None) -> None:
        """Raise `SaveCancelledError` instead if the save is cancelled."""
        with self._lock:
            if not self._cancelled_by:
                self._phase = phase
            if total_bytes is not None:
                self._total_bytes = total_bytes
        self.check()

    def consent(self, *, commits: bool) -> None:
        """Have done this rank's part: it cannot cancel any more. Raise `SaveCancelledError` if it did before."""
        with self._lock:
            self._is_decided = not self._cancelled_by
            if self._is_decided:
                self._phase, self.is_committing = "committing", commits
        self.check()

    def end(self, phase: SavePhase) -> None:
        """The save has ended: there is nothing to decide any more."""
        with self._lock:
            self._is_decided, self._stop = True, None
            self._phase = phase
            if phase == "committed":
                self._total_bytes = self._uploaded_bytes

    def count_uploaded(self, num_bytes: int) -> None:
        with self._lock:
            self._uploaded_bytes += num_bytes

    @contextlib.contextmanager
    def heeded(self, stop: Callable[[SaveCancelledError], None]) -> Iterator[None]:
        """Have `stop` called, in whichever thread, when the save is cancelled in this context.

        What the context raises after that is taken for its consequence.
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
        who = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        return SaveCancelledError(
            f"the save to {self._uri} was cancelled by {who} before its commit: nothing of it is visible",
            uri=self._uri,
            ranks=ranks,
        )
