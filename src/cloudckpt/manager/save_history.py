"""The saves of one manager: their outcomes, the damage that restores find, and the step where the run can resume."""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cloudckpt._messages import name_all, quote_names
from cloudckpt._this_process import is_forked
from cloudckpt.background.handle import AsyncSave
from cloudckpt.dcp.ranks.failures import causes_of
from cloudckpt.dcp.save_and_load import SavedMetadata
from cloudckpt.errors import RESTORED, CloudckptError, CommitUnknownError
from cloudckpt.events import Event
from cloudckpt.inspect.catalog import parse_earlier_metrics, parse_metrics
from cloudckpt.manager.places import Places
from cloudckpt.manager.policies import Failures, SaveFailure
from cloudckpt.manager.steps import check_metrics
from cloudckpt.pipeline.context import log_and_deliver
from cloudckpt.report import Place

_log = logging.getLogger("cloudckpt")

MAX_EARLIER_VALUES = 1000
"""The most values of earlier steps in a manifest, about 25 KB."""

_with_resume_hint: weakref.WeakSet[SaveHistory] = weakref.WeakSet()
"""The histories of managers that have saved since they were closed."""


@dataclass(slots=True, kw_only=True)
class StepSave:
    """The save of a step by this manager, from before it begins; or a restored step, without a result."""

    step: int
    uri: str = ""
    is_fast: bool = False
    """True if the step was saved to the fast place, and not directly to the root."""
    is_owed: bool = False
    """True if the step was due at the root, so that a fast place has to copy it there."""
    may_overwrite: bool = False
    replaces_unowed_step: bool = False
    """True if the fast place has the step, and the root is not owed it: a save there replaces it."""
    metrics: Mapping[str, float | None] | None = None
    result: AsyncSave | SavedMetadata | None = None
    rank: int = 0
    is_outcome_noted: bool = False

    @property
    def reaches_root(self) -> bool:
        """True if the root has the step, or is owed a copy."""
        return self.is_owed or not self.is_fast

    @property
    def failure(self) -> BaseException | None:
        """The failure of the save, or None. Waits for the end of the save, so that all ranks get the same answer."""
        if not isinstance(self.result, AsyncSave):
            return None
        self.result.committed.wait()
        return self.result.committed.failure()


