"""Decide which checkpoints of a run stay, and if training continues after a failed save."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from numbers import Integral
from typing import Literal, TypeAlias

from cloudckpt._display import shown
from cloudckpt.commit.times import commit_order
from cloudckpt.dcp.protocol import SaveOrLoadError, causes_of
from cloudckpt.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    InvalidOptionError,
    SaveInFlightError,
    StoreError,
    did_you_mean,
    find_near,
    quote_names,
)
from cloudckpt.inspect.catalog import Mode, mode_of_name

_MODES = ("min", "max")
_NUM_FIELDS_OF_KEEP_BEST = 3
OnFailure: TypeAlias = Literal["raise", "warn"]
_TROUBLE = (StoreError, CommitUnknownError)
"""The classes of failures that are the store's. All others come from the program, or end the group of the ranks."""
_MOST_KEPT = 100


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """One committed checkpoint of a `CheckpointManager`."""

    step: int
    """Number of the step."""
    uri: str
    """URI of the checkpoint."""
    committed_at: datetime
    """See `cloudckpt.types.CheckpointInfo.committed_at`. If each rank saves alone, the time of rank 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that were saved with it. NaN stands for a value that was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The checkpoints to keep. Without `keep_last`, all of them."""

    keep_last: int | None
    keep_every: int | None
    keep_best: tuple[str, Mode, int] | None

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a positive whole number or None, not {value!r}"
            for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every))
            if value is not None and not is_positive(value)
        ]
        if self.keep_best is not None and not _is_keep_best(self.keep_best):
            problems.append(
                f"keep_best must be the name of a metric, 'min' or 'max', and a number to keep, not {self.keep_best!r}"
            )
        if self.keep_last is None and (self.keep_every is not None or self.keep_best is not None):
            problems.append(
                "keep_every and keep_best need keep_last, because without it no checkpoint is removed: pass the number "
                "of newest checkpoints to keep (keep_last=1)"
            )
        if problems:
            raise InvalidOptionError("CheckpointManager: " + "; ".join(problems))


def is_positive(value: object) -> bool:
    """Return True for a whole number of at least 1, NumPy's included."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _is_keep_best(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))  # a list comes from a configuration file
        and len(value) == _NUM_FIELDS_OF_KEEP_BEST
        and isinstance(value[0], str)
        and value[1] in _MODES
        and is_positive(value[2])
    )


def choose_mode(metric: str, mode: Mode | None) -> Mode:
    """Return `mode`, or without one what the metric's name tells. Raises `InvalidOptionError` if that is nothing."""
    chosen = mode_of_name(metric) if mode is None else mode
    if chosen is None:
        raise InvalidOptionError(
            f"the name {metric!r} does not tell which value is the best: pass mode='min' or mode='max'"
        )
    if chosen not in _MODES:
        raise InvalidOptionError(f"mode must be 'min' or 'max', not {mode!r}")
    return chosen


def sort_newest_first(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Sort by commit time. If two times are equal, the higher step is the newer one."""
    return sorted(steps, key=lambda info: commit_order(info.committed_at, info.uri.rpartition("/")[2]), reverse=True)


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
    """Return a sentence that names the metrics of `steps`, if they have some and none has `metric`, or else None."""
    names = sorted({name for info in steps for name in info.metrics})
    if not names or metric in names:
        return None
    hint = did_you_mean(find_near(metric, names))
    return f"no step has the metric {metric!r}{hint}; the steps have {quote_names(names)}"


def find_superseded(
    steps: Sequence[StepInfo], policy: RetentionPolicy, *, damaged: Collection[str] = (), own_step: int | None = None
) -> list[StepInfo]:
    """Return the checkpoints to remove, oldest first.

    The newest checkpoint, the URIs in `damaged` and `own_step`, the caller's last commit, are never among them. A
    damaged checkpoint does not count as one of the last, because it cannot be loaded; it is not removed either, because
    only a user can say that it is lost. `own_step` stays even if another machine, whose clock is ahead, has committed a
    newer step. The checkpoints of one step stay and go together.
    """
    if policy.keep_last is None:
        return []
    whole = [info for info in sort_newest_first(steps) if info.uri not in damaged]
    latest = keep_newest_of_each_step(whole)
    kept = {info.step for info in latest[: policy.keep_last]} | {own_step}
    if policy.keep_every is not None:
        kept |= {info.step for info in whole if info.step % policy.keep_every == 0}
    if policy.keep_best is not None:
        metric, mode, number = policy.keep_best
        kept |= {info.step for info in sort_best_first(latest, metric, mode)[:number]}
    return [info for info in reversed(whole) if info.step not in kept]


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailure:
    """A save of a `CheckpointManager` that failed because of the store."""

    step: int
    """Number of the step."""
    uri: str
    """URI of the step. After a `CommitUnknownError`, it may be committed."""
    error: BaseException
    """The exception of `cloudckpt.save`, or a `SaveInFlightError`."""


class Failures:
    """The failed saves of one manager.

    The outcome of a save is the same on all ranks. A save that is refused beside another one changes nothing for that
    one, whichever ends first. `take` depends on nothing else, so all ranks go on, or none does.
    """

    def __init__(self, on_failure: OnFailure, max_failures: int) -> None:
        if on_failure not in ("raise", "warn"):
            raise InvalidOptionError(f"CheckpointManager: on_failure must be 'raise' or 'warn', not {on_failure!r}")
        if not is_positive(max_failures):
            raise InvalidOptionError(
                f"CheckpointManager: max_failures must be a positive whole number, not {max_failures!r}"
            )
        self.limit = max_failures if on_failure == "warn" else 1
        """Number of failures in a row of which the last is raised."""
        self.in_a_row = 0
        self.all: tuple[SaveFailure, ...] = ()

    def take(self, step: int, uri: str, error: BaseException) -> SaveFailure | None:
        """Take note of a failed save. Returns None if its error is to be raised."""
        # Without a URI, threads of this rank alone were in each other's way.
        is_refused = isinstance(error, SaveInFlightError) and error.uri != ""
        causes = causes_of(error)
        # A cause that is a SaveOrLoadError is the failure of another save.
        is_trouble = [
            isinstance(each, _TROUBLE) and not isinstance(each, (SaveOrLoadError, CheckpointExistsError))
            for each in causes
        ]
        if not is_refused and not (is_trouble and all(is_trouble)):
            return None
        # A copy has no traceback, whose frames hold the state dict.
        failure = SaveFailure(step=step, uri=uri, error=copy.copy(error))
        self.all = (*self.all, failure)[-_MOST_KEPT:]
        # The save in flight has an outcome of its own, and when that comes differs between ranks.
        self.in_a_row += not is_refused
        return failure if self.limit != 1 and (is_refused or self.in_a_row < self.limit) else None
