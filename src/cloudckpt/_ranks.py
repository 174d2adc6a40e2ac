"""Ranks that wait for one another: as long as those they wait for are alive, and no longer.

They meet over a key-value store that all of them reach (torch's c10d store), where each posts a sign of life at short
intervals from the beginning to the end of a save or load, however long its own work takes. Whoever has waited for
`timeout_s` without a new sign from a rank gives it up, by its own clock. Rank 0 counts those who have arrived and says
when all may go on; the others watch rank 0 alone, so that the traffic grows with the number of ranks, not its square.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from cloudckpt._signs import Sign, Word, has_ended, loss_text, opened_anew, read, sign_of, word_of
from cloudckpt._trace import meeting
from cloudckpt.errors import RankLostError

_SIGNS_WITHIN_TIMEOUT = 8
_LONGEST_PAUSE_S = 5.0
_SHORTEST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.05
_LONGEST_FAREWELL_S = 2.0
_WORD = "word"
_GIVEN_UP = "given-up"


class GivenUpError(Exception):
    """The ranks gave one another up in a call that this rank has left already: meet anew."""


class Meetings:
    """The meetings of `num_ranks` ranks on `store`, as one of them sees them; in each of them all take part, in order.

    `store` must be theirs, and may have been that of others before; `store_keeper` is the rank in whose process it is
    kept, if in one's. After a `RankLostError` there are no further meetings. Not for several threads.
    """

    def __init__(self, store: Any, *, rank: int, num_ranks: int, store_keeper: tuple[int, ...]) -> None:
        self.store = store
        self._store_keeper = store_keeper
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = 0.0
        self.is_over = False
        """Whether these ranks have given one another up."""
        self.on_cancelled: Callable[[tuple[int, ...]], object] | None = None  # told by whom, perhaps repeatedly
        self._uri = self._doing = ""
        self._changed = threading.Condition()
        self._own_connection: Any = None
        self._thread: threading.Thread | None = None
        self._mine = Sign()
        self._word = Word()
        self._signs: dict[int, Sign] = {}
        self._heard_s: dict[int, float] = {}
        self._reached_s = 0.0
        self._trouble = ""
        self._given_up_in_call = 0
        self._is_waiting = self._is_urgent = self._is_ending = False

    def begin(self, *, doing: str, uri: str, timeout_s: float) -> None:
        """From now on this rank shows that it is alive.

        Raises `GivenUpError` where the others have given up a call that this rank has left, and `RankLostError` where
        they have given up this one.
        """
        self._doing, self._uri, self.timeout_s = doing, uri, timeout_s
        self._await_farewell()
        # Ranks may load from copies on disks of their own: that all are of one save is checked with their plans.
        self._mine = self._mine.of_next_call(doing, "" if doing == "loading" else uri)
        self._reached_s, self._is_ending, self._is_urgent = time.monotonic(), False, True
        before_s = self._reached_s
        self._thread = threading.Thread(target=self._run, name="cloudckpt-ranks", daemon=True)
        self._thread.start()
        with self._changed:
            while self._reached_s == before_s:
                self._fail_without_store()
                self._changed.wait(timeout_s)
            if any(0 < call < self._mine.call for call in (self._given_up_in_call, self._word.lost_in_call)):
                self.is_over = True
                raise GivenUpError
            self._fail_if_lost()

    @meeting
    def meet(self) -> None:
        """Wait until all ranks have come as far as this one.

        Raises `RankLostError` once one of them has left the call, has shown no sign of life for `timeout_s`, or has
        come to do something else.
        """
        with self._changed:
            goal = self._mine.num_met + 1
            self._mine = replace(self._mine, num_met=goal)
            self._wait_for(lambda: self._have_met(goal))
            if self.rank == 0:
                self._word = replace(self._word, num_met=goal)
                self._wake()

    def cancel(self) -> None:
        """Let all ranks know that this one wants the call to come to nothing: at once where they wait, else soon."""
        with self._changed:
            self._mine = replace(self._mine, has_cancelled=True)
            self._wake()

    def explain(self, error: Exception) -> RankLostError:
        """What to raise after a collective failed: found out whose fault it was, within `timeout_s`."""
        deadline_s = time.monotonic() + self.timeout_s
        try:
            with self._changed:
                self._wait_for(lambda: time.monotonic() >= deadline_s)
        except RankLostError as lost:
            return lost
        with self._changed:
            return self._lost((), f"the ranks' connection failed ({error})")

    def end(self, *, has_left: bool) -> None:
        """Show no more signs of life. `has_left` tells the others that this rank will not come, so that none waits."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._let_hear(time.monotonic() + min(self.timeout_s, _LONGEST_FAREWELL_S))
            self._mine = replace(self._mine, has_left=has_left)
            self._is_ending = True
            self._wake()
        thread.join(min(self.timeout_s, _LONGEST_FAREWELL_S))
        if not thread.is_alive():
            self._thread = None  # else the store is slow, or hangs: the next call, if there is one, has time to wait

    def _await_farewell(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self.timeout_s)
            if thread.is_alive():
                with self._changed:
                    raise self._lost(self._store_keeper, f"{self._keeps} did not answer for {self.timeout_s:g} s")

    def _let_hear(self, deadline_s: float) -> None:
        """On rank 0, which may take the store with it when it exits: let the others hear whom it has given up."""
        word, call = self._word, self._mine.call
        if self.rank != 0 or word.lost_in_call != call:
            return
        self._is_waiting = True
        self._wake()
        while not self._trouble and time.monotonic() < deadline_s:
            left = {rank for rank, sign in self._signs.items() if sign.has_left and sign.call == call}
            if len(left | set(word.lost)) == self.num_ranks - 1:
                break
            self._changed.wait(max(0.001, deadline_s - time.monotonic()))
        self._is_waiting = False

    def _have_met(self, goal: int) -> bool:
        if self.rank != 0:
            return self._word.num_met >= goal
        return len(self._signs) == self.num_ranks - 1 and all(
            sign.num_met >= goal and (sign.call, sign.task) == (self._mine.call, self._mine.task)
            for sign in self._signs.values()
        )

    def _wait_for(self, is_done: Any) -> None:
        now_s = time.monotonic()
        self._heard_s = dict.fromkeys(self._watched, now_s)
        self._reached_s = now_s
        self._is_waiting = True
        self._wake()
        try:
            while not is_done():
                self._fail_if_lost()
                self._fail_without_store()
                self._changed.wait(max(0.001, min(self._heard_s.values()) + self.timeout_s - time.monotonic()))
        finally:
            self._is_waiting = False

    @property
    def _watched(self) -> Iterable[int]:
        return range(1, self.num_ranks) if self.rank == 0 else (0,)

    def _fail_if_lost(self) -> None:
        word, call = self._word, self._mine.call
        apart = [rank for rank, sign in self._signs.items() if sign.call == call and sign.task != self._mine.task]
        if apart:
            raise self._lost(
                apart, "came to do something else: all ranks have to make the same calls, and save to the same URI"
            )
        if word.lost_in_call >= call:
            if self.rank in word.lost:
                raise self._lost((self.rank,), "the others had waited too long for this one, and went on without it")
            raise self._lost(word.lost, word.why)
        gone = [rank for rank, sign in self._signs.items() if sign.call > call or (sign.has_left and sign.call == call)]
        if gone:
            raise self._lost(gone, "left before the end; its own error says why")
        if not self._is_waiting:
            return
        ended = [rank for rank, sign in self._signs.items() if sign.call == call and has_ended(sign.process)]
        if ended:
            raise self._lost(ended, "ended, or was killed")
        since_s = time.monotonic() - self.timeout_s
        silent = [rank for rank, heard_s in self._heard_s.items() if heard_s <= since_s]
        if silent:
            raise self._lost(silent, f"gave no sign of life for {self.timeout_s:g} s")

    def _fail_without_store(self) -> None:
        if self._trouble:
            raise self._lost(self._store_keeper, f"{self._keeps} is out of reach: {self._trouble}")
        if time.monotonic() - self._reached_s >= self.timeout_s:
            raise self._lost(self._store_keeper, f"{self._keeps} did not answer for {self.timeout_s:g} s")

    @property
    def _keeps(self) -> str:
        return f"{'keeps ' if self._store_keeper else ''}the process group's store, which"

    def _lost(self, ranks: Iterable[int], why: str) -> RankLostError:
        lost = tuple(sorted(ranks))
        if self.rank == 0 and self.rank not in lost and not self._word.lost_in_call:
            # Whoever has arrived hears it from here, at once.
            self._word = replace(self._word, lost_in_call=self._mine.call, lost=lost, why=why)
            self._wake()
        self.is_over = True
        text = loss_text(doing=self._doing, uri=self._uri, on_rank=self.rank, lost=lost, why=why)
        return RankLostError(text, uri=self._uri, ranks=lost)

    def _wake(self) -> None:
        self._is_urgent = True
        self._changed.notify_all()

    def _run(self) -> None:
        """Post and read, in a thread of its own: any call to the store may take for ever."""
        try:
            store = self._own_connection = self._own_connection or self._opened()
            known: set[str] = set()
            posted, said = "", Word()
            due_s = 0.0
            poll_s = _SHORTEST_POLL_S
            pause_s = min(_LONGEST_PAUSE_S, self.timeout_s / _SIGNS_WITHIN_TIMEOUT)
            if store.check([_GIVEN_UP]):
                with self._changed:
                    self._given_up_in_call = int(store.get(_GIVEN_UP))
            while True:
                with self._changed:
                    is_ending, is_urgent, self._is_urgent = self._is_ending, self._is_urgent, False
                    if is_urgent or time.monotonic() >= due_s:
                        self._mine = replace(self._mine, beat=self._mine.beat + 1)
                        due_s = time.monotonic() + pause_s
                    mine, word = self._mine, self._word
                    wanted = self._wanted()
                if posted != mine.encoded():
                    posted = mine.encoded()
                    store.set(str(self.rank), posted)
                if self.rank == 0 and said != word:
                    said = word
                    store.set(_WORD, said.encoded())
                if is_ending and self.is_over:
                    # One rank alone can come to this: the others have to meet it anew, in their next call.
                    store.set(_GIVEN_UP, str(mine.call))
                found = read(store, wanted, known)
                with self._changed:
                    self._take_in(found)
                    if is_ending:
                        return
                    cancelled_by, on_cancelled = self._passed_on(), self.on_cancelled
                if cancelled_by and on_cancelled is not None:
                    on_cancelled(cancelled_by)
                poll_s = _SHORTEST_POLL_S if is_urgent else min(_LONGEST_POLL_S, 1.5 * poll_s)
                with self._changed:
                    wait_s = min(poll_s, pause_s) if self._is_waiting else pause_s
                    self._changed.wait_for(lambda: self._is_urgent, wait_s)
        except Exception as error:  # noqa: BLE001  # whoever waits must learn of it
            with self._changed:
                self._trouble = f"{type(error).__name__}: {error}".partition("\n")[0]
                self._changed.notify_all()

    def _opened(self) -> Any:
        self.store, connection = opened_anew(self.store, self.rank)
        return connection

    def _wanted(self) -> list[str]:
        if self.rank == 0:
            return [str(rank) for rank in range(1, self.num_ranks)] if self._is_waiting or self.on_cancelled else []
        return [_WORD, "0"] if self._is_waiting or self._mine.beat <= 1 else [_WORD]

    def _passed_on(self) -> tuple[int, ...]:
        """Who has cancelled this call; rank 0 tells the others."""
        if self.rank == 0 and self.on_cancelled is not None:
            word = self._word.with_cancelled(self._mine, self._signs)
            self._is_urgent |= word != self._word
            self._word = word
        return self._word.cancelled_by if self._word.cancelled_in_call == self._mine.call else ()

    def _take_in(self, found: dict[str, bytes]) -> None:
        now_s = self._reached_s = time.monotonic()
        for key, text in found.items():
            if key == _WORD:
                self._word = word_of(text)
                continue
            rank, sign = int(key), sign_of(text)
            if self._signs.get(rank) != sign:
                self._signs[rank], self._heard_s[rank] = sign, now_s
        self._changed.notify_all()
