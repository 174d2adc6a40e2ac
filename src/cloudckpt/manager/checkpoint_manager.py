"""Save the checkpoints of one run when they are due, restore the newest, remove superseded ones."""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, SupportsFloat, TypeAlias

import torch.distributed as dist
from typing_extensions import Self

from cloudckpt._display import Listing, add_note, pairs_to_html
from cloudckpt._this_process import OfThisProcess, is_forked, refuse_in_fork
from cloudckpt.api import async_save, entries_of, load, prepare_async_save, save
from cloudckpt.background import in_flight
from cloudckpt.background.handle import AsyncSave
from cloudckpt.dcp import LoadPlanner, SavePlanner
from cloudckpt.dcp.live_loaders import warn_of_shared_generator
from cloudckpt.dcp.live_objects import LiveObjects, Model, Optimizers
from cloudckpt.dcp.reader import ObjectStoreReader
from cloudckpt.dcp.renaming import Rename
from cloudckpt.dcp.save_and_load import RankCalls, SavedMetadata, SaveOrLoadError, causes_of, rank_in
from cloudckpt.dcp.writer import ObjectStoreWriter, require_collectives
from cloudckpt.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptCheckpointError,
    InvalidOptionError,
    SaveInFlightError,
    name_all,
    raised_via,
)
from cloudckpt.events import Event
from cloudckpt.inspect.catalog import METRICS_KEY, Mode
from cloudckpt.manager.debts import FAST_KEY, Debts, DrainReport, make_record
from cloudckpt.manager.places import FastPlace, Found
from cloudckpt.manager.policies import (
    Failures,
    OnFailure,
    RetentionPolicy,
    SaveFailure,
    SaveSchedule,
    choose_mode,
    explain_missing_metric,
    is_store_failure,
    keep_newest_of_each_step,
    sort_best_first,
)
from cloudckpt.manager.restore import Candidate, Restored, check_fresh_start, load_newest, raise_missing
from cloudckpt.manager.retention import Retention, RetentionReport, lock_root
from cloudckpt.manager.steps import (
    STEP_KEY,
    StepInfo,
    Steps,
    build_metadata,
    check_metrics,
    format_folder,
    own_uris,
    parse_folder,
    parse_step_uri,
)
from cloudckpt.options import Options, naming_keywords, require_options
from cloudckpt.pipeline.context import log_and_deliver
from cloudckpt.report import LoadReport, SkippedCheckpoint
from cloudckpt.uri import parse_location

_log = logging.getLogger("cloudckpt")

_RESERVED = (STEP_KEY, METRICS_KEY)
OnDamaged: TypeAlias = Literal["raise", "skip", "replace"]
_ON_DAMAGED = ("raise", "skip", "replace")
_FAST_KEEP = 2
_resume_hints: set[weakref.WeakMethod[Callable[[], None]]] = set()
"""Functions that print where a run can resume, one for each manager that has saved since it was closed."""


@dataclass(slots=True, kw_only=True)
class _StepState:
    """A step that this manager has saved, with its result, or restored, without one."""

    step: int
    uri: str = ""
    is_fast: bool = False
    """True if the step was saved to the fast place, and not directly to the root."""
    is_owed: bool = False
    """True if the step was due at the root, so that a fast place has to copy it there."""
    may_overwrite: bool = False
    is_again: bool = False
    """True if the fast place has the step, and the root is not owed it: a save there replaces it."""
    numbers: Mapping[str, float | None] | None = None
    result: AsyncSave | SavedMetadata | None = None
    rank: int = 0
    is_noted: bool = False
    """True once the manager has recorded the outcome."""

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


