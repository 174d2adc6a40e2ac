"""Save the checkpoints of one run when they are due, restore the newest, remove superseded ones."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, SupportsFloat

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from typing_extensions import Self

from cloudckpt._forks import refuse_in_fork
from cloudckpt.api import async_save, save
from cloudckpt.background import in_flight
from cloudckpt.background.handle import AsyncSave
from cloudckpt.dcp.protocol import SavedMetadata, rank_in
from cloudckpt.errors import InvalidOptionError
from cloudckpt.manager.restore import ON_DAMAGED, OnDamaged, Restored, Restorer
from cloudckpt.manager.retention import Retention, RetentionReport, lock_root
from cloudckpt.manager.retention_policy import (
    Mode,
    RetentionPolicy,
    StepInfo,
    check_mode,
    is_positive,
    keep_newest_of_each_step,
    sort_best_first,
)
from cloudckpt.manager.steps import (
    METRICS_KEY,
    STEP_KEY,
    Steps,
    build_metadata,
    check_metrics,
    format_folder,
    parse_folder,
)
from cloudckpt.options import Options
from cloudckpt.uri import parse_location

_log = logging.getLogger("cloudckpt")

_RESERVED = (STEP_KEY, METRICS_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastSave:
    """The last save and its result, or the last restored step, which has no result."""

    step: int
    numbers: Mapping[str, float | None] | None = None
    result: AsyncSave | SavedMetadata | None = None

    @property
    def has_failed(self) -> bool:
        """True if the save failed. Waits for its end, so that all ranks get the same answer."""
        if not isinstance(self.result, AsyncSave):
            return False
        self.result.committed.wait()
        return self.result.committed.failure() is not None


class _DamagedSteps:
    """The steps that `restore` found damaged, until they are replaced. Equal on all ranks; thread-safe."""

    def __init__(self, steps: Steps, on_damaged: OnDamaged) -> None:
        self._lock = threading.Lock()
        self._steps = steps
        self._on_damaged = on_damaged
        self._uris: frozenset[str] = frozenset()
        self._replacement: _LastSave | None = None
        """Last save that replaces a damaged step."""

    @property
    def uris(self) -> frozenset[str]:
        """URIs of the damaged checkpoints."""
        return self._uris

    def add(self, uri: str) -> None:
        """Note that the checkpoint at `uri` is damaged."""
        with self._lock:
            self._uris |= {uri}
            self._replacement = None

    def remove(self, uri: str) -> None:
        """Note that another checkpoint was committed at `uri`."""
        with self._lock:
            self._uris -= {uri}

    def choose_uri(self, step: int) -> str:
        """Return the URI to save `step` to. With the policy ``"skip"``, it is never that of a damaged checkpoint."""
        again = 0
        while self._on_damaged == "skip" and self._steps.uri_of(step, again) in self._uris:
            again += 1
        return self._steps.uri_of(step, again)

    def note_save(self, save: _LastSave, uri: str) -> None:
        """Note a save that may replace a damaged step."""
        if uri in self._uris:
            self._replacement = save

    def is_to_replace(self, step: int) -> bool:
        """True if `step` is damaged and is to be overwritten. Does not rely on callbacks, which may run late."""
        if self._on_damaged != "replace" or self._steps.uri_of(step) not in self._uris:
            return False
        return self._replacement is None or self._replacement.step != step or self._replacement.has_failed


class CheckpointManager:
    """Manages the checkpoints of one run, each at ``<root>/step-<n>``.

    Every rank creates one with the same arguments and uses it from one thread. As a context manager, it ends with
    `close`. The coordinator removes superseded checkpoints in a background thread after each commit.

    Args:
        root: Folder of all steps.
        save_every: `save` skips steps that are not multiples of this number.
        keep_last: Number of newest checkpoints to keep. None keeps all.
        keep_every: Also keep multiples of this number of steps.
        keep_best: Also keep the best by a metric, as in ``("loss", "min", 3)``.
        on_damaged: Policy for a step that `restore` finds damaged. ``"skip"`` skips it with a warning, never overwrites
            or removes it, and saves its step beside it as ``step-<n>-again-<k>``. ``"replace"`` skips it and overwrites
            it when its step is saved again. ``"raise"`` raises `CorruptCheckpointError`.
        async_: Save with `cloudckpt.async_save` instead of `cloudckpt.save`.
        verify_first: See `cloudckpt.load_latest`.
        allow_pickle: See `cloudckpt.load`.
        process_group: See `cloudckpt.save`, also for `no_dist` and `use_collectives`.
        options: Options of all saves and loads.

    Raises:
        InvalidOptionError: An argument is invalid.
        InvalidURIError: `root` is not a valid URI.

    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, Mode, int] | None = None,
        on_damaged: OnDamaged = "skip",
        async_: bool = True,
        verify_first: bool = False,
        allow_pickle: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
        options: Options | None = None,
    ) -> None:
        policy = RetentionPolicy(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        if save_every is not None and not is_positive(save_every):
            raise InvalidOptionError(
                f"CheckpointManager: save_every must be a positive whole number or None, not {save_every!r}"
            )
        if on_damaged not in ON_DAMAGED:
            words = ", ".join(map(repr, ON_DAMAGED))
            raise InvalidOptionError(f"CheckpointManager: on_damaged must be one of {words}, not {on_damaged!r}")
        self._options = options or Options()
        taken = [name for name in _RESERVED if name in self._options.metadata]
        if taken:
            raise InvalidOptionError(
                f"CheckpointManager: Options.metadata must not contain {', '.join(map(repr, taken))}, because the "
                "manager saves the step and the metrics there. Use other names"
            )
        self._save_every = save_every
        self._is_async = async_
        self._process_group, self._no_dist, self._use_collectives = process_group, no_dist, use_collectives
        self._steps = Steps(
            parse_location(root), self._options, get_num_ranks=None if use_collectives else self._get_num_ranks
        )
        self._damaged = _DamagedSteps(self._steps, on_damaged)
        self._restorer = Restorer(
            steps=self._steps,
            options=self._options,
            process_group=process_group,
            no_dist=no_dist,
            allow_pickle=allow_pickle,
            verify_first=verify_first,
            on_damaged=on_damaged,
            note_damage=self._damaged.add,
        )
        self._retention = Retention(self._steps, self._options, policy, get_damaged_uris=lambda: self._damaged.uris)
        self._last: _LastSave | None = None
        self._current: _LastSave | None = None
        """The step that holds the job's state: the last save, or the step that was restored since."""

    @property
    def root(self) -> str:
        """URI of the folder of all steps."""
        return self._steps.root.uri

    @property
    def in_flight(self) -> AsyncSave | None:
        """Handle of the save that is running, or None."""
        result = self._last.result if self._last is not None else None
        return result if isinstance(result, AsyncSave) and not result.done() else None

    @property
    def retention(self) -> RetentionReport | None:
        """Report of the last retention run. None before the first, and always on ranks other than the coordinator."""
        return self._retention.report

    def uri_of(self, step: int) -> str:
        """Return the URI to which this manager saves `step`. `steps` lists the URIs of committed steps."""
        return self._damaged.choose_uri(_check_step(step))

    def is_due(self, step: int) -> bool:
        """Return True if `save` saves this step without `force`."""
        return self._save_every is None or _check_step(step) % self._save_every == 0

    def save(
        self,
        step: int,
        state_dict: dict[str, Any],
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        force: bool = False,
        overwrite: bool = False,
        planner: SavePlanner | None = None,
    ) -> AsyncSave | SavedMetadata | None:
        """Save a step from all ranks with `cloudckpt.async_save` or `cloudckpt.save`.

        The failure of a background save is raised by the next save or by `close`.

        Args:
            step: Number of the step.
            state_dict: See `cloudckpt.save`.
            metrics: Numbers by name, saved in the manifest. The coordinator's count.
            force: Save also a step that is not due. The step that this manager saved last is not saved again: the call
                waits for that save and, unless it failed, returns its result. A step that was restored since is not
                saved again either; the call returns None. Neither gets new `metrics`.
            overwrite: Replace a step that exists, for example from an earlier start of this job.
            planner: See `cloudckpt.save`.

        Returns:
            The result of `async_save` or `save`. None, without any I/O, if the step is not due.

        Raises:
            CheckpointExistsError: The step exists and `overwrite` is False.

        """
        step, numbers = _check_step(step), check_metrics(metrics)
        if not force and not self.is_due(step):
            return None
        # The metrics play no part: they may differ between ranks, and all ranks must take the same branch.
        current = self._current
        if force and not overwrite and current is not None and current.step == step and not current.has_failed:
            if metrics is not None and numbers != current.numbers:
                _log.warning("%s exists already and keeps its metrics", self.uri_of(step))
            return current.result
        settings: dict[str, Any] = {
            "planner": planner,
            "process_group": self._process_group,
            "no_dist": self._no_dist,
            "use_collectives": self._use_collectives,
            "overwrite": overwrite or self._damaged.is_to_replace(step),
            "options": self._options_for(step, numbers),
        }
        is_coordinator = rank_in(self._process_group, no_dist=self._no_dist) == 0
        if is_coordinator and self._steps.times.is_clock_behind():
            _log.warning("a step under %s is a day ahead of this clock, so step %d will not be newer", self.root, step)
        call = async_save if self._is_async else save
        uri = self.uri_of(step)
        if uri != self._steps.uri_of(step):
            _log.warning("saving step %d as %s beside the damaged one", step, uri)
        result: AsyncSave | SavedMetadata = call(state_dict, uri, **settings)
        if is_coordinator:
            self._retention.announce(result)
        if isinstance(result, AsyncSave):
            result.committed.add_done_callback(functools.partial(self._handle_end, uri, result))
        else:
            self._handle_commit(uri, result)
        self._last = self._current = _LastSave(step=step, numbers=numbers, result=result)
        self._damaged.note_save(self._last, uri)
        return result

    def restore(
        self, state_dict: dict[str, Any], step: int | None = None, *, planner: LoadPlanner | None = None
    ) -> Restored | None:
        """Load a step into `state_dict`, in place, on all ranks.

        Without `step`, the newest whole step is loaded as by `cloudckpt.load_latest`: the one that was committed last.
        Damaged steps are skipped on all ranks with a warning and listed in the result.

        Args:
            state_dict: See `cloudckpt.load`.
            step: Step to load, or None for the newest.
            planner: See `cloudckpt.load`.

        Returns:
            The step that was loaded. None if there is no step at all; `state_dict` is then unchanged: a fresh start.

        Raises:
            CheckpointNotFoundError: `step` is not committed. The message lists the steps that are.
            CorruptCheckpointError: There are steps, and none of them can be loaded.

        """
        wanted = None if step is None else _check_step(step)
        restored: Restored | None
        with lock_root(self.root):
            if wanted is not None:
                restored = self._restorer.restore_step(state_dict, wanted, planner)
            else:
                restored = self._restorer.restore_newest(state_dict, planner)
        if restored is not None:
            self._current = _LastSave(step=restored.step)
        return restored

    def steps(self) -> list[StepInfo]:
        """Return the committed steps with their metrics, lowest first, without contacting other ranks.

        Each manifest is read once. A damaged manifest gives no metrics. Raises `StoreError`.
        """
        committed = self._steps.find_committed(with_metrics=True)
        return sorted(keep_newest_of_each_step(committed), key=lambda info: info.step)

    def latest(self) -> StepInfo | None:
        """Return the step that was committed last, without its metrics, or None. Raises `StoreError`."""
        return next(iter(self._steps.find_committed(with_metrics=False)), None)

    def best(self, metric: str, mode: Mode = "min") -> StepInfo | None:
        """Return the step with the lowest (``"min"``) or highest (``"max"``) value of a metric.

        The newest wins if values are equal. Returns None if no step has a finite value. Raises `StoreError`.
        """
        check_mode(mode)
        committed = self._steps.find_committed(with_metrics=True)
        return next(iter(sort_best_first(keep_newest_of_each_step(committed), metric, mode)), None)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save in flight is committed and the checkpoints that it supersedes are removed.

        Raises the failure of the save unless its handle or the next save has raised it, and `TimeoutError` after
        `timeout` seconds. A checkpoint that could not be removed is not an error: see `retention`.
        """
        refuse_in_fork()
        ends_at_s = None if timeout is None else time.monotonic() + timeout
        handle = self._last.result if self._last is not None else None
        if isinstance(handle, AsyncSave):
            if not handle.committed.wait(timeout):
                raise TimeoutError(f"the background save to {handle.uri} did not end within {timeout} s and continues")
            if in_flight.latest() is handle:  # it failed, and nothing has raised the failure yet
                handle.result(0)
            if self._last is not None and handle.committed.failure() is None:
                self._retention.start(handle.uri, handle)  # the callback that does this may not have run yet
        if not self._retention.wait(None if ends_at_s is None else max(0.0, ends_at_s - time.monotonic())):
            raise TimeoutError(
                f"superseded checkpoints under {self.root} were not removed within {timeout} s; the removal continues"
            )

    def close(self, timeout: float | None = None) -> None:
        """Wait as `wait` does, and for retention also if the save failed. The manager stays usable.

        `cloudckpt.close` frees the memory that background saves keep for the process.
        """
        try:
            self.wait(timeout)
        except CheckpointException:
            self._retention.wait(timeout)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except (CheckpointException, Exception) as failure:  # noqa: BLE001  # the error that left the context is raised
            _log.warning("the last save failed, too: %s", failure)

    def _options_for(self, step: int, numbers: Mapping[str, float | None]) -> Options:
        return dataclasses.replace(self._options, metadata={**self._options.metadata, **build_metadata(step, numbers)})

    def _handle_end(self, uri: str, handle: AsyncSave, outcome: Any) -> None:
        if outcome.failure() is None:
            self._handle_commit(uri, handle)

    def _handle_commit(self, uri: str, save: AsyncSave | SavedMetadata) -> None:
        self._damaged.remove(uri)
        self._retention.start(uri, save)

    def _get_num_ranks(self) -> int:
        is_alone = self._no_dist or not dist.is_available() or not dist.is_initialized()
        return 1 if is_alone else dist.get_world_size(self._process_group)


def _check_step(step: int) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or parse_folder(format_folder(number)) is None:  # `restore` would not find it
        raise InvalidOptionError(f"a step must be a whole number from 0 to 10**18 - 1, not {step!r}")
    return number
