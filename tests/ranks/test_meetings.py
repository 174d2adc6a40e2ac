"""Ranks that leave a call by an exception of their own, and come to the next one: all make that one together."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from cloudckpt._ranks.meetings import Meetings
from cloudckpt._ranks.waiting import GivenUpError
from cloudckpt.errors import RankLostError

TIMEOUT_S = 60.0
"""Far longer than any of this takes: who waits so long has missed the others."""
NUM_MEETINGS = 2
TO_THE_END = NUM_MEETINGS + 1


class Rank:
    """As `cloudckpt._ranks.group.Call` has it: from call to call with the same meetings, until they are over."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.meetings = Meetings(store, rank=rank, num_ranks=num_ranks, store_keeper=())
        self.num_calls = 0

    def begin(self, task: str, *, timeout_s: float = TIMEOUT_S, is_interrupted: bool = False) -> None:
        self.num_calls += 1
        self.found(task, timeout_s=timeout_s, is_interrupted=is_interrupted)

    def found(self, task: str, *, timeout_s: float = TIMEOUT_S, is_interrupted: bool = False) -> None:
        """`is_interrupted`: as soon as it hears that it has to meet the others anew."""
        while True:
            try:
                self.meetings.begin(self.num_calls, doing="saving", uri=task, timeout_s=timeout_s)
            except GivenUpError:
                self.give_up(is_interrupted=is_interrupted)
                continue
            return

    def give_up(self, *, is_interrupted: bool = False) -> None:
        self.end(has_left=False)
        if is_interrupted:
            raise KeyboardInterrupt from None
        self.num_calls = max(self.num_calls, self.meetings.known_call + 1)

    def end(self, *, has_left: bool) -> None:
        self.meetings.end(has_left=has_left)
        if self.meetings.is_over:
            self.meetings = self.meetings.anew()

    def meet(self, task: str) -> None:
        """As `cloudckpt._ranks.met_group.MetGroup` does."""
        while True:
            try:
                self.meetings.meet()
            except GivenUpError:
                self.give_up()
                self.found(task)
                continue
            return

    def call(self, task: str, leaves_at: int = TO_THE_END) -> str:
        """What becomes of a call that this rank leaves after so many meetings."""
        try:
            self.begin(task)
            for _ in range(min(leaves_at, NUM_MEETINGS)):
                self.meet(task)
        except RankLostError as error:
            self.end(has_left=True)
            return str(error)
        self.end(has_left=leaves_at != TO_THE_END)
        return "left" if leaves_at != TO_THE_END else "made"


def ranks(num_ranks: int) -> list[Rank]:
    store = dist.HashStore()
    return [Rank(store, rank, num_ranks) for rank in range(num_ranks)]


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(2 * TIMEOUT_S) for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_whoever_left_a_call_makes_the_next_one_with_the_others(num_ranks: int) -> None:
    """If this fails, Ctrl-C on some ranks, at some moment, makes all ranks miss each other in the next call."""
    ways = (0, 1, NUM_MEETINGS, TO_THE_END)
    for leaves_at in itertools.product(ways, repeat=num_ranks):

        def both(rank: Rank, at: int) -> list[str]:
            return [rank.call("first", at), rank.call("second"), rank.call("third")]

        told = at_once(
            [lambda r=rank, at=at: both(r, at) for rank, at in zip(ranks(num_ranks), leaves_at, strict=True)]
        )
        for at, (first, *later) in zip(leaves_at, told, strict=True):
            assert later == ["made", "made"], (leaves_at, told)
            if at == TO_THE_END and min(leaves_at) < NUM_MEETINGS:
                assert "left before the end" in first, (leaves_at, told)
            elif min(leaves_at) >= NUM_MEETINGS:
                assert first == ("made" if at == TO_THE_END else "left"), (leaves_at, told)


@pytest.mark.parametrize("early", [0, 1])
def test_who_has_left_a_call_before_the_others_came_to_it_waits_for_them_in_the_next(early: int) -> None:
    """If this fails, a rank that is interrupted first of all waits in the next call for ranks that meet elsewhere."""
    both = ranks(2)
    assert both[early].call("first", 0) == "left"
    has_begun = threading.Event()
    begin = both[early].meetings.begin

    def noted(call: int, **arguments: Any) -> None:
        has_begun.set()
        begin(call, **arguments)

    both[early].meetings.begin = noted  # type: ignore[method-assign]

    def late() -> list[str]:
        assert has_begun.wait(TIMEOUT_S)
        return [both[1 - early].call("first"), both[1 - early].call("second")]

    second, (first, also_second) = at_once([lambda: both[early].call("second"), late])
    assert "left before the end" in first
    assert [second, also_second] == ["made", "made"]


