"""Which checkpoints stay. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from numbers import Integral
from typing import Literal, TypeAlias

from cloudckpt._commit.commit_time import commit_order
from cloudckpt.errors import InvalidOptionError

Mode: TypeAlias = Literal["min", "max"]
_MODES = ("min", "max")
OnDamaged: TypeAlias = Literal["raise", "skip", "replace"]
ON_DAMAGED = ("raise", "skip", "replace")
_NUM_OF_BEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """One committed checkpoint of a `CheckpointManager`."""

    step: int
    uri: str
    committed_at: datetime
    """See `cloudckpt.CheckpointInfo.committed_at`; of a step whose ranks saved on their own, that of rank 0's."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was saved with it. NaN stands for what was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is kept; without `keep_last`, everything."""

    keep_last: int | None
    keep_every: int | None
    keep_best: tuple[str, Mode, int] | None

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a positive whole number or None, not {value!r}"
            for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every))
            if value is not None and not is_positive(value)
        ]
        if self.keep_best is not None and not _is_choice(self.keep_best):
            problems.append(
                f"keep_best must be a metric's name, 'min' or 'max', and how many to keep, not {self.keep_best!r}"
            )
        if self.keep_last is None and (self.keep_every is not None or self.keep_best is not None):
            problems.append(
                "keep_every and keep_best say what is kept of what would go, and without keep_last nothing goes: say "
                "how many of the newest are kept (keep_last=1)"
            )
        if problems:
            raise InvalidOptionError("CheckpointManager: " + "; ".join(problems))


def is_positive(value: object) -> bool:
    """Whether it is a whole number of at least 1."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1  # NumPy's are, too


def _is_choice(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))  # as a file of settings gives it
        and len(value) == _NUM_OF_BEST
        and isinstance(value[0], str)
        and value[1] in _MODES
        and is_positive(value[2])
    )


def check_mode(mode: str) -> None:
    """Raises `InvalidOptionError` for what is none."""
    if mode not in _MODES:
        raise InvalidOptionError(f"mode must be 'min' or 'max', not {mode!r}")


def newest_first(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Return them by the time of their commits; of equal times, the higher step is newer."""
    return sorted(steps, key=lambda info: commit_order(info.committed_at, info.uri.rpartition("/")[2]), reverse=True)


def newest_of_each(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Without what was saved again since, of steps that were found damaged. The newest first, as they are given."""
    found: dict[int, StepInfo] = {}
    for info in steps:
        found.setdefault(info.step, info)
    return list(found.values())


def best_first(steps: Sequence[StepInfo], metric: str, mode: Mode) -> list[StepInfo]:
    """Those that have a finite value of the metric; of equal ones, the newer is better."""
    found = [info for info in newest_first(steps) if math.isfinite(info.metrics.get(metric, math.nan))]
    return sorted(found, key=lambda info: info.metrics[metric] * (1 if mode == "min" else -1))


def superseded(
    steps: Sequence[StepInfo], policy: Policy, *, damaged: Collection[str] = (), own: int | None = None
) -> list[StepInfo]:
    """What is to go, the oldest first: never the newest, nor the `damaged` URIs, nor `own`, the asker's last commit.

    What is damaged does not count as one of the last, for it cannot stand in for them; whether it really is lost is not
    for a rule to say. A step that was saved again beside a damaged one counts once, and both stay and go together. The
    asker's last commit stays besides the last where another machine, whose clock is ahead, has committed a newer one.
    """
    if policy.keep_last is None:
        return []
    whole = [info for info in newest_first(steps) if info.uri not in damaged]
    latest = newest_of_each(whole)
    kept = {info.step for info in latest[: policy.keep_last]} | {own}
    if policy.keep_every is not None:
        kept |= {info.step for info in whole if info.step % policy.keep_every == 0}
    if policy.keep_best is not None:
        metric, mode, number = policy.keep_best
        kept |= {info.step for info in best_first(latest, metric, mode)[:number]}
    return [info for info in reversed(whole) if info.step not in kept]
