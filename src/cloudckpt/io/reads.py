"""Plan the ranged reads that fetch the wanted byte ranges. Pure functions of values.

`tensors.load_targets` and `io.boxes.find_runs` find the byte ranges that a tensor wants.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class WantedRange(NamedTuple):
    """Bytes ``[begin, end)`` of an object that one target wants. A tuple, since a load has one for each tensor."""

    target_number: int
    object_index: int
    begin: int
    end: int
    is_held: bool = False
    """True if memory for the whole range is taken with its first byte, and released with its last."""


_RANGE = operator.itemgetter(WantedRange._fields.index("begin"), WantedRange._fields.index("end"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead:
    """One ranged read, and the wanted ranges that have bytes in it. They may reach beyond the read."""

    object_index: int
    begin: int
    end: int
    wanted: tuple[WantedRange, ...] = ()
    overlapping: bool = False
    """True if a byte is wanted twice."""
    continues: bool = False
    """True if the read continues a held range that the read before it in its object has begun."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def plan_reads(
    wants: Sequence[WantedRange],
    *,
    object_sizes_bytes: Mapping[int, int],
    tile_bytes: int,
    request_bytes: int,
    max_gap_bytes: int,
    max_over_read: float,
    is_aligned: bool = False,
) -> list[RangeRead]:
    """Return reads of whole tiles that bring all `wants`, each byte once, in the order in which to send them.

    Ranges up to `max_gap_bytes` apart are read as one. Ranges further apart are also joined if that saves requests,
    nearest first, while all such gaps have at most `max_over_read` times the wanted bytes. No read is longer than
    `request_bytes`, rounded down to whole tiles but at least one. Empty wants need no read.

    If reads are cut `is_aligned`, at multiples of their maximum size, then ranks that want a range in common have most
    reads of it in common, whatever else they want.
    """
    by_object: defaultdict[int, list[WantedRange]] = defaultdict(list)
    for want in wants:
        if want.begin < want.end:
            by_object[want.object_index].append(want)
    max_read_bytes = max(request_bytes // tile_bytes, 1) * tile_bytes
    runs: list[_Run] = []
    num_wanted_bytes = 0
    for object_index, members in sorted(by_object.items()):
        members.sort(key=_RANGE)
        for begin, end, num_bytes in _join_tiles(members, tile_bytes, max_gap_bytes):
            runs.append(_Run(object_index, begin, min(end, object_sizes_bytes[object_index])))
            num_wanted_bytes += num_bytes
    budget_bytes = int(max_over_read * num_wanted_bytes)
    requests: list[RangeRead] = []
    merged = _merge_runs(runs, max_read_bytes=max_read_bytes, budget_bytes=budget_bytes)
    for object_index, runs_of_object in itertools.groupby(merged, key=operator.attrgetter("object_index")):
        cuts = (
            cut for run in runs_of_object for cut in _split_run(run, tile_bytes, max_read_bytes, is_aligned=is_aligned)
        )
        requests += _plan_reads_of_object(object_index, by_object[object_index], cuts, tile_bytes)
    return _interleave_reads(requests)


def _join_tiles(wants: Sequence[WantedRange], tile_bytes: int, max_gap_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield the ranges of whole tiles that hold the sorted `wants`, and the number of wanted bytes in each."""
    begin = end = reached = -1
    num_wanted_bytes = 0
    for want in wants:
        low = want.begin // tile_bytes * tile_bytes
        high = -(-want.end // tile_bytes) * tile_bytes
        if end >= 0 and low - end > max_gap_bytes:
            yield begin, end, num_wanted_bytes
            end, num_wanted_bytes = -1, 0
        if end < 0:
            begin, end = low, high
        elif high > end:
            end = high
        if want.end > reached:
            num_wanted_bytes += want.end - max(want.begin, reached)
            reached = want.end
    if end >= 0:
        yield begin, end, num_wanted_bytes


def _split_run(run: _Run, tile_bytes: int, max_read_bytes: int, *, is_aligned: bool) -> Iterator[tuple[int, int]]:
    """Split a run into as few ranges of at most `max_read_bytes` as possible, of whole tiles and about one size."""
    if is_aligned:
        for low in range(run.begin // max_read_bytes * max_read_bytes, run.end, max_read_bytes):
            yield max(low, run.begin), min(low + max_read_bytes, run.end)
        return
    num_bytes = run.end - run.begin
    share_bytes = -(-num_bytes // -(-num_bytes // max_read_bytes))
    piece_bytes = -(-share_bytes // tile_bytes) * tile_bytes
    for low in range(run.begin, run.end, piece_bytes):
        yield low, min(low + piece_bytes, run.end)


def _plan_reads_of_object(
    object_index: int, wants: Sequence[WantedRange], cuts: Iterable[tuple[int, int]], tile_bytes: int
) -> Iterator[RangeRead]:
    """Yield a read for each of the rising ranges `cuts` that holds bytes of the sorted `wants`."""
    unfinished: list[WantedRange] = []  # they begin before this cut, and end in it or after it
    index = 0
    for low, high in cuts:
        wants_in_cut = unfinished
        while index < len(wants) and wants[index].begin < high:
            wants_in_cut.append(wants[index])
            index += 1
        if not wants_in_cut:
            continue
        overlapping, reached = False, low
        for want in wants_in_cut:
            overlapping = overlapping or max(want.begin, low) < reached
            reached = max(reached, min(want.end, high))
        yield RangeRead(
            object_index=object_index,
            # A cut can fall into a gap, which is then not read.
            begin=max(low, wants_in_cut[0].begin // tile_bytes * tile_bytes),
            end=min(high, -(-reached // tile_bytes) * tile_bytes),
            wanted=tuple(wants_in_cut),
            overlapping=overlapping,
            continues=any(want.is_held and want.begin < low for want in wants_in_cut),
        )
        unfinished = [want for want in wants_in_cut if want.end > high]


class _Run(NamedTuple):
    """Bytes ``[begin, end)`` of an object."""

    object_index: int
    begin: int
    end: int


def _merge_runs(runs: Sequence[_Run], *, max_read_bytes: int, budget_bytes: int) -> Iterator[_Run]:
    """Yield `runs`, some joined over the gap between them. The gaps that are read have at most `budget_bytes` in all.

    `runs` are sorted by object and offset, and do not touch. Smaller gaps come first. A gap is read only if that saves
    a read of at most `max_read_bytes`.
    """
    # For a joined run, `last_of` is right at its first index, and `first_of` at its last. No other index is looked up.
    first_of, last_of = list(range(len(runs))), list(range(len(runs)))

    def num_reads(num_bytes: int) -> int:
        return -(-num_bytes // max_read_bytes)

    for gap_bytes, index in _find_gaps(runs, max_gap_bytes=budget_bytes):
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
        yield _Run(runs[index].object_index, runs[index].begin, runs[last].end)
        index = last + 1


def _find_gaps(runs: Sequence[_Run], *, max_gap_bytes: int) -> list[tuple[int, int]]:
    """Return the size of each gap of at most `max_gap_bytes`, and the index of the run before it, smallest first."""
    gaps = (
        (runs[index + 1].begin - runs[index].end, index)
        for index in range(len(runs) - 1)
        if runs[index].object_index == runs[index + 1].object_index
    )
    return sorted(gap for gap in gaps if gap[0] <= max_gap_bytes)


def _interleave_reads(reads: Iterable[RangeRead]) -> list[RangeRead]:
    """Order `reads`, given object by object, so that connections stay busy to the end and on many objects.

    Large reads come before small ones (by powers of two), so that no connection still works on a long read when the
    others are done. Among reads of about one size the objects take turns, so that no phase of a load is bound by one
    object or its disks. A read that continues another one follows it directly, so that little memory is held at once.
    """
    num_turns: defaultdict[tuple[int, int], int] = defaultdict(int)
    placed: list[tuple[int, int, int, list[RangeRead]]] = []
    for unit in _group_continued(reads):
        size_class = (sum(read.num_bytes for read in unit) - 1).bit_length()
        object_index = unit[0].object_index
        turn = num_turns[size_class, object_index]
        num_turns[size_class, object_index] += 1
        placed.append((-size_class, turn, object_index, unit))
    placed.sort(key=lambda turn_of_unit: turn_of_unit[:3])
    return [read for *_, unit in placed for read in unit]


def _group_continued(reads: Iterable[RangeRead]) -> Iterator[list[RangeRead]]:
    """Yield groups of a read and the reads that continue it."""
    unit: list[RangeRead] = []
    for read in reads:
        if unit and not read.continues:
            yield unit
            unit = []
        unit.append(read)
    if unit:
        yield unit


def spread_over_connections(
    num_bytes: int, *, connections: int, requests_per_connection: int, min_bytes: int, max_bytes: int
) -> int:
    """Return the size at which `num_bytes` make so many requests for each of `connections`, within bounds.

    `max_bytes` wins if it is below `min_bytes`.
    """
    return min(max(num_bytes // (requests_per_connection * connections), min_bytes), max_bytes)
