"""Save the checkpoints of one run when they are due, restore the newest, remove superseded ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypeAlias

import torch.distributed as dist
from typing_extensions import Self

from cloudckpt._display import Listing, add_note, pairs_to_html
from cloudckpt._keywords import suggest_keywords
from cloudckpt._messages import did_you_mean, find_near
from cloudckpt._this_process import OfThisProcess, refuse_in_fork
from cloudckpt.api import async_save, prepare_async_save, resolve_state_dict, save
from cloudckpt.background import in_flight
from cloudckpt.background.handle import AsyncSave
from cloudckpt.dcp import LoadPlanner, SavePlanner
from cloudckpt.dcp.live.loaders import warn_of_shared_generator
from cloudckpt.dcp.live.objects import LiveObjects, Model, Optimizers
from cloudckpt.dcp.ranks.failures import SaveOrLoadError
from cloudckpt.dcp.ranks.rank_calls import RankCalls, rank_in
from cloudckpt.dcp.renaming import Rename
from cloudckpt.dcp.save_and_load import SavedMetadata
from cloudckpt.dcp.storage_writer import ObjectStoreWriter, require_collectives
from cloudckpt.errors import UNRESTORED, InvalidOptionError, RemovedObjectsError, SaveInFlightError, raised_via
from cloudckpt.inspect.catalog import EARLIER_KEY, METRICS_KEY, Mode, mode_of_name
from cloudckpt.manager.drain import Drain, DrainReport, make_record
from cloudckpt.manager.fast_place import FastPlace
from cloudckpt.manager.places import Places
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
from cloudckpt.manager.restore import Restored, Restorer
from cloudckpt.manager.retention import Retention, RetentionReport
from cloudckpt.manager.save_history import SaveHistory, StepSave
from cloudckpt.manager.steps import (
    STEP_KEY,
    StepInfo,
    Steps,
    build_metadata,
    check_metrics,
    format_folder,
    note_own_uris,
    parse_folder,
    parse_step_uri,
)
from cloudckpt.options import Options, require_options
from cloudckpt.report import FAST_KEY
from cloudckpt.uri import parse_location

_log = logging.getLogger("cloudckpt")

OnDamaged: TypeAlias = Literal["raise", "skip", "replace"]
_ON_DAMAGED = ("raise", "skip", "replace")
_FAST_KEEP = 2
_OTHER_METHODS = {
    "load": "restore",
    "latest_step": "latest",
    "best_step": "best",
    "all_steps": "steps",
    "should_save": "is_due",
    "wait_until_finished": "wait",
}
"""The names that Orbax's manager and `cloudckpt.load` give to the methods."""


