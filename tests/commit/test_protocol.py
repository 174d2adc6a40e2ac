"""The commit protocol under every interleaving of a few actors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.commit.actors import (
    acknowledged,
    commits_in,
    committed,
    data_key_of,
    deleter,
    reader,
    saver,
    written_by,
)
from tests.commit.model import Actor, Check, Progress, Result, World


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time has no part in the protocol."""
    monkeypatch.setattr("cloudckpt._transfer.retry._delay_s", lambda error, num_failures: 0.0)


def inspect(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
    """What must hold in every state that can be reached, as long as nobody deletes."""
    commits = commits_in(world)
    highest = max(commits, default=None)
    if highest is not None:
        # G1: what a reader would take now is whole.
        manifest = commits[highest]
        assert all(stored.key in dict(world) for stored in manifest.objects), f"{manifest.attempt} lost its data"
    winners: dict[int, str] = {}
    for was, progress in zip(before, after, strict=True):
        for milestone in progress.milestones:
            found = acknowledged(milestone)
            if found is None:
                continue
            attempt, number = found
            # G2: at most one winner for each number.
            assert winners.setdefault(number, attempt) == attempt, f"{winners[number]} and {attempt} both won {number}"
            assert highest is not None, f"{attempt} was confirmed, and nothing is there"
            # A confirmed commit stays until a later one takes its place.
            assert highest >= number, f"{attempt} was confirmed, and an older commit counts"
            if milestone not in was.milestones:
                assert commits[highest].attempt == attempt, f"{attempt} was confirmed, but {highest} counts"
        if progress.outcome is not None:
            assert "corrupt" not in progress.outcome, f"a reader found {progress.outcome}"
            # Who was told that he failed has not committed.
            attempt, _, fate = progress.outcome.partition(" ")
            if fate in ("refused", "lost", "failed") and highest is not None:
                assert commits[highest].attempt != attempt, f"{attempt} was told {fate}, and counts"


def checked(
    actors: Sequence[Actor], *, world: World = (), attempts: str = "", num_faults: int = 0, num_kills: int = 0
) -> Result:
    whole = tuple(sorted((*world, *written_by(*attempts))))
    result = Check(actors, inspect, world=whole, num_faults=num_faults, num_kills=num_kills).run()
    print(f"{result.num_schedules} schedules in {result.num_states} states")  # shown by pytest -s
    return result


def winners_of(result: Result) -> set[tuple[str, ...]]:
    """Who committed, in each possible end."""
    return {
        tuple(sorted(outcome.split()[0] for outcome in outcomes if outcome.endswith(" committed")))
        for outcomes in result.outcomes
    }


def test_of_two_writers_exactly_one_wins() -> None:
    """If this fails, two jobs with one URI destroy each other's checkpoint, or neither gets one (G2)."""
    result = checked([saver("A"), saver("B")], attempts="AB")
    assert winners_of(result) == {("A",), ("B",)}
    assert result.num_schedules > 20


def test_of_three_writers_exactly_one_wins_and_readers_see_it_or_nothing() -> None:
    """If this fails, a reader sees a part of a save, or a save that was told that it lost."""
    result = checked([saver("A"), saver("B"), saver("C"), reader()], attempts="ABC")
    assert winners_of(result) == {("A",), ("B",), ("C",)}
    assert {outcomes[3] for outcomes in result.outcomes} == {"found nothing", "read A", "read B", "read C"}


@pytest.mark.parametrize("num_faults", [1, 2])
def test_lost_answers_do_not_change_who_won(num_faults: int) -> None:
    """If this fails, a lost answer makes a save fail that is there, succeed that is not, or lose its data."""
    result = checked([saver("A"), saver("B")], attempts="AB", num_faults=num_faults)
    assert ("A", "B") not in winners_of(result)
    assert any("unknown" in outcome for outcomes in result.outcomes for outcome in outcomes) == (num_faults > 1)


def test_of_two_overwriters_one_wins_each_number_and_readers_always_find_a_whole_one() -> None:
    """If this fails, an overwrite leaves no checkpoint for a moment, or one with missing data (G2)."""
    result = checked(
        [saver("B", overwrite=True), saver("C", overwrite=True), reader()],
        world=committed(0, "A"),
        attempts="BC",
    )
    # Both can win, one after the other; both can not lose.
    assert winners_of(result) == {("B",), ("C",), ("B", "C")}
    # Overwritten twice in the middle of one load is all that can go wrong.
    assert {outcomes[2] for outcomes in result.outcomes} == {"read A", "read B", "read C", "told to read again"}


def test_a_slow_writer_does_not_slip_below_an_overwrite() -> None:
    """If this fails, a save that found nothing wins the number that an overwrite has just freed."""
    result = checked(
        [saver("A"), saver("B"), saver("C", overwrite=True), reader()],
        attempts="ABC",
    )
    # C may come first and find nothing to overwrite; then it is as the others are.
    assert winners_of(result) == {("A",), ("B",), ("C",), ("A", "C"), ("B", "C")}


def test_overwrites_with_lost_answers() -> None:
    """If this fails, an overwriter whose answer was lost removes its own data, or both overwriters succeed as one."""
    result = checked(
        [saver("B", overwrite=True), saver("C", overwrite=True)],
        world=committed(0, "A"),
        attempts="BC",
        num_faults=2,
    )
    assert ("B", "C") in winners_of(result)


def test_three_overwriters() -> None:
    """If this fails, overwriters that come one upon the other confirm a commit that does not count."""
    result = checked(
        [saver(name, overwrite=True) for name in "BCD"],
        world=committed(0, "A"),
        attempts="BCD",
    )
    assert () not in winners_of(result)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_death_at_any_moment_leaves_a_whole_checkpoint(overwrite: bool) -> None:  # noqa: FBT001
    """If this fails, a job that is killed in its commit, or in its tidying up, takes the checkpoint with it."""
    result = checked(
        [saver("B", overwrite=overwrite), saver("C", overwrite=True), reader()],
        world=committed(0, "A"),
        attempts="BC",
        num_kills=2,
    )
    assert any("dead" in outcomes for outcomes in result.outcomes)


def test_the_next_save_after_a_death_succeeds() -> None:
    """If this fails, what a killed overwriter left stands in the way of the next one."""
    result = checked(
        [saver("B", overwrite=True), saver("C", overwrite=True)],
        world=committed(0, "A"),
        attempts="BC",
        num_kills=1,
    )
    ends = [dict(zip("BC", outcomes, strict=True)) for outcomes in result.outcomes]
    assert {"B": "dead", "C": "C committed"} in ends


def check_whole(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
    """What must hold in every state also where somebody deletes."""
    commits = commits_in(world)
    if commits:
        manifest = commits[max(commits)]
        assert all(stored.key in dict(world) for stored in manifest.objects), f"{manifest.attempt} lost its data"
    for progress in after:
        attempt, _, fate = (progress.outcome or "").partition(" ")
        assert fate != "corrupt", f"a reader found {attempt} corrupt"
        if fate in ("refused", "lost", "failed") and commits:
            assert commits[max(commits)].attempt != attempt, f"{attempt} was told {fate}, and counts"


@pytest.mark.parametrize(
    "others",
    [
        [reader()],
        [saver("B"), reader()],
        [saver("B", overwrite=True), reader()],
        [deleter(), saver("B")],
        [saver("B"), saver("C", overwrite=True)],
    ],
    ids=["reader", "writer and reader", "overwriter and reader", "deleter and writer", "writer and overwriter"],
)
def test_deletion_leaves_whole_checkpoints_or_none(others: list[Actor]) -> None:
    """If this fails, a deletion beside saves and loads leaves a manifest whose data is gone (G1)."""
    world = tuple(sorted((*committed(0, "A"), *written_by("B", "C"))))
    result = Check([deleter(), *others], check_whole, world=world).run()
    assert all(outcomes[0] == "deleted" for outcomes in result.outcomes)


def test_a_save_that_was_overtaken_keeps_its_data() -> None:
    """If this fails, deleting the save that won uncovers another whose data was removed when it lost."""
    world = tuple(sorted(written_by("A", "B", "C")))
    actors = [saver("A"), saver("B"), saver("C", overwrite=True), deleter()]
    result = Check(actors, check_whole, world=world).run()
    assert any(outcomes[0] == "A overtaken" for outcomes in result.outcomes)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a deletion frees its numbers, and a slow overwriter then tidies up under a number that is another save's; "
    "a deletion that leaves a tombstone as the next number would not",
)
def test_tidying_up_does_not_outlive_a_deletion() -> None:
    """If this fails, an overwriter that stood still while its checkpoint was deleted removes the one that came next."""

    def inspect_next(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
        if before[0].outcome == "deleted" and before[1].outcome == "B committed":
            assert commits_in(world), "B was confirmed after the deletion, and is gone"

    world = tuple(sorted((*committed(0, "A"), *written_by("B", "C"))))
    Check([deleter(), saver("B"), saver("C", overwrite=True)], inspect_next, world=world).run()


def test_what_was_replaced_is_removed() -> None:
    """If this fails, every overwrite leaves a whole checkpoint's bytes behind, to be paid for."""
    ends: list[World] = []

    def remember(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
        if after[0].outcome is not None:
            ends.append(world)

    world = tuple(sorted((*committed(0, "A"), *written_by("B"))))
    Check([saver("B", overwrite=True)], remember, world=world).run()
    assert [{key for key, _ in end} for end in ends] == [{"manifest.1.json", data_key_of("B")}]
