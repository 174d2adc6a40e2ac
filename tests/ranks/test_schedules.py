"""Ranks that leave saves, miss them, are interrupted, die, are slow or late, in thousands of orders of their threads.

They run the real code; the clock, the threads and the store are simulated, so that one seed is one run, to the letter.
`CLOUDCKPT_SCHEDULES` says how many are tried.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import pytest
from tests.ranks.oracle import complaints
from tests.ranks.world import NUM_COLLECTIVES, TIMEOUT_S, Act, Kind, World

NUM_SCHEDULES = int(os.environ.get("CLOUDCKPT_SCHEDULES", "150"))
LONGEST_S = 3.2 * TIMEOUT_S
"""To hear that one is silent, twice where gloo was left meanwhile; and what delays add."""
DELAYS_S = (0.005, 0.05, 0.3, 1.0)
NUM_DISTURBED = 3
STEPS_OF_A_SAVE = 500
"""So many there are about, of three ranks."""
EVERY = 1 if "CLOUDCKPT_EXHAUSTIVE" in os.environ else 61

MIXES: tuple[tuple[Kind, ...], ...] = (
    ("leaves", "drops", "is interrupted"),
    ("misses", "leaves", "is interrupted", "drops"),
    ("misses", "is late", "is slow"),
    ("differs", "is slow"),
    ("dies", "leaves", "is slow"),
)


def drawn(seed: int, *, num_ranks: int, kinds: tuple[Kind, ...], is_in_step: bool = True, num_after: int = 1) -> World:
    """Some saves in which something goes wrong, and then those in which nothing does."""
    choose = random.Random(seed)

    def act() -> Act:
        if choose.random() > 0.35:
            return Act()
        kind = choose.choice(kinds)
        at = {
            "leaves": choose.randrange(NUM_COLLECTIVES + 1),
            "drops": choose.randrange(NUM_COLLECTIVES + 1),
            "is interrupted": int(120 * choose.random() ** 2),
            "dies": choose.randrange(NUM_COLLECTIVES),
            "is slow": choose.randrange(NUM_COLLECTIVES),
        }
        return Act(kind=kind, at=at.get(kind, 0))

    program = [[act() for _ in range(num_ranks)] for _ in range(NUM_DISTURBED)] + [[Act()] * num_ranks] * num_after
    most_steps = STEPS_OF_A_SAVE * len(program)
    delays = {choose.randrange(most_steps): choose.choice(DELAYS_S) for _ in range(choose.randrange(5))}
    return World(program, seed=seed, delays=delays, is_in_step=is_in_step)


def check(world: World, *, named: str, num_after: int = 0) -> None:
    world.run()
    found = complaints(world, longest_s=LONGEST_S, num_after=num_after)
    assert not found, "\n".join([named, *found, str(world)])


@pytest.mark.parametrize("kinds", MIXES, ids=" ".join)
def test_ranks_that_meet_between_saves_make_the_next_one_after_whatever_went_wrong(kinds: tuple[Kind, ...]) -> None:
    """If this fails, in some order of the ranks' threads, a save fails that all have come to, names a rank that has
    done nothing, waits for too long, or has ranks in one collective that do different things.
    """
    for seed in range(NUM_SCHEDULES // len(MIXES)):
        check(drawn(seed, num_ranks=2 + seed % 2, kinds=kinds), named=f"seed {seed}")


def test_ranks_that_nothing_else_joins_find_one_another() -> None:
    """If this fails, ranks that only saves join go on side by side after one has missed some."""
    num_after = 4
    for seed in range(NUM_SCHEDULES // 10):
        world = drawn(
            seed, num_ranks=2 + seed % 2, kinds=MIXES[1], is_in_step=False, num_after=NUM_DISTURBED + 2 * num_after
        )
        check(world, named=f"seed {seed}", num_after=num_after)


LEAVES, MISSES, DIFFERS, ACTS = Act(kind="leaves", at=1), Act(kind="misses"), Act(kind="differs"), Act()
PROGRAMS: dict[str, list[list[Act]]] = {
    "one leaves": [[ACTS, LEAVES, ACTS]],
    "rank 0 leaves": [[LEAVES, ACTS, ACTS]],
    "one differs": [[ACTS, DIFFERS, ACTS]],
    "one misses what another leaves": [[MISSES, Act(kind="leaves"), ACTS]],
    "two miss what the third gives up": [[MISSES, MISSES, ACTS]],
}


@pytest.mark.parametrize("named", PROGRAMS)
def test_wherever_a_thread_is_put_aside_for_a_while(named: str) -> None:
    """If this fails, ranks hear of one another in some order that was not thought of."""
    program = [*PROGRAMS[named], [ACTS] * 3, [ACTS] * 3]

    def world(delays: Mapping[int, float]) -> World:
        return World(program, seed=named, delays=delays, is_in_step=True)

    undelayed = world({})
    check(undelayed, named=named)
    for duration_s in (0.05, 1.0):
        for step in range(0, min(undelayed.scheduler.num_steps, 3 * STEPS_OF_A_SAVE), EVERY):
            check(world({step: duration_s}), named=f"{duration_s} s at step {step}")


def test_one_seed_is_one_run() -> None:
    """If this fails, what one of the other tests finds cannot be run again."""
    worlds = [drawn(7, num_ranks=3, kinds=MIXES[1]) for _ in range(2)]
    for world in worlds:
        world.run()
    assert str(worlds[0]) == str(worlds[1])
    assert worlds[0].scheduler.num_steps == worlds[1].scheduler.num_steps
