"""What ranks let one another know while they make a call together, posted and read by a thread of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cloudckpt._ranks.signs import (
    GivenUp,
    Sign,
    Word,
    connection_of_its_own,
    given_up_of,
    read,
    sign_of,
    under,
    word_of,
)
from cloudckpt._threads import Condition, Thread

_SIGNS_WITHIN_TIMEOUT = 8
_LONGEST_PAUSE_S = 5.0
_SHORTEST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.05
_WORD = "word"
_GIVEN_UP = "given-up"


class Notices:
    """Those of one rank, and what it has heard of the others. Its values are to be touched only by who holds `lock`.

    Rank 0 reads the sign of each rank, the others that of rank 0 and its word. `earlier` are those from which this
    rank goes on, because the ranks gave one another up.
    """

    def __init__(self, store: Any, *, rank: int, num_ranks: int, earlier: Notices | None = None) -> None:
        self.store = self._whole_store = store
        self._era, self._generation, self._gave_up = ("", 1, GivenUp()) if earlier is None else earlier.going_on()
        self.lock = threading.RLock()
        self.changed = Condition(self.lock)
        self.mine: Sign = Sign()
        self.word = Word()
        self.signs: dict[int, Sign] = {}
        self.heard_s: dict[int, float] = {}
        """When each rank that is waited for gave a new sign last."""
        self.reached_s = 0.0
        """When the store answered last."""
        self.trouble = ""
        """Why nothing more can be posted."""
        self.given_up = GivenUp()
        """As some rank has found, which may be a single one."""
        self.is_waiting = False
        """Whether this rank waits for others: only then is everything read, and often."""
        self.is_settling = False
        """Whether it has to know of `given_up` as it is now, and not only at the beginning of its call."""
        self.gives_up = GivenUp()
        """What it is to leave word of when it ends."""
        self.on_cancelled: Callable[[tuple[int, ...]], object] | None = None  # told by whom, perhaps repeatedly
        self.rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = 0.0
        self._own_connection: Any = None
        self._thread: Thread | None = None
        self._is_urgent = self._is_ending = False

    def begin(self, mine: Sign, *, timeout_s: float) -> float:
        """Show that this rank is alive. When the store has answered, `reached_s` is not what is returned any more."""
        with self.lock:
            self.mine, self._timeout_s, self.on_cancelled = mine, timeout_s, None
            self._is_ending, self._is_urgent = False, True
            begun_s = self.reached_s = time.monotonic()
            self._start()
        return begun_s

    def wake(self) -> None:
        """Post and read at once."""
        self._is_urgent = True
        self.changed.notify_all()

    def end(self, *, within_s: float) -> None:
        """Post once more, and then no more. Where the store does not take it within `within_s`, it goes on trying."""
        with self.lock:
            self._is_ending = True
            if self._thread is None or self._thread.ident is None:
                self._start()  # an interrupt was faster
            self.wake()
        self.has_ended(within_s=within_s)

    def has_ended(self, *, within_s: float) -> bool:
        """Whether what was to be posted at the end has been, waiting up to `within_s`."""
        thread = self._thread
        if thread is not None and thread.ident is not None:
            thread.join(within_s)
            if thread.is_alive():
                return False
        self._thread = None
        return True

    def _start(self) -> None:
        self._thread = Thread(self._run, name="cloudckpt-ranks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Post and read, in a thread of its own: any call to the store may take for ever."""
        try:
            store = self._own_connection = self._own_connection or self._opened()
            known: set[str] = set()
            posted, said = "", Word()
            due_s = 0.0
            poll_s = _SHORTEST_POLL_S
            pause_s = min(_LONGEST_PAUSE_S, self._timeout_s / _SIGNS_WITHIN_TIMEOUT)
            first, is_first = read(store, [_GIVEN_UP], set()), True
            while True:
                with self.lock:
                    is_ending, is_urgent, self._is_urgent = self._is_ending, self._is_urgent, False
                    if is_urgent or time.monotonic() >= due_s:
                        self.mine = replace(self.mine, beat=self.mine.beat + 1)
                        due_s = time.monotonic() + pause_s
                    mine, word, gives_up = self.mine, self.word, self.gives_up
                    wanted = self._wanted(is_first=is_first)
                # Whoever knows a rank's sign knows its word as well: it is posted first, and read last.
                if self.rank == 0 and said != word:
                    said = word
                    store.set(_WORD, said.encoded())
                if posted != mine.encoded():
                    posted = mine.encoded()
                    store.set(str(self.rank), posted)
                if is_ending and gives_up.call and not store.check([_GIVEN_UP]):
                    store.set(_GIVEN_UP, gives_up.encoded())
                found, first, is_first = first | read(store, wanted, known), {}, False
                with self.lock:
                    self._take_in(found)
                    if is_ending:
                        return
                    cancelled_by, on_cancelled = self._passed_on(), self.on_cancelled
                if cancelled_by and on_cancelled is not None:
                    on_cancelled(cancelled_by)
                poll_s = _SHORTEST_POLL_S if is_urgent else min(_LONGEST_POLL_S, 1.5 * poll_s)
                with self.lock:
                    wait_s = min(poll_s, pause_s) if self.is_waiting else pause_s
                    self.changed.wait_for(lambda: self._is_urgent, wait_s)
        except Exception as error:  # noqa: BLE001  # whoever waits must learn of it
            with self.lock:
                self.trouble = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.changed.notify_all()

    def going_on(self) -> tuple[str, int, GivenUp]:
        """Under which keys those go on that come after these, and what is to be said of these before."""
        if self._own_connection is None:  # nothing of this rank's can be there
            return self._era, self._generation, self._gave_up
        gave_up = self.gives_up if self.gives_up.call else GivenUp(call=self.mine.call)
        return self._era, self._generation + 1, gave_up

    def _opened(self) -> Any:
        """A connection of its own to keys that no earlier meetings have used."""
        connection = connection_of_its_own(self._whole_store)
        if not self._era:
            # The store outlives groups that are made anew on it, on all ranks; so each counts its own.
            self._era = str(connection.add(f"era-{self.rank}", 1))
        if self._gave_up.call:
            # Whoever comes to the earlier ones, or is still there, must not wait for this rank.
            earlier = under(f"{self._era}.{self._generation - 1}", connection)
            if not earlier.check([_GIVEN_UP]):
                earlier.set(_GIVEN_UP, self._gave_up.encoded())
        prefix = f"{self._era}.{self._generation}"
        self.store = under(prefix, self._whole_store)
        return under(prefix, connection)

    def _wanted(self, *, is_first: bool) -> list[str]:
        # Rank 0 tells the others what it finds there.
        settling = [_GIVEN_UP] if self.is_settling or (self.rank == 0 and self.is_waiting) else []
        if self.rank == 0:
            asks = self.is_waiting or self.on_cancelled is not None
            return [*map(str, range(1, self._num_ranks)), *settling] if asks else []
        return ["0", _WORD, *settling] if self.is_waiting or is_first else [_WORD]

    def _passed_on(self) -> tuple[int, ...]:
        """Who has cancelled this call; rank 0 tells the others."""
        if self.rank == 0 and self.on_cancelled is not None:
            word = self.word.with_cancelled(self.mine, self.signs)
            self._is_urgent |= word != self.word
            self.word = word
        return self.word.cancelled_by if self.word.cancelled_in_call == self.mine.call else ()

    def _take_in(self, found: dict[str, bytes]) -> None:
        now_s = self.reached_s = time.monotonic()
        for key, text in found.items():
            if key == _WORD:
                self.word = word_of(text)
            elif key == _GIVEN_UP:
                self.given_up = given_up_of(text)
            elif self.signs.get(int(key)) != (sign := sign_of(text)):
                self.signs[int(key)], self.heard_s[int(key)] = sign, now_s
        self.changed.notify_all()
