"""Actors in threads of their own that take turns at the calls to stores: any interleaving, and the same one again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.kit.options import make_options

from cloudckpt.options import Options
from cloudckpt.testing.faults import Faults, Rule, Tell

TO_THE_END = 1 << 30
_WAIT_S = 60.0


class Killed(BaseException):
    """The end of an actor as by SIGKILL: no call of it comes after."""


class Turns:
    """Runs actors, one at a time, for numbers of calls that a schedule gives."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn, self._left = "", 0
        self._waiting: set[str] = set()
        self._free: set[str] = set()
        self.ended: dict[str, Any] = {}
        """The result of each actor, or its error."""
        self.num_calls: dict[str, int] = {}

    def options_of(self, name: str, **settings: Any) -> Options:
        """Return the options with which an actor waits for its turn before each call."""
        faults = Faults(Rule(fault=Tell(before=lambda _call: self._wait(name)), times=None))
        return make_options(connections=1, wrap_store=faults, **settings)

    def _wait(self, name: str) -> None:
        if name in self._free:
            return
        with self._changed:
            self._waiting.add(name)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._turn == name and self._left > 0, _WAIT_S)
            self._waiting.discard(name)
            self._left -= 1
            self.num_calls[name] = self.num_calls.get(name, 0) + 1

    def open_to(self, *names: str) -> None:
        """Let actors act without turns, one after the other."""
        self._free.update(names)

    def run(self, actors: dict[str, Callable[[], Any]], schedule: Sequence[tuple[str, int]]) -> None:
        """Give the turns of `schedule`, and then let each actor end, in their order."""
        threads = [threading.Thread(target=self._act, args=(name, act), daemon=True) for name, act in actors.items()]
        for thread in threads:
            thread.start()
        for name, num_calls in [*schedule, *((name, TO_THE_END) for name in actors)]:
            with self._changed:
                self._turn, self._left = name, num_calls
                self._changed.notify_all()
                # The last call of a turn ends before the next turn begins: the actor waits again, or has ended.
                assert self._changed.wait_for(
                    lambda name=name: name in self.ended or (self._left == 0 and name in self._waiting), _WAIT_S
                )
        for thread in threads:
            thread.join(_WAIT_S)

    def _act(self, name: str, act: Callable[[], Any]) -> None:
        try:
            outcome = act()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            outcome = error
        with self._changed:
            self.ended[name] = outcome
            self._changed.notify_all()


class Mortal:
    """The options of an actor that dies at a call, once it is told so. The store carries that call out, or does not."""

    def __init__(self, *, carried_out: bool) -> None:
        self.calls_left = TO_THE_END
        self.is_dead = False
        self._carried_out = carried_out
        faults = Faults(Rule(fault=Tell(before=self._before, after=self._after), times=None))
        self.options = make_options(connections=1, wrap_store=faults)

    def _before(self, _call: object) -> None:
        self.calls_left -= 1
        if self.calls_left < -int(self._carried_out):
            self.is_dead = True
            raise Killed

    def _after(self, _call: object) -> None:
        if self._carried_out and self.calls_left < 0:
            self.is_dead = True
            raise Killed

    def dies_in(self, act: Callable[[], Any], *, after_calls: int) -> bool:
        """Run `act`, and return True if the actor has died in it. A save wraps its death in an error."""
        self.calls_left = after_calls
        try:
            act()
        except BaseException:  # it is raised again, unless it is the death
            if not self.is_dead:
                raise
        return self.is_dead
