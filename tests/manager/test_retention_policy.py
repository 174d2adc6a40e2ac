"""The rule of retention, against another statement of it; and what a policy may be."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidOptionError
from cloudckpt.manager.policies import RetentionPolicy, StepInfo, find_superseded

EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)


def step_info(step: int, *, minute: int, again: str = "", **metrics: float) -> StepInfo:
    return StepInfo(
        step=step, uri=f"memory://x/step-{step}{again}", committed_at=EPOCH + timedelta(minutes=minute), metrics=metrics
    )


def policy(**settings: Any) -> RetentionPolicy:
    return RetentionPolicy(**{"keep_last": None, "keep_every": None, "keep_best": None, **settings})


Situation: TypeAlias = tuple[list[StepInfo], RetentionPolicy, set[str], int | None]
"""What there is, what is kept, the URIs of what is damaged, and the step that the asker has committed last."""


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    numbers = draw(st.lists(st.integers(0, 40), unique=True, max_size=12))
    losses = st.one_of(st.none(), st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf]), st.floats(-5, 5))
    infos = []
    for number in numbers:
        loss = draw(losses)
        metrics = {} if loss is None else {"loss": loss}
        minute = draw(st.integers(0, 8))
        infos.append(step_info(number, minute=minute, **metrics))
        if draw(st.integers(0, 4)) == 0:  # it was found damaged, and saved again
            infos.append(step_info(number, minute=minute + draw(st.integers(1, 3)), again="-again-1", **metrics))
    keep_last = draw(st.one_of(st.none(), st.integers(1, 5)))
    best = st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4))
    kept = policy(
        keep_last=keep_last,
        keep_every=None if keep_last is None else draw(st.one_of(st.none(), st.integers(1, 9))),
        keep_best=None if keep_last is None else draw(st.one_of(st.none(), best)),
    )
    damaged = {info.uri for info in draw(st.lists(st.sampled_from(infos), max_size=3))} if numbers else set()
    own = draw(st.one_of(st.none(), st.sampled_from(numbers))) if numbers else None
    return infos, kept, damaged, own


def stays(info: StepInfo, infos: list[StepInfo], kept: RetentionPolicy, damaged: set[str], last: int | None) -> bool:
    """The documented promise, asked of one checkpoint by counting those that are ahead of it; no sorting."""
    if kept.keep_last is None or info.uri in damaged or info.step == last:
        return True
    there = [other for other in infos if other.uri not in damaged]
    # Of a step that was saved again, the later one stands for both.
    whole = [
        one
        for one in there
        if not any(other.step == one.step and other.committed_at > one.committed_at for other in there)
    ]
    (info,) = (one for one in whole if one.step == info.step)

    def is_newer(one: StepInfo, other: StepInfo) -> bool:
        return one.committed_at > other.committed_at or (
            one.committed_at == other.committed_at and one.step > other.step
        )

    if sum(is_newer(other, info) for other in whole) < kept.keep_last:
        return True
    if kept.keep_every is not None and info.step // kept.keep_every * kept.keep_every == info.step:
        return True
    if kept.keep_best is None:
        return False
    name, mode, number = kept.keep_best
    own = info.metrics.get(name)
    if own is None or math.isnan(own) or math.isinf(own):
        return False

    def is_better(other: StepInfo) -> bool:
        value = other.metrics.get(name)
        if value is None or math.isnan(value) or math.isinf(value):
            return False
        if value == own:
            return is_newer(other, info)
        return value < own if mode == "min" else value > own

    return sum(is_better(other) for other in whole if other is not info) < number


@given(situations())
def test_policy_removes_only_steps_that_no_rule_keeps(situation: Situation) -> None:
    """If this fails, retention removes a checkpoint that it promised to keep, or fills the bucket."""
    infos, kept, damaged, own = situation
    gone = find_superseded(infos, kept, damaged=damaged, own_step=own)
    assert {info.uri for info in infos if not stays(info, infos, kept, damaged, own)} == {info.uri for info in gone}
    times = [(info.committed_at, info.step) for info in gone]
    assert times == sorted(times), "the oldest go first, so that a death half-way leaves the newer ones"


def test_the_order_is_that_of_the_commits() -> None:
    """If this fails, a job that went back to step 100 loses what it has saved since to steps of its earlier life."""
    earlier_life = [step_info(step, minute=step // 100) for step in (100, 200, 300)]
    again = [step_info(150, minute=10), step_info(175, minute=11)]
    assert [info.step for info in find_superseded([*earlier_life, *again], policy(keep_last=2))] == [100, 200, 300]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_last": 0}, "keep_last must be a positive"),
        ({"keep_last": True}, "keep_last must be a positive"),
        ({"keep_last": 1, "keep_every": -1}, "keep_every must be a positive"),
        ({"keep_every": 100}, "need keep_last, because without it"),
        ({"keep_best": ("loss", "min", 1)}, "need keep_last, because without it"),
        ({"keep_last": 1, "keep_best": ("loss", 1)}, "keep_best must be"),
        ({"keep_last": 1, "keep_best": ("loss", "least", 1)}, "keep_best must be"),
        ({"keep_last": 1, "keep_best": ("loss", "min", 0)}, "keep_best must be"),
    ],
)
def test_policies_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    """If this fails, a slip in a policy removes everything, or nothing, hours later."""
    with pytest.raises(InvalidOptionError, match=words):
        policy(**settings)
