"""Which memory a snapshot has to copy. Addresses and sizes are bytes; ranges are half-open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MAX_HOLLOWNESS = 2  # of a hull's bytes, how many there may be for one byte of its tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Hulls:
    """What is copied of some views: segments in the order of their first view, and views that are copied alone."""

    begins: list[int]
    ends: list[int]
    """Of each segment, in the memory of the views."""
    segment_of: list[int]
    """Of each view, the position of the segment that it lies in; -1 where its elements are to be copied alone."""


def hulls_of(begins: Sequence[int], ends: Sequence[int], own_bytes: Sequence[int]) -> Hulls:
    """The segments that hold views which reach over ``[begins[i], ends[i])`` and have ``own_bytes[i]`` of their own.

    Views that share a byte share a segment, so that no byte is copied twice. A view with large holes is not copied as
    it lies, unless a segment of others holds it anyway. No segment has more than twice the bytes of its views.
    """
    lows, highs = np.array(begins, dtype=np.uint64), np.array(ends, dtype=np.uint64)
    own = np.array(own_bytes, dtype=np.uint64)
    is_hollow = highs - lows > own * np.uint64(_MAX_HOLLOWNESS)
    dense = np.flatnonzero(~is_hollow)
    order = dense[np.argsort(lows[dense], kind="stable")]
    reached = np.maximum.accumulate(highs[order])
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = lows[order][1:] >= reached[:-1]
    number = np.cumsum(is_first) - 1
    starts = np.flatnonzero(is_first)
    if not len(starts):
        return Hulls(begins=[], ends=[], segment_of=[-1] * len(begins))
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
        at = int(np.searchsorted(segment_begins, lows[view], side="right")) - 1
        if at >= 0 and highs[view] <= segment_ends[at]:
            segment_of[view] = position_of[at]
    return Hulls(
        begins=segment_begins[by_view].tolist(),
        ends=segment_ends[by_view].tolist(),
        segment_of=segment_of.tolist(),
    )
