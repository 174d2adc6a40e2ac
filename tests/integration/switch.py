"""A server that ranks kill in the middle of what they do, and have started again.

The ranks ask through a socket and wait for the answer, so that what they do next is done to a server that is gone, or
back: no test has to sleep, or to guess.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from typing import Literal

import cloudckpt
from cloudckpt.events import EventName
from cloudckpt.testing.servers import Server

Wish = Literal["kill", "restart", "end"]
_WAIT_S = 90.0
_KEY = b"nobody but the ranks of this test"


@dataclass(slots=True)
class Switch:
    """Kills the server at the first wish for it, and restarts it at the first wish that comes after."""

    server: Server
    address: str
    has_killed: bool = False
    has_restarted: bool = False
    errors: list[Exception] = field(default_factory=list)
    """Errors of the server itself."""

    def serve(self, listener: connection.Listener) -> None:
        """Fulfil wishes, one after the other, until it is asked to end."""
        while True:
            try:
                with listener.accept() as rank:
                    wish: Wish = rank.recv()
                    self._try_to_fulfil(wish)
                    rank.send("done")
            except (EOFError, OSError, AuthenticationError) as error:  # a rank that died while it asked
                self.errors.append(error)
                continue
            if wish == "end":
                return

    def _try_to_fulfil(self, wish: Wish) -> None:
        try:
            self._fulfil(wish)
        except Exception as error:  # noqa: BLE001  # the test that started it has to see it
            self.errors.append(error)

    def _fulfil(self, wish: Wish) -> None:
        if wish == "kill" and not self.has_killed:
            self.has_killed = True
            self.server.kill()
        if wish == "restart" and self.has_killed and not self.has_restarted:
            self.has_restarted = True
            self.server.restart()


@contextlib.contextmanager
def switch_of(server: Server, directory: Path) -> Iterator[Switch]:
    """The server's switch; in the end the server runs."""
    address = str(directory / "switch")
    with connection.Listener(address, family="AF_UNIX", authkey=_KEY) as listener:
        switch = Switch(server, address)
        thread = threading.Thread(target=switch.serve, args=(listener,), name="switch", daemon=True)
        thread.start()
        try:
            yield switch
        finally:
            ask(address, "end")
            thread.join(_WAIT_S)
            if switch.has_killed and not switch.has_restarted:
                server.restart()
    assert switch.errors == []


def ask(address: str, wish: Wish) -> None:
    """Returns once it is fulfilled."""
    with connection.Client(address, family="AF_UNIX", authkey=_KEY) as switch:
        switch.send(wish)
        assert switch.poll(_WAIT_S), f"nobody answered to {wish!r} in {_WAIT_S:g} s"
        switch.recv()


@dataclass(slots=True, kw_only=True)
class Killer:
    """Listens to the events of a save or load; at the `nth` that `rank` has of `moment` for one key, it kills."""

    address: str
    rank: int
    moment: EventName
    nth: int = 1
    restarts: bool
    """Have the server started again when some rank has seen that it is gone."""
    seen: Counter[str] = field(default_factory=Counter)

    def __call__(self, event: cloudckpt.Event) -> None:
        if event.name == "retry" and self.restarts:
            ask(self.address, "restart")
        if event.name == self.moment and event.rank == self.rank:
            self.seen[event.key] += 1
            if self.seen[event.key] == self.nth:
                ask(self.address, "kill")
