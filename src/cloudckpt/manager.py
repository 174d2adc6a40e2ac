"""The checkpoints of one run: saved when they are due, found again, and removed when they are superseded."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, SupportsFloat

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from typing_extensions import Self

from cloudckpt._api.failures import rank_in
from cloudckpt._api.saved import SavedMetadata
from cloudckpt._background import in_flight
from cloudckpt._background.handle import AsyncSave
from cloudckpt._manager.damage import Damage
from cloudckpt._manager.made import Made
from cloudckpt._manager.metrics import METRICS_KEY, STEP_KEY, checked, metadata_of
from cloudckpt._manager.reading import reading
from cloudckpt._manager.restoring import Restored, Restorer
from cloudckpt._manager.retention import Retention, RetentionReport
from cloudckpt._manager.rule import (
    ON_DAMAGED,
    Mode,
    OnDamaged,
    Policy,
    StepInfo,
    best_first,
    check_mode,
    is_positive,
    newest_of_each,
)
from cloudckpt._manager.steps import Steps, name_of, step_in
from cloudckpt._uri import parse_location
from cloudckpt.api import async_save, save
from cloudckpt.errors import InvalidOptionError
from cloudckpt.options import Options

_log = logging.getLogger("cloudckpt")

_RESERVED = (STEP_KEY, METRICS_KEY)


class CheckpointManager:
    """The checkpoints of one run, each at ``<root>/step-<n>``. Every rank makes one, with the same arguments.

    `save_every`: `save` does something at multiples of so many steps. `async_`: by `cloudckpt.async_save`. `keep_last`:
    so many of those committed last are kept; `keep_every`: besides, all multiples of so many steps; `keep_best`:
    besides, the best by a metric, as in ``("loss", "min", 3)``. What is kept by none of them is removed after a newer
    checkpoint is committed, by the coordinator, in a thread of its own. Without `keep_last`, nothing is.

    `on_damaged` says what becomes of a step that `restore` finds damaged. With ``"skip"`` it is passed over with a
    warning; this manager never overwrites or removes it, and saves its step beside it, as ``step-<n>-again-<k>``. With
    ``"replace"`` it is passed over, and overwritten when its step is saved again. With ``"raise"`` nothing is passed
    over: `restore` raises `CorruptCheckpointError`.

    `verify_first` and `allow_pickle` are those of `cloudckpt.load_latest`, `process_group`, `no_dist` and
    `use_collectives` those of `cloudckpt.save`. A manager is for one thread. As a context, it ends with `close`.
    Raises `InvalidOptionError` and `InvalidURIError`.
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
        policy = Policy(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
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
                f"CheckpointManager: it keeps the step and the metrics under {', '.join(map(repr, _RESERVED))} in "
                f"Options.metadata, so leave out {', '.join(map(repr, taken))}"
            )
        self._save_every = save_every
        self._is_async = async_
        self._process_group, self._no_dist, self._use_collectives = process_group, no_dist, use_collectives
        self._steps = Steps(
            parse_location(root), self._options, alone_ranks=None if use_collectives else self._num_ranks
        )
        self._damage = Damage(self._steps, on_damaged)
        self._restorer = Restorer(
            steps=self._steps,
            options=self._options,
            process_group=process_group,
            no_dist=no_dist,
            allow_pickle=allow_pickle,
            verify_first=verify_first,
            on_damaged=on_damaged,
            note=self._damage.note,
        )
        self._retention = Retention(self._steps, self._options, policy, damaged=lambda: self._damage.uris)
        self._last: Made | None = None
        self._held: Made | None = None
        """What holds the job's state, as far as it is known here: the last save, or what was restored since."""

    @property
    def root(self) -> str:
        """Under which everything lies."""
        return self._steps.root.uri

    @property
    def in_flight(self) -> AsyncSave | None:
        """The handle of the save that still runs; None where none does."""
        answer = self._last.answer if self._last is not None else None
        return answer if isinstance(answer, AsyncSave) and not answer.done() else None

    @property
    def retention(self) -> RetentionReport | None:
        """What was removed, kept, and not to be removed, when that was last looked at; always None on other ranks than
        the coordinator.
        """
        return self._retention.report

    def uri_of(self, step: int) -> str:
        """Where this manager saves a step; whether there is one is another question, and `steps` tells where it is."""
        return self._damage.uri_for(_checked(step))

    def is_due(self, step: int) -> bool:
        """Whether `save` would save this step by itself."""
        return self._save_every is None or _checked(step) % self._save_every == 0

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
        """Save a step from all ranks, as `cloudckpt.async_save` or `cloudckpt.save` does, and return what that returns.

        None, without a word to the store or the other ranks, where the step is not due and not asked for by `force`.
        With `force`, the step that this manager has saved last is not saved once more: that save is waited for and,
        unless it failed, its answer returned. Nor is one that it has restored since: None. New `metrics` are not added.

        A step that is there already is refused with `CheckpointExistsError`, also if it is of an earlier life of this
        job, unless `overwrite`; `on_damaged` says where one is saved that `restore` found damaged. `metrics` lie in
        the manifest (the coordinator's count), and so are there if and only if the checkpoint is. What goes wrong in a
        background save is raised by the next save, or by `close`.
        """
        step, numbers = _checked(step), checked(metrics)
        if not force and not self.is_due(step):
            return None
        # Whatever the metrics are: those of other ranks may differ, and all have to come to the same conclusion.
        if force and not overwrite and self._held is not None and self._held.step == step and not self._held.has_failed:
            if metrics is not None and numbers != self._held.numbers:
                _log.warning("%s is there already: its metrics stay what they are", self.uri_of(step))
            return self._held.answer
        settings: dict[str, Any] = {
            "planner": planner,
            "process_group": self._process_group,
            "no_dist": self._no_dist,
            "use_collectives": self._use_collectives,
            "overwrite": overwrite or self._damage.is_to_replace(step),
            "options": self._options_for(step, numbers),
        }
        is_coordinator = rank_in(self._process_group, no_dist=self._no_dist) == 0
        if is_coordinator and self._steps.times.is_clock_behind():
            _log.warning("step %d is not later than one under %s, which is a day ahead of the clock", step, self.root)
        call = async_save if self._is_async else save
        uri = self.uri_of(step)
        if uri != self._steps.uri_of(step):
            _log.warning("saving step %d as %s, since it was found damaged and is not replaced", step, uri)
        answer: AsyncSave | SavedMetadata = call(state_dict, uri, **settings)
        if is_coordinator:
            self._retention.announce(answer)
        if isinstance(answer, AsyncSave):
            answer.committed.add_done_callback(functools.partial(self._ended, uri, answer))
        else:
            self._committed(uri, answer)
        self._last = self._held = Made(step=step, numbers=numbers, answer=answer)
        self._damage.saving(self._last, uri)
        return answer

    def restore(
        self, state_dict: dict[str, Any], step: int | None = None, *, planner: LoadPlanner | None = None
    ) -> Restored | None:
        """Load into `state_dict`, in place, on all ranks: `step`, or else the newest step that is whole.

        The newest is the one that was committed last. It is found as by `cloudckpt.load_latest`: damaged ones are
        passed over with a warning, on all ranks alike, and named in the result. Where there is no step at all, nothing
        is touched, and the answer is None: a fresh start. Where there are some and none can be loaded, that is a
        `CorruptCheckpointError`.

        A `step` that is asked for is loaded, or the call fails: with `CheckpointNotFoundError`, which names the steps
        that there are, where it is not there. Raises what `cloudckpt.load` does.
        """
        wanted = None if step is None else _checked(step)
        restored: Restored | None
        with reading(self.root):
            if wanted is not None:
                restored = self._restorer.one(state_dict, wanted, planner)
            else:
                restored = self._restorer.newest(state_dict, planner)
        if restored is not None:
            self._held = Made(step=restored.step)
        return restored

    def steps(self) -> list[StepInfo]:
        """The committed steps with their metrics, the lowest first. Asks the store, and no other rank.

        Reads each manifest, once in a manager's life. Of one that is damaged no metrics are known. Raises `StoreError`.
        """
        return sorted(newest_of_each(self._steps.found(with_metrics=True)), key=lambda info: info.step)

    def latest(self) -> StepInfo | None:
        """The step that was committed last; None where there is none. Its metrics are not looked up. As `steps`."""
        return next(iter(self._steps.found(with_metrics=False)), None)

    def best(self, metric: str, mode: Mode = "min") -> StepInfo | None:
        """The step with the lowest, or for ``"max"`` the highest, value of a metric; of equal ones, the newest.

        None where no step has a finite one. As `steps`.
        """
        check_mode(mode)
        return next(iter(best_first(newest_of_each(self._steps.found(with_metrics=True)), metric, mode)), None)

    def wait(self, timeout: float | None = None) -> None:
        """Until the save in flight is committed, and what it supersedes is removed.

        Raises why the save failed, if nobody has asked its handle or heard of it by the next save; and `TimeoutError`
        where `timeout` seconds are not enough. What could not be removed is no error: see `retention`.
        """
        ends_at_s = None if timeout is None else time.monotonic() + timeout
        handle = self._last.answer if self._last is not None else None
        if isinstance(handle, AsyncSave):
            if not handle.committed.wait(timeout):
                raise TimeoutError(f"the background save to {handle.uri} has not ended within {timeout} s; it goes on")
            if in_flight.latest() is handle:  # it has failed, and nobody knows
                handle.result(0)
            if self._last is not None and handle.committed.failure() is None:
                self._retention.begin(handle.uri, handle)  # who is told by a callback may not have been yet
        if not self._retention.wait(None if ends_at_s is None else max(0.0, ends_at_s - time.monotonic())):
            raise TimeoutError(f"old checkpoints under {self.root} were not removed within {timeout} s; that goes on")

    def close(self, timeout: float | None = None) -> None:
        """Wait, as `wait` does, also for retention where the save has failed. Can be called again, and so can all else.

        The memory that saves keep is the process's: `cloudckpt.close` frees it.
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
        except (CheckpointException, Exception) as failure:  # noqa: BLE001  # the one that came first is the one to see
            _log.warning("while another error ended the program, the last save failed: %s", failure)

    def _options_for(self, step: int, numbers: Mapping[str, float | None]) -> Options:
        return dataclasses.replace(self._options, metadata={**self._options.metadata, **metadata_of(step, numbers)})

    def _ended(self, uri: str, handle: AsyncSave, outcome: Any) -> None:
        if outcome.failure() is None:
            self._committed(uri, handle)

    def _committed(self, uri: str, saved: AsyncSave | SavedMetadata) -> None:
        self._damage.committed(uri)
        self._retention.begin(uri, saved)

    def _num_ranks(self) -> int:
        is_alone = self._no_dist or not dist.is_available() or not dist.is_initialized()
        return 1 if is_alone else dist.get_world_size(self._process_group)


def _checked(step: int) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or step_in(name_of(number)) is None:  # one that `restore` would not find
        raise InvalidOptionError(f"a step is a whole number, not negative and below 10**18, not {step!r}")
    return number
