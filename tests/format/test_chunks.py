"""The chunks of a tensor fill it, each element once, and lie where a manifest may have them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.format.samples import as_json

from cloudckpt.format.model import Chunk, Manifest, StoredTensor, find_overlapping_chunks
from cloudckpt.format.validation import arrays_fill_once, fills_once, find_problems, is_sound

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
    shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
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


def filled_by_arrays(blocks: list[Block], shape: Shape) -> bool:
    size = (len(blocks), len(shape))
    offsets = np.array([offsets for offsets, _ in blocks], dtype=np.int64).reshape(size)
    return arrays_fill_once(offsets, np.array([n for _, n in blocks], dtype=np.int64).reshape(size), shape)


@settings(max_examples=300)
@given(shapes_and_blocks())
@example(((2,), [((0,), (1,)), ((0,), (1,))]))
@example(((), [((), ())]))
@example(((), []))
@example(((), [((), ()), ((), ())]))
@example(((0, 3), []))
def test_both_checks_of_chunks_agree_with_counting(case: tuple[Shape, list[Block]]) -> None:
    """If this fails, a manifest passes in which a part of a tensor is stored twice or never, or a good one does not."""
    shape, blocks = case
    counts = np.zeros(shape, dtype=np.int64)
    for offsets, lengths in blocks:
        counts[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    assert fills_once(blocks, shape) == bool((counts == 1).all())
    assert filled_by_arrays(blocks, shape) == bool((counts == 1).all())


def test_chunks_of_shapes_beyond_64_bits_are_checked() -> None:
    """If this fails, corners whose positions do not fit into one number let holes and overlaps pass."""
    side = 2**31
    for shape in ((side, side, 1), (side, side, side)):
        halves = [(0, side // 2) if extent > 1 else (0,) for extent in shape]
        lengths = tuple(max(1, extent // 2) for extent in shape)
        blocks = [(corner, lengths) for corner in itertools.product(*halves)]
        assert filled_by_arrays(blocks, shape)
        assert not filled_by_arrays([*blocks[:-1], blocks[0]], shape)


def test_many_dimensions_take_no_exponential_time() -> None:
    """If this fails, a tensor split along many dimensions is refused, or a short manifest keeps its reader for ever."""
    blocks = [(corner, (1,) * 9) for corner in itertools.product((0, 1), repeat=9)]
    assert fills_once(blocks, (2,) * 9)
    assert not fills_once([*blocks[:-1], blocks[0]], (2,) * 9)
    assert not fills_once([((0,) * 60, (1,) * 60), ((1,) * 60, (1,) * 60)], (2,) * 60)


# Chunks that a load looks up.


@st.composite
def tiled(draw: st.DrawFn) -> tuple[Shape, list[Block], Block]:
    """A shape, blocks that fill it once in some order, and a box inside of it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    blocks = draw(tilings((0,) * len(shape), shape))
    blocks = sorted(blocks) if draw(st.booleans()) else draw(st.permutations(blocks))
    begins = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    ends = tuple(draw(st.integers(begin, extent)) for begin, extent in zip(begins, shape, strict=True))
    return shape, blocks, (begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))


@given(tiled())
def test_overlapping_chunks_are_all_found(case: tuple[Shape, list[Block], Block]) -> None:
    """If this fails, a load leaves a part of a tensor as it was, without an error."""
    _, blocks, (offsets, lengths) = case
    found = find_overlapping_chunks([Chunk(begins, extents, 0, 0, 0) for begins, extents in blocks], offsets, lengths)
    if found is None:
        return
    overlapping = [
        position
        for position, (begins, extents) in enumerate(blocks)
        if all(
            max(begin, offset) < min(begin + extent, offset + length)
            for begin, extent, offset, length in zip(begins, extents, offsets, lengths, strict=True)
        )
    ]
    assert found == overlapping


# The checks of all chunks of a large tensor at once, and of a tensor in one chunk.

