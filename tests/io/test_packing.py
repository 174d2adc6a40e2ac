"""Which tensors share an object, and how an object is cut into parts."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.io.boxes import find_overlapping, place_segments, plan_address_ranges
from cloudckpt.io.upload import plan_parts
from cloudckpt.stores.base import Limits, Part
from cloudckpt.tensors.body import pack


@given(st.lists(st.integers(0, 100)), st.integers(1, 120))
def test_pack_keeps_order_and_bound(sizes_bytes: list[int], object_bytes: int) -> None:
    """If this fails, tensors are left out or written twice, or objects outgrow what was asked for."""
    groups = pack(sizes_bytes, object_bytes=object_bytes)
    assert [index for group in groups for index in group] == list(range(len(sizes_bytes)))
    for group in groups:
        assert len(group) > 0
        assert len(group) == 1 or sum(sizes_bytes[index] for index in group) <= object_bytes
    for group, following in itertools.pairwise(groups):  # greedy: no group could have taken one more
        assert sum(sizes_bytes[index] for index in group) + sizes_bytes[following[0]] > object_bytes


def assert_accepted(parts: list[Part], size_bytes: int, tile_bytes: int, limits: Limits) -> None:
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    position = 0
    for part in parts:
        assert part.offset_bytes == position
        assert 0 < part.size_bytes <= limits.max_part_bytes
        position += part.size_bytes
    assert position == size_bytes
    assert len(parts) <= limits.max_parts
    for part in parts[:-1]:
        assert part.size_bytes % tile_bytes == 0
        assert part.size_bytes >= limits.min_part_bytes


@settings(max_examples=1000)
@given(
    size_bytes=st.integers(0, 60),
    part_bytes=st.integers(1, 20),
    tile_bytes=st.integers(1, 6),
    limits=st.builds(
        lambda min_part_bytes, more_bytes, max_parts: Limits(
            min_part_bytes=min_part_bytes,
            max_part_bytes=min_part_bytes + more_bytes,
            max_parts=max_parts,
            max_put_bytes=100,
        ),
        st.integers(1, 8),
        st.integers(0, 12),
        st.integers(1, 6),
    ),
)
def test_parts_are_refused_only_where_there_are_none(
    size_bytes: int, part_bytes: int, tile_bytes: int, limits: Limits
) -> None:
    """If this fails, an object is refused that fits, or cut into parts that the store refuses."""
    possible_steps = [
        step
        for step in range(tile_bytes, limits.max_part_bytes + 1, tile_bytes)
        if -(-size_bytes // step) <= limits.max_parts and (step >= limits.min_part_bytes or size_bytes <= step)
    ]
    try:
        parts = plan_parts(size_bytes, part_bytes=part_bytes, tile_bytes=tile_bytes, limits=limits)
    except ValueError:
        assert not possible_steps
    else:
        assert_accepted(parts, size_bytes, tile_bytes, limits)


HIGH = 2**47

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


@given(drawn=ranges, offset=st.sampled_from([0, HIGH, 2**63]))
def test_exactly_those_that_share_a_byte_are_found(drawn: list[tuple[int, int]], offset: int) -> None:
    """If this fails, two reads fill one piece of memory at once, or tensors are copied for no reason."""
    spans = [set(range(begin, begin + length)) for begin, length in drawn]
    expected = {
        index
        for index, span in enumerate(spans)
        if any(span & other for position, other in enumerate(spans) if position != index)
    }
    begins = [offset + begin for begin, _ in drawn]
    assert find_overlapping(begins, [offset + begin + length for begin, length in drawn]) == expected


Views = list[tuple[int, int, int]]


@st.composite
def some_views(draw: st.DrawFn) -> Views:
    """Views ``(begin, end, own bytes)`` of a small memory; some hollow, some of repeated elements."""
    views = []
    for _ in range(draw(st.integers(0, 12))):
        begin = draw(st.integers(0, 60))
        length = draw(st.integers(1, 20))
        views.append((begin, begin + length, draw(st.integers(1, 30))))
    return views


def components(views: Views) -> list[set[int]]:
    """The views that are joined by shared bytes, found pair by pair."""
    groups: list[set[int]] = []
    for number, (begin, end, _) in enumerate(views):
        touched = [group for group in groups if any(views[o][0] < end and begin < views[o][1] for o in group)]
        groups = [group for group in groups if group not in touched] + [{number}.union(*touched)]
    return groups


@settings(max_examples=500)
@given(some_views())
def test_each_shared_byte_is_copied_once_and_all_are_copied(views: Views) -> None:
    """If this fails, tied weights take their memory twice, or a view is missing bytes."""
    hulls = (
        plan_address_ranges(*(list(column) for column in zip(*views, strict=True)))
        if views
        else plan_address_ranges([], [], [])
    )
    dense = [number for number, (begin, end, own) in enumerate(views) if end - begin <= 2 * own]
    groups = components([views[number] for number in dense])
    expected = {
        (min(views[dense[n]][0] for n in group), max(views[dense[n]][1] for n in group)): min(dense[n] for n in group)
        for group in groups
    }
    assert list(zip(hulls.begins, hulls.ends, strict=True)) == sorted(expected, key=lambda item: expected[item])
    assert len(hulls.segment_of) == len(views)
    for number, (begin, end, _) in enumerate(views):
        around = [at for at, (low, high) in enumerate(expected_in(hulls)) if low <= begin and end <= high]
        assert hulls.segment_of[number] == (around[0] if around else -1)
        assert around or number not in dense


def expected_in(hulls: object) -> list[tuple[int, int]]:
    """The segments."""
    return list(zip(hulls.begins, hulls.ends, strict=True))  # type: ignore[attr-defined]


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
