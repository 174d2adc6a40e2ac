"""Removing what is superseded, in a thread of its own, after each commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from cloudckpt import _forks
from cloudckpt._manager.reading import removing
from cloudckpt._manager.removal import remove
from cloudckpt._manager.rule import Policy, StepInfo, newest_first, superseded
from cloudckpt._manager.steps import Seen, Steps, step_at
from cloudckpt._threads import Condition, Thread
from cloudckpt._trace import watchers
from cloudckpt.errors import AccessDeniedError, CheckpointError, CloudckptError, StoreError
from cloudckpt.housekeeping import Spared, gc
from cloudckpt.options import Options
from cloudckpt.report import Event, EventName

_log = logging.getLogger("cloudckpt")

_ALIVE = timedelta(days=1)
"""As in `gc`: for so long after its last sign of life, a save counts as alive."""
_MOST_REFUSED = 8
"""Removals in one run. A few steps may be protected; where that many are denied, the next would be, too."""
_MOST_TRACES = 64
"""Of deleted checkpoints that one run removes, so that it ends soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """What one run of a manager's retention did."""

    kept: tuple[str, ...]
    """The URIs of all that stay, the newest first. None of them was touched."""
    removed: tuple[str, ...]
    """The oldest first."""
    failed: tuple[Spared, ...]
    """What should have gone, and why it did not: it may be half removed, and then loads no more. And the steps that may
    not be looked at. It is tried again after the next save."""


