"""The rule of retention, against another statement of it; and what a policy may be."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cloudckpt
from cloudckpt.errors import InvalidOptionError
from cloudckpt.manager.policies import RetentionPolicy, SaveSchedule, find_superseded
from cloudckpt.manager.steps import StepInfo

EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)


def step_info(step: int, *, minute: int, again: str = "", **metrics: float) -> StepInfo:
    return StepInfo(
        step=step, uri=f"memory://x/step-{step}{again}", committed_at=EPOCH + timedelta(minutes=minute), metrics=metrics
    )


def policy(**settings: Any) -> RetentionPolicy:
    return RetentionPolicy(**{"keep_last": None, "keep_every": None, "keep_best": None, **settings})


Situation: TypeAlias = tuple[list[StepInfo], RetentionPolicy, set[str], int | None]
"""The existing steps, the policy, the URIs of the damaged steps, and the step that the caller has committed last."""


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
    minutes = st.builds(timedelta, minutes=st.integers(1, 5))
    keep_for = draw(st.one_of(st.none(), minutes))
    removes = keep_last is not None or keep_for is not None
    kept = policy(
        keep_last=keep_last,
        keep_every=draw(st.one_of(st.none(), st.integers(1, 9))) if removes else None,
        keep_best=draw(st.one_of(st.none(), best)) if removes else None,
        keep_for=keep_for,
        keep_one_per=draw(st.one_of(st.none(), minutes)) if removes else None,
    )
    damaged = {info.uri for info in draw(st.lists(st.sampled_from(infos), max_size=3))} if numbers else set()
    own = draw(st.one_of(st.none(), st.sampled_from(numbers))) if numbers else None
    return infos, kept, damaged, own


def is_newer(one: StepInfo, other: StepInfo) -> bool:
    return one.committed_at > other.committed_at or (one.committed_at == other.committed_at and one.step > other.step)


def stays_by_number_or_time(info: StepInfo, whole: list[StepInfo], kept: RetentionPolicy) -> bool:
    """Ask the rules about one checkpoint that need the times of commits alone."""
    if sum(is_newer(other, info) for other in whole) < (kept.keep_last or 1):
        return True
    if kept.keep_for is not None and all(one.committed_at - kept.keep_for <= info.committed_at for one in whole):
        return True
    if kept.keep_one_per is None:
        return False
    period_s = kept.keep_one_per.total_seconds()
    of_period = [
        one for one in whole if one.committed_at.timestamp() // period_s == info.committed_at.timestamp() // period_s
    ]
    return not any(is_newer(info, one) for one in of_period)


def stays(info: StepInfo, infos: list[StepInfo], kept: RetentionPolicy, damaged: set[str], last: int | None) -> bool:
    """The documented promise, asked of one checkpoint by counting those that are ahead of it; no sorting."""
    if (kept.keep_last is None and kept.keep_for is None) or info.uri in damaged or info.step == last:
        return True
    there = [other for other in infos if other.uri not in damaged]
    # Of a step that was saved again, the later one stands for both.
    whole = [
        one
        for one in there
        if not any(other.step == one.step and other.committed_at > one.committed_at for other in there)
    ]
    (info,) = (one for one in whole if one.step == info.step)

    if stays_by_number_or_time(info, whole, kept):
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


def test_a_run_resumed_after_weeks_keeps_its_steps() -> None:
    """If this fails, a run that is resumed after two weeks loses all of its steps but the new one, by its clock."""
    days = [step_info(day, minute=24 * 60 * day) for day in range(10)]
    kept = policy(keep_for=timedelta(days=7))
    assert [info.step for info in find_superseded(days, kept)] == [0, 1]
    assert find_superseded(days[:5], kept) == []


def test_one_step_of_each_day_stays_the_same() -> None:
    """If this fails, each new save of a day replaces the one that is kept of it, and the day before has none."""
    hours = [step_info(hour, minute=60 * hour) for hour in range(72)]
    kept = policy(keep_last=2, keep_one_per=timedelta(days=1))
    for now in range(1, 73):
        gone = {info.step for info in find_superseded(hours[:now], kept)}
        assert {*range(now)} - gone == {*range(0, now, 24), *range(max(0, now - 2), now)}


class Ranks:
    """A run on several ranks, each with a clock of its own, and one schedule each."""

    def __init__(self, interval: timedelta, num_ranks: int) -> None:
        self.now_s = 0.0
        self.is_saving = False
        self.num_questions = 0
        rates = [1.0, *(7.0 * number for number in range(1, num_ranks))]
        self.schedules = [SaveSchedule(interval, monotonic_s=lambda rate=rate: self.now_s * rate) for rate in rates]

    def is_due(self, step: int) -> bool:
        """Ask all ranks; those that ask rank 0 must all do so."""
        asked: list[int] = []
        answers: list[Any] = []

        def ask(decide: Callable[[], tuple[bool, int]], rank: int) -> tuple[bool, int]:
            asked.append(rank)
            if rank == 0:
                answers.append(decide())
            return answers[0]

        due = {
            schedule.is_due(step, is_saving=lambda: self.is_saving, ask=functools.partial(ask, rank=rank))
            for rank, schedule in enumerate(self.schedules)
        }
        assert asked in ([], [*range(len(self.schedules))]), "a rank waits for others that do not come"
        self.num_questions += bool(asked)
        (answer,) = due
        if answer:
            for schedule in self.schedules:
                schedule.note_save()
        return answer


@given(
    interval_s=st.floats(1, 1e5),
    steps_s=st.lists(st.floats(0.01, 100), min_size=1, max_size=80),
    saves_s=st.floats(0, 300),
    num_ranks=st.integers(1, 3),
)
def test_saves_by_time_are_due_on_all_ranks_and_never_early(
    interval_s: float, steps_s: list[float], saves_s: float, num_ranks: int
) -> None:
    """If this fails, ranks wait for each other in vain, a save comes too early, or waits for the one before."""
    ranks = Ranks(timedelta(seconds=interval_s), num_ranks)
    began_s, ends_s = 0.0, 0.0
    for step, step_s in enumerate(steps_s):
        ranks.now_s += step_s
        ranks.is_saving = ranks.now_s < ends_s
        if ranks.is_due(step):
            assert not ranks.is_saving
            assert ranks.now_s - began_s >= interval_s - 1e-6
            began_s, ends_s = ranks.now_s, ranks.now_s + saves_s


@pytest.mark.parametrize(("saves_s", "late_s"), [(0.0, 1.0), (750.0, 750.0 / 8 + 1)])
def test_save_by_time_is_on_time_with_few_questions(saves_s: float, late_s: float) -> None:
    """If this fails, each step of a run at an even pace costs a broadcast, or saves come late."""
    ranks = Ranks(timedelta(minutes=10), 2)
    began_s, ends_s, num_saves = 0.0, 0.0, 0
    for step in range(20_000):
        ranks.now_s += 0.5
        ranks.is_saving = ranks.now_s < ends_s
        if ranks.is_due(step):
            assert 0 <= ranks.now_s - max(began_s + 600, ends_s) <= late_s
            began_s, ends_s = ranks.now_s, ranks.now_s + saves_s
            num_saves += 1
    assert num_saves >= 10
    assert ranks.num_questions <= 30 * num_saves


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_last": 0}, "keep_last must be a positive"),
        ({"keep_last": True}, "keep_last must be a positive"),
        ({"keep_last": 1, "keep_every": -1}, "keep_every must be a positive"),
        ({"keep_every": 100}, "need keep_last or keep_for, because without them"),
        ({"keep_best": ("loss", "min", 1)}, "need keep_last or keep_for, because without them"),
        ({"keep_one_per": timedelta(days=1)}, "need keep_last or keep_for, because without them"),
        ({"keep_for": timedelta(0)}, "keep_for must be a positive datetime.timedelta"),
        ({"keep_for": 7}, "keep_for must be a positive datetime.timedelta"),
        ({"keep_last": 1, "keep_one_per": -timedelta(days=1)}, "keep_one_per must be a positive datetime.timedelta"),
        ({"keep_last": 1, "keep_best": ("loss", 1)}, "keep_best must be"),
        ({"keep_last": 1, "keep_best": ("loss", "least", 1)}, "keep_best must be"),
        ({"keep_last": 1, "keep_best": ("loss", "min", 0)}, "keep_best must be"),
        ({"keep_last": 1, "keep_best": "acc"}, re.escape("such as keep_best=('acc', 'max', 3), not 'acc'")),
    ],
)
def test_policies_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    """If this fails, a slip in a policy removes everything, or nothing, hours later."""
    with pytest.raises(InvalidOptionError, match=words):
        policy(**settings)


@pytest.mark.parametrize(
    ("keep_best", "told"),
    [(("val_acc", "min", 1), "highest value. Pass 'max'"), (("loss", "max", 1), "lowest value. Pass 'min'")]
    + [((metric, mode, 1), "") for metric, mode in (("val_acc", "max"), ("loss", "min"), ("score", "min"))],
)
def test_direction_against_the_name_of_the_metric_is_named(
    keep_best: tuple[str, Any, int], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a run keeps its worst step and removes the best one, and nobody is told."""
    cloudckpt.CheckpointManager("memory://direction", keep_last=1, keep_best=keep_best)
    assert told in caplog.text
    assert bool(told) == ("keep_best=" in caplog.text)
