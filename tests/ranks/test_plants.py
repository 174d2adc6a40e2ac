"""Errors that are planted in how ranks wait for one another: the simulation must find each, within a bounded search."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tests.ranks.oracle import complaints
from tests.ranks.test_schedules import LONGEST_S, MIXES, NUM_DISTURBED, drawn

from cloudckpt._ranks.meetings import Meetings
from cloudckpt._ranks.notices import Notices
from cloudckpt._ranks.waiting import Waiting

pytestmark = pytest.mark.faults

_MOST_SCHEDULES = 400
Plant = Callable[[pytest.MonkeyPatch], None]


def who_comes_between_loss_and_word_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for what rank 0 has to say."""
    monkeypatch.setattr(Waiting, "_rank_0_comes_for_it", lambda _: False)


def what_was_left_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes its call for the one that another has left."""
    monkeypatch.setattr(Waiting, "_fail_if_missed", lambda _: None)


def who_left_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on without knowing what became of the call that it has left."""
    monkeypatch.setattr(Waiting, "_settle", lambda _: None)


def who_is_ahead_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks go on side by side."""
    monkeypatch.setattr(Waiting, "_fail_if_ahead", lambda _: None)


def no_word_is_left_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes to the old keys finds nothing there."""
    end = Notices.end

    def ended(notices: Notices, **settings: Any) -> None:
        notices.gives_up = type(notices.gives_up)()
        end(notices, **settings)

    monkeypatch.setattr(Notices, "end", ended)


def all_are_taken_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that come for different things go on together."""
    monkeypatch.setattr("cloudckpt._ranks.signs.task_of", lambda *_: "same")
    monkeypatch.setattr("cloudckpt._ranks.waiting.task_of", lambda *_: "same")


def rank_0_does_not_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank holds the others in gloo."""
    have_met: Any = Meetings._have_met
    monkeypatch.setattr(Meetings, "_have_met", lambda self, goal: self.rank == 0 or have_met(self, goal))


# In which kinds of disturbances each is to be found, and whether something else joins the ranks.
PLANTS: dict[Plant, tuple[int, bool]] = {
    who_comes_between_loss_and_word_is_late: (3, True),
    what_was_left_is_not_missed: (1, True),
    who_left_does_not_settle: (0, False),
    who_is_ahead_does_not_wait: (1, False),
    no_word_is_left_of_a_loss: (2, True),
    all_are_taken_for_the_same: (3, True),
    rank_0_does_not_wait_for_all: (2, True),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_error_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the simulation is blind for a whole class of errors, and its silence says nothing."""
    plant(monkeypatch)
    mix, is_in_step = PLANTS[plant]
    for seed in itertools.count():
        assert seed < _MOST_SCHEDULES, "not found"
        num_after = 1 if is_in_step else NUM_DISTURBED + 8
        world = drawn(seed, num_ranks=3, kinds=MIXES[mix], is_in_step=is_in_step, num_after=num_after)
        try:
            world.run()
        except (AssertionError, RuntimeError):
            return
        if complaints(world, longest_s=LONGEST_S, num_after=0 if is_in_step else 4):
            print(f"found at seed {seed}")
            return
