"""How long a rank waits for the others of a save or load, and what it takes for the loss of one.

See ``docs/design/009-waiting-for-ranks.md``.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from cloudckpt._ranks.notices import Notices
from cloudckpt._ranks.signs import APART, LATE, LEFT, GivenUp, Sign, has_ended, loss_in, loss_text, task_of
from cloudckpt.errors import RankLostError


class GivenUpError(Exception):
    """The ranks gave one another up in an earlier call than this one: make this one with `Meetings.anew`."""


class Waiting:
    """Of one rank, in one call after the other."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        num_ranks: int,
        store_keeper: tuple[int, ...],
        known_call: int = 0,
        late_for: str = "",
        failed: dict[str, int] | None = None,
        earlier: Notices | None = None,
    ) -> None:
        self._notices = Notices(store, rank=rank, num_ranks=num_ranks, earlier=earlier)
        self._notices.mine = Sign(call=known_call)
        self._store = store
        self._store_keeper = store_keeper
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = self._patience_s = 0.0
        self.is_over = False
        """Whether these ranks have given one another up."""
        self._uri = self._doing = ""
        self.known_call = known_call
        """Until which this rank knows what became of its calls; or of those that the others have made."""
        self._ended_call = known_call
        self._late_for = late_for
        """What its last call was to do, where this rank came too late for it."""
        self._failed: dict[str, int] = {} if failed is None else failed
        """What it was to do in calls that came to nothing, since the last one that was made, and their numbers."""

    def _settle(self) -> None:
        """Wait until it is known what became of the call that this rank has left.

        Where any rank has come to its end, all have met as often as they were to, and go on to meet. Rank 0 finds that
        out, or goes on itself, for the others to see.
        """
        notices, earlier = self._notices, self._notices.mine.call - 1

        def is_known() -> bool:
            self._fail_if_given_up()
            signs = notices.signs.values()
            has_gone_on = [sign.call > earlier != sign.left_call for sign in signs]
            has_left = [self.rank == 0 and sign.left_call == earlier for sign in signs]
            if len(signs) < len(self._watched) or not all(map(operator.or_, has_gone_on, has_left)):
                return False
            if not any(has_gone_on):
                self._give_up_earlier_call(earlier)  # each may have left it somewhere else
            return True

        notices.is_settling = True
        try:
            self._wait_for(is_known)
        finally:
            notices.is_settling = False
        self.known_call = earlier
        notices.mine = replace(notices.mine, left_call=0)
        notices.wake()

    def _fail_if_late(self) -> None:
        """Where the others have given up the call that has the number of this one.

        Either this rank comes too late to it; or it was asked for fewer calls than they, because of an error of its own
        beside them, and this is another one, which they have not come to, or are waiting in.
        """
        notices = self._notices
        mine, given_up = notices.mine, notices.given_up
        if given_up.call < mine.call or self._rank_0_comes_for_it():
            self._late_for = ""
            return
        tasks = {given_up.task, *(sign.task for sign in notices.signs.values() if sign.call == mine.call)} - {"-"}
        is_the_same = not tasks.isdisjoint((task_of(self._doing, self._uri), mine.task))
        # Calls that are all the same, and those of which nothing is known, tell nothing apart the second time.
        if self._late_for != mine.task if is_the_same else given_up.task == "-" and not self._late_for:
            self._late_for = mine.task
            self._fail_if_lost()
            raise self._lost((self.rank,), LATE)
        self._give_up_missed_call(given_up)

    def _fail_if_missed(self) -> None:
        """Where another has left the call that has the number of this one, and that was to do something else."""
        mine = self._notices.mine
        for sign in self._notices.signs.values():
            if sign.left_call == mine.call and sign.left_task not in ("-", mine.task):
                self._give_up_missed_call(GivenUp(call=mine.call, task=sign.left_task))

    def _give_up_missed_call(self, missed: GivenUp) -> None:
        notices = self._notices
        # Others who have missed it must not take this rank's task for its.
        notices.mine = replace(notices.mine, task="-", left_call=notices.mine.call, left_task=missed.task)
        notices.gives_up = missed
        # Not by rank 0's word, which is read without the sign that says what was missed.
        self.is_over = True
        raise GivenUpError

    def _rank_0_comes_for_it(self) -> bool:
        """Whether rank 0 is in the call of this rank, and has not given anybody up: then it will say what came of it.

        Another may have given it up alone, and rank 0 has not heard of that.
        """
        mine, word, at_0 = self._notices.mine, self._notices.word, self._notices.signs.get(0)
        is_there = at_0 is not None and (at_0.call, at_0.task) == (mine.call, mine.task) and at_0.left_call < mine.call
        return is_there and word.lost_in_call < mine.call

    def _fail_if_ahead(self) -> None:
        """Where the others come to what this rank has failed at already: it has missed as many calls before that.

        Else they would go on side by side, each time to something else.
        """
        notices = self._notices
        mine = notices.mine
        behind = [sign for sign in notices.signs.values() if sign.call == mine.call and sign.task != mine.task]
        for sign in behind:
            num_missed = mine.call - self._failed.get(sign.task, mine.call)
            if num_missed > 0:
                self._failed = {task: call + num_missed for task, call in self._failed.items()}
                self.known_call = mine.call + num_missed - 1
                notices.given_up = GivenUp(call=mine.call, task=sign.task)  # what the call of this number is now
                if self.rank == 0 and not notices.word.lost_in_call:
                    notices.word = replace(notices.word, lost_in_call=mine.call, lost=(0,), why=APART)
                self._give_up_earlier_call(mine.call)

    def _fail_if_given_up(self) -> None:
        call, notices = self._notices.mine.call, self._notices
        given_up = [earlier for earlier in (notices.given_up.call, notices.word.lost_in_call) if 0 < earlier < call]
        if given_up:
            self._give_up_earlier_call(min(given_up))

    def _give_up_earlier_call(self, earlier: int) -> None:
        notices = self._notices
        notices.gives_up = notices.given_up if notices.given_up.call == earlier else GivenUp(call=earlier)
        if self.rank == 0 and not notices.word.lost_in_call:
            # Those who wait for this rank to go on from there are to hear that it does not.
            lost = (0,) if notices.mine.left_call == earlier else ()
            notices.word = replace(notices.word, lost_in_call=earlier, lost=lost, why=LEFT)
        self.is_over = True
        raise GivenUpError

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        notices = self._notices
        now_s = time.monotonic()
        notices.heard_s = dict.fromkeys(self._watched, now_s)
        notices.reached_s = now_s
        notices.is_waiting = True
        notices.wake()
        try:
            while not is_done():
                self._fail_if_lost()
                self._fail_without_store()
                notices.changed.wait(max(0.001, min(notices.heard_s.values()) + self._patience_s - time.monotonic()))
        finally:
            notices.is_waiting = False

    @property
    def _watched(self) -> range:
        return range(1, self.num_ranks) if self.rank == 0 else range(1)

    def _fail_if_lost(self) -> None:
        notices = self._notices
        mine, signs = notices.mine, notices.signs
        loss = loss_in(mine, notices.word, signs, on_rank=self.rank)
        if loss is not None and not (self._failed and notices.is_waiting and self._is_unread(loss[1])):
            raise self._lost(*loss)
        if not notices.is_waiting:
            return
        ended = [rank for rank, sign in signs.items() if sign.call == mine.call and has_ended(sign.process)]
        if ended:
            raise self._lost(ended, "ended, or was killed")
        since_s = time.monotonic() - self._patience_s
        silent = [rank for rank, heard_s in notices.heard_s.items() if heard_s <= since_s]
        if silent:
            raise self._lost(silent, f"gave no sign of life for {self._patience_s:.3g} s")

    def _is_unread(self, why: str) -> bool:
        """Whether it is not known yet what rank 0 does, for which it gave this rank up."""
        notices, at_0 = self._notices, self._notices.signs.get(0)
        is_of_this_call = notices.word.lost_in_call == notices.mine.call
        return why == APART and self.rank != 0 and is_of_this_call and (at_0 is None or at_0.call < notices.mine.call)

    def _fail_without_store(self) -> None:
        if self._notices.trouble:
            raise self._lost(self._store_keeper, f"{self._keeps} is out of reach: {self._notices.trouble}")
        if time.monotonic() - self._notices.reached_s >= self.timeout_s:
            raise self._lost(self._store_keeper, f"{self._keeps} did not answer for {self.timeout_s:g} s")

    @property
    def _keeps(self) -> str:
        return f"{'keeps ' if self._store_keeper else ''}the process group's store, which"

    def _lost(self, ranks: Iterable[int], why: str) -> RankLostError:
        lost, notices = tuple(sorted(ranks)), self._notices
        if self.rank == 0 and self.rank not in lost and not notices.word.lost_in_call:
            # Whoever has arrived hears it from here, at once.
            notices.word = replace(notices.word, lost_in_call=notices.mine.call, lost=lost, why=why)
            notices.wake()
        self.is_over = True
        self._failed[notices.mine.task] = notices.mine.call
        text = loss_text(doing=self._doing, uri=self._uri, on_rank=self.rank, lost=lost, why=why)
        return RankLostError(text, uri=self._uri, ranks=lost)
