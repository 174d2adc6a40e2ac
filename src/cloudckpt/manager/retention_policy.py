"""Decide which checkpoints of a run stay. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from numbers import Integral
from typing import Literal, TypeAlias

from cloudckpt.commit.attempts import commit_order
from cloudckpt.errors import InvalidOptionError

Mode: TypeAlias = Literal["min", "max"]
_MODES = ("min", "max")
_NUM_FIELDS_OF_KEEP_BEST = 3


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


def check_mode(mode: str) -> None:
    """Raise `InvalidOptionError` unless `mode` is ``"min"`` or ``"max"``."""
    if mode not in _MODES:
        raise InvalidOptionError(f"mode must be 'min' or 'max', not {mode!r}")


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
