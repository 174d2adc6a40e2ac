"""Actors that run the real public functions, one call to the store at a time, as a schedule says.

An actor is a thread. Each of its calls waits at a gate until the scheduler lets it go, and the scheduler waits until
the actor stands at its next call, or has ended: so only one thread ever runs, and what happens depends on the schedule
alone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

from cloudckpt.errors import TransientStoreError
from cloudckpt.stores.base import Store, Views
from cloudckpt.testing.faults import Call, WrappedStore

_T = TypeVar("_T")
_WAIT_S = 60.0

Fate: TypeAlias = Literal["done", "lost", "unanswered", "late", "dies", "dies after"]
"""The fate of a call. "done": the store carries it out. "lost": it does not, and raises. "unanswered": it does, and
raises. "late": it raises, and does when the schedule says so. "dies", "dies after": its process dies before, after it.
"""
_WRITES = {"put", "create_multipart", "upload_part", "complete_multipart", "delete", "copy"}


class Killed(BaseException):
    """The process of an actor is gone, and nothing of it runs any more."""


class Actor:
    """A process that calls `function`, which gets what it has to put in front of its stores."""

    def __init__(
        self, name: str, function: Callable[[Callable[[Store], Store]], Any], *, clock: itertools.count
    ) -> None:
        self.name = name
        self.begun_at: int = next(clock)
        self.ended_at: int | None = None
        """By the scheduler's clock; None while it runs."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.was_disturbed = False
        self.is_dead = False
        self.waiting: Call | None = None
        self.late: list[Callable[[], object]] = []
        """Requests of its on which nobody waits any more, and which have not arrived yet."""
        self.last_arrival_at = -1
        self._function = function
        self._clock = clock
        self._fate: Fate = "done"
        self._go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._wait()

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    def step(self, fate: Fate = "done") -> str:
        """Let the call at the gate go, and wait for the next; what happened, in words."""
        assert self.waiting is not None
        text = f"{self.name}: {self.waiting.operation} {self.waiting.key} {fate}"
        if fate == "late" and self.waiting.operation not in _WRITES:
            fate = "lost"
        self.was_disturbed |= fate != "done"
        self.is_dead = fate in ("dies", "dies after")
        self._fate = fate
        self.waiting = None
        self._go.release()
        self._wait()
        return f"{text} -> {self.outcome}" if self.has_ended else text

    def end(self) -> None:
        """Kill it, unless it has ended."""
        while not self.has_ended:
            self.step("dies")

    @property
    def outcome(self) -> str:
        return "dead" if self.is_dead else type(self.error).__name__ if self.error is not None else repr(self.result)

    def gate(self, call: Call, action: Callable[[], _T]) -> _T:
        """The place where each call waits."""
        if self.is_dead:
            raise Killed
        assert self.waiting is None, f"{self.name} makes two calls at once, {self.waiting} and {call}"
        self.waiting = call
        self._stands.release()
        assert self._go.acquire(timeout=_WAIT_S), "the scheduler has forgotten a call"
        fate = self._fate
        if fate == "dies":
            raise Killed
        result = action() if fate in ("done", "unanswered", "dies after") else None
        if fate == "done":
            return result  # type: ignore[return-value]
        if fate == "dies after":
            raise Killed
        if fate == "late":
            self.late.append(action)
        raise TransientStoreError("the connection broke", key=call.key, operation=call.operation)

    def _run(self) -> None:
        try:
            self.result = self._function(lambda store: _Gated(store, self))
        except BaseException as error:  # noqa: BLE001  # what became of it is for the oracle to judge
            self.error = error
        self.ended_at = next(self._clock)
        self._stands.release()

    def _wait(self) -> None:
        assert self._stands.acquire(timeout=_WAIT_S), f"{self.name} neither calls the store nor ends"
        if self.has_ended:
            self._thread.join(_WAIT_S)
            assert not self._thread.is_alive()


class _Gated(WrappedStore):
    """Every call stops at the actor's gate."""

    def __init__(self, inner: Store, actor: Actor) -> None:
        super().__init__(inner)
        self._actor = actor

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        return self._actor.gate(call, action)

    def put(self, key: str, views: Views, *, crc32c: int, if_absent: bool = False) -> None:
        super().put(key, _copied(views), crc32c=crc32c, if_absent=if_absent)

    def upload_part(self, key: str, upload_id: str, part: Any, views: Views, *, crc32c: int) -> Any:
        return super().upload_part(key, upload_id, part, _copied(views), crc32c=crc32c)


def _copied(views: Views) -> list[memoryview]:
    # A request that arrives late does so when its sender's memory holds something else.
    return [memoryview(b"".join(views))]