class SaveHistory:
    """The saves of one manager, and what is known of the steps that it restored.

    Args:
        places: The places of the steps. Each commit starts their retention, and the copy that the root is owed.
        failures: Decides if a failed save is raised.

    """

    def __init__(self, places: Places, failures: Failures) -> None:
        self._places, self.failures = places, failures
        self._options = places.root.options
        self._lock = threading.Lock()
        self.last: StepSave | None = None
        self.current: StepSave | None = None
        """The step that holds the job's state: the last save, or the step that was restored since."""
        self.last_committed: tuple[int, str] | None = None
        """Number and URI of a step."""
        self._last_restored: tuple[int, str] | None = None
        self._unraised: SaveFailure | None = None
        """Failure of the last save, until another save begins or `close` raises the failure."""
        self.damaged_uris: frozenset[str] = frozenset()
        """URIs of the steps that `restore` found damaged, until they are replaced. Equal on all ranks."""
        self._base_uris: dict[str, str | None] = {}
        """URI of the step to which the next save may refer, by place: the last one that was committed or restored
        there. None after damage was found, since other steps may share the damaged data."""
        self._dropped_metrics: dict[str, int] = {}
        """Metrics that were passed since the last save for steps that were not due, each with its last step."""
        self._has_warned_of_dropped = False
        self._objects: dict[str, int] = {}
        """Names of the objects, or keys of the state dicts, that were saved, each with its last step."""
        self._has_warned_of_lacking = False
        self._metrics: dict[int, Mapping[str, float | None]] | None = None
        """Metrics of the steps that the run has saved. None before the first save, which reads those before it."""
        self._last_not_due: int | None = None
        """The last step that was not saved, because it was not due."""

    @property
    def in_flight(self) -> AsyncSave | None:
        """Handle of the save that is running, or None."""
        result = self.last.result if self.last is not None else None
        return result if isinstance(result, AsyncSave) and not result.done() else None

    def note_begin(self, step_save: StepSave) -> None:
        """Record a save that has begun or, without a background save, ended."""
        self.last = self.current = step_save
        if step_save.rank == 0:
            _with_resume_hint.add(self)
        self._unraised = None
        if isinstance(step_save.result, AsyncSave):
            step_save.result.committed.add_done_callback(lambda _: self.finish(step_save))
        else:
            self.finish(step_save)

    def note_refusal(self, step_save: StepSave, error: BaseException) -> SaveFailure | None:
        """Record a save that failed before it began or, without a background save, at all. None: `error` is raised."""
        self.note_saved(step_save, error)
        with self._lock:
            failure = self._unraised = self.failures.record(step_save.step, step_save.uri, error)
        if failure is not None:
            self._log_tolerated(failure, step_save.rank)
        return failure

    def finish(self, step_save: StepSave) -> None:
        """Record the outcome of a save that has ended, once, and start what follows a commit.

        A commit replaces damage, and starts retention and the copy to the root. The callback of the save, and every
        method that waits for it, call this. So a method that has waited finds the outcome recorded.
        """
        error, failure = step_save.failure, None
        self.note_saved(step_save, error)
        with self._lock:
            if step_save.is_outcome_noted:
                return
            step_save.is_outcome_noted = True
            if error is None:
                self.failures.in_a_row = 0
                self.last_committed = step_save.step, step_save.uri
                self._base_uris[step_save.uri.rpartition("/")[0]] = step_save.uri
                self.damaged_uris -= {step_save.uri}
                # Before a method that waits checks if a copy or a removal runs.
                self._places.start_after_commit(
                    step_save.uri, step_save.rank, is_fast=step_save.is_fast, is_owed=step_save.is_owed
                )
            elif isinstance(step_save.result, AsyncSave):
                failure = self.failures.record(step_save.step, step_save.uri, error)
                if failure is not None:
                    step_save.result.committed.exception(0)  # so that no other save raises it
                    self._unraised = self._unraised or failure
        if failure is not None:
            self._log_tolerated(failure, step_save.rank)

    def note_saved(self, step_save: StepSave, error: BaseException | None) -> None:
        """Record that the rules of this manager hold for a step that it has committed, or may have committed."""
        if error is None or any(isinstance(cause, CommitUnknownError) for cause in causes_of(error)):
            self._places.root.run_uris.add(step_save.uri)

    def note_damage(self, uri: str) -> None:
        """Record that `restore` found a step damaged."""
        with self._lock:
            self.damaged_uris |= {uri}
            self._base_uris = dict.fromkeys(steps.location.uri for steps in self._places.each)

    def note_restored(self, step: int, uri: str, *, reaches_root: bool, is_whole: bool) -> None:
        """Record that the job's state is that of a step. `is_whole` is False if a part was read from its copy."""
        self.current = StepSave(step=step, is_fast=not reaches_root)
        self._last_restored = step, uri
        self._metrics = None
        self._base_uris[uri.rpartition("/")[0]] = uri if is_whole and not self.damaged_uris else None

    def name_manager(self, step: int) -> str:
        """Return `CloudckptError.via` of a save of `step` after a restore."""
        restored = -1 if self._last_restored is None else self._last_restored[0]
        return f"{RESTORED}{restored}" if step <= restored else "manager"

    def find_earlier_metrics(self, step: int) -> dict[str, Mapping[str, float | None]]:
        """Return the last metrics of the steps before `step`, if retention may remove these: the manifest keeps them.

        Waits for the save in flight, as the save of `step` does. Rank 0 calls this.
        """
        if self._places.root_retention.policy.keeps_all:
            return {}
        if self._metrics is None:
            self._metrics = {} if self._last_restored is None else self._read_metrics(*self._last_restored)
        last, waits = self.last, self.in_flight is None or self._options.async_in_flight == "wait"
        if last is not None and last.metrics and waits:
            failure = last.failure  # waits: the place of the step is known at its end
            if failure is None and last.reaches_root:
                self._metrics[last.step] = last.metrics
        # After a restore of an earlier step, higher ones are no part of this run's past.
        self._metrics = {number: values for number, values in self._metrics.items() if number < step}
        earlier, num_values = dict[str, Mapping[str, float | None]](), 0
        for number in sorted(self._metrics, reverse=True):
            num_values += len(self._metrics[number])
            if num_values > MAX_EARLIER_VALUES:
                break
            earlier[str(number)] = self._metrics[number]
        return earlier

    def _read_metrics(self, step: int, uri: str) -> dict[int, Mapping[str, float | None]]:
        try:
            read = (steps.read_metadata(uri.rpartition("/")[2]) for steps in self._places.each)
            metadata = next(filter(None, read), {})
        except CloudckptError as error:
            _log.warning("plots will lack removed steps up to %d, whose metrics could not be read: %s", step, error)
            return {}
        metrics = {**parse_earlier_metrics(metadata), step: parse_metrics(metadata)}
        return {number: check_metrics(values) for number, values in metrics.items() if values}

    def note_objects(self, step: int, names: Iterable[str], *, may_remove: bool = False) -> None:
        """Record what is saved. Warn once if a save lacks what an earlier one had.

        `may_remove` is True if retention may remove that step.
        """
        own = dict.fromkeys(names, step)
        lacking = [name for name in self._objects if name not in own]
        if lacking and not self._has_warned_of_lacking:
            self._has_warned_of_lacking = True
            _log.warning(
                "step %d is saved without %s, which step %d has. A restart from this step lacks that. %sPass it to "
                "each save, or save such steps under another root",
                step,
                quote_names(lacking),
                max(self._objects[name] for name in lacking),
                "Retention may remove the last step that has it. " if may_remove else "",
            )
        self._objects |= own

    def note_not_due(self, step: int, metrics: Mapping[str, object] | None) -> None:
        """Record a step that is not saved, because it is not due, and its metrics, which no save keeps."""
        self._last_not_due = step
        self._dropped_metrics.update(dict.fromkeys(metrics if isinstance(metrics, Mapping) else (), step))

    def warn_of_dropped_metrics(self, step_save: StepSave) -> None:
        """Warn once if a step is saved without metrics that were passed only for steps that were not due."""
        dropped = [name for name in self._dropped_metrics if name not in (step_save.metrics or {})]
        if dropped and step_save.rank == 0 and not self._has_warned_of_dropped:
            self._has_warned_of_dropped = True
            step = self._dropped_metrics[dropped[0]]
            advice = (
                "an earlier save of this step had them, and was not due. Pass metrics= to this one, too"
                if step == step_save.step
                else f"they were passed for step {step}, which was not due, so that no step has them. Pass force=True "
                "to save such a step, or measure if is_due(step) is True"
            )
            names = name_all("metric", [*map(repr, dropped)])
            _log.warning("step %d is saved without the %s: %s", step_save.step, names, advice)
        self._dropped_metrics.clear()

    def warn_of_unsaved_end(self) -> None:
        """Warn, once, if the last step that this manager was called for is not saved, because it was not due."""
        step, self._last_not_due = self._last_not_due, None
        last, current = self.last, self.current
        if step is None or (last is not None and not last.reaches_root):  # `warn_of_unowed` warns of the latter
            return
        if last is not None and current is not None and current.step >= step:
            return
        _log.warning(
            "%s was due. A new start begins %s. At the end of a run, save its last step before the close: "
            "manager.save(%d, …, force=True)",
            f"this run has saved nothing under {self._places.root.location.uri}, because no step up to {step}"
            if last is None
            else f"step {step}, the last one, is not saved under {self._places.root.location.uri}: no step after "
            f"{last.step}",
            "from scratch" if current is None else f"after step {current.step}",
            step,
        )

    def warn_of_unowed(self) -> None:
        """Warn if the last save of this manager is in the fast place alone, and the root never gets it."""
        last, root = self.last, self._places.root
        if last is None or last.rank or last.reaches_root or last.failure is not None:
            return
        try:
            newest = root.find_latest()
        except CloudckptError as error:
            has = f"cannot be asked for its newest step: {error.message}"
        else:
            has = "has no step" if newest is None else f"has step {newest.step} as its newest"
        _log.warning(
            "step %d, the last one, is in the fast place alone, at %s, and %s %s. At the end of a run, save its last "
            "step for the root, too, before the close: manager.save(%d, …, force=True)",
            last.step, last.uri, root.location.uri, has, last.step,
        )  # fmt: skip

    def may_be_committed(self, step: int) -> bool:
        """Return True if one of the last saves, of `step`, failed without an answer to its commit."""
        if self.last is not None and self.last.step == step:
            self.finish(self.last)
        last_tries = itertools.takewhile(lambda failure: failure.step == step, reversed(self.failures.all))
        return self._unraised is not None and any(
            isinstance(failure.error, CommitUnknownError) for failure in last_tries
        )

    def find_base(self, uri: str) -> str | None:
        """Return the newest other step of a place, for `Options.unchanged`. Rank 0 calls this when the save begins."""
        place, root = uri.rpartition("/")[0], self._places.root
        if place not in self._base_uris:
            latest = root.find_latest() if place == root.location.uri else None
            self._base_uris[place] = None if latest is None else latest.uri
        return None if self._base_uris[place] == uri else self._base_uris[place]

    def take_unraised(self) -> SaveFailure | None:
        """Return the failure of the last save, once, if nothing has raised it."""
        failure, self._unraised = self._unraised, None
        return failure

    def drop_resume_hint(self) -> None:
        """Print nothing when the interpreter ends."""
        _with_resume_hint.discard(self)

    def describe_last_step(self) -> str:
        """Return where the run can resume, for the last line of a traceback. Makes no request: the store may hang."""
        words = f"no step was committed under {self._places.root.location.uri} in this run"
        if self.last_committed is not None:
            step, uri = self.last_committed
            words = f"the last committed step is {step} ({uri}). Start the program again to resume"
        elif self._last_restored is not None:
            step, uri = self._last_restored
            words += f", which was restored from step {step} ({uri})"
        if (handle := self.in_flight) is not None:
            words += f". The save to {handle.uri} is still running"
        return words

    def warn_of_save_in_flight(self) -> None:
        """Say that the end of the program waits for a save, if one is running."""
        if (running := self.in_flight) is not None:
            _log.warning("stopping: waiting for the save in flight to %s", running.uri)

    def print_resume_hint(self) -> None:
        """Print where the run can resume."""
        self.warn_of_save_in_flight()  # the interpreter completes it at its exit
        if self.last is not None:
            self.finish(self.last)
        sys.stderr.write(f"cloudckpt: {self.describe_last_step()}\n")

    def _log_tolerated(self, failure: SaveFailure, rank: int) -> None:
        kind, limit = type(failure.error).__name__, self.failures.limit
        count = f"{self.failures.in_a_row} in a row; {limit} end it"
        is_fast = self._places.fast is not None and self._places.fast.has_step(failure.uri)
        place: Place = "fast" if is_fast else "root"
        words = f"the save of step {failure.step} failed, and training continues ({count}): {failure.error}"
        event = Event(
            name="save.tolerated", uri=failure.uri, rank=rank, place=place, error=kind, message=str(failure.error)
        )
        log_and_deliver(event, self._options, words=words)


@atexit.register
def _print_resume_hints() -> None:
    """Say where runs can resume, at the end of a script that Ctrl-C has ended without the context of a manager.

    An interactive session continues after Ctrl-C, and keeps the error in ``sys.last_value``.
    """
    is_interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    if is_interrupted and not hasattr(sys, "ps1") and not is_forked():
        for history in [*_with_resume_hint]:
            history.print_resume_hint()
