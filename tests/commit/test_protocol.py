"""The commit protocol under every interleaving of a few actors."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from tests.commit.actors import (
    acknowledged,
    collector,
    committed,
    counting_in,
    deleter,
    fence,
    reader,
    saver,
    written_by,
    zombie,
)
from tests.commit.model import IDS, Actor, Check, Progress, Result, World
from tests.kit.clock import skip_waits

takes_minutes = pytest.mark.skipif(
    "CLOUDCKPT_EXHAUSTIVE" not in os.environ, reason="takes long; `make exhaustive` runs it"
)


pytestmark = pytest.mark.timeout(900)
"""Some explorations take minutes on a busy machine."""


@pytest.fixture(autouse=True)
def nothing_left_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time has no part in the protocol, nor have the ids that are drawn."""
    skip_waits(monkeypatch)
    monkeypatch.setattr("cloudckpt.commit.entries.secrets.token_hex", lambda _num_bytes: IDS.draw())


def inspect(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
    """Check a state that can be reached while nobody deletes."""
    check_whole(world, before, after)
    counting = counting_in(world)
    winners: dict[int, str] = {}
    for was, progress in zip(before, after, strict=True):
        for milestone in progress.milestones:
            found = acknowledged(milestone)
            if found is None:
                continue
            attempt, number = found
            # G2: at most one winner for each number.
            assert winners.setdefault(number, attempt) == attempt, f"{winners[number]} and {attempt} both won {number}"
            assert counting is not None, f"{attempt} was confirmed, and nothing is there"
            # A confirmed commit stays until a later one takes its place.
            assert counting[0] >= number, f"{attempt} was confirmed, and an older commit counts"
            # Told by its list of entries, so at that moment; or by a fence in it, which was read a moment later.
            if milestone not in was.milestones and was.call is not None and was.call.operation == "list":
                assert counting[1].attempt == attempt, f"{attempt} was confirmed, but {counting[0]} counts"


def check_whole(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
    """Check a state that can be reached, also while somebody deletes."""
    counting = counting_in(world)
    counts = None if counting is None else counting[1].attempt
    if counting is not None:
        # G1: what a reader would take now is whole.
        assert all(stored.key in dict(world) for stored in counting[1].objects), f"{counts} lost its data"
    for progress in after:
        attempt, _, fate = (progress.outcome or "").partition(" ")
        assert fate != "corrupt", f"a reader found {attempt} corrupt"
        # Who was told that he failed has not committed.
        assert fate not in ("refused", "lost", "failed") or counts != attempt, f"{attempt} was told {fate}, and counts"


def checked(
    actors: Sequence[Actor], *, world: World = (), attempts: str = "", num_faults: int = 0, num_kills: int = 0
) -> Result:
    whole = tuple(sorted((*world, *written_by(*attempts))))
    result = Check(actors, inspect, world=whole, num_faults=num_faults, num_kills=num_kills).run()
    print(f"{result.num_schedules} schedules in {result.num_states} states")  # shown by pytest -s
    return result


def _cells(actor: Actor) -> list[object]:
    """Return what the function closes over."""
    return [cell.cell_contents for cell in actor.__closure__ or ()]


def winners_of(result: Result) -> set[tuple[str, ...]]:
    """Return who committed, in each possible end."""
    return {
        tuple(sorted(outcome.split()[0] for outcome in outcomes if outcome.endswith(" committed")))
        for outcomes in result.outcomes
    }


def test_one_of_three_writers_wins_and_readers_see_it_or_nothing() -> None:
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


def test_each_number_has_one_overwriter_and_readers_find_a_whole_checkpoint() -> None:
    """If this fails, an overwrite leaves no checkpoint for a moment, or one with missing data (G2)."""
    result = checked(
        [saver("B", overwrite=True), saver("C", overwrite=True), reader()], world=committed(0, "A"), attempts="BC"
    )
    # Both can win, one after the other; both can not lose.
    assert winners_of(result) == {("B",), ("C",), ("B", "C")}
    # Overwritten twice in the middle of one load is all that can go wrong.
    assert {outcomes[2] for outcomes in result.outcomes} == {"read A", "read B", "read C", "told to read again"}


def test_a_slow_writer_does_not_slip_below_an_overwrite() -> None:
    """If this fails, a save that found nothing wins the number that an overwrite has just freed."""
    result = checked([saver("A"), saver("B"), saver("C", overwrite=True), reader()], attempts="ABC")
    # C may come first and find nothing to overwrite; then it is as the others are.
    assert winners_of(result) == {("A",), ("B",), ("C",), ("A", "C"), ("B", "C")}


def test_two_overwriters_with_lost_answers_agree_on_the_winner() -> None:
    """If this fails, an overwriter whose answer was lost removes its own data, or both overwriters succeed as one."""
    result = checked(
        [saver("B", overwrite=True), saver("C", overwrite=True)], world=committed(0, "A"), attempts="BC", num_faults=2
    )
    assert ("B", "C") in winners_of(result)


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


@pytest.mark.parametrize(
    "others",
    [
        [reader()],
        [saver("B", writes=True), reader()],
        [saver("B", overwrite=True, writes=True), reader()],
        [deleter(), reader()],
        pytest.param([deleter(), saver("B", writes=True)], marks=takes_minutes),
        [saver("B", writes=True), saver("C", overwrite=True, writes=True)],
        [zombie("B", number=1), zombie("C", number=0)],
        [zombie("B", number=1), saver("D", writes=True)],
    ],
    ids=[
        "reader",
        "writer and reader",
        "overwriter and reader",
        "deleter and reader",
        "deleter and writer",
        "writer and overwriter",
        "two zombies",
        "zombie and writer",
    ],
)
@pytest.mark.slow
def test_deletion_leaves_whole_checkpoints_or_none(others: list[Actor]) -> None:
    """If this fails, a deletion beside saves and loads leaves a manifest whose data is gone (G1)."""
    is_zombie = any("zombie" in actor.__qualname__ for actor in others)
    world = tuple(sorted((*committed(0, "A"), *written_by(*("BC" if is_zombie else "")))))
    result = Check([deleter(), *others], check_whole, world=world).run()
    print(f"{result.num_schedules} schedules in {result.num_states} states")
    results = {outcomes[0] for outcomes in result.outcomes}
    assert results <= {"deleted", "nothing there", "changed"}
    assert "deleted" in results
    assert "changed" not in results or any(" committed" in text for outcomes in result.outcomes for text in outcomes)


@pytest.mark.parametrize("refused", ["manifest", "data/"])
@pytest.mark.parametrize(
    "others",
    [
        [reader()],
        [deleter()],
        [collector()],
        [saver("B", writes=True)],
        [saver("B", overwrite=True, writes=True)],
        [zombie("B", number=1)],
        pytest.param([deleter(), reader()], marks=takes_minutes),
        pytest.param([collector(), reader()], marks=takes_minutes),
    ],
    ids=lambda actors: " and ".join(actor.__qualname__.partition(".")[0] for actor in actors),
)
@pytest.mark.slow
def test_a_refused_deletion_leaves_the_checkpoint_or_hides_it(others: list[Actor], refused: str) -> None:
    """If this fails, a deletion that the store refuses puts back a checkpoint that others have begun to remove (G1), or
    hides one that nobody wants to remove.
    """
    attempts = "B" if "zombie" in others[0].__qualname__ else ""
    world = tuple(sorted((*committed(0, "A"), *written_by(*attempts))))
    result = Check([deleter(refused=refused), *others], check_whole, world=world).run()
    results = {outcomes[0] for outcomes in result.outcomes}
    assert "refused, put back" in results
    if others[0].__qualname__.startswith(("reader", "saver")):
        assert results <= {"refused, put back", "changed"} | (
            {"refused, hidden"} if "saver" in others[0].__qualname__ else set()
        )


def test_a_save_that_was_overtaken_keeps_its_data() -> None:
    """If this fails, deleting the save that won uncovers another whose data was removed when it lost."""
    actors = [zombie("A", number=0), zombie("C", number=1), deleter()]
    result = Check(actors, check_whole, world=tuple(sorted((*committed(0, "B"), *written_by("A", "C"))))).run()
    assert any(outcomes[0] == "A overtaken" for outcomes in result.outcomes)


@pytest.mark.slow
def test_tidying_up_does_not_outlive_a_deletion() -> None:
    """If this fails, an overwriter that stood still while its checkpoint was deleted removes the one that came next."""

    def inspect_next(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
        if before[0].outcome == "deleted" and before[1].outcome == "B committed":
            assert counting_in(world), "B was confirmed after the deletion, and is gone"

    actors = [deleter(), saver("B", writes=True), saver("C", overwrite=True, writes=True)]
    Check(actors, inspect_next, world=committed(0, "A")).run()


@pytest.mark.parametrize(
    ("actors", "num_faults", "num_kills"),
    [
        ([collector(), zombie("B", number=1), zombie("C", number=0)], 0, 0),
        ([collector(), zombie("B", number=1), reader()], 1, 0),
        ([collector(), zombie("B", number=1), zombie("C", number=1)], 0, 1),
        pytest.param(
            [collector(), saver("D", overwrite=True, writes=True), zombie("B", number=1)], 0, 0, marks=takes_minutes
        ),
        ([collector(), saver("D", overwrite=True, writes=True), reader()], 0, 1),
        pytest.param([collector(), collector(), zombie("B", number=1)], 0, 0, marks=takes_minutes),
        pytest.param([collector(), collector(), saver("D", overwrite=True, writes=True)], 0, 0, marks=takes_minutes),
        pytest.param([collector(), collector(), zombie("B", number=1)], 1, 1, marks=takes_minutes),
    ],
    ids=[
        "two zombies",
        "lost answers",
        "deaths",
        "overwriter and zombie",
        "overwriter and reader",
        "two collectors",
        "two collectors and overwriter",
        "two collectors, a lost answer and a death",
    ],
)
@pytest.mark.slow
def test_gc_removes_no_data_that_a_manifest_names_or_can_come_to_name(
    actors: list[Actor], num_faults: int, num_kills: int
) -> None:
    """If this fails, gc breaks a checkpoint, undoes a confirmed one, or leaves a save that becomes one without its
    data (G1, G5): here every save looks dead to gc, the moment that it has written.
    """
    names = "".join(name for name in "BC" if any(name in str(_cells(actor)) for actor in actors))
    result = checked(actors, world=committed(0, "A"), attempts=names, num_faults=num_faults, num_kills=num_kills)
    assert any(outcomes[0] == "collected" for outcomes in result.outcomes)


@pytest.mark.parametrize("keeps", [None, 0])
@pytest.mark.slow
def test_gc_behind_a_fence_keeps_the_current_checkpoint(keeps: int | None) -> None:
    """If this fails, gc forgets what the last gc kept, or a save cannot go on where gc or a deletion has been."""
    before = committed(0, "A") if keeps == 0 else ()
    world = (*before, ("manifest.1.json", fence(keeps=keeps)))
    actors = [collector(), saver("D", overwrite=keeps is not None, writes=True), reader()]
    result = checked(actors, world=world, attempts="B")
    assert "D committed" in {outcomes[1] for outcomes in result.outcomes}
    results = {outcomes[2] for outcomes in result.outcomes}
    assert results <= {"read A", "read B", "read D", "told to read again"} | (
        {"found nothing"} if keeps is None else set()
    )


def test_gc_without_a_checkpoint_lets_no_dead_save_commit() -> None:
    """If this fails, a save that gc took for dead commits a checkpoint without data, as the first of its place."""
    result = checked([collector(), zombie("B", number=0), zombie("C", number=0)], attempts="BC")
    assert () in winners_of(result)
    assert ("B",) in winners_of(result)


@pytest.mark.parametrize(
    ("others", "num_kills"),
    [
        pytest.param([], 1, id="deaths", marks=pytest.mark.slow),
        pytest.param([zombie("B", number=1)], 0, id="zombie", marks=takes_minutes),
    ],
)
def test_gc_beside_a_deletion_leaves_a_whole_checkpoint_or_none(others: list[Actor], num_kills: int) -> None:
    """If this fails, gc and a deletion between them leave half a checkpoint, or bring a deleted one back."""

    def inspect_both(world: World, before: Sequence[Progress], after: Sequence[Progress]) -> None:
        check_whole(world, before, after)
        counting = counting_in(world)
        if after[1].outcome == "deleted" and counting is not None:
            assert counting[1].attempt != "A", "A was deleted, and counts"

    world = tuple(sorted((*committed(0, "A"), *written_by("B"))))
    result = Check([collector(), deleter(), *others], inspect_both, world=world, num_kills=num_kills).run()
    assert any(outcomes[1] == "deleted" for outcomes in result.outcomes)
