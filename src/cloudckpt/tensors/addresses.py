"""Plan the segments of memory that hold views, by addresses, and the offsets of segments in blocks of memory.

Sizes are bytes, and ranges half-open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Addresses: TypeAlias = Sequence[int] | npt.NDArray[np.uint64]
_MAX_BYTES_PER_TENSOR_BYTE = 2  # a view with more bytes from its first element to its last is copied alone
LINE_BYTES = 64
"""The size of a cache line, to which torch aligns its memory."""
_PAGE_BYTES = 4096
_LARGE_BYTES = 64 * 1024  # a segment of this size or more begins on a page
_BLOCK_BYTES = 2 * 1024 * 1024  # blocks are whole numbers of huge pages
_GROWTH_DIVISOR = 8  # a new block has at least an eighth of the bytes of all earlier blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRanges:
    """The memory to copy for some views: segments in the order of their first view, and views that are copied alone."""

    begins: list[int]
    ends: list[int]
    """The segments' ends in the memory of the views."""
    segment_of: list[int]
    """The position of the segment that holds each view; -1 if its elements are copied alone."""


def plan_address_ranges(begins: Addresses, ends: Addresses, own_bytes: Addresses) -> AddressRanges:
    """Plan segments to hold views that reach over ``[begins[i], ends[i])`` and have ``own_bytes[i]`` of their own.

    Views that share a byte share a segment, so that no byte is copied twice. A view with large holes is copied alone,
    without the holes, unless a segment of other views holds it. No segment has more than twice the bytes of its views.
    """
    lows, highs = np.array(begins, dtype=np.uint64), np.array(ends, dtype=np.uint64)
    own = np.array(own_bytes, dtype=np.uint64)
    is_hollow = highs - lows > own * np.uint64(_MAX_BYTES_PER_TENSOR_BYTE)
    dense = np.flatnonzero(~is_hollow)
    order = dense[np.argsort(lows[dense], kind="stable")]
    reached = np.maximum.accumulate(highs[order])
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = lows[order][1:] >= reached[:-1]
    number = np.cumsum(is_first) - 1
    starts = np.flatnonzero(is_first)
    if not len(starts):
        return AddressRanges(begins=[], ends=[], segment_of=[-1] * len(begins))
    segment_begins = lows[order][starts]
    segment_ends = reached[np.append(starts[1:], len(order)) - 1]
    # In the order of the views from here on: what comes first in a state dict is uploaded first.
    first_views = np.minimum.reduceat(order, starts)
    by_view = np.argsort(first_views)
    position_of = np.empty_like(by_view)
    position_of[by_view] = np.arange(len(by_view))
    segment_of = np.full(len(begins), -1, dtype=np.int64)
    segment_of[order] = position_of[number]
    for view in np.flatnonzero(is_hollow).tolist():
        position = int(np.searchsorted(segment_begins, lows[view], side="right")) - 1
        if position >= 0 and highs[view] <= segment_ends[position]:
            segment_of[view] = position_of[position]
    return AddressRanges(
        begins=segment_begins[by_view].tolist(),
        ends=segment_ends[by_view].tolist(),
        segment_of=segment_of.tolist(),
    )


def find_overlapping(begins: Sequence[int], ends: Sequence[int]) -> set[int]:
    """Return the positions of the address ranges ``[begin, end)`` that share a byte with another range."""
    lows, highs = np.array(begins, dtype=np.uint64), np.array(ends, dtype=np.uint64)
    filled = np.flatnonzero(lows < highs)
    lows, highs = lows[filled], highs[filled]
    segment_of = np.array(plan_address_ranges(lows, highs, highs - lows).segment_of, dtype=np.int64)
    is_shared = np.bincount(segment_of)[segment_of] > 1
    return set(filled[is_shared].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The block of each segment, and its offset there. The last block may not exist yet."""

    blocks: list[int]
    offsets: list[int]
    new_block_bytes: int
    """0 if all segments fit into the existing blocks."""


def place_segments(segments: Iterable[tuple[int, int]], capacities: Sequence[int]) -> Placement:
    """Place segments of ``(address, num_bytes)`` in blocks of these capacities.

    No two segments overlap. Segments in a block keep their order. Each keeps its address modulo 64, so that its views
    keep their alignment.
    """
    blocks: list[int] = []
    offsets: list[int] = []
    filled = [0] * (len(capacities) + 1)
    current, new = 0, len(capacities)
    limits = [*capacities, math.inf]
    for address, num_bytes in segments:
        line_offset = address % LINE_BYTES
        alignment = _PAGE_BYTES if num_bytes >= _LARGE_BYTES else LINE_BYTES
        for block in (current, *range(len(limits))):
            offset = -(-filled[block] // alignment) * alignment + line_offset
            if offset + num_bytes <= limits[block]:
                blocks.append(block)
                offsets.append(offset)
                filled[block] = offset + num_bytes
                current = block if block < new else 0
                break
    missing_bytes = max(filled[new], sum(capacities) // _GROWTH_DIVISOR) if filled[new] else 0
    return Placement(blocks=blocks, offsets=offsets, new_block_bytes=-(-missing_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