def test_a_rank_that_is_interrupted_again_and_again_is_met_in_the_end() -> None:
    """If this fails, two interrupts in a row put a rank out of step with the others for good."""
    for early, num_left in itertools.product((0, 1), (2, 3)):
        both = ranks(2)

        def impatient(rank: Rank, num_left: int = num_left) -> list[str]:
            return [rank.call(str(number), 0) for number in range(num_left)] + [rank.call("last"), rank.call("after")]

        def patient(rank: Rank, num_left: int = num_left) -> list[str]:
            return [rank.call(str(number)) for number in range(num_left)] + [rank.call("last"), rank.call("after")]

        calls = [lambda: patient(both[1 - early]), lambda: impatient(both[early])]  # noqa: B023  # they have ended by then
        for told in at_once(calls):
            assert told[-2:] == ["made", "made"], (early, num_left, told)


@pytest.mark.parametrize("lonely", [0, 1, 2])
def test_what_one_of_three_gives_up_alone_when_the_others_wait_for_it_in_the_next_call(lonely: int) -> None:
    """If this fails, they wait for it in vain, and it for them elsewhere; and no later save or load is ever made."""
    three = ranks(3)
    at_once([lambda r=rank: r.begin("first") for rank in three])
    at_once([rank.meetings.meet for rank in three])
    others = [rank for rank in three if rank is not three[lonely]]
    are_waiting = threading.Barrier(len(others) + 1)

    def wait_for_it(rank: Rank) -> list[str]:
        rank.end(has_left=False)
        rank.begin("second")
        are_waiting.wait(TIMEOUT_S)
        rank.meet("second")
        rank.meet("second")
        rank.end(has_left=False)
        return ["made", rank.call("third")]

    def give_up() -> list[str]:
        are_waiting.wait(TIMEOUT_S)
        three[lonely].meetings.is_over = True
        three[lonely].end(has_left=True)
        return [three[lonely].call("second"), three[lonely].call("third")]

    told = at_once([*[lambda r=rank: wait_for_it(r) for rank in others], give_up])
    assert told == [["made", "made"]] * 3


def test_a_rank_that_is_apart_is_told_so_whichever_it_hears_first() -> None:
    """If this fails, a rank that came to do something else, and is descheduled, is told that it came too late."""
    both = ranks(2)
    late = both[1].meetings
    both[1].begin("something else")
    both[0].begin("something")
    with pytest.raises(RankLostError, match="something else"):
        both[0].meetings.meet()
    with late._notices.lock:  # its own sign is due: beside that only the word is read
        late._notices.wake()
        assert late._notices.changed.wait_for(lambda: late._notices.word.lost_in_call == 1, TIMEOUT_S)
    with pytest.raises(RankLostError, match="something else") as caught:
        late.meet()
    assert caught.value.ranks == (0,)
    for rank in both:
        rank.end(has_left=True)
    assert at_once([lambda r=rank: r.call("next") for rank in both]) == ["made"] * 2


def test_a_rank_that_comes_when_only_another_has_left_one_that_is_apart_is_told_who_that_is() -> None:
    """If this fails, who comes between a rank that gives up alone and rank 0 that hears of it takes itself for late."""
    three = ranks(3)
    three[0].begin("something")  # and works on its plan: it does not listen yet
    assert "rank 0 came to do something else" in three[1].call("something else")
    three[2].begin("something")

    def meet(rank: Rank) -> str:
        with pytest.raises(RankLostError) as caught:
            rank.meetings.meet()
        rank.end(has_left=True)
        return str(caught.value)

    told = at_once([lambda: meet(three[0]), lambda: meet(three[2])])
    assert all("rank 1 came to do something else" in text for text in told), told
    assert at_once([lambda r=rank: r.call("next") for rank in three]) == ["made"] * 3


def test_a_cancel_that_comes_too_late_does_not_cancel_the_next_call() -> None:
    """If this fails, a thread that was descheduled in `AsyncSave.cancel` cancels the save after the one it meant."""
    both = ranks(2)
    number = both[1].num_calls + 1
    at_once([lambda r=rank: r.call("first") for rank in both])
    heard: list[tuple[int, ...]] = []
    at_once([lambda r=rank: r.begin("second") for rank in both])
    both[0].meetings.heed(heard.append)
    both[1].meetings.cancel(number)
    at_once([both[0].meetings.meet, both[1].meetings.meet])
    assert heard == []
    both[1].meetings.cancel(number + 1)
    at_once([both[0].meetings.meet, both[1].meetings.meet])
    for rank in both:
        rank.end(has_left=False)
    assert set(heard) == {(1,)}


