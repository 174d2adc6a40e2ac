"""Who reads what several ranks want: pure, and the same on every rank that plans from the same values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Range: TypeAlias = tuple[int, int, int]
"""Bytes ``[begin, end)`` of an object: (object_index, begin, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Bytes ``[begin, end)`` of an object that `reader` reads, and hands on to the `takers`."""

    number: int
    object_index: int
    begin: int
    end: int
    reader: int
    takers: tuple[int, ...]
    machine: int | None = None
    """The one, of those that want the same, whose reader fetches it from the store and sends it to the readers on the
    others; None where each machine reads for itself."""


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in rising ranges that neither meet nor overlap; empty ones are left out."""
    found: list[Range] = []
    for object_index, begin, end in sorted(ranges):
        if begin >= end:
            continue
        if found and found[-1][0] == object_index and found[-1][2] >= begin:
            found[-1] = (object_index, found[-1][1], max(found[-1][2], end))
        else:
            found.append((object_index, begin, end))
    return found


def plan_segments(
    wanted: Mapping[int, Sequence[Range]],
    *,
    segment_bytes: int,
    min_bytes: int,
    min_ranks: int,
    num_segments: int,
) -> list[Segment]:
    """What is read by one rank for others, in the order of the objects and their bytes.

    `wanted` maps each rank to `merged` ranges. Each byte that `min_ranks` want is in at most one
    segment, and those that want it are that segment's reader and takers, no others; stretches shorter than `min_bytes`
    are left to each rank.
    No segment is longer than `segment_bytes`, and each begins where one could have been cut: at the begin of a wanted
    range or a multiple of `segment_bytes` from there. Readers are chosen so that all ranks read about as many bytes,
    with what they want for themselves alone. There are at most `num_segments`; what is beyond is left to each rank.
    """
    num_read_bytes: Counter[int] = Counter(dict.fromkeys(wanted, 0))
    shared: list[tuple[Range, tuple[int, ...]]] = []
    for stretch, ranks in _stretches(wanted):
        _, begin, end = stretch
        if len(ranks) >= min_ranks and end - begin >= min_bytes:
            shared.append((stretch, ranks))
        else:
            for rank in ranks:
                num_read_bytes[rank] += end - begin
    segments: list[Segment] = []
    for (object_index, begin, end), ranks in shared:
        for low in range(begin, end, segment_bytes):
            if len(segments) == num_segments:
                return segments
            high = min(low + segment_bytes, end)
            reader = min(ranks, key=lambda rank: (num_read_bytes[rank], rank))
            num_read_bytes[reader] += high - low
            segments.append(
                Segment(
                    number=len(segments),
                    object_index=object_index,
                    begin=low,
                    end=high,
                    reader=reader,
                    takers=tuple(rank for rank in ranks if rank != reader),
                )
            )
    return segments


def num_bytes_in(ranges: Sequence[Range]) -> int:
    """How many there are in `merged` ranges."""
    return sum(end - begin for _, begin, end in ranges)


def num_repeated_bytes(wanted: Iterable[Sequence[Range]]) -> int:
    """How many bytes would be read more than once, counted as often as they are read again."""
    every = [one for ranges in wanted for one in ranges]
    return num_bytes_in(every) - num_bytes_in(merged(every))


def _stretches(wanted: Mapping[int, Sequence[Range]]) -> Iterator[tuple[Range, tuple[int, ...]]]:
    """Ranges all of whose bytes the same ranks want, as long as they can be."""
    changes: list[tuple[int, int, int, int]] = []
    for rank, ranges in wanted.items():
        for object_index, begin, end in ranges:
            changes.append((object_index, begin, 1, rank))
            changes.append((object_index, end, 0, rank))
    changes.sort()
    active: set[int] = set()
    reached: tuple[int, int] = (-1, 0)
    for object_index, position, begins, rank in changes:
        if active and position > reached[1]:
            yield (object_index, reached[1], position), tuple(sorted(active))
        reached = (object_index, position)
        if begins:
            active.add(rank)
        else:
            active.discard(rank)
