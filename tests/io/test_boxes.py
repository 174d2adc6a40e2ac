"""Boxes and flat ranges, against numpy's own indexing."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.io.boxes import Box, find_runs, intersect, split_into_boxes

Shape = tuple[int, ...]

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
shapes_with_empty_dims = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def box_in(draw: st.DrawFn, shape: Shape, *, min_length: int = 0) -> Box:
    offsets, lengths = [], []
    for extent in shape:
        length = draw(st.integers(min(min_length, extent), extent))
        lengths.append(length)
        offsets.append(draw(st.integers(0, extent - length)))
    return Box(tuple(offsets), tuple(lengths))


def numbered(shape: Shape) -> np.ndarray:
    """An array whose elements are their own flat indices."""
    return np.arange(math.prod(shape)).reshape(shape)


def picked(array: np.ndarray, box: Box) -> list[int]:
    """The elements of `box`, in row-major order."""
    slices = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
    return array[slices].ravel().tolist()


@given(st.data(), shapes_with_empty_dims)
def test_the_boxes_of_a_range_fill_it_in_order(data: st.DataObject, shape: Shape) -> None:
    """If this fails, a copied part of a strided tensor has elements missing, doubled or in another order."""
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    boxes = list(split_into_boxes(begin, end, shape))
    assert [element for box in boxes for element in picked(numbered(shape), box)] == list(range(begin, end))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@given(st.data(), shapes_with_empty_dims)
def test_runs_without_gaps_hold_exactly_the_box(data: st.DataObject, shape: Shape) -> None:
    """If this fails, a load reads other elements into the target than it was asked for."""
    box = data.draw(box_in(shape))
    runs = find_runs(shape, box, max_gap=0)
    assert [element for begin, end in runs for element in range(begin, end)] == picked(numbered(shape), box)


@given(st.data(), shapes, st.integers(0, 30))
def test_runs_with_gaps_cover_the_box_and_little_else(data: st.DataObject, shape: Shape, max_gap: int) -> None:
    """If this fails, a load misses elements, reads far more than allowed, or makes requests that could be one."""
    box = data.draw(box_in(shape, min_length=1))
    wanted = picked(numbered(shape), box)
    runs = find_runs(shape, box, max_gap=max_gap)
    covered = [element for begin, end in runs for element in range(begin, end)]
    assert covered == sorted(set(covered))
    assert set(wanted) <= set(covered)
    for begin, end in runs:
        inside = [element for element in wanted if begin <= element < end]
        assert (inside[0], inside[-1]) == (begin, end - 1)
        assert all(later - earlier - 1 <= max_gap for earlier, later in itertools.pairwise(inside))
    assert all(later[0] - earlier[1] > max_gap for earlier, later in itertools.pairwise(runs))


@given(st.data(), shapes_with_empty_dims)
def test_intersection_is_what_both_hold(data: st.DataObject, shape: Shape) -> None:
    """If this fails, resharding copies elements to where they do not belong."""
    one, other = data.draw(box_in(shape)), data.draw(box_in(shape))
    array = numbered(shape)
    expected = sorted(set(picked(array, one)) & set(picked(array, other)))
    common = intersect(one, other)
    assert (picked(array, common) if common else []) == expected
    assert (common is None) == (not expected)
    assert common == intersect(other, one)
