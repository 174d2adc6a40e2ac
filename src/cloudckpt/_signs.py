"""What ranks that wait for one another post on the store that they share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank posts under its number."""

    beat: int = 0
    call: int = 0
    """The save or load that it is in, counted from 1."""
    num_met: int = 0
    has_left: bool = False

    def encoded(self) -> str:
        return f"{self.beat} {self.call} {self.num_met} {int(self.has_left)}"


def sign_of(text: bytes) -> Sign:
    beat, call, num_met, has_left = map(int, text.split())
    return Sign(beat=beat, call=call, num_met=num_met, has_left=bool(has_left))


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What rank 0 says to all: until where they may go on, and whom it has given up, in which call."""

    num_met: int = 0
    lost_in_call: int = 0
    why: str = ""
    lost: tuple[int, ...] = ()

    def encoded(self) -> str:
        return f"{self.num_met} {self.lost_in_call} {','.join(map(str, self.lost)) or '-'} {self.why}"


def word_of(text: bytes) -> Word:
    num_met, call, lost, why = text.decode().split(" ", 3)
    ranks = tuple(map(int, lost.split(","))) if lost != "-" else ()
    return Word(num_met=int(num_met), lost_in_call=int(call), lost=ranks, why=why)


def read(store: Any, keys: list[str], known: set[str]) -> dict[str, bytes]:
    """The values of those of `keys` that there are: a store waits for one that is not."""
    known.update(key for key in keys if key not in known and store.check([key]))
    there = [key for key in keys if key in known]
    if not there:
        return {}
    if store.has_extended_api():
        return dict(zip(there, store.multi_get(there), strict=True))
    return {key: store.get(key) for key in there}


def connection_of_its_own(store: Any) -> Any:
    # Calls over one connection wait for each other, and training may be using it.
    with contextlib.suppress(AttributeError):
        return store.clone()
    return store
