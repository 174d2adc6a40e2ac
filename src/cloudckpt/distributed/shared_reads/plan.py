"""Plan which rank reads what several ranks want. Pure: ranks that plan from the same values get the same plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cloudckpt.format.model import ITEMSIZE_BYTES, ItemLocation
from cloudckpt.io.boxes import Box, find_runs

Range: TypeAlias = tuple[int, int, int]
"""Bytes ``[begin, end)`` of an object: (object_index, begin, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Bytes ``[begin, end)`` of an object that `reader` reads and publishes for the `receivers`."""

    number: int
    object_index: int
    begin: int
    end: int
    reader: int
    receivers: tuple[int, ...]


def wanted_ranges(
    items: Iterable[tuple[ItemLocation, Sequence[int], Sequence[int]]],
    *,
    object_sizes_bytes: Mapping[int, int],
    tile_bytes: int,
    max_gap_bytes: int,
) -> list[Range]:
    """Merged ranges of whole tiles that hold all `items`: each the offsets and lengths of a block of a stored chunk."""
    ranges: list[Range] = []
    for location, offsets, lengths in items:
        begin = location.begin
        if location.dtype is None or location.transforms or tuple(lengths) == location.lengths:
            ranges.append((location.object_index, begin, location.end))
            continue
        size = ITEMSIZE_BYTES[location.dtype]
        box = Box(tuple(offsets), tuple(lengths))
        ranges += [
            (location.object_index, begin + low * size, begin + high * size)
            for low, high in find_runs(location.lengths, box, max_gap=max_gap_bytes // size)
        ]
    return merge_ranges(
        (
            object_index,
            begin // tile_bytes * tile_bytes,
            min(-(-end // tile_bytes) * tile_bytes, object_sizes_bytes[object_index]),
        )
        for object_index, begin, end in ranges
        if begin < end
    )


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in rising ranges that neither meet nor overlap; empty ones are left out."""
    merged: list[Range] = []
    for object_index, begin, end in sorted(ranges):
        if begin >= end:
            continue
        if merged and merged[-1][0] == object_index and merged[-1][2] >= begin:
            merged[-1] = (object_index, merged[-1][1], max(merged[-1][2], end))
        else:
            merged.append((object_index, begin, end))
    return merged


def plan_segments(
    wanted: Mapping[int, Sequence[Range]],
    *,
    segment_bytes: int,
    min_bytes: int,
    min_ranks: int,
    num_segments: int,
) -> list[Segment]:
    """Cut what one rank reads for others into segments, in the order of the objects and their bytes.

    `wanted` maps each rank to merged ranges. Each byte that `min_ranks` want is in at most one segment, and the ranks
    that want it are that segment's reader and receivers, no others; stretches shorter than `min_bytes` are left to
    each rank.
    No segment is longer than `segment_bytes`, and each begins at the begin of a stretch or a multiple of
    `segment_bytes` from there. Readers are chosen so that all ranks read about as many bytes, with what they want for
    themselves alone. There are at most `num_segments`; what is beyond is left to each rank.
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
                    receivers=tuple(rank for rank in ranks if rank != reader),
                )
            )
    return segments


def count_repeated_bytes(wanted: Iterable[Sequence[Range]]) -> int:
    """Count the bytes that several ranks want, once for each rank but the first."""
    every = [one for ranges in wanted for one in ranges]
    return _count_bytes(every) - _count_bytes(merge_ranges(every))


def _count_bytes(ranges: Sequence[Range]) -> int:
    return sum(end - begin for _, begin, end in ranges)


def _stretches(wanted: Mapping[int, Sequence[Range]]) -> Iterator[tuple[Range, tuple[int, ...]]]:
    """The longest ranges all of whose bytes the same ranks want, each with those ranks."""
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