SIDE = 5
NUM_CHUNKS = SIDE * SIDE
CHUNK_BYTES = 2 * 3 * 4
OBJECT_SIZES_BYTES = np.array([NUM_CHUNKS * CHUNK_BYTES] * 2, dtype=np.int64)


def tensor_on_a_mesh(position: int = 0, **changes: Any) -> StoredTensor:
    chunks = [
        Chunk((2 * row, 3 * column), (2, 3), row % 2, number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES)
        for number, (row, column) in enumerate((row, column) for row in range(SIDE) for column in range(SIDE))
    ]
    chunks[position] = msgspec.structs.replace(chunks[position], **changes)
    return StoredTensor(dtype="float32", shape=(2 * SIDE, 3 * SIDE), chunks=chunks)


DAMAGE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "moved": ("offsets", lambda offsets: (offsets[0] + 1, offsets[1])),
    "before the tensor": ("offsets", lambda offsets: (-2, offsets[1])),
    "past the tensor": ("offsets", lambda offsets: (offsets[0], 3 * SIDE)),
    "in a wrapped place": ("offsets", lambda offsets: (offsets[0], 2**63 - 1)),
    "beyond 64 bits": ("offsets", lambda offsets: (offsets[0], 2**64)),
    "of fewer dimensions": ("offsets", lambda offsets: offsets[:1]),
    "without dimensions": ("lengths", lambda _: ()),
    "longer": ("lengths", lambda lengths: (lengths[0], lengths[1] + 1)),
    "negative": ("lengths", lambda lengths: (-lengths[0], -lengths[1])),
    "empty": ("lengths", lambda lengths: (0, lengths[1])),
    "endless": ("lengths", lambda _: (2**32, 2**32)),
    "in no object": ("object_index", lambda _: 2),
    "in the last object from behind": ("object_index", lambda _: -1),
    "begun before its object": ("begin", lambda _: -CHUNK_BYTES),
    "not aligned": ("begin", lambda begin: begin + 2),
    "past its object": ("end", lambda end: end + NUM_CHUNKS * CHUNK_BYTES),
    "too long": ("end", lambda end: end + 4),
    "too short": ("end", lambda end: end - 4),
    "backwards": ("end", lambda _: 0),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_one_wrong_number_among_many_chunks_is_enough(name: str) -> None:
    """If this fails, a manifest of a large job chooses what a load reads, allocates or leaves unfilled."""
    assert is_sound(tensor_on_a_mesh(), 4, OBJECT_SIZES_BYTES)
    field, change = DAMAGE[name]
    position = NUM_CHUNKS // 2
    value = change(getattr(tensor_on_a_mesh().chunks[position], field))
    assert not is_sound(tensor_on_a_mesh(position, **{field: value}), 4, OBJECT_SIZES_BYTES)


def manifest_with(chunk: list[Any]) -> Manifest:
    """A manifest with one tensor in one chunk, and two objects."""
    document = as_json() | {"nesting": None}
    document["tensors"]["w"] = {"dtype": "float32", "shape": [2, 3], "chunks": [chunk]}
    return msgspec.convert(document, Manifest, strict=False)


@pytest.mark.parametrize(
    "chunk",
    [
        [[0, 0], [2, 3], 2, 8, 32],
        [[0, 0], [2, 3], -1, 8, 32],
        [[0, 0], [2, 3], 1, -8, 16],
        [[0, 0], [2, 3], 1, 6, 30],
        [[0, 0], [2, 3], 1, 112, 136],
        [[0, 0], [2, 3], 1, 8, 28],
        [[1, 0], [2, 3], 1, 8, 32],
        [[0, 0], [3, 2], 1, 8, 32],
        [[0], [2, 3], 1, 8, 32],
    ],
)
def test_one_wrong_number_of_a_single_chunk_is_enough(chunk: list[Any]) -> None:
    """If this fails, a load reads outside of an object, out of step with its elements, or leaves some unfilled."""
    assert not find_problems(manifest_with([[0, 0], [2, 3], 1, 8, 32]))
    assert find_problems(manifest_with(chunk))