class CheckpointManager(OfThisProcess):
    """Manages the checkpoints of one run, each at ``<root>/step-<n>``.

    Every rank makes one with the same arguments and uses it from one thread. It makes no request before its first call,
    so that one serves to look at the run of another job. As a context manager, it ends with `close`. The coordinator
    removes superseded checkpoints in a background thread after each commit.

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
        fast: A faster place in front of `root`, such as a directory on an NVMe drive or in ``/dev/shm``.
            Saves are committed there, and those that are due at `root` are then copied to it in a background thread of
            rank 0. If each host has a directory of its own there, each rank sends its share. `restore` takes
            the newest step of both. See places.md.
        fast_every: `save` also saves multiples of this number of steps, or after each such ``datetime.timedelta``, to
            `fast` alone. None saves only what is due at `root`.
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
                manager.save(step, model=model, optimizer=optimizer, force=step == 999)

    """

    @suggest_keywords
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
        implied = None if keep_best is None else mode_of_name(keep_best[0])
        if (
            keep_best is not None
            and implied not in {None, keep_best[1]}
            and rank_in(process_group, no_dist=no_dist) == 0
        ):
            _log.warning(
                "keep_best=%r keeps the worst steps if the metric is what its name says: best(%r) takes the step with "
                "the %s value. Pass %r, if you do not mean this",
                keep_best,
                keep_best[0],
                "highest" if implied == "max" else "lowest",
                implied,
            )
        self._schedule = SaveSchedule(save_every)
        if on_damaged not in _ON_DAMAGED:
            words = ", ".join(map(repr, _ON_DAMAGED))
            raise InvalidOptionError(f"CheckpointManager: on_damaged must be one of {words}, not {on_damaged!r}")
        require_collectives(use_collectives=use_collectives)
        failures = Failures(on_failure, max_failures)
        self._options = require_options(options)
        reserved = [STEP_KEY, METRICS_KEY, EARLIER_KEY, *([] if fast is None else [FAST_KEY])]
        if conflicts := [name for name in reserved if name in self._options.metadata]:
            raise InvalidOptionError(
                f"CheckpointManager: Options.metadata must not contain {', '.join(map(repr, conflicts))}, because the "
                "manager saves the step, the metrics and the place there. Use other names"
            )
        if fast is None and (fast_every is not None or fast_keep != _FAST_KEEP):
            raise InvalidOptionError("CheckpointManager: fast_every and fast_keep need a place: pass fast='/nvme/run'")
        self._is_async = async_
        self._process_group, self._no_dist = process_group, no_dist
        self._on_damaged = on_damaged

        def get_damaged_uris() -> frozenset[str]:
            return self._history.damaged_uris

        steps = Steps(parse_location(root), self._options)
        retention = Retention(steps, policy, get_damaged_uris=get_damaged_uris)
        fast_place = None
        if fast is not None:
            drain = Drain(
                parse_location(fast),
                steps,
                root_policy=policy,
                get_damaged_uris=get_damaged_uris,
                on_drained=retention.start,
            )
            fast_place = FastPlace(drain, every=fast_every, keep=fast_keep)
            if fast_every is not None:
                _check_fast_every(fast_every, save_every)
        self._places = Places(steps, retention, fast_place)
        self._history = SaveHistory(self._places, failures)
        self._restorer = Restorer(
            places=self._places,
            make_rank_calls=self._make_rank_calls,
            process_group=process_group,
            no_dist=no_dist,
            verify_first=verify_first,
            allow_pickle=allow_pickle,
            skips_damage=on_damaged != "raise",
            note_damage=self._history.note_damage,
        )
        self._has_checked_loaders = False
        self._has_restored = False
        """True once `restore` has loaded a step, or has found none."""
        self._unknown_metrics: set[str] = set()
        """Metrics of which no step has a finite value, and for which a warning has said so."""

    if not TYPE_CHECKING:  # else a type checker takes any name

        def __getattr__(self, name: str) -> Any:
            near = _OTHER_METHODS.get(name) or ("" if name.startswith("_") else find_near(name, dir(type(self))))
            raise AttributeError(f"{type(self).__name__} has no {name}{did_you_mean(near)}", name=name, obj=self)

    def __repr__(self) -> str:
        last_saved = self._history.last
        last = "no save by this process yet" if last_saved is None else f"last save step {last_saved.step}"
        return f"<CheckpointManager of {self.root}: {last}>"

    def _repr_html_(self) -> str:
        """Show the state that is known without a request to the store."""
        last = self._history.last
        handle = last.result if last is not None and isinstance(last.result, AsyncSave) else None
        values = {
            "root": self.root,
            "save_every": self._schedule.save_every,
            **dataclasses.asdict(self._places.root_retention.policy),
            "last save": None if last is None else f"step {last.step}",
            "phase": None if handle is None else handle.progress.phase,
            "retention": self.retention,
            "failures": self.failures,
        }
        return pairs_to_html("CheckpointManager", values)

    @property
    def root(self) -> str:
        """URI of the folder of all steps."""
        return self._places.root.location.uri

    @property
    def in_flight(self) -> AsyncSave | None:
        """Handle of the save that is running, or None."""
        return self._history.in_flight

    @property
    def retention(self) -> RetentionReport | None:
        """Report of the last retention run. None before the first, and always on ranks other than the coordinator."""
        return self._places.root_retention.report

    @property
    def drains(self) -> DrainReport | None:
        """Report of the last look for steps that `root` is owed. None without `fast`, and on ranks other than 0.

        ``drained`` has the copies of that look alone, and ``failed`` all steps that `root` is still owed. If each host
        has a directory of its own, each other rank has a report, too: ``failed`` are the steps of which it could not
        send its part.
        """
        fast = self._places.fast
        return None if fast is None else fast.drain.report

    @property
    def failures(self) -> tuple[SaveFailure, ...]:
        """The last 100 saves of this manager that failed because of the store. Equal on all ranks if none runs."""
        return self._history.failures.all

    def uri_of(self, step: int) -> str:
        """Return the URI that this manager saves a step to under `root`. `steps` lists the URIs of committed steps.

        Args:
            step: Number of the step.

        Returns:
            ``<root>/step-<n>``, or ``<root>/step-<n>-again-<k>`` beside a damaged one.

        """
        return self._places.root.location.child(self._choose_folder(_check_step(step))).uri

    def _choose_folder(self, step: int) -> str:
        """Return the name of the folder for a step: without damage in any place, unless damage is to be replaced."""
        return self._places.choose_folder(step, self._history.damaged_uris if self._on_damaged == "skip" else ())

    def is_due(self, step: int) -> bool:
        """Return True if `save` saves a step without ``force``, to the root or to the fast place alone.

        If ``save_every`` is a time, all ranks have to call it, or none. `close` warns if the last step that it was
        asked for is not due, and is not saved.

        Args:
            step: Number of the step.

        Returns:
            True for multiples of ``save_every`` or ``fast_every``, and if ``save_every`` is None. For a time, the
            answer for a step stays the same until `save` or `is_due` is called with another step.

        """
        step = _check_step(step)
        is_due_now = self._is_due(self._schedule, step)
        fast = self._places.fast
        if fast is not None and fast.schedule is not None:
            is_due_now |= self._is_due(fast.schedule, step)
        if not is_due_now:
            self._history.note_not_due(step, None)
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
            self._places.read_times()
        if not self._is_async:
            return
        objects = LiveObjects(model, optimizer, scheduler, dataloader, extra, has_random_state=random_state)
        state_dict, _ = resolve_state_dict(
            objects, state_dict, self.root, self._process_group, no_dist=self._no_dist, doing="saving"
        )
        prepare_async_save(
            state_dict, self.root, process_group=self._process_group, no_dist=self._no_dist, options=self._options
        )

    @suggest_keywords
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
            The result of `async_save` or `save`. None if the step is not due, or is due in the fast place alone and
            the ranks cannot use that. Nothing keeps the `metrics` of such a step, and the next save without them warns,
            once. The failure, if the save has failed already and ``on_failure="warn"`` lets training go on.

        Raises:
            CheckpointExistsError: The step exists, and `overwrite` is False. Not raised for a damaged step with
                ``on_damaged="replace"``, nor with ``on_failure="warn"`` for one whose last commit got no answer.
            CheckpointException: See `cloudckpt.save`.

        """
        step = _check_step(step)
        if not force and not self.is_due(step):
            self._history.note_not_due(step, metrics)  # the value of a tensor on a GPU would wait for the GPU
            return None
        checked_metrics = check_metrics(metrics)
        refuse_in_fork()
        is_owed = force or self._is_due(self._schedule, step)
        fast = self._open_fast()
        if fast is None and not is_owed:
            self._history.note_not_due(step, checked_metrics)
            return None
        rank = rank_in(self._process_group, no_dist=self._no_dist)
        is_coordinator = rank == 0
        # The metrics play no part: they may differ between ranks, and all ranks must take the same branch.
        current = self._history.current
        repeats_last_save = (
            force and not overwrite and current is not None and current.step == step and current.failure is None
        )
        if repeats_last_save and current is not None and current.reaches_root:
            if is_coordinator and metrics is not None and checked_metrics != current.metrics:
                _log.warning("%s exists already and keeps its metrics", self.uri_of(step))
            return current.result
        overwrite = overwrite or self._is_to_replace(step)
        folder = self._choose_folder(step)
        if is_coordinator and random_state and not self._has_checked_loaders:
            self._has_checked_loaders = True
            warn_of_shared_generator(dataloader)
        objects = LiveObjects(model, optimizer, scheduler, dataloader, extra, has_random_state=random_state)
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
            names = objects.given or (state_dict if isinstance(state_dict, Mapping) else ())
            may_remove = not self._places.root_retention.policy.keeps_all
            self._history.note_objects(step, map(str, names), may_remove=may_remove)
        if is_owed:
            self._schedule.note_save()
        if self._places.fast is not None and self._places.fast.schedule is not None and not repeats_last_save:
            self._places.fast.schedule.note_save()
        step_save = StepSave(
            step=step,
            is_owed=is_owed,
            may_overwrite=overwrite,
            replaces_unowed_step=repeats_last_save,
            metrics=checked_metrics,
            rank=rank,
        )
        if fast is not None:
            ranks = self._make_rank_calls("choosing the place of a step under")
            step_save.is_fast, step_save.is_owed = fast.choose_place(
                ranks, folder, is_owed=is_owed, may_overwrite=overwrite
            )
        return self._save_to(step_save, folder, state_dict, settings)

    def _look_before_save(self, step: int, *, overwrite: bool) -> None:
        """Read the times of all commits; before the first save, also warn of other jobs."""
        self._places.read_times()
        if self._history.last is None:
            self._places.root.look_for_others()
            # If nothing was restored, retention names all steps that it spares.
            if not overwrite and (self._has_restored or self._places.root_retention.policy.keeps_all):
                self._warn_of_higher(step, "the first save of this job is step")

    def _warn_of_higher(self, step: int, begin: str) -> None:
        self._places.root.warn_of_higher(step, begin, damaged_uris=self._history.damaged_uris)

    def _is_to_replace(self, step: int) -> bool:
        """Return True if `step` is to be overwritten: it is damaged, or one of the last saves may have committed it."""
        if self._history.may_be_committed(step):
            return True
        damaged_uris = self._history.damaged_uris
        return self._on_damaged == "replace" and not damaged_uris.isdisjoint(self._places.uris_of(format_folder(step)))

    def _save_to(
        self, step_save: StepSave, folder: str, state_dict: dict[str, Any] | None, settings: dict[str, Any]
    ) -> AsyncSave | SavedMetadata | SaveFailure | None:
        """Save to the chosen place, or to the root if the fast place fails."""
        self._history.warn_of_dropped_metrics(step_save)
        uris = self._places.uris_of(folder)
        note_own_uris(uris)
        self._places.root.begun_uris.update(uris)
        call = async_save if self._is_async else save
        try:
            metadata = build_metadata(step_save.step, step_save.metrics or {})
            if step_save.rank == 0 and (earlier := self._history.find_earlier_metrics(step_save.step)):
                metadata[EARLIER_KEY] = earlier
            writer = self._make_writer(step_save, folder, metadata)
            step_save.result = call(state_dict, storage_writer=writer, **settings)
        except (SaveOrLoadError, SaveInFlightError) as error:
            failure = self._history.note_refusal(step_save, error)
            if failure is None:
                raise
            return failure
        self._history.note_begin(step_save)
        return step_save.result

    def _make_writer(self, step_save: StepSave, folder: str, metadata: Mapping[str, Any]) -> ObjectStoreWriter:
        """Make the writer of a step in the place that `step_save` names."""
        root = self._places.root
        fast = self._places.fast if step_save.is_fast else None
        record: dict[str, Any] = {}
        if fast is not None:
            record[FAST_KEY] = make_record(
                root.location,
                is_owed=step_save.is_owed,
                may_overwrite=step_save.may_overwrite,
                host_names=() if fast.hosts is None else fast.hosts.names,
            )
        steps = root if fast is None else fast.steps
        options = dataclasses.replace(steps.options, metadata={**steps.options.metadata, **metadata, **record})
        step_save.uri = steps.location.child(folder).uri
        if step_save.rank == 0 and folder != format_folder(step_save.step):
            _log.warning("saving step %d as %s beside the damaged one", step_save.step, step_save.uri)
        return ObjectStoreWriter(
            step_save.uri,
            options=options,
            overwrite=step_save.may_overwrite or (step_save.is_fast and step_save.replaces_unowed_step),
            _find_base=functools.partial(self._history.find_base, step_save.uri),
            _find_next=None if fast is None else functools.partial(self._leave_fast, step_save, folder, metadata),
            _via=self._history.name_manager(step_save.step) if self._has_restored else UNRESTORED,
            _hosts=None if fast is None else fast.hosts,
        )

    def _leave_fast(
        self, step_save: StepSave, folder: str, metadata: Mapping[str, Any], failure: BaseException
    ) -> ObjectStoreWriter | None:
        """Return a writer to the root, for the same save, if the fast place has failed."""
        if not is_store_failure(failure) and not isinstance(failure, RemovedObjectsError):
            return None
        if step_save.rank == 0:
            _log.warning("saving to %s, because the fast place failed: %s", self.root, failure)
        self._history.note_saved(step_save, failure)  # its commit may have arrived
        step_save.is_fast = False
        return self._make_writer(step_save, folder, metadata)

    @suggest_keywords
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
        if isinstance(state_dict, (int, str)):
            raise TypeError(
                f"restore takes a state dict as its first argument, and not {state_dict!r}. To restore a step, pass "
                "step=100; without a step, restore takes the newest"
            )
        objects = LiveObjects(model, optimizer, scheduler, dataloader, extra, has_random_state=random_state)
        strict = strict is not False if objects.are_given else strict
        state_dict, _ = resolve_state_dict(
            objects,
            state_dict,
            self.root,
            self._process_group,
            no_dist=self._no_dist,
            doing="loading",
            strict=strict,
        )
        wanted_step = None if step is None else _check_step(step)
        if (running := self.in_flight) is not None:
            running.committed.wait()  # it may be the newest step, and its copy may still read the tensors
        self._open_fast()
        with self._places.lock(), raised_via("manager"):
            loaded = (
                self._restorer.load_newest(state_dict, planner=planner, strict=strict, rename=rename)
                if wanted_step is None
                else self._restorer.load_step(state_dict, wanted_step, planner=planner, strict=strict, rename=rename)
            )
        rank = rank_in(self._process_group, no_dist=self._no_dist)
        self._has_restored = True
        self._places.adopt_found(is_coordinator=rank == 0)
        restored = None
        if loaded is None:
            _log.info("no step is committed under %s: fresh start", self._places)
        else:
            candidate, report = loaded
            restored = Restored(step=parse_step_uri(candidate.uri), uri=candidate.uri, report=report)
            _log.info("restored step %d from %s", restored.step, restored.uri)
            if wanted_step is None and self._history.last is None and rank == 0:
                self._warn_of_higher(restored.step, "this job continues from the step that was committed last,")
            is_whole = True
            if candidate.copy_uri is not None and self._options.unchanged == "reference":
                is_whole = not any(self._make_rank_calls().all_gather("find", lambda: report.num_objects_of_copy))
            reaches_root = candidate.reaches_root
            self._history.note_restored(restored.step, restored.uri, reaches_root=reaches_root, is_whole=is_whole)
        if self._places.fast is not None:
            self._places.fast.start(rank)  # copies that an earlier process has left undone
        return restored

    def steps(self) -> list[StepInfo]:
        """Return the committed steps with their metrics, lowest first. Makes no collective call.

        Each manifest is read once. A damaged manifest has no metrics.

        Raises:
            StoreError: A request failed.

        """
        committed = self._places.find_committed(with_metadata=True)
        return Listing(sorted(keep_newest_of_each_step(committed), key=lambda info: info.step))

    def latest(self) -> StepInfo | None:
        """Return the step that was committed last, or None if there is no step.

        Reads the manifest of this step, and the manifests in a fast place. A damaged manifest has no metrics.

        Raises:
            StoreError: A request failed.

        """
        return self._places.find_latest()

    def best(self, metric: str, mode: Mode | None = None) -> StepInfo | None:
        """Return the step with the best value of a metric. The newest wins if values are equal.

        Args:
            metric: Name of the metric.
            mode: ``"min"`` if low values are good, ``"max"`` if high values are. None: a word of the name decides, such
                as ``loss`` or ``acc``; the same words as for ``cloudckpt ls --metrics``.

        Returns:
            The step. None if no step has a finite value. A warning says so if the steps have metrics, once for each
            metric, and names the others if none has this one.

        Raises:
            InvalidOptionError: `mode` is another word; or it is None, and no word of the metric's name decides.
            StoreError: A request failed.

        """
        if mode is not None:
            choose_mode(metric, mode)
        committed = keep_newest_of_each_step(self._places.find_committed(with_metadata=True))
        best = None
        if any(metric in info.metrics for info in committed):
            best = next(iter(sort_best_first(committed, metric, choose_mode(metric, mode))), None)
            problem = None if best is not None else f"no step has a finite value of {metric!r}"
        else:  # it may be measured later, or be mistyped
            problem = explain_missing_metric(committed, metric)
        if problem is not None and metric not in self._unknown_metrics:
            self._unknown_metrics.add(metric)
            _log.warning("no step is the best under %s: %s", self.root, problem)
        return best

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
        last = self._history.last
        if last is not None and isinstance(handle := last.result, AsyncSave):
            if not handle.committed.wait(timeout):
                raise TimeoutError(f"the background save to {handle.uri} did not end within {timeout} s and continues")
            self._history.finish(last)
            if in_flight.find_unreported() is handle:  # it failed, and nothing has raised the failure yet
                handle.result(0)
        self._places.wait(ends_at_s)

    def close(self, timeout: float | None = None) -> None:
        """Wait as `wait`, and for copies and removals also if the save failed. The manager stays usable.

        Raises the failure of the last save also with ``on_failure="warn"``, since no later save can. Warns if the last
        save is in the fast place alone, and `root` is not owed it; and if the last step was not due, so that it is not
        saved. `cloudckpt.close` frees the memory that background saves keep for the process.

        Args:
            timeout: See `wait`, also for the errors.

        Raises:
            CheckpointError: On rank 0, the root does not have all steps that it is owed from the fast place. If each
                host has a directory of its own, also on a rank whose host could not send its part.

        """
        ends_at_s = None if timeout is None else time.monotonic() + timeout
        try:
            self.wait(timeout)
            if not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # it may be called in a `finally`
                self._history.drop_resume_hint()
        except SaveOrLoadError:
            with contextlib.suppress(TimeoutError):  # the failure of the save is raised
                self._places.wait(ends_at_s)
            raise
        failure = self._history.take_unraised()
        if failure is not None:
            raise failure.error
        if sys.exc_info()[1] is None and rank_in(self._process_group, no_dist=self._no_dist) == 0:
            self._history.warn_of_unsaved_end()
        if self._places.fast is not None:
            self._places.fast.drain.check()
            self._history.warn_of_unowed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            if isinstance(error, KeyboardInterrupt):
                self._history.warn_of_save_in_flight()
            self.close()
        except KeyboardInterrupt as interrupt:
            error = interrupt
            raise
        except (SaveOrLoadError, Exception) as failure:  # noqa: BLE001  # the error that left the context is raised
            kind = type(failure)
            _log.warning("the last save failed, too: %s.%s: %s", kind.__module__, kind.__qualname__, failure)
        finally:
            self._history.drop_resume_hint()
            can_resume = isinstance(error, Exception) and self._history.last_committed is not None
            is_told = can_resume or isinstance(error, KeyboardInterrupt)
            if is_told and rank_in(self._process_group, no_dist=self._no_dist) == 0:
                add_note(error, self._history.describe_last_step())

    def _open_fast(self) -> FastPlace | None:
        """Return the fast place if all ranks can use it."""
        fast = self._places.fast
        if fast is None:
            return None
        return fast if fast.open(self._make_rank_calls("looking at the fast place of")) else None

    def _make_rank_calls(self, doing: str = "finding a checkpoint under") -> RankCalls:
        return RankCalls(
            self._process_group,
            no_dist=self._no_dist,
            root=self.root,
            timeout_s=self._options.timeout_s,
            doing=doing,
        )


def _check_fast_every(fast_every: int | timedelta, save_every: int | timedelta | None) -> None:
    """Refuse a `fast_every` that has no effect. A time and a number of steps cannot be compared."""
    if isinstance(fast_every, timedelta) and isinstance(save_every, timedelta):
        has_effect = fast_every <= save_every
    elif isinstance(fast_every, timedelta) or isinstance(save_every, timedelta):
        has_effect = save_every is not None
    else:
        has_effect = save_every is not None and fast_every <= save_every
    if not has_effect:
        raise InvalidOptionError(
            f"CheckpointManager: fast_every={fast_every!r} is of no use with save_every={save_every!r}. The fast place "
            "also gets each step that is due at the root. Pass a fast_every that is less than save_every, such as a "
            "tenth, or leave it out"
        )


def _check_step(step: int) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or parse_folder(format_folder(number)) is None:  # `restore` would not find it
        raise InvalidOptionError(f"a step must be a whole number from 0 to 10**18 - 1, not {step!r}")
    return number
