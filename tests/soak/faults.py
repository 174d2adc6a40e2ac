"""One in twenty calls goes wrong: some in the store's client, some on the wire. Seeded.

The seed fixes the sequence of the faults. Which call meets which of them is for the threads to find out.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tests.wrapped import Call, WrappedStore

from cloudckpt.errors import StoreError, ThrottledError, TransientStoreError
from cloudckpt.stores.base import Store
from cloudckpt.testing.wire import (
    S3_INTERNAL_ERROR,
    S3_SLOW_DOWN,
    Action,
    CutSomewhere,
    LoseAnswer,
    Rule,
)

_T = TypeVar("_T")

# Together 5 %.
SHARE_ON_THE_WIRE = 0.03
SHARE_IN_THE_CLIENT = 0.02
_KINDS = ("before", "after", "throttled", "for good")
_WEIGHTS = (4, 4, 1, 1)


@dataclass(slots=True, kw_only=True)
class Dice:
    """Which calls of one process go wrong in its client, and how."""

    seed: str
    on_fault: Callable[[str, str], None]
    """Told the address and the kind of each."""
    num_calls: int = 0
    num_faults: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def thrown(self, address: str) -> str | None:
        """What befalls this call, if anything."""
        with self._lock:
            self.num_calls += 1
            if self._random.random() >= SHARE_IN_THE_CLIENT:
                return None
            (kind,) = self._random.choices(_KINDS, _WEIGHTS)
            self.num_faults += 1
        self.on_fault(address, kind)
        return kind


class UnluckyStore(WrappedStore):
    """The store behind, as seen over a client that fails now and then: before the call, or after it was carried out."""

    def __init__(self, inner: Store, dice: Dice) -> None:
        super().__init__(inner)
        self._dice = dice

    def probe(self):
        return self.inner.probe()

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        address = self.inner.url(call.key)
        kind = self._dice.thrown(address)
        if kind is None:
            return action()
        if kind == "after":
            action()
        error = {"throttled": ThrottledError, "for good": StoreError}.get(kind, TransientStoreError)
        raise error(f"{address}: injected, {kind}", key=address, operation=call.operation)


def wire_faults(seed: int) -> list[Rule]:
    """Throttled, failed, cut off on the way there or back, answer lost: shares of the requests."""
    shares: dict[Action, float] = {S3_SLOW_DOWN: 0.2, S3_INTERNAL_ERROR: 0.2, CutSomewhere(): 0.4, LoseAnswer(): 0.2}
    return [
        Rule(action=action, times=None, probability=SHARE_ON_THE_WIRE * share, seed=seed + number)
        for number, (action, share) in enumerate(shares.items())
    ]
