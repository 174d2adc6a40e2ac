"""Ranks that wait for one another: as long as those they wait for are alive, and no longer.

They meet over a key-value store that all of them reach (torch's c10d store), where each posts a sign of life at short
intervals from the beginning to the end of a save or load, however long its own work takes. Whoever has waited for
`timeout_s` without a new sign from a rank gives it up, by its own clock. Rank 0 counts those who have arrived and says
when all may go on; the others watch rank 0 alone, so that the traffic grows with the number of ranks, not its square.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cloudckpt._ranks.signs import LEFT, GivenUp, Sign, task_of
from cloudckpt._ranks.waiting import Waiting
from cloudckpt._trace.recorder import meeting
from cloudckpt.errors import RankLostError

_LONGEST_FAREWELL_S = 2.0


class Meetings(Waiting):
    """The meetings of `num_ranks` ranks on `store`, as one of them sees them; in each of them all take part, in order.

    `store` must be theirs, and may have been that of others before; `store_keeper` is the rank in whose process it is
    kept, if in one's. After a `RankLostError` there are no further meetings but `anew`. Not for several threads, but
    for `cancel`.
    """

    def anew(self) -> Meetings:
        """Those of the same ranks after these, which are over."""
        return Meetings(
            self._store,
            rank=self.rank,
            num_ranks=self.num_ranks,
            store_keeper=self._store_keeper,
            known_call=self.known_call,
            late_for=self._late_for,
            failed=self._failed,
            earlier=self._notices,
        )

    @property
    def store(self) -> Any:
        """With keys that no other meetings use, once a call has begun."""
        return self._notices.store

    @property
    def call(self) -> int:
        """The number of the call that has begun last."""
        return self._notices.mine.call

    def begin(self, call: int, *, doing: str, uri: str, timeout_s: float, grace_s: float = 0.0) -> None:
        """From now on this rank shows that it is alive. In the first meeting it waits by `grace_s` longer.

        `call` counts what this rank is asked for, from 1, whatever becomes of it. A rank that has left the call before
        waits here until it is known what became of that one. Raises `GivenUpError` where the others have given up an
        earlier call, and `RankLostError` where they have given up this one, or one that has to be known of is lost.
        """
        notices = self._notices
        self._doing, self._uri, self.timeout_s = doing, uri, timeout_s
        self._patience_s = timeout_s + grace_s
        self.end(has_left=True)  # where an interrupt was faster
        if not notices.has_ended(within_s=timeout_s):
            with notices.lock:
                raise self._lost(self._store_keeper, f"{self._keeps} did not answer for {timeout_s:g} s")
        mine = self._sign_of(call)
        begun_s = notices.begin(mine, timeout_s=timeout_s)
        with notices.lock:
            while notices.reached_s == begun_s:
                self._fail_without_store()
                notices.changed.wait(timeout_s)
            self._fail_if_late()
            if mine.left_call:
                self._settle()
            self._fail_if_given_up()
            self._fail_if_missed()
            self._fail_if_ahead()
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
            self._fail_if_missed()
            self._fail_if_ahead()
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

    def leave(self, call: int, *, doing: str, uri: str, timeout_s: float) -> None:
        """Let the others know that this rank was asked for a call, and does not come to it. Seconds at most."""
        if self.call < call and self._notices.has_ended(within_s=0.0):
            self._doing, self._uri, self.timeout_s = doing, uri, timeout_s
            self._notices.begin(self._sign_of(call), timeout_s=timeout_s)
            self._say_farewell(has_left=True, within_s=min(timeout_s, _LONGEST_FAREWELL_S))

    def abandon(self, call: int) -> None:
        """End the call of this number, if it has not ended, as one that this rank has left. Waits for nothing."""
        if self._notices.mine.call == call != self._ended_call:
            self._say_farewell(has_left=True, within_s=0.0)

    def _sign_of(self, call: int) -> Sign:
        # Ranks may load from copies on disks of their own: that all are of one save is checked with their plans.
        uri = "" if self._doing == "loading" else self._uri
        left_call = call - 1 if self.known_call < call - 1 else 0
        return self._notices.mine.of_call(call, self._doing, uri, left_call=left_call)

    def _say_farewell(self, *, has_left: bool, within_s: float) -> None:
        notices = self._notices
        with notices.lock:
            mine = notices.mine
            if self.is_over and not notices.gives_up.call:
                # One rank alone can come to this: the others have to meet it anew, in their next call.
                notices.gives_up = GivenUp(call=mine.call, task=task_of(self._doing, self._uri))
                if self.rank == 0 and not notices.word.lost_in_call:  # they may be waiting for it there already
                    notices.word = replace(notices.word, lost_in_call=mine.call, lost=(0,), why=LEFT)
            if has_left or (self.is_over and notices.gives_up.call == mine.call):
                left_task = mine.left_task if mine.left_call == mine.call else "-" if self.is_over else mine.task
                notices.mine = replace(notices.mine, left_call=mine.call, left_task=left_task)
            if self.is_over or not has_left:
                self.known_call = max(self.known_call, notices.gives_up.call if self.is_over else mine.call)
            if not (self.is_over or has_left):
                self._failed.clear()
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
            if len((left | set(notices.word.lost)) - {self.rank}) == self.num_ranks - 1:
                break
            notices.changed.wait(max(0.001, deadline_s - time.monotonic()))
        notices.is_waiting = False

    def _have_met(self, goal: int) -> bool:
        mine, word, signs = self._notices.mine, self._notices.word, self._notices.signs
        if self.rank != 0:
            return word.num_met >= goal
        return len(signs) == self.num_ranks - 1 and all(
            sign.num_met >= goal and (sign.call, sign.task) == (mine.call, mine.task) for sign in signs.values()
        )
