"""Whether blocks fill an array, against a count of every element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cloudckpt.format.chunk_arrays import arrays_fill_once
from cloudckpt.format.validation import fills_once

Block = tuple[tuple[int, ...], tuple[int, ...]]
Shape = tuple[int, ...]


@st.composite
def tilings(draw: st.DrawFn, offsets: Shape, lengths: Shape, depth: int = 4) -> list[Block]:
    """A box cut in two, again and again, anywhere; some pieces are empty."""
    dim = draw(st.integers(0, len(lengths))) if depth else len(lengths)
    if dim == len(lengths):
        return [(offsets, lengths)]
    cut = draw(st.integers(0, lengths[dim]))
    first = (*lengths[:dim], cut, *lengths[dim + 1 :])
    second = (*lengths[:dim], lengths[dim] - cut, *lengths[dim + 1 :])
    moved = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
    return [*draw(tilings(offsets, first, depth - 1)), *draw(tilings(moved, second, depth - 1))]


@st.composite
def shapes_and_blocks(draw: st.DrawFn) -> tuple[Shape, list[Block]]:
    """A tiling, in which perhaps one block is moved, resized, dropped or doubled."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    blocks = draw(tilings((0,) * len(shape), shape))
    kind = draw(st.sampled_from(["as it is", "drop", "double", "change"]))
    victim = draw(st.integers(0, len(blocks) - 1))
    if kind == "drop":
        del blocks[victim]
    elif kind == "double":
        blocks.append(blocks[victim])
    elif kind == "change":
        lengths = tuple(draw(st.integers(0, extent)) for extent in shape)
        offsets = tuple(draw(st.integers(0, extent - n)) for extent, n in zip(shape, lengths, strict=True))
        blocks[victim] = (offsets, lengths)
    return shape, draw(st.permutations(blocks))


@settings(max_examples=500)
@given(shapes_and_blocks())
@example(((2,), [((0,), (1,)), ((0,), (1,))]))
@example(((), [((), ())]))
@example(((), []))
@example(((), [((), ()), ((), ())]))
@example(((0, 3), []))
@pytest.mark.slow
def test_says_what_counting_says(case: tuple[Shape, list[Block]]) -> None:
    """If this fails, a manifest passes in which a part of a tensor is stored twice or never, or a good one does not."""
    shape, blocks = case
    counts = np.zeros(shape, dtype=np.int64)
    for offsets, lengths in blocks:
        counts[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    assert fills_once(blocks, shape) == bool((counts == 1).all())
    assert filled_by_arrays(blocks, shape) == bool((counts == 1).all())


def filled_by_arrays(blocks: list[Block], shape: Shape) -> bool:
    size = (len(blocks), len(shape))
    offsets = np.array([offsets for offsets, _ in blocks], dtype=np.int64).reshape(size)
    return arrays_fill_once(offsets, np.array([n for _, n in blocks], dtype=np.int64).reshape(size), shape)


def test_arrays_of_any_size_are_judged() -> None:
    """If this fails, corners whose positions do not fit into one number let holes and overlaps pass."""
    side = 2**31
    blocks = [
        ((row * side // 2, column * side // 2, 0), (side // 2, side // 2, 1)) for row in range(2) for column in range(2)
    ]
    assert filled_by_arrays(blocks, (side, side, 1))
    assert not filled_by_arrays([*blocks[:3], blocks[0]], (side, side, 1))
    halved = [((*offsets[:2], low), (*lengths[:2], side // 2)) for offsets, lengths in blocks for low in (0, side // 2)]
    assert filled_by_arrays(halved, (side, side, side))
    assert not filled_by_arrays([*halved[:7], halved[0]], (side, side, side))


def test_equal_volume_is_not_enough() -> None:
    """If this fails, half of a tensor stays unfilled without anybody noticing."""
    assert not fills_once([((0, 0), (2, 4)), ((1, 0), (2, 4))], (4, 4))
    assert math.prod((2, 4)) * 2 == math.prod((4, 4))


def test_time_grows_with_the_number_of_blocks() -> None:
    """If this fails, the manifest of a large job cannot be opened in reasonable time."""
    side = 150
    blocks = [((row, column), (1, 1)) for row in range(side) for column in range(side)]
    assert fills_once(blocks, (side, side))
    assert not fills_once(blocks[1:], (side, side))


@pytest.mark.parametrize("num_dims", [4, 6, 9])
def test_many_dimensions_are_judged(num_dims: int) -> None:
    """If this fails, a tensor that is split along many dimensions is refused, or one with a hole passes."""
    blocks = [(corner, (1,) * num_dims) for corner in itertools.product((0, 1), repeat=num_dims)]
    shape = (2,) * num_dims
    assert fills_once(blocks, shape)
    assert not fills_once(blocks[:-1], shape)
    assert not fills_once([*blocks[:-1], blocks[0]], shape)
    assert not fills_once([*blocks, blocks[0]], shape)


def test_hostile_numbers_of_dimensions_end_at_once() -> None:
    """If this fails, a short manifest keeps its reader busy for ever."""
    shape = (2,) * 60
    blocks = [((0,) * 60, (1,) * 60), ((1,) * 60, (1,) * 60)]
    assert not fills_once(blocks, shape)
