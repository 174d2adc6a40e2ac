"""Decide when a run saves, which checkpoints stay, and whether training continues after a failed save."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from numbers import Integral
from typing import Any, Literal, TypeAlias

from cloudckpt._display import with_short_repr
from cloudckpt._messages import did_you_mean, find_near, quote_names
from cloudckpt.dcp.ranks.failures import SaveOrLoadError, causes_of
from cloudckpt.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    InvalidOptionError,
    SaveInFlightError,
    StoreError,
)
from cloudckpt.inspect.catalog import Mode, mode_of_name
from cloudckpt.manager.steps import StepInfo, sort_newest_first

_MODES = ("min", "max")
_NUM_FIELDS_OF_KEEP_BEST = 3
OnFailure: TypeAlias = Literal["raise", "warn"]
_STORE_FAILURES = (StoreError, CommitUnknownError)
"""The failures that a store causes. All other failures come from the program, or end the process group."""
_MAX_KEPT = 100
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The checkpoints to keep: all of them without `keep_last` and `keep_for`."""

    keep_last: int | None
    keep_every: int | None
    keep_best: tuple[str, Mode, int] | None
    keep_for: timedelta | None = None
    keep_one_per: timedelta | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a positive whole number or None, not {value!r}"
            for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every))
            if value is not None and not is_positive(value)
        ]
        problems += [
            f"{name} must be a positive datetime.timedelta or None, not {value!r}"
            for name, value in (("keep_for", self.keep_for), ("keep_one_per", self.keep_one_per))
            if value is not None and not is_positive_time(value)
        ]
        if self.keep_best is not None and not _is_keep_best(self.keep_best):
            metric = self.keep_best if isinstance(self.keep_best, str) else "loss"
            example = (metric, mode_of_name(metric) or "min", 3)
            problems.append(
                "keep_best must be a metric, 'min' or 'max', and the number of steps to keep, such as "
                f"keep_best={example!r}, not {self.keep_best!r}"
            )
        if self.keeps_all and any(rule is not None for rule in (self.keep_every, self.keep_best, self.keep_one_per)):
            problems.append(
                "keep_every, keep_best and keep_one_per need keep_last or keep_for, because without them no checkpoint "
                "is removed: pass the number of newest checkpoints to keep (keep_last=1)"
            )
        if problems:
            raise InvalidOptionError("CheckpointManager: " + "; ".join(problems))

    @property
    def keeps_all(self) -> bool:
        """True if no checkpoint is ever removed."""
        return self.keep_last is None and self.keep_for is None