class Retention:
    """Of one manager, on the coordinator. At most one thread at a time, which ends when there is nothing to do."""

    def __init__(
        self, steps: Steps, options: Options, policy: Policy, *, damaged: Callable[[], Collection[str]]
    ) -> None:
        self._steps = steps
        self._options = options
        self._policy = policy
        self._damaged = damaged
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_wanted = False
        self._report: RetentionReport | None = None
        self._traces: dict[str, datetime] = {}
        """URIs of steps that are known to be deleted, and since when."""
        self._own: set[str] = set()
        """URIs that were committed here since the store was last asked what there is."""
        self._last: int | None = None
        """The one that was committed here last."""
        self._refused: set[str] = set()
        """URIs of steps whose removal was denied: their turn comes after that of the others."""
        self._announced: object = None
        """The save whose commit has not been heard of yet."""
        self._is_given_up = False
        """In a child of the very thread that removes: it goes on there, but is to remove no more."""
        _forks.watch(self)

    def after_fork(self) -> None:
        """What is being removed is its parent's affair: nothing is under way here."""
        self._changed = Condition()
        self._thread, self._is_wanted, self._announced = None, False, None
        self._is_given_up = True

    @property
    def report(self) -> RetentionReport | None:
        """Of the last run."""
        with self._changed:
            return self._report

    def announce(self, save: object) -> None:
        """Only for what was announced last does `begin` do anything, and once."""
        self._announced = save

    def begin(self, uri: str, save: object) -> None:
        """After the commit of a step at `uri` by `save`: look what is to go. Does not wait, and never raises."""
        if self._policy.keep_last is None:
            return
        with self._changed:
            if self._announced is not save:
                return
            self._announced, self._is_given_up = None, False
            self._traces.pop(uri, None)
            self._own.add(uri)
            self._last = step_at(uri)
            self._is_wanted = True
            if self._thread is not None:
                return
            # No daemon: the interpreter waits for it, and it ends by itself.
            thread = Thread(self._run, name="cloudckpt-retention", daemon=False)
            try:
                thread.start()
            except RuntimeError as error:  # the interpreter ends, or the system's limit: after the next save, then
                _log.warning("old checkpoints under %s were not looked for: %s", self._steps.root.uri, error)
                return
            self._thread = thread

    def wait(self, timeout: float | None) -> bool:
        """Until nothing is being removed, nor about to be; False where that is not so within `timeout` seconds."""
        ends_at_s = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            thread = self._thread
            if not self._changed.wait_for(lambda: self._thread is None, timeout):
                return False
        if thread is not None:
            thread.join(None if ends_at_s is None else max(0.0, ends_at_s - time.monotonic()))
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        try:
            while self._goes_on():
                report = self._once()
                with self._changed:
                    self._report = report
        finally:
            with self._changed:
                self._thread = None
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        with self._changed:
            if not self._is_wanted:
                self._thread = None  # with the same lock: who wants more from here on starts another
                return False
            self._is_wanted = False
            return True

    def _once(self) -> RetentionReport:
        failed: list[Spared] = []
        removed: list[str] = []
        infos: list[StepInfo] = []
        try:
            with self._changed:
                known, last = set(self._traces), self._last
                self._own.clear()
            seen = self._judged(without=known)
            infos = [one.info for one in seen if one.info is not None]
            closed = [one for one in seen if one.denied is not None]
            failed += [Spared(uri=one.uri, reason=str(one.denied)) for one in closed]
            # What may be among the best, and cannot be read, is not removed.
            unknown = [one for one in seen if one.problem]
            failed += [Spared(uri=one.uri, reason=one.problem) for one in unknown]
            damaged = {*self._damaged(), *(one.uri for one in unknown)}
            gone = superseded(infos, self._policy, damaged=damaged, own=last)
            num_refused = 0
            for info in sorted(gone, key=lambda info: info.uri in self._refused):
                try:
                    why = self._removed(info)
                except StoreError as error:
                    failed.append(Spared(uri=info.uri, reason=str(error)))
                    if not isinstance(error, AccessDeniedError):
                        break  # it would befall the others, too
                    self._refused.add(info.uri)
                    num_refused += 1
                    if num_refused == _MOST_REFUSED:
                        break
                    continue
                if why is None:
                    removed.append(info.uri)
                else:
                    failed.append(Spared(uri=info.uri, reason=why))
                if self._is_given_up:
                    return RetentionReport(kept=(), removed=tuple(removed), failed=())
            self._note_traces(seen)
            self._remove_traces()
        except Exception as error:  # noqa: BLE001  # a thread has nobody to raise it to; the report has it
            failed.append(Spared(uri=self._steps.root.uri, reason=str(error) or repr(error)))
        for one in failed:
            _log.warning("superseded, but not removed: %s: %s", one.uri, one.reason)
            self._emit("retention.failed", one.uri)
        tried = {*removed, *(one.uri for one in failed)}
        kept = [info.uri for info in newest_first(infos) if info.uri not in tried]
        return RetentionReport(kept=tuple(kept), removed=tuple(removed), failed=tuple(failed))

    def _judged(self, *, without: set[str]) -> list[Seen]:
        """What there is, as far as the policy asks. Raises `StoreError`, also where nothing may be looked at."""
        seen = self._steps.seen(without=without)
        if self._policy.keep_best is not None:
            seen = self._steps.measured(seen)
        denied = [one.denied for one in seen if one.denied is not None]
        if denied and len(denied) == len(seen):
            raise denied[0]
        return seen

    def _removed(self, info: StepInfo) -> str | None:
        """None, or why not. Raises `StoreError`."""
        with removing(self._steps.root.uri):
            try:
                why = remove(info.uri, self._options, alive_since=datetime.now(timezone.utc) - _ALIVE)
            except CheckpointError as error:
                return str(error)
        if why is None:
            with self._changed:
                self._traces[info.uri] = datetime.now(timezone.utc)
            _log.info("removed %s, which is superseded", info.uri)
            self._emit("retention.removed", info.uri)
        return why

    def _note_traces(self, seen: list[Seen]) -> None:
        with self._changed:
            for one in seen:
                # One of ours may have been committed since it was looked at.
                if one.fenced_at is not None and one.uri not in self._own:
                    self._traces[one.uri] = one.fenced_at

    def _remove_traces(self) -> None:
        """The fence that a deleted checkpoint leaves goes, once no save of before can be under way any more."""
        before = datetime.now(timezone.utc) - _ALIVE
        with self._changed:
            old = [uri for uri, since in self._traces.items() if since < before]
        for uri in old[:_MOST_TRACES]:
            try:
                gc(uri, older_than=_ALIVE, dry_run=False, options=self._options)
            except CloudckptError as error:
                _log.warning("what is left of %s was not removed: %s", uri, error)
                return
            with self._changed:
                self._traces.pop(uri, None)

    def _emit(self, name: EventName, uri: str) -> None:
        event = Event(name=name, uri=uri, rank=0)
        watchers.tell(event)
        if self._options.on_event is None:
            return
        try:
            self._options.on_event(event)
        except Exception:  # noqa: BLE001  # it is the user's, and the thread is ours
            _log.exception("Options.on_event failed in a thread that has nobody to raise it to")
