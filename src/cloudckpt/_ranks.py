"""Ranks that wait for one another: as long as those they wait for are alive, and no longer.

They meet over a key-value store that all of them reach (torch's c10d store), where each posts a sign of life at short
intervals from the beginning to the end of a save or load, however long its own work takes. Whoever has waited for
`timeout_s` without a new sign from a rank gives it up, by its own clock. Rank 0 counts those who have arrived and says
when all may go on; the others watch rank 0 alone, so that the traffic grows with the number of ranks, not its square.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from cloudckpt._notices import Notices
from cloudckpt._signs import has_ended, loss_text
from cloudckpt._trace import meeting
from cloudckpt.errors import RankLostError

_LONGEST_FAREWELL_S = 2.0
_LEFT = "left before the end; its own error says why"
_APART = "came to do something else: all ranks have to make the same calls, and save to the same URI"


class GivenUpError(Exception):
    """The ranks gave one another up in a call that this rank has left already: meet anew."""


class Meetings:
    """The meetings of `num_ranks` ranks on `store`, as one of them sees them; in each of them all take part, in order.

    `store` must be theirs, and may have been that of others before; `store_keeper` is the rank in whose process it is
    kept, if in one's. After a `RankLostError` there are no further meetings. Not for several threads, but for `cancel`.
    """

    def __init__(self, store: Any, *, rank: int, num_ranks: int, store_keeper: tuple[int, ...]) -> None:
        self._notices = Notices(store, rank=rank, num_ranks=num_ranks)
        self._store_keeper = store_keeper
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = self._patience_s = 0.0
        self.is_over = False
        """Whether these ranks have given one another up."""
        self._uri = self._doing = ""
        self._ended_call = 0

    @property
    def store(self) -> Any:
        """With keys that no other meetings use, once a call has begun."""
        return self._notices.store

    @property
    def next_call(self) -> int:
        """The number that the call gets which begins next."""
        return self._notices.mine.call + 1

    def begin(self, *, doing: str, uri: str, timeout_s: float, grace_s: float = 0.0) -> None:
        """From now on this rank shows that it is alive. In the first meeting it waits by `grace_s` longer.

        A rank that has left the call before waits here until it is known what became of that one. Raises `GivenUpError`
        where the others have given up a call that this rank has left, and `RankLostError` where they have given up this
        one, or one that has to be known of is lost.
        """
        notices = self._notices
        self._doing, self._uri, self.timeout_s = doing, uri, timeout_s
        self._patience_s = timeout_s + grace_s
        self.end(has_left=True)  # where an interrupt was faster
        if not notices.has_ended(within_s=timeout_s):
            with notices.lock:
                raise self._lost(self._store_keeper, f"{self._keeps} did not answer for {timeout_s:g} s")
        has_left = notices.mine.has_left
        # Ranks may load from copies on disks of their own: that all are of one save is checked with their plans.
        mine = notices.mine.of_next_call(doing, "" if doing == "loading" else uri)
        begun_s = notices.begin(mine, timeout_s=timeout_s)
        with notices.lock:
            while notices.reached_s == begun_s:
                self._fail_without_store()
                notices.changed.wait(timeout_s)
            if has_left:
                self._settle()
            self._fail_if_given_up()
            self._fail_if_lost()

    @meeting
    def meet(self) -> None:
        """Wait until all ranks have come as far as this one.

        Raises `RankLostError` once one of them has left the call, has shown no sign of life for `timeout_s`, or has
        come to do something else; and `GivenUpError` where one of them has found since this call began, and alone, that
        the one before has failed: then nobody has met in this call yet.
        """
        notices = self._notices

        def is_met() -> bool:
            self._fail_if_given_up()
            return self._have_met(goal)

        with notices.lock:
            goal = notices.mine.num_met + 1
            notices.mine = replace(notices.mine, num_met=goal)
            self._wait_for(is_met)
            self._patience_s = self.timeout_s
            if self.rank == 0:
                notices.word = replace(notices.word, num_met=goal)
                notices.wake()

    def heed(self, on_cancelled: Callable[[tuple[int, ...]], object] | None) -> None:
        """Have it called, with the ranks who did it, when this call is cancelled; perhaps repeatedly."""
        with self._notices.lock:
            self._notices.on_cancelled = on_cancelled

    def cancel(self, call: int) -> None:
        """Let all ranks know that this one wants the call of this number to come to nothing, if it is still made.

        They hear it at once where they wait, else soon. For any thread.
        """
        notices = self._notices
        with notices.lock:
            if notices.mine.call == call != self._ended_call:
                notices.mine = replace(notices.mine, has_cancelled=True)
                notices.wake()

    def explain(self, error: Exception) -> RankLostError:
        """What to raise after a collective failed: found out whose fault it was, within `timeout_s`."""
        deadline_s = time.monotonic() + self.timeout_s
        with self._notices.lock:
            try:
                self._wait_for(lambda: time.monotonic() >= deadline_s)
            except RankLostError as lost:
                return lost
            return self._lost((), f"the ranks' connection failed ({error})")

    def end(self, *, has_left: bool) -> None:
        """Show no more signs of life. `has_left` tells the others that this rank will not come, so that none waits.

        Does nothing where the call has ended.
        """
        if self._notices.mine.call == self._ended_call:
            return
        within_s = min(self.timeout_s, _LONGEST_FAREWELL_S)
        try:
            with self._notices.lock:
                self._let_hear(time.monotonic() + within_s)
        finally:  # an interrupt must not leave this rank alive for the others
            self._say_farewell(has_left=has_left, within_s=within_s)

    def abandon(self, call: int) -> None:
        """End the call of this number, if it has not ended, as one that this rank has left. Waits for nothing."""
        if self._notices.mine.call == call != self._ended_call:
            self._say_farewell(has_left=True, within_s=0.0)

    def _say_farewell(self, *, has_left: bool, within_s: float) -> None:
        notices = self._notices
        with notices.lock:
            mine = notices.mine
            if has_left:
                notices.mine = replace(mine, left_call=mine.call)
            if self.is_over and not notices.gives_up_in_call:
                # One rank alone can come to this: the others have to meet it anew, in their next call.
                notices.gives_up_in_call = mine.call
                if self.rank == 0 and not notices.word.lost_in_call:  # they may be waiting for it there already
                    notices.word = replace(notices.word, lost_in_call=mine.call, lost=(0,), why=_LEFT)
        # Where the store is slow, or hangs, the next call, if there is one, has time to wait.
        notices.end(within_s=within_s)
        self._ended_call = mine.call

    def _let_hear(self, deadline_s: float) -> None:
        """On rank 0, which may take the store with it when it exits: let the others hear whom it has given up."""
        notices, call = self._notices, self._notices.mine.call
        if self.rank != 0 or notices.word.lost_in_call != call:
            return
        notices.is_waiting = True
        notices.wake()
        while not notices.trouble and time.monotonic() < deadline_s:
            left = {rank for rank, sign in notices.signs.items() if sign.left_call == call}
            if len(left | set(notices.word.lost)) == self.num_ranks - 1:
                break
            notices.changed.wait(max(0.001, deadline_s - time.monotonic()))
        notices.is_waiting = False

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
                self._give_up_earlier_call()  # each may have left it somewhere else
            return True

        notices.is_settling = True
        try:
            self._wait_for(is_known)
        finally:
            notices.is_settling = False
        notices.mine = replace(notices.mine, left_call=0)
        notices.wake()

    def _fail_if_given_up(self) -> None:
        call, notices = self._notices.mine.call, self._notices
        if any(0 < earlier < call for earlier in (notices.given_up_in_call, notices.word.lost_in_call)):
            self._give_up_earlier_call()

    def _give_up_earlier_call(self) -> None:
        notices = self._notices
        notices.gives_up_in_call = earlier = notices.mine.call - 1
        if self.rank == 0 and not notices.word.lost_in_call:
            # Those who wait for this rank to go on from there are to hear that it does not.
            lost = (0,) if notices.mine.left_call == earlier else ()
            notices.word = replace(notices.word, lost_in_call=earlier, lost=lost, why=_LEFT)
        self.is_over = True
        raise GivenUpError

    def _have_met(self, goal: int) -> bool:
        mine, word, signs = self._notices.mine, self._notices.word, self._notices.signs
        if self.rank != 0:
            return word.num_met >= goal
        return len(signs) == self.num_ranks - 1 and all(
            sign.num_met >= goal and (sign.call, sign.task) == (mine.call, mine.task) for sign in signs.values()
        )

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
        mine, word, signs = notices.mine, notices.word, notices.signs
        apart = [rank for rank, sign in signs.items() if sign.call == mine.call and sign.task != mine.task]
        if apart:
            raise self._lost(apart, _APART)
        if word.lost_in_call >= mine.call:
            if self.rank in word.lost and word.why == _APART:
                raise self._lost((0,), _APART)  # whose sign is read only where this rank waits, and its word always
            if self.rank in word.lost:
                raise self._lost((self.rank,), "the others had waited too long for this one, and went on without it")
            raise self._lost(word.lost, word.why)
        gone = [rank for rank, sign in signs.items() if sign.call > mine.call or sign.left_call == mine.call]
        if gone:
            raise self._lost(gone, _LEFT)
        if not notices.is_waiting:
            return
        ended = [rank for rank, sign in signs.items() if sign.call == mine.call and has_ended(sign.process)]
        if ended:
            raise self._lost(ended, "ended, or was killed")
        since_s = time.monotonic() - self._patience_s
        silent = [rank for rank, heard_s in notices.heard_s.items() if heard_s <= since_s]
        if silent:
            raise self._lost(silent, f"gave no sign of life for {self._patience_s:.3g} s")

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
        text = loss_text(doing=self._doing, uri=self._uri, on_rank=self.rank, lost=lost, why=why)
        return RankLostError(text, uri=self._uri, ranks=lost)
