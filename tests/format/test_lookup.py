"""Chunks are found without a look at all of them, and none is overlooked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.format.test_chunks import Block, Shape, tilings

from cloudckpt.format.model import Chunk
from cloudckpt.format.torch_metadata import find_chunk, find_overlapping_chunks


class Counted(Sequence[Chunk]):
    """Chunks that count how often one is looked at."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self.num_looks = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        self.num_looks += 1
        return self._chunks[index]


def chunks_of(blocks: Sequence[Block]) -> list[Chunk]:
    return [Chunk(offsets, lengths, 0, 0, 0) for offsets, lengths in blocks]


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
def test_what_is_found_is_all_there_is(case: tuple[Shape, list[Block], Block]) -> None:
    """If this fails, a load leaves a part of a tensor as it was, without an error."""
    _, blocks, (offsets, lengths) = case
    found = find_overlapping_chunks(chunks_of(blocks), offsets, lengths)
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


@pytest.mark.parametrize("columns", [1, 8])
def test_looks_grow_with_the_logarithm(columns: int) -> None:
    """If this fails, each of 16,384 ranks goes through the chunks of all others to plan its load."""
    num_rows = 2**14 // columns
    chunks = chunks_of([((4 * row, 4 * column), (4, 4)) for row in range(num_rows) for column in range(columns)])
    for row in (0, num_rows // 3, num_rows - 1):
        counted = Counted(chunks)
        assert find_overlapping_chunks(counted, (4 * row, 4 * columns - 4), (4, 4)) == [row * columns + columns - 1]
        assert find_chunk(counted, (4 * row, 0)) == row * columns
        assert counted.num_looks < 100
    counted = Counted(chunks)
    assert find_overlapping_chunks(counted, (2, 0), (4, 4)) == [0, columns]
    assert counted.num_looks < 100