class SaveSchedule:
    """Decides which steps are due, alike on all ranks.

    With an interval of time, the clock of rank 0 decides. All ranks ask rank 0 at the same steps, which rank 0 chooses:
    halfway to the expected end of the interval, then halfway through the rest, and so on. So an interval of `n` steps
    costs about ``log2(n)`` broadcasts. If steps become slower, a save is late by fewer steps than remained at the last
    question.

    Args:
        save_every: Number of steps, or the time between the beginnings of two saves. None: each step is due.
        name: Name of the manager's argument, for errors.
        monotonic_s: The clock.

    """

    def __init__(
        self,
        save_every: int | timedelta | None,
        *,
        name: str = "save_every",
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if save_every is not None and not is_positive(save_every) and not is_positive_time(save_every):
            raise InvalidOptionError(
                f"CheckpointManager: {name} must be a positive whole number of steps, a positive datetime.timedelta "
                f"or None, not {save_every!r}{'. For ten minutes: timedelta(minutes=10)' * isinstance(save_every, str)}"
            )
        self.save_every = save_every
        self._monotonic_s = monotonic_s
        self._began_s = self._asked_s = monotonic_s()
        self._num_steps, self._num_steps_to_wait = 0, 1
        """Steps since the last question to rank 0, and steps until the next one. Equal on all ranks."""
        self._answer: tuple[int, bool] = (-1, False)

    def is_due(
        self, step: int, *, is_saving: Callable[[], bool], ask: Callable[[Callable[[], tuple[bool, int]]], Any]
    ) -> bool:
        """Return True if `step` is due. `ask` runs a function on rank 0 and returns its result on all ranks."""
        interval = self.save_every
        if not isinstance(interval, timedelta):
            return interval is None or step % interval == 0
        if self._answer[0] != step:
            self._num_steps += 1
            is_due = False
            if self._num_steps >= self._num_steps_to_wait:
                is_due, self._num_steps_to_wait = ask(
                    lambda: self._decide(interval.total_seconds(), is_saving=is_saving())
                )
                self._num_steps = 0
            self._answer = step, is_due
        return self._answer[1]

    def note_save(self) -> None:
        """Record that a save begins now."""
        self._began_s = self._monotonic_s()

    def _decide(self, interval_s: float, *, is_saving: bool) -> tuple[bool, int]:
        """Return True if a save is due now, and the number of steps until the next question."""
        now_s = self._monotonic_s()
        step_s, self._asked_s = (now_s - self._asked_s) / self._num_steps, now_s
        elapsed_s = now_s - self._began_s
        # The end of a save in flight is unknown.
        left_s = max(interval_s - elapsed_s, elapsed_s / 8 if is_saving else 0.0)
        return left_s <= 0, max(1, int(left_s / 2 / step_s)) if step_s > 0 else 1


def is_positive(value: object) -> bool:
    """Return True for a whole number of at least 1, NumPy's included."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def is_positive_time(value: object) -> bool:
    """Return True for a ``timedelta`` of more than 0."""
    return isinstance(value, timedelta) and value > timedelta(0)


def _is_keep_best(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))  # a list comes from a configuration file
        and len(value) == _NUM_FIELDS_OF_KEEP_BEST
        and isinstance(value[0], str)
        and value[1] in _MODES
        and is_positive(value[2])
    )


def choose_mode(metric: str, mode: Mode | None) -> Mode:
    """Return `mode`, or the mode that the metric's name implies. Raises `InvalidOptionError` if it implies none."""
    chosen = mode_of_name(metric) if mode is None else mode
    if chosen is None:
        raise InvalidOptionError(
            f"the name {metric!r} does not tell which value is the best: pass mode='min' or mode='max'"
        )
    if chosen not in _MODES:
        raise InvalidOptionError(f"mode must be 'min' or 'max', not {mode!r}")
    return chosen


def keep_newest_of_each_step(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Keep the first checkpoint of each step in `steps`, which is sorted newest first.

    A step has several checkpoints if it was saved again beside a damaged one.
    """
    newest: dict[int, StepInfo] = {}
    for info in steps:
        newest.setdefault(info.step, info)
    return list(newest.values())


def sort_best_first(steps: Sequence[StepInfo], metric: str, mode: Mode) -> list[StepInfo]:
    """Sort the steps that have a finite value of `metric`. If two values are equal, the newer step is better."""
    measured = [info for info in sort_newest_first(steps) if math.isfinite(info.metrics.get(metric, math.nan))]
    return sorted(measured, key=lambda info: info.metrics[metric] * (1 if mode == "min" else -1))


def explain_missing_metric(steps: Sequence[StepInfo], metric: str) -> str | None:
    """Return a sentence that names the metrics of `steps`, if no step has `metric` but some have others; else None."""
    names = sorted({name for info in steps for name in info.metrics})
    if not names or metric in names:
        return None
    hint = did_you_mean(find_near(metric, names))
    return f"no step has the metric {metric!r}{hint}; the steps have {quote_names(names)}"


def find_superseded(
    steps: Sequence[StepInfo], policy: RetentionPolicy, *, damaged: Collection[str] = (), own_step: int | None = None
) -> list[StepInfo]:
    """Return the checkpoints to remove, oldest first.

    The newest checkpoint, the URIs in `damaged`, and `own_step`, the caller's last commit, always stay. A damaged
    checkpoint does not count for `keep_last`, because it cannot be loaded; it is not removed either, because only a
    user can say that it is lost. `own_step` stays even if another machine, whose clock is ahead, has committed a newer
    step. The checkpoints of one step are kept or removed together. Ages are measured from the newest commit. So the
    time of the removal does not matter, and a run that paused for days loses nothing.
    """
    if policy.keeps_all:
        return []
    whole = [info for info in sort_newest_first(steps) if info.uri not in damaged]
    latest = keep_newest_of_each_step(whole)
    kept = {info.step for info in latest[: policy.keep_last or 1]} | {own_step}
    if policy.keep_for is not None:
        kept |= {info.step for info in latest if latest[0].committed_at - info.committed_at <= policy.keep_for}
    if policy.keep_one_per is not None:
        # Keep the first one of each period: to keep the last one, each save would remove the one before.
        first_of = {(info.committed_at - _EPOCH) // policy.keep_one_per: info.step for info in latest}
        kept |= set(first_of.values())
    if policy.keep_every is not None:
        kept |= {info.step for info in whole if info.step % policy.keep_every == 0}
    if policy.keep_best is not None:
        metric, mode, number = policy.keep_best
        kept |= {info.step for info in sort_best_first(latest, metric, mode)[:number]}
    return [info for info in reversed(whole) if info.step not in kept]


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailure:
    """A save of a `CheckpointManager` that failed because of the store."""

    step: int
    """Number of the step."""
    uri: str
    """URI of the step. After a `CommitUnknownError`, it may be committed."""
    error: BaseException
    """The exception of `cloudckpt.save`, or a `SaveInFlightError`."""


def is_store_failure(error: BaseException) -> bool:
    """Return True if a save failed on all failing ranks because of the store."""
    # A cause that is a SaveOrLoadError is the failure of another save.
    is_trouble = [
        isinstance(cause, _STORE_FAILURES) and not isinstance(cause, (SaveOrLoadError, CheckpointExistsError))
        for cause in causes_of(error)
    ]
    return bool(is_trouble) and all(is_trouble)


class Failures:
    """The failed saves of one manager.

    Either all ranks continue, or none: `record` depends only on the outcomes of the saves, which all ranks share. A
    save that is refused because another save is in flight does not count as a failure of the other save.
    """

    def __init__(self, on_failure: OnFailure, max_failures: int) -> None:
        if on_failure not in ("raise", "warn"):
            raise InvalidOptionError(f"CheckpointManager: on_failure must be 'raise' or 'warn', not {on_failure!r}")
        if not is_positive(max_failures):
            raise InvalidOptionError(
                f"CheckpointManager: max_failures must be a positive whole number, not {max_failures!r}"
            )
        self.limit = max_failures if on_failure == "warn" else 1
        """Number of failures in a row after which the last is raised."""
        self.in_a_row = 0
        self.all: tuple[SaveFailure, ...] = ()

    def record(self, step: int, uri: str, error: BaseException) -> SaveFailure | None:
        """Record a failed save. Returns None if its error is to be raised."""
        # An error without a URI: only threads of this rank were in conflict.
        is_refused = isinstance(error, SaveInFlightError) and error.uri != ""
        if not is_refused and not is_store_failure(error):
            return None
        # A copy has no traceback, whose frames hold the state dict.
        failure = SaveFailure(step=step, uri=uri, error=copy.copy(error))
        self.all = (*self.all, failure)[-_MAX_KEPT:]
        # The save in flight has an outcome of its own, which reaches the ranks at different times.
        self.in_a_row += not is_refused
        return failure if self.limit != 1 and (is_refused or self.in_a_row < self.limit) else None
