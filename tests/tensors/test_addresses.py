"""Segments of memory for views, against a search of each pair, and places for segments."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.tensors.addresses import find_overlapping, place_segments, plan_address_ranges

HIGH = 2**47

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


@given(drawn=ranges, offset=st.sampled_from([0, HIGH, 2**63]))
def test_exactly_the_ranges_that_share_a_byte_are_found(drawn: list[tuple[int, int]], offset: int) -> None:
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
def test_places_of_segments_are_apart_within_their_block_and_aligned(
    wanted: list[tuple[int, int]], capacities: list[int]
) -> None:
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