class CheckpointManager(OfThisProcess):
    """Manages the checkpoints of one run, each at ``<root>/step-<n>``.

    Every rank makes one with the same arguments and uses it from one thread. As a context manager, it ends with
    `close`. The coordinator removes superseded checkpoints in a background thread after each commit.

    Args:
        root: Folder of all steps.
        save_every: `save` skips steps that are not multiples of this number. A ``datetime.timedelta``: a save is due
            once so much time has passed since the last one began, and that has ended. The clock of rank 0 decides, and
            the ranks ask it a few times in each interval, at the same steps.
        keep_last: Number of newest checkpoints to keep. None keeps all, unless `keep_for` is given.
        keep_every: Also keep multiples of this number of steps.
        keep_best: Also keep the best by a metric, as in ``("loss", "min", 3)``.
        keep_for: Keep the checkpoints that were committed within this ``datetime.timedelta`` before the newest.
        keep_one_per: Also keep the first checkpoint of each such ``datetime.timedelta``, as in ``timedelta(days=1)``,
            which begins at midnight UTC.
        fast: A place in front of `root` that answers sooner, such as a directory on an NVMe drive or in ``/dev/shm``.
            Saves are committed there, and those that are due at `root` are then copied to it in a background thread of
            rank 0. If each host has a directory of its own there, those are saved to `root` directly. `restore` takes
            the newest step of both. See places.md.
        fast_every: `save` also saves multiples of this number of steps, or after each such ``datetime.timedelta``, to
            `fast` alone.
        fast_keep: Number of newest checkpoints that stay in `fast`, besides those that `root` does not have yet.
        on_damaged: Policy for a step that `restore` finds damaged. ``"skip"`` skips it with a warning, never overwrites
            or removes it, and saves the same step beside it as ``step-<n>-again-<k>``. ``"replace"`` skips it, and
            overwrites it when the step is saved again. ``"raise"`` raises `CorruptCheckpointError`.
        on_failure: Policy for a save that fails because of the store. ``"raise"`` raises the error. ``"warn"`` logs a
            warning, on all ranks, and training continues. Both raise every other error: a value that cannot be saved, a
            step that exists, a lost rank.
        max_failures: Number of failures in a row after which ``"warn"`` raises the last one.
        async_: Save with `cloudckpt.async_save` instead of `cloudckpt.save`.
        verify_first: See `cloudckpt.load_latest`.
        allow_pickle: See `cloudckpt.load`.
        process_group: See `cloudckpt.save`.
        no_dist: See `cloudckpt.save`.
        use_collectives: See `cloudckpt.save`.
        options: Options of all saves and loads.

    Raises:
        InvalidOptionError: An argument is invalid.
        InvalidURIError: `root` is not a valid URI.

    Example::

        with cloudckpt.CheckpointManager("s3://bucket/run", save_every=100, keep_last=3) as manager:
            restored = manager.restore(model=model, optimizer=optimizer)  # None: a fresh start
            for step in range(restored.step + 1 if restored else 0, 1000):
                train_on()
                manager.save(step, model=model, optimizer=optimizer)

    """

    @naming_keywords
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: int | timedelta | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, Mode, int] | None = None,
        keep_for: timedelta | None = None,
        keep_one_per: timedelta | None = None,
        fast: str | os.PathLike[str] | None = None,
        fast_every: int | timedelta | None = None,
        fast_keep: int = _FAST_KEEP,
        on_damaged: OnDamaged = "skip",
        on_failure: OnFailure = "raise",
        max_failures: int = 3,
        async_: bool = True,
        verify_first: bool = False,
        allow_pickle: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
        options: Options | None = None,
    ) -> None:
        policy = RetentionPolicy(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            keep_for=keep_for,
            keep_one_per=keep_one_per,
        )
        self._schedule = SaveSchedule(save_every)
        if on_damaged not in _ON_DAMAGED:
            words = ", ".join(map(repr, _ON_DAMAGED))
            raise InvalidOptionError(f"CheckpointManager: on_damaged must be one of {words}, not {on_damaged!r}")
        require_collectives(use_collectives=use_collectives)
        self._failures = Failures(on_failure, max_failures)
        self._unraised: SaveFailure | None = None
        """Failure of the last save, until another save begins or `close` raises the failure."""
        self._options = require_options(options)
        reserved = (*_RESERVED, *([] if fast is None else [FAST_KEY]))
        taken = [name for name in reserved if name in self._options.metadata]
        if taken:
            raise InvalidOptionError(
                f"CheckpointManager: Options.metadata must not contain {', '.join(map(repr, taken))}, because the "
                "manager saves the step, the metrics and the place there. Use other names"
            )
        self._is_async = async_
        self._process_group, self._no_dist = process_group, no_dist
        self._steps = Steps(parse_location(root), self._options)
        self._allow_pickle, self._verify_first, self._on_damaged = allow_pickle, verify_first, on_damaged
        self._damaged: frozenset[str] = frozenset()
        """URIs of the steps that `restore` found damaged, until they are replaced. Equal on all ranks."""
        self._note_lock = threading.Lock()
        self._retention = Retention(self._steps, policy, get_damaged_uris=lambda: self._damaged)
        if fast is None and (fast_every is not None or fast_keep != _FAST_KEEP):
            raise InvalidOptionError("CheckpointManager: fast_every and fast_keep need a place: pass fast='/nvme/run'")
        if fast is not None and self._options.unchanged == "reference":
            raise InvalidOptionError(
                "CheckpointManager: Options(unchanged='reference') cannot be used with a fast place, from which whole "
                "steps are copied to the root. Leave one of them out"
            )
        self._fast = None
        if fast is not None:
            debts = Debts(
                parse_location(fast),
                self._steps,
                root_policy=policy,
                get_damaged_uris=lambda: self._damaged,
                on_drained=self._retention.start,
            )
            self._fast = FastPlace(debts, every=fast_every, keep=fast_keep)
        self._has_checked_loaders = False
        self._last: _StepState | None = None
        self._current: _StepState | None = None
        """The step that holds the job's state: the last save, or the step that was restored since."""
        self._last_committed: tuple[int, str] | None = None
        """Number and URI of the step that this manager committed last."""
        self._base: str | None = None
        """URI of the step to which the next save may refer: the last one that was committed or restored. Empty after
        damage was found, since other steps may share the damaged data. None before the first save or restore."""
        self._restored: Restored | None = None
        self._unknown_metrics: set[str] = set()
        """Metrics that no step has, and for which a warning has said so."""
        self._dropped: dict[str, int] = {}
        """Metrics that were passed since the last save for steps that were not due, each with its last step."""
        self._has_warned_of_dropped = self._has_warned_of_higher = False
        self._resume_hint = weakref.WeakMethod(self._print_resume_hint, _resume_hints.discard)

    def __repr__(self) -> str:
        last = "no save by this process yet" if self._last is None else f"last save step {self._last.step}"
        return f"<CheckpointManager of {self.root}: {last}>"

    def _repr_html_(self) -> str:
        """Show the state that is known without a request to the store."""
        last = self._last
        handle = last.result if last is not None and isinstance(last.result, AsyncSave) else None
        values = {
            "root": self.root,
            "save_every": self._schedule.save_every,
            **dataclasses.asdict(self._retention.policy),
            "last save": None if last is None else f"step {last.step}",
            "phase": None if handle is None else handle.progress.phase,
            "retention": self.retention,
            "failures": self.failures,
        }
        return pairs_to_html("CheckpointManager", values)

    @property
    def root(self) -> str:
        """URI of the folder of all steps."""
        return self._steps.location.uri

    @property
    def in_flight(self) -> AsyncSave | None:
        """Handle of the save that is running, or None."""
        result = self._last.result if self._last is not None else None
        return result if isinstance(result, AsyncSave) and not result.done() else None

    @property
    def retention(self) -> RetentionReport | None:
        """Report of the last retention run. None before the first, and always on ranks other than the coordinator."""
        return self._retention.report

    @property
    def drains(self) -> DrainReport | None:
        """Report of the last look for steps that `root` is owed. None without `fast`, and on ranks other than 0.

        ``drained`` has the copies of that look alone, and ``failed`` all steps that `root` is still owed.
        """
        return None if self._fast is None else self._fast.debts.report

    @property
    def failures(self) -> tuple[SaveFailure, ...]:
        """The last 100 saves of this manager that failed because of the store. Equal on all ranks if none runs."""
        return self._failures.all

    def uri_of(self, step: int) -> str:
        """Return the URI that this manager saves a step to under `root`. `steps` lists the URIs of committed steps.

        Args:
            step: Number of the step.

        Returns:
            ``<root>/step-<n>``, or ``<root>/step-<n>-again-<k>`` beside a damaged one.

        """
        return self._steps.location.child(self._choose_folder(_check_step(step))).uri

    def _choose_folder(self, step: int) -> str:
        """Return the name of the folder for a step: without damage in any place, unless damage is to be replaced."""
        again = 0
        while self._on_damaged == "skip" and not self._damaged.isdisjoint(self._uris_of(format_folder(step, again))):
            again += 1
        return format_folder(step, again)

    @property
    def _places(self) -> list[Steps]:
        """The root's steps, and those of the fast place."""
        return [self._steps] if self._fast is None else [self._steps, self._fast.steps]

    @property
    def _where(self) -> str:
        return " or ".join(steps.location.uri for steps in self._places)

    def _read_times(self) -> None:
        """Read the times of all commits, so that the next one is later in every place."""
        for steps in self._places:
            steps.read_times()

    def _uris_of(self, folder: str) -> list[str]:
        """Return the URIs of a folder in all places."""
        return [steps.location.child(folder).uri for steps in self._places]

    def is_due(self, step: int) -> bool:
        """Return True if `save` saves a step without ``force``.

        If ``save_every`` is a time, all ranks have to call it, or none.

        Args:
            step: Number of the step.

        Returns:
            True for multiples of ``save_every`` or ``fast_every``, and if ``save_every`` is None. For a time, the
            answer for a step stays the same until `save` or `is_due` is called with another step.

        """
        step = _check_step(step)
        is_due_now = self._is_due(self._schedule, step)
        if self._fast is not None and self._fast.schedule is not None:
            is_due_now |= self._is_due(self._fast.schedule, step)
        return is_due_now

    def _is_due(self, schedule: SaveSchedule, step: int) -> bool:
        return schedule.is_due(
            step,
            is_saving=lambda: self.in_flight is not None,
            ask=lambda decide: self._make_rank_calls("asking if a step is due under").broadcast("find", decide),
        )

    def prepare(
        self,
        state_dict: dict[str, Any] | None = None,
        *,
        model: Model | None = None,
        optimizer: Optimizers | None = None,
        scheduler: Any = None,
        dataloader: Any = None,
        extra: dict[str, Any] | None = None,
        random_state: bool = True,
    ) -> None:
        """Prepare the first background save, so that it blocks training no longer than later ones.

        Allocates the memory of the snapshot, plans the copies, connects the ranks and looks at the steps under the
        root. All ranks call this method, after `restore` or after the optimizer's first step: a fresh optimizer has no
        state. A manager with ``async_=False`` needs no memory.

        Args:
            state_dict: See `save`, also for all other arguments.
            model: See `save`.
            optimizer: See `save`.
            scheduler: See `save`.
            dataloader: See `save`.
            extra: See `save`.
            random_state: See `save`.

        Raises:
            CheckpointException: Not all ranks came.
            UnsupportedValueError: The state cannot be copied on this rank.

        """
        if rank_in(self._process_group, no_dist=self._no_dist) == 0:
            self._read_times()
        if not self._is_async:
            return
        objects = LiveObjects(model, optimizer, scheduler, dataloader, extra, has_random_state=random_state)
        state_dict, _ = entries_of(
            objects, state_dict, self.root, self._process_group, no_dist=self._no_dist, doing="saving"
        )
        prepare_async_save(
            state_dict, self.root, process_group=self._process_group, no_dist=self._no_dist, options=self._options
        )

    @naming_keywords
    def save(
        self,
        step: int,
        state_dict: dict[str, Any] | None = None,
        *,
        model: Model | None = None,
        optimizer: Optimizers | None = None,
        scheduler: Any = None,
        dataloader: Any = None,
        extra: dict[str, Any] | None = None,
        random_state: bool = True,
        metrics: Mapping[str, SupportsFloat] | None = None,
        force: bool = False,
        overwrite: bool = False,
        planner: SavePlanner | None = None,
    ) -> AsyncSave | SavedMetadata | SaveFailure | None:
        """Save a step from all ranks with `cloudckpt.async_save` or `cloudckpt.save`.

        The next save or `close` raises the failure of a background save. With ``on_failure="warn"``, `close` raises the
        failure of the last save, and a save raises a failure only after `max_failures` in a row.

        Args:
            step: Number of the step.
            state_dict: See `cloudckpt.save`. Pass it, or live objects.
            model: See `cloudckpt.save`.
            optimizer: See `cloudckpt.save`.
            scheduler: See `cloudckpt.save`.
            dataloader: See `cloudckpt.save`.
            extra: See `cloudckpt.save`.
            random_state: See `cloudckpt.save`.
            metrics: Numbers by name, saved in the manifest. The coordinator's count.
            force: Save also a step that is not due. The step that this manager saved last is not saved again: the call
                waits for that save and, unless it failed, returns its result. A step that was restored since is not
                saved again either; the call returns None. Neither gets new `metrics`. With a fast place, a step there
                that is not owed to the root is saved again, with the `metrics` of this call.
            overwrite: Replace a step that exists, for example from an earlier start of this job.
            planner: See `cloudckpt.save`.

        Returns:
            The result of `async_save` or `save`. None, without any I/O, if the step is not due: its `metrics` are not
            kept, and the next save without metrics warns, once. The failure, if the save has failed already and
            ``on_failure="warn"`` lets training go on.

        Raises:
            CheckpointExistsError: The step exists and `overwrite` is False.
            CheckpointException: See `cloudckpt.save`.

        """
        step, numbers = _check_step(step), check_metrics(metrics)
        if not force and not self.is_due(step):
            self._dropped.update(dict.fromkeys(numbers or (), step))
            return None
        refuse_in_fork()
        is_owed = force or self._is_due(self._schedule, step)
        fast = self._open_fast()
        if fast is None and not is_owed:
            return None
        rank = rank_in(self._process_group, no_dist=self._no_dist)
        is_coordinator = rank == 0
        # The metrics play no part: they may differ between ranks, and all ranks must take the same branch.
        current = self._current
        is_saved = force and not overwrite and current is not None and current.step == step and current.failure is None
        if is_saved and current is not None and current.reaches_root:
            if is_coordinator and metrics is not None and numbers != current.numbers:
                _log.warning("%s exists already and keeps its metrics", self.uri_of(step))
            return current.result
        overwrite = overwrite or self._is_to_replace(step)
        folder = self._choose_folder(step)
        if is_coordinator and random_state and not self._has_checked_loaders:
            self._has_checked_loaders = True
            warn_of_shared_generator(dataloader)
        settings: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "dataloader": dataloader,
            "extra": extra,
            "random_state": random_state,
            "planner": planner,
            "process_group": self._process_group,
            "no_dist": self._no_dist,
        }
        if is_coordinator:
            self._look_before_save(step, overwrite=overwrite)
        if is_owed:
            self._schedule.note_save()
        if self._fast is not None and self._fast.schedule is not None and not is_saved:
            self._fast.schedule.note_save()
        saved = _StepState(
            step=step, is_owed=is_owed, may_overwrite=overwrite, is_again=is_saved, numbers=numbers, rank=rank
        )
        if fast is not None:
            ranks = self._make_rank_calls("choosing the place of a step under")
            saved.is_fast, saved.is_owed = fast.choose_place(ranks, folder, is_owed=is_owed, may_overwrite=overwrite)
        return self._save_to(saved, folder, state_dict, settings)

    def _look_before_save(self, step: int, *, overwrite: bool) -> None:
        """Read the times of all commits; before the first save, also warn of other jobs."""
        self._read_times()
        if self._last is None:
            self._steps.look_for_others()
            if not overwrite:
                self._warn_of_higher(step, "the first save of this job is step")

    def _warn_of_higher(self, step: int, begin: str) -> None:
        """Warn, once, of steps above the first that this manager saves, or above the one that was committed last."""
        known_uris = self._steps.known_uris - self._damaged
        higher = sorted({number for uri in known_uris if (number := parse_step_uri(uri)) > step})
        if higher and not self._has_warned_of_higher:
            self._has_warned_of_higher = True
            _log.warning(
                "%s %d, and %s also has %s. If another job saves there, pass another root, because each job restores "
                "and removes the other's steps. Delete higher steps that are not wanted (cloudckpt rm), or continue "
                "from one with restore(…, step=…)",
                begin,
                step,
                self.root,
                name_all("step", higher),
            )

    def _warn_of_dropped(self, saved: _StepState) -> None:
        """Warn once if a step is saved without metrics that were passed only for steps that were not due."""
        dropped = [name for name in self._dropped if name not in (saved.numbers or {})]
        if dropped and saved.rank == 0 and not self._has_warned_of_dropped:
            self._has_warned_of_dropped = True
            _log.warning(
                "step %d is saved without the %s, passed for step %d, which was not due, so that nothing has it. Pass "
                "force=True to save such a step, or measure if is_due(step) is True",
                saved.step,
                name_all("metric", [*map(repr, dropped)]),
                self._dropped[dropped[0]],
            )
        self._dropped.clear()

    def _save_to(
        self, saved: _StepState, folder: str, state_dict: dict[str, Any] | None, settings: dict[str, Any]
    ) -> AsyncSave | SavedMetadata | SaveFailure | None:
        """Save to the chosen place. If the fast place fails at once, save to the root."""
        self._warn_of_dropped(saved)
        own_uris.update(self._uris_of(folder))
        steps, metadata = self._steps, build_metadata(saved.step, saved.numbers or {})
        if self._fast is not None and saved.is_fast:
            steps = self._fast.steps
            metadata[FAST_KEY] = make_record(
                self._steps.location, is_owed=saved.is_owed, may_overwrite=saved.may_overwrite
            )
        options = dataclasses.replace(steps.options, metadata={**steps.options.metadata, **metadata})
        saved.uri = steps.location.child(folder).uri
        if saved.rank == 0 and folder != format_folder(saved.step):
            _log.warning("saving step %d as %s beside the damaged one", saved.step, saved.uri)
        call = async_save if self._is_async else save
        try:
            overwrite = saved.may_overwrite or (saved.is_fast and saved.is_again)
            writer = ObjectStoreWriter(
                saved.uri,
                options=options,
                overwrite=overwrite,
                _find_base=functools.partial(self._find_base, saved.uri),
                _via="manager",
                _hosts=self._fast.hosts if self._fast is not None and saved.is_fast else None,
            )
            saved.result = call(state_dict, storage_writer=writer, **settings)
        except (SaveOrLoadError, SaveInFlightError) as error:
            if saved.is_fast and is_store_failure(error):
                if saved.rank == 0:
                    _log.warning("saving to %s, because the save to %s failed: %s", self.root, saved.uri, error)
                saved.is_fast = False
                return self._save_to(saved, folder, state_dict, settings)
            with self._note_lock:
                failure = self._unraised = self._failures.take(saved.step, saved.uri, error)
            if failure is None:
                raise
            self._log_tolerated(failure, saved.rank)
            return failure
        self._last = self._current = saved
        if saved.rank == 0:
            _resume_hints.add(self._resume_hint)
        self._unraised = None
        if self._fast is not None and not saved.is_fast:
            self._fast.has_failed = False
        if isinstance(saved.result, AsyncSave):
            saved.result.committed.add_done_callback(lambda _: self._note_end(saved))
        else:
            self._note_end(saved)
        return saved.result

    def _find_base(self, uri: str) -> str | None:
        """Return the newest other step of the root, for `Options.unchanged`. Rank 0 calls this when the save begins."""
        if self._base is None:
            latest = self._steps.find_latest()
            self._base = "" if latest is None else latest.uri
        return None if self._base in ("", uri) else self._base

    @naming_keywords
    def restore(
        self,
        state_dict: dict[str, Any] | None = None,
        step: int | None = None,
        *,
        model: Model | None = None,
        optimizer: Optimizers | None = None,
        scheduler: Any = None,
        dataloader: Any = None,
        extra: dict[str, Any] | None = None,
        random_state: bool = True,
        strict: bool | None = None,
        rename: Rename | None = None,
        planner: LoadPlanner | None = None,
    ) -> Restored | None:
        """Load a step into live objects or into `state_dict`, in place, on all ranks.

        Unless ``strict=False``, live objects must take all entries of the step, so that nothing is lost silently. A
        state dict may leave out entries, unless ``strict=True``, but no part of an optimizer's state. Without `step`,
        the whole step that was committed last is loaded, as by `cloudckpt.load_latest`. All ranks skip damaged steps
        with a warning, and the result lists them. A save of this manager in flight is waited for; if it fails, an
        earlier step is loaded.

        Args:
            state_dict: See `cloudckpt.load`. Pass it, or the live objects that `save` was given.
            step: Step to load, or None for the newest.
            model: See `cloudckpt.save`.
            optimizer: See `cloudckpt.save`.
            scheduler: See `cloudckpt.save`.
            dataloader: See `cloudckpt.save`.
            extra: See `cloudckpt.save`.
            random_state: See `cloudckpt.save`.
            strict: See `cloudckpt.load`. For live objects, None is the same as True.
            rename: See `cloudckpt.load`, as in ``{"optim": "optimizer"}``. A pair is ignored if the step has its new
                name and not its old one: the run has saved the step after the renaming.
            planner: See `cloudckpt.load`.

        Returns:
            The step that was loaded. None if there is no step at all: a fresh start, which changes nothing.

        Raises:
            CheckpointNotFoundError: `step` is not committed. The message lists the committed steps.
            CorruptCheckpointError: There are steps, and none of them can be loaded.
            StateDictMismatchError: The step does not fit the state dict or the live objects.

        """
        objects = LiveObjects(model, optimizer, scheduler, dataloader, extra, has_random_state=random_state)
        strict = strict is not False if objects.are_given else strict
        state_dict, _ = entries_of(
            objects,
            state_dict,
            self.root,
            self._process_group,
            no_dist=self._no_dist,
            doing="loading",
            strict=strict,
        )
        wanted = None if step is None else _check_step(step)
        reader_of = functools.partial(self._open_reader, strict=strict, rename=rename)
        if (running := self.in_flight) is not None:
            running.committed.wait()  # it may be the newest step, and its copy may still read the tensors
        self._open_fast()
        with contextlib.ExitStack() as stack:
            for steps in self._places:
                stack.enter_context(lock_root(steps.location.uri))
            stack.enter_context(raised_via("manager"))
            if wanted is not None:
                restored: Restored | None = self._restore_step(state_dict, wanted, planner, reader_of)
            else:
                restored = self._restore_newest(state_dict, planner, reader_of)
        if restored is not None:
            _log.info("restored step %d from %s", restored.step, restored.uri)
            if wanted is None and self._last is None and rank_in(self._process_group, no_dist=self._no_dist) == 0:
                self._warn_of_higher(restored.step, "this job continues from the step that was committed last,")
            self._restored = restored
            self._base = "" if self._damaged else restored.uri
        if self._fast is not None and rank_in(self._process_group, no_dist=self._no_dist) == 0:
            self._fast.start()  # copies that an earlier process has left undone
        return restored

    def steps(self) -> list[StepInfo]:
        """Return the committed steps with their metrics, lowest first. Makes no collective call.

        Each manifest is read once. A damaged manifest has no metrics.

        Raises:
            StoreError: A request failed.

        """
        committed = self._find_committed(with_metadata=True)
        return Listing(sorted(keep_newest_of_each_step(committed), key=lambda info: info.step))

    def latest(self) -> StepInfo | None:
        """Return the step that was committed last, or None if there is no step.

        Reads the manifest of this step, and the manifests in a fast place. A damaged manifest has no metrics.

        Raises:
            StoreError: A request failed.

        """
        if self._fast is not None:
            return next(iter(self._find_committed(with_metadata=True)), None)
        return self._steps.find_latest()

    def best(self, metric: str, mode: Mode | None = None) -> StepInfo | None:
        """Return the step with the best value of a metric. The newest wins if values are equal.

        Args:
            metric: Name of the metric.
            mode: ``"min"`` if low values are good, ``"max"`` if high values are. None: a word of the name decides, such
                as ``loss`` or ``acc``; the same words as for ``cloudckpt ls --metrics``.

        Returns:
            The step. None if no step has a finite value. If the steps have other metrics, and none has this one, a
            warning names them, once for each metric.

        Raises:
            InvalidOptionError: `mode` is another word; or it is None, and no word of the metric's name decides.
            StoreError: A request failed.

        """
        if mode is not None:
            choose_mode(metric, mode)
        committed = keep_newest_of_each_step(self._find_committed(with_metadata=True))
        if not any(metric in info.metrics for info in committed):  # it may be measured later, or be mistyped
            missing = explain_missing_metric(committed, metric)
            if missing is not None and metric not in self._unknown_metrics:
                self._unknown_metrics.add(metric)
                _log.warning("no step is the best under %s: %s", self.root, missing)
            return None
        return next(iter(sort_best_first(committed, metric, choose_mode(metric, mode))), None)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save in flight is committed and copied to the root, and superseded steps are removed.

        A checkpoint that could not be copied or removed is no error: see `drains` and `retention`.

        Args:
            timeout: Seconds to wait. None waits for ever.

        Raises:
            CheckpointException: The save failed, and neither its handle nor a later save has raised the failure, nor
                does ``on_failure="warn"`` let training go on.
            TimeoutError: Save, copies or removals have not ended within `timeout`, and go on.

        """
        refuse_in_fork()
        ends_at_s = None if timeout is None else time.monotonic() + timeout
        last = self._last
        if last is not None and isinstance(handle := last.result, AsyncSave):
            if not handle.committed.wait(timeout):
                raise TimeoutError(f"the background save to {handle.uri} did not end within {timeout} s and continues")
            self._note_end(last)
            if in_flight.find_unsettled() is handle:  # it failed, and nothing has raised the failure yet
                handle.result(0)
        self._wait_for_copies_and_removals(timeout, ends_at_s)

    def _wait_for_copies_and_removals(self, timeout: float | None, ends_at_s: float | None) -> None:
        if self._fast is not None and not self._fast.wait(_remaining_s(ends_at_s)):
            raise TimeoutError(
                f"steps were not copied from {self._fast.uri} to {self.root} within {timeout} s; the copy continues"
            )
        retentions = [self._retention] if self._fast is None else [self._fast.retention, self._retention]
        if not all(retention.wait(_remaining_s(ends_at_s)) for retention in retentions):
            raise TimeoutError(
                f"superseded checkpoints under {self.root} were not removed within {timeout} s; the removal continues"
            )

    def close(self, timeout: float | None = None) -> None:
        """Wait as `wait`, and for copies and removals also if the save failed. The manager stays usable.

        Raises the failure of the last save also with ``on_failure="warn"``, since no later save can.
        `cloudckpt.close` frees the memory that background saves keep for the process.

        Args:
            timeout: See `wait`, also for the errors.

        Raises:
            CheckpointError: On rank 0, the root does not have all steps that it is owed from the fast place.

        """
        ends_at_s = None if timeout is None else time.monotonic() + timeout
        try:
            self.wait(timeout)
            if not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # it may be called in a `finally`
                _resume_hints.discard(self._resume_hint)
        except SaveOrLoadError:
            with contextlib.suppress(TimeoutError):  # the failure of the save is raised
                self._wait_for_copies_and_removals(timeout, ends_at_s)
            raise
        failure, self._unraised = self._unraised, None
        if failure is not None:
            raise failure.error
        if self._fast is not None:
            self._fast.debts.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            if isinstance(error, KeyboardInterrupt) and (running := self.in_flight) is not None:
                _log.warning("stopping: waiting for the save in flight to %s", running.uri)
            self.close()
        except KeyboardInterrupt as again:
            error = again
            raise
        except (SaveOrLoadError, Exception) as failure:  # noqa: BLE001  # the error that left the context is raised
            kind = type(failure)
            _log.warning("the last save failed, too: %s.%s: %s", kind.__module__, kind.__qualname__, failure)
        finally:
            _resume_hints.discard(self._resume_hint)
            if isinstance(error, KeyboardInterrupt) and rank_in(self._process_group, no_dist=self._no_dist) == 0:
                add_note(error, self._describe_last_step())

    def _describe_last_step(self) -> str:
        """Return where the run can resume, for the last line of a traceback. Makes no request: the store may hang."""
        words = f"no step was committed under {self.root} in this run"
        if self._last_committed is not None:
            step, uri = self._last_committed
            words = f"the last committed step is {step} ({uri}). Start the program again to resume"
        elif self._restored is not None:
            words += f", which was restored from step {self._restored.step} ({self._restored.uri})"
        if (handle := self.in_flight) is not None:
            words += f". The save to {handle.uri} is still running"
        return words

    def _print_resume_hint(self) -> None:
        if self.in_flight is not None:  # the interpreter completes it at its exit
            _log.warning("stopping: waiting for the save in flight to %s", self.in_flight.uri)
        if self._last is not None:
            self._note_end(self._last)
        sys.stderr.write(f"cloudckpt: {self._describe_last_step()}\n")

    def _note_end(self, saved: _StepState) -> None:
        """Record a save's outcome, once. Each waiter calls this first, because the callback may run after the waiter.

        After a commit, forget the damage that it replaced, and start retention on the coordinator.
        """
        error, failure = saved.failure, None
        with self._note_lock:
            if saved.is_noted:
                return
            saved.is_noted = True
            if error is None:
                self._failures.in_a_row = 0
                self._last_committed = saved.step, saved.uri
                self._base = saved.uri
                self._damaged -= {saved.uri}
                self._start_after(saved)  # before a waiter checks if a copy or a removal runs
            elif isinstance(saved.result, AsyncSave):
                failure = self._take_failure(saved, error)
                if failure is not None:
                    saved.result.committed.exception(0)  # so that no other save raises it
                    self._unraised = self._unraised or failure
        if failure is not None:
            self._log_tolerated(failure, saved.rank)

    def _start_after(self, saved: _StepState) -> None:
        if self._fast is not None and saved.is_fast:
            if self._fast.leads(saved.rank):
                self._fast.note_commit(saved.uri, is_owed=saved.is_owed)
        elif saved.rank == 0:
            self._steps.known_uris.add(saved.uri)
            self._retention.start(saved.uri)

    def _take_failure(self, saved: _StepState, error: BaseException) -> SaveFailure | None:
        """Record a failed background save. Returns None if its error is to be raised."""
        if self._fast is not None and saved.is_fast and is_store_failure(error):
            self._fast.has_failed = True
            if not saved.is_owed:  # `close` raises it, if no save comes after it
                return SaveFailure(step=saved.step, uri=saved.uri, error=copy.copy(error))
        return self._failures.take(saved.step, saved.uri, error)

    def _log_tolerated(self, failure: SaveFailure, rank: int) -> None:
        kind, limit = type(failure.error).__name__, self._failures.limit
        count = f"{self._failures.in_a_row} in a row; {limit} end it"
        if self._fast is not None and self._fast.has(failure.uri):
            count = f"the next one is saved to {self.root}"
        words = f"the save of step {failure.step} failed, and training continues ({count}): {failure.error}"
        event = Event(name="save.tolerated", uri=failure.uri, rank=rank, error=kind, message=str(failure.error))
        log_and_deliver(event, self._options, words=words)

    def _note_damage(self, uri: str) -> None:
        with self._note_lock:
            self._damaged |= {uri}
            self._base = ""

    def _is_to_replace(self, step: int) -> bool:
        """Return True if `step` is to be overwritten: it is damaged, or one of the last saves may have committed it."""
        last = self._last
        if last is not None and last.step == step:
            self._note_end(last)
        last_tries = itertools.takewhile(lambda failure: failure.step == step, reversed(self._failures.all))
        if self._unraised is not None and any(isinstance(failure.error, CommitUnknownError) for failure in last_tries):
            return True
        return self._on_damaged == "replace" and not self._damaged.isdisjoint(self._uris_of(format_folder(step)))

    def _find_committed(self, step: int | None = None, *, with_metadata: bool) -> list[StepInfo]:
        """Return the committed steps of all places, or the checkpoints of one step, newest first."""
        return [info for info, _ in self._find_placed(step, with_metadata=with_metadata)]

    def _find_placed(
        self, step: int | None, *, with_metadata: bool, gathered: Sequence[Found] | None = None
    ) -> list[tuple[StepInfo, bool]]:
        """Return the committed steps of all places, newest first, each with True if the root has it or is owed it."""
        if self._fast is not None:
            return self._fast.find_committed(step, with_metadata=with_metadata, gathered=gathered)
        return [(info, True) for info in self._steps.find_committed(step, with_metadata=with_metadata)]

    def _find_candidates(self, ranks: RankCalls, step: int | None = None) -> list[Candidate]:
        """Return the committed steps of all places, newest first, by their URIs on this rank. All ranks call it."""
        fast = self._fast
        gathered = None if fast is None else fast.gather(ranks)

        def find() -> list[Candidate]:
            placed = self._find_placed(step, with_metadata=False, gathered=gathered)
            if not placed and step is None:
                check_fresh_start(self._steps, self._options)
            return [
                Candidate(
                    uri=info.uri,
                    copy_uri=info.copy_uri,
                    reaches_root=reaches_root,
                    holder=None if fast is None or not fast.has(info.uri) else fast.holder_of(info.uri),
                )
                for info, reaches_root in placed
            ]

        candidates = ranks.broadcast("find", find)
        if fast is None:
            return candidates
        here = fast.steps.location  # hosts may have their directories under different paths
        return [
            candidate
            if candidate.holder is None
            else dataclasses.replace(candidate, uri=here.child(candidate.uri.rpartition("/")[2]).uri)
            for candidate in candidates
        ]

    def _open_reader(self, candidate: Candidate, *, strict: bool | None, rename: Rename | None) -> ObjectStoreReader:
        fast = self._fast if candidate.holder is not None else None
        steps = self._steps if fast is None else fast.steps
        return ObjectStoreReader(
            candidate.uri,
            options=steps.options,
            allow_pickle=self._allow_pickle,
            strict=strict,
            rename=rename,
            _via="",
            _copy=None if candidate.copy_uri is None else (candidate.copy_uri, self._options),
            _may_be_renamed=True,
            _hosts=None if fast is None else fast.hosts,
            _holder=candidate.holder or 0,
        )

    def _restore_newest(
        self,
        state_dict: dict[str, Any],
        planner: LoadPlanner | None,
        reader_of: Callable[[Candidate], ObjectStoreReader],
    ) -> Restored | None:
        loaded = load_newest(
            state_dict,
            self.root,
            self._where,
            self._find_candidates,
            reader_of=reader_of,
            planner=planner,
            process_group=self._process_group,
            no_dist=self._no_dist,
            verify_first=self._verify_first,
            options=self._options,
            on_skip=self._handle_skipped,
        )
        if loaded is None:
            _log.info("no step is committed under %s: fresh start", self._where)
            return None
        return self._take_restored(*loaded)

    def _restore_step(
        self,
        state_dict: dict[str, Any],
        step: int,
        planner: LoadPlanner | None,
        reader_of: Callable[[Candidate], ObjectStoreReader],
    ) -> Restored:
        ranks = self._make_rank_calls()
        loaded = self._find_candidates(ranks, step)[:1]
        candidate = loaded[0] if loaded else Candidate(uri=self._steps.uri_of(step))
        try:
            report = load(
                state_dict,
                candidate.uri,
                storage_reader=reader_of(candidate),
                planner=planner,
                process_group=self._process_group,
                no_dist=self._no_dist,
            )
        except SaveOrLoadError as error:
            # All ranks get the same failures, so all of them take the same branch.
            causes = causes_of(error)
            if causes and all(isinstance(cause, CheckpointNotFoundError) for cause in causes):
                ranks.broadcast(
                    "find",
                    lambda: raise_missing(
                        self._steps.uri_of(step),
                        step,
                        self._find_committed(with_metadata=False),
                        where=self._where,
                    ),
                )
            if isinstance(error, CorruptCheckpointError):
                self._note_damage(candidate.uri)
            raise
        return self._take_restored(candidate, report)

    def _take_restored(self, candidate: Candidate, report: LoadReport) -> Restored:
        step = parse_step_uri(candidate.uri)
        self._current = _StepState(step=step, is_fast=not candidate.reaches_root)
        return Restored(step=step, uri=candidate.uri, report=report)

    def _handle_skipped(self, skipped: SkippedCheckpoint) -> None:
        if skipped.is_gone:
            return
        self._note_damage(skipped.uri)
        if self._on_damaged == "raise":
            raise self._make_rank_calls().make_failure(
                CorruptCheckpointError(
                    f"the newest step, {skipped.uri}, is damaged, and on_damaged='raise' does not skip it: "
                    f"{skipped.why}. Restore an older step with restore(state_dict, step=…), or skip damaged steps "
                    "with on_damaged='skip'",
                    uri=skipped.uri,
                )
            )

    def _open_fast(self) -> FastPlace | None:
        """Return the fast place if all ranks can use it."""
        if self._fast is None:
            return None
        return self._fast if self._fast.open(self._make_rank_calls("looking at the fast place of")) else None

    def _make_rank_calls(self, doing: str = "finding a checkpoint under") -> RankCalls:
        return RankCalls(
            self._process_group,
            no_dist=self._no_dist,
            root=self.root,
            timeout_s=self._options.timeout_s,
            doing=doing,
        )


@atexit.register
def _print_resume_hints() -> None:
    """Say where runs can resume, at the end of a script that Ctrl-C has ended without the context of a manager.

    An interactive session continues after Ctrl-C, and keeps the error in ``sys.last_value``.
    """
    is_interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    if is_interrupted and not hasattr(sys, "ps1") and not is_forked():
        for hint in [*_resume_hints]:
            if (print_hint := hint()) is not None:
                print_hint()


def _remaining_s(ends_at_s: float | None) -> float | None:
    return None if ends_at_s is None else max(0.0, ends_at_s - time.monotonic())


def _check_step(step: int) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or parse_folder(format_folder(number)) is None:  # `restore` would not find it
        raise InvalidOptionError(f"a step must be a whole number from 0 to 10**18 - 1, not {step!r}")
    return number
