"""Savers, overwriters, loads, deletions and gc at once, in thousands of orders, with faults and deaths in between.

All of them are the real public functions, on a store in memory. `CLOUDCKPT_SCHEDULES` says how many orders are tried.
"""

from __future__ import annotations

import logging
import os
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.kit.clock import skip_waits
from tests.simulated.scheduler import Fate
from tests.simulated.world import KINDS, World

pytestmark = pytest.mark.faults

NUM_SCHEDULES = int(os.environ.get("CLOUDCKPT_SCHEDULES", "1100"))
_MAX_AT_ONCE = 4
_MAX_EVER = 6
_CHOICE = st.integers(0, 59)  # 60 is divisible by all numbers of things to choose from
NUM_STEPS = (*range(8), 99, 99, 99)
"""Steps before the one that may fail. Many are enough to reach the end."""
FATES: tuple[Fate, ...] = ("done",) * 8 + ("lost", "unanswered", "late", "dies", "dies after")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time has no part in it, nor have torch's logs, which would take most of it."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    skip_waits(monkeypatch)


class Schedules(RuleBasedStateMachine):
    """Every run is one schedule."""

    counts: Counter[str]
    """The number of each event in all runs together."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @precondition(lambda self: self.has_room())
    @rule(choice=_CHOICE, is_large=st.booleans())
    def begin(self, choice: int, is_large: bool) -> None:  # noqa: FBT001
        self.world.begin(KINDS[choice % len(KINDS)], is_large=is_large)

    @precondition(lambda self: self.world.running)
    @rule(choice=_CHOICE, num_steps=_CHOICE, fate=_CHOICE)
    def proceed(self, choice: int, num_steps: int, fate: int) -> None:
        running = self.world.running
        actor = running[choice % len(running)]
        for last in [False] * NUM_STEPS[num_steps % len(NUM_STEPS)] + [True]:
            if not actor.has_ended:
                self.world.step(actor, FATES[fate % len(FATES)] if last else "done")

    @precondition(lambda self: self.world.late)
    @rule(choice=_CHOICE)
    def deliver(self, choice: int) -> None:
        late = self.world.late
        self.world.deliver(late[choice % len(late)])

    def has_room(self) -> bool:
        num_running = len(self.world.running)
        return num_running < _MAX_AT_ONCE and (self.world.num_begun < _MAX_EVER or not num_running)

    def teardown(self) -> None:
        try:
            self.world.finish()
        finally:
            self.world.close()
            self.counts.update(self.world.counts)
            self.counts["schedules"] += 1


def test_a_checkpoint_is_one_whole_save_or_none_in_every_schedule() -> None:
    """If this fails, there is an order of events in which a confirmed save is lost, two savers win, a reader gets a mix
    or something older than was confirmed, or gc takes away what counts (G1, G2, G5).
    """
    counts: Counter[str] = Counter()
    choices = settings(
        max_examples=NUM_SCHEDULES,
        stateful_step_count=24,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate],  # a shorter schedule can take longer to find than a failing one is worth
    )
    try:
        run_state_machine_as_test(type("Counted", (Schedules,), {"counts": counts}), settings=choices)
    finally:
        print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    assert counts["schedules"] >= NUM_SCHEDULES