def test_a_call_that_an_interrupt_left_open_is_left_by_the_next_one() -> None:
    """If this fails, an interrupt between the beginning of a call and all that would end it makes this rank look alive
    to the others for ever.
    """
    both = ranks(2)

    def interrupted() -> list[str]:
        both[1].begin("first")
        return [both[1].call("second")]

    assert at_once([lambda: [both[0].call("first"), both[0].call("second")], interrupted])[1] == ["made"]


@pytest.mark.parametrize("lonely", [0, 1, 2])
def test_what_one_of_three_gives_up_alone_all_meet_anew(lonely: int) -> None:
    """If this fails, the second rank that hears of it hides it from the third, which then misses the others."""
    three = ranks(3)
    at_once([lambda r=rank: r.begin("first") for rank in three])
    at_once([rank.meetings.meet for rank in three])
    three[lonely].meetings.is_over = True
    for rank in three:
        rank.end(has_left=False)
    for rank in three[:lonely:-1] + three[:lonely][::-1]:  # rank 0, whose word would tell all, is the last one
        with pytest.raises(GivenUpError):
            rank.meetings.begin(2, doing="saving", uri="second", timeout_s=TIMEOUT_S)
        rank.end(has_left=False)
    assert at_once([lambda r=rank: r.call("second") for rank in three]) == ["made"] * 3


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_rank_that_is_interrupted_while_it_changes_to_new_keys_leaves_that_call_and_no_other(
    early: int, *, is_told: bool
) -> None:
    """If this fails, a second Ctrl-C puts a rank out of step: all later calls fail, each after `timeout_s`."""
    both = ranks(2)
    twice, other = both[early], both[1 - early]
    at_once([lambda r=rank: (r.begin("first"), r.meet("first")) for rank in both])
    other.meetings.is_over = True
    other.end(has_left=False)
    twice.end(has_left=False)

    def interrupted_twice() -> list[str]:
        with pytest.raises(KeyboardInterrupt):
            twice.begin("second", is_interrupted=True)
        if is_told:
            twice.meetings.leave(twice.num_calls, doing="saving", uri="second", timeout_s=TIMEOUT_S)
        return ["left", twice.call("third"), twice.call("fourth")]

    told = at_once([interrupted_twice, lambda: [other.call("second"), other.call("third"), other.call("fourth")]])
    assert "left before the end" in told[1][0]
    assert [those[1:] for those in told] == [["made", "made"]] * 2


@pytest.mark.parametrize("absent", [(0,), (1,), (0, 2)])
def test_ranks_that_miss_a_call_make_the_next_one_with_the_others(absent: tuple[int, ...]) -> None:
    """If this fails, an error of a rank's own beside saving, after which the job goes on, makes every later save fail:
    the others count one call more, for ever.
    """
    three = ranks(3)
    at_once([lambda r=rank: r.call("first") for rank in three])

    def wait_in_vain(rank: Rank) -> None:
        with pytest.raises(RankLostError, match="no sign of life"):  # noqa: PT012  # whichever finds it
            rank.begin("missed", timeout_s=0.5)
            rank.meet("missed")
        rank.end(has_left=True)

    at_once([lambda r=rank: wait_in_vain(r) for rank in three if rank.meetings.rank not in absent])
    for task in ("second", "third"):
        assert at_once([lambda r=rank: r.call(task) for rank in three]) == ["made"] * 3  # noqa: B023  # done by then


@pytest.mark.parametrize("num_missed", [1, 2])
@pytest.mark.parametrize("absent", [(0,), (1,), (2,), (0, 2)])
def test_ranks_that_go_on_side_by_side_meet_again(absent: tuple[int, ...], num_missed: int) -> None:
    """If this fails, a rank that missed a call stays one ahead of others who do not wait for it anywhere else: each
    comes to something else every time, and no save is ever made again.
    """
    three = ranks(3)

    def work(rank: Rank) -> list[str]:
        begins_at = num_missed if rank.meetings.rank in absent else 0
        return [rank.call(str(number)) for number in range(begins_at, 12)]

    for told in at_once([lambda r=rank: work(r) for rank in three]):
        assert told[-3:] == ["made"] * 3, told


def test_a_rank_that_comes_too_late_is_told_so_and_makes_the_next_one() -> None:
    """If this fails, a rank that was slow takes its save for one that the others are to make after it."""
    both = ranks(2)
    both[0].begin("first", timeout_s=0.5)
    with pytest.raises(RankLostError, match="no sign of life"):
        both[0].meet("first")
    both[0].end(has_left=True)
    assert "waited too long for this one" in both[1].call("first")
    assert at_once([lambda r=rank: r.call("second") for rank in both]) == ["made"] * 2
