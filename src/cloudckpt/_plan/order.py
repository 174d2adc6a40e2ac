"""In which order to send the reads of a load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Read(Protocol):
    """A ranged read, as far as its place in the order depends on it."""

    @property
    def object_index(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def continues(self) -> bool:
        """It brings more of what the read before it in its object has begun, and for which memory is held."""


_Read = TypeVar("_Read", bound=Read)


def spread(reads: Iterable[_Read]) -> list[_Read]:
    """`reads`, given object by object, so ordered that connections stay busy to the end and on many objects.

    Large ones come before small ones (by powers of two), so that no connection still works on a long one when the
    others are done. Among alike ones the objects take turns: the bandwidth of one object, or of the disks it lies on,
    bounds no phase of a load. Those that continue others follow them, so that little memory is held at once.
    """
    num_turns: defaultdict[tuple[int, int], int] = defaultdict(int)
    placed: list[tuple[int, int, int, list[_Read]]] = []
    for unit in _units(reads):
        size_class = (sum(read.num_bytes for read in unit) - 1).bit_length()
        object_index = unit[0].object_index
        turn = num_turns[size_class, object_index]
        num_turns[size_class, object_index] += 1
        placed.append((-size_class, turn, object_index, unit))
    placed.sort(key=lambda at: at[:3])
    return [read for *_, unit in placed for read in unit]


def _units(reads: Iterable[_Read]) -> Iterator[list[_Read]]:
    unit: list[_Read] = []
    for read in reads:
        if unit and not read.continues:
            yield unit
            unit = []
        unit.append(read)
    if unit:
        yield unit
