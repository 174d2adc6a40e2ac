"""Which of the gaps between the stretches to read are read too, because that saves requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Bytes ``[begin, end)`` of an object."""

    object_index: int
    begin: int
    end: int


def merged_within_budget(runs: Sequence[Run], *, step_bytes: int, budget_bytes: int) -> Iterator[Run]:
    """`runs`, some joined over the gap between them; all such gaps together have at most `budget_bytes`.

    `runs` are by object, and rising and apart within each. The smallest gaps come first. One is only read where that
    leaves fewer reads of at most `step_bytes`.
    """
    # Of a joined run, the index of the first is known at its last, and the other way round: no other is ever asked for.
    first_of, last_of = list(range(len(runs))), list(range(len(runs)))

    def num_reads(num_bytes: int) -> int:
        return -(-num_bytes // step_bytes)

    for gap_bytes, index in _gaps(runs, budget_bytes):
        if gap_bytes > budget_bytes:
            break
        first, last = first_of[index], last_of[index + 1]
        begin, end = runs[first].begin, runs[last].end
        apart = num_reads(runs[index].end - begin) + num_reads(end - runs[index + 1].begin)
        if num_reads(end - begin) < apart:
            budget_bytes -= gap_bytes
            last_of[first], first_of[last] = last, first
    index = 0
    while index < len(runs):
        last = last_of[index]
        yield Run(runs[index].object_index, runs[index].begin, runs[last].end)
        index = last + 1


def _gaps(runs: Sequence[Run], most_bytes: int) -> list[tuple[int, int]]:
    """Size and place of each gap that could be read, the smallest first."""
    gaps = (
        (runs[index + 1].begin - runs[index].end, index)
        for index in range(len(runs) - 1)
        if runs[index].object_index == runs[index + 1].object_index
    )
    return sorted(gap for gap in gaps if gap[0] <= most_bytes)
