"""Boxes in row-major arrays, and flat ranges.

Counts are elements. Ranges are half-open.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A box in an array: it starts at `offsets` and extends over `lengths`."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box in the array."""
        return tuple(slice(offset, offset + length) for offset, length in zip(self.offsets, self.lengths, strict=True))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the same box relative to `origin`."""
        return Box(tuple(offset - first for offset, first in zip(self.offsets, origin, strict=True)), self.lengths)


def compute_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def find_runs(shape: Sequence[int], box: Box, *, max_gap: int) -> list[tuple[int, int]]:
    """Return the flat ranges of an array of `shape` that hold `box`, in order.

    Ranges at most `max_gap` elements apart are joined. With ``max_gap=0`` the ranges hold the elements of the box
    alone; otherwise, they also hold the gaps.
    """
    if 0 in box.lengths:
        return []
    strides = compute_strides(shape)
    span = 1
    repeated: list[tuple[int, int]] = []
    for stride, length in zip(reversed(strides), reversed(box.lengths), strict=True):
        if length == 1:
            continue
        if not repeated and stride - span <= max_gap:
            span += (length - 1) * stride
        else:
            repeated.append((length, stride))
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    starts = (
        first + sum(steps)
        for steps in itertools.product(*(range(0, n * stride, stride) for n, stride in reversed(repeated)))
    )
    return [(start, start + span) for start in starts]


def split_into_boxes(begin: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """Split the flat range ``[begin, end)`` of an array of `shape` into at most ``2 * ndim - 1`` boxes, in order."""
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    inner_shape = tuple(shape[1:])
    inner = math.prod(inner_shape)
    (row, head), (last_row, tail) = divmod(begin, inner), divmod(end, inner)
    if row == last_row:
        yield from _in_row(row, split_into_boxes(head, tail, inner_shape))
        return
    if head:
        yield from _in_row(row, split_into_boxes(head, inner, inner_shape))
        row += 1
    if row < last_row:
        yield Box((row, *(0 for _ in inner_shape)), (last_row - row, *inner_shape))
    if tail:
        yield from _in_row(last_row, split_into_boxes(0, tail, inner_shape))


def intersect(first: Box, second: Box) -> Box | None:
    """Return the overlap of two boxes; None if they have none."""
    offsets = tuple(max(a, b) for a, b in zip(first.offsets, second.offsets, strict=True))
    ends = (
        min(a + n, b + m)
        for a, n, b, m in zip(first.offsets, first.lengths, second.offsets, second.lengths, strict=True)
    )
    lengths = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return Box(offsets, lengths) if all(length > 0 for length in lengths) else None


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sorted, disjoint `ranges`, with those that touch joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((row, *box.offsets), (1, *box.lengths))
