"""Where the segments of a snapshot lie."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.io.addresses import place_segments

MIB = 1024 * 1024

segments = st.lists(
    st.tuples(st.integers(0, 10**6), st.one_of(st.integers(1, 300), st.integers(60_000, 70_000), st.just(3 * MIB)))
)


@settings(max_examples=500)
@given(segments, st.lists(st.integers(1, 3).map(lambda number: number * 2 * MIB), max_size=3))
def test_places_are_apart_inside_and_aligned(wanted: list[tuple[int, int]], capacities: list[int]) -> None:
    """If this fails, one tensor of a snapshot overwrites another, or memory beyond the snapshot's."""
    placing = place_segments(wanted, capacities)
    sizes = [*capacities, placing.new_block_bytes]
    taken: dict[int, int] = {}
    for (address, num_bytes), block, offset in zip(wanted, placing.blocks, placing.offsets, strict=True):
        assert offset >= taken.get(block, 0)  # which is also: in their order
        taken[block] = offset + num_bytes
        assert offset + num_bytes <= sizes[block]
        assert offset % 64 == address % 64
        if num_bytes >= 65536:
            assert offset % 4096 == address % 64
    assert (placing.new_block_bytes > 0) == (len(capacities) in placing.blocks)
    assert placing.new_block_bytes % (2 * MIB) == 0


@given(segments)
def test_the_same_segments_fit_where_they_did(wanted: list[tuple[int, int]]) -> None:
    """If this fails, memory grows from save to save of one and the same state dict."""
    first = place_segments(wanted, [])
    again = place_segments(wanted, [first.new_block_bytes] if first.new_block_bytes else [])
    assert again.new_block_bytes == 0
    assert again.offsets == first.offsets


@given(segments, segments)
def test_what_is_there_is_filled_before_more_is_asked_for(
    before: list[tuple[int, int]], more: list[tuple[int, int]]
) -> None:
    """If this fails, a state dict that has grown a little takes all of its memory anew."""
    there = place_segments(before, []).new_block_bytes
    placing = place_segments([*before, *more], [there] if there else [])
    new_bytes = sum(
        num_bytes + 4096 + 64
        for (_, num_bytes), block in zip([*before, *more], placing.blocks, strict=True)
        if not there or block == 1
    )
    assert (
        0 not in placing.blocks[: len(before)] or placing.offsets[: len(before)] == place_segments(before, []).offsets
    )
    assert placing.new_block_bytes <= max(new_bytes, there // 8) + 2 * MIB
