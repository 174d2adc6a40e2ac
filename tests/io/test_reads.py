"""From wanted byte ranges to requests, against a count of every single byte."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.io.reads import RangeRead, WantedRange, plan_reads

SIZES_BYTES = {0: 97, 1: 64, 2: 1, 3: 0, 4: 200}


@st.composite
def wants(draw: st.DrawFn) -> list[WantedRange]:
    made = []
    for target in range(draw(st.integers(0, 12))):
        object_index = draw(st.sampled_from(sorted(SIZES_BYTES)))
        begin = draw(st.integers(0, SIZES_BYTES[object_index]))
        end = draw(st.integers(begin, SIZES_BYTES[object_index]))
        made.append(WantedRange(target, object_index, begin, end, is_held=draw(st.booleans())))
    return made


def num_wanted(wanted: list[WantedRange], object_index: int) -> Counter[int]:
    """Count the ranges of `wanted` that have each byte of the object."""
    members = (want for want in wanted if want.object_index == object_index)
    return Counter(byte for want in members for byte in range(want.begin, want.end))


def needed_bytes(wanted: list[WantedRange], tile_bytes: int, max_gap_bytes: int) -> set[tuple[int, int]]:
    """Every byte of a tile that holds something wanted, and of each gap between such tiles that is small enough."""
    needed = set()
    for object_index, size_bytes in SIZES_BYTES.items():
        tiles = {byte // tile_bytes for byte in num_wanted(wanted, object_index)}
        there = {byte for byte in range(size_bytes) if byte // tile_bytes in tiles}
        inside = range(min(there, default=0), max(there, default=-1) + 1)
        gap: list[int] = []
        for byte in inside:
            if byte not in there:
                gap.append(byte)
                continue
            if len(gap) <= max_gap_bytes:
                there.update(gap)
            gap = []
        needed |= {(object_index, byte) for byte in there}
    return needed


def intersects(want: WantedRange, request: RangeRead) -> bool:
    return want.object_index == request.object_index and max(want.begin, request.begin) < min(want.end, request.end)


@settings(max_examples=300)
@given(
    wanted=wants(),
    tile_bytes=st.integers(1, 20),
    request_bytes=st.integers(1, 250),
    max_gap_bytes=st.integers(0, 60),
    max_over_read=st.sampled_from([0.0, 0.1, 0.5, 3.0]),
)
def test_every_wanted_byte_comes_once(
    *, wanted: list[WantedRange], tile_bytes: int, request_bytes: int, max_gap_bytes: int, max_over_read: float
) -> None:
    """If this fails, a load leaves bytes unread, reads them twice, past the end, or more than it may at once."""
    requests = plan_reads(
        wanted,
        object_sizes_bytes=SIZES_BYTES,
        tile_bytes=tile_bytes,
        request_bytes=request_bytes,
        max_gap_bytes=max_gap_bytes,
        max_over_read=max_over_read,
    )
    longest_bytes = max(request_bytes // tile_bytes, 1) * tile_bytes
    read: Counter[tuple[int, int]] = Counter()
    for request in requests:
        size_bytes = SIZES_BYTES[request.object_index]
        assert 0 <= request.begin < request.end <= size_bytes
        assert request.begin % tile_bytes == 0
        assert request.end % tile_bytes == 0 or request.end == size_bytes
        assert request.num_bytes == request.end - request.begin <= longest_bytes
        read.update((request.object_index, byte) for byte in range(request.begin, request.end))
        counts = num_wanted(wanted, request.object_index)
        assert request.overlapping == any(counts[byte] > 1 for byte in range(request.begin, request.end))
        expected = sorted(want for want in wanted if intersects(want, request))
        assert sorted(request.wanted) == expected
        assert list(request.wanted) == sorted(request.wanted, key=lambda want: (want.begin, want.end))
        for edge in (request.begin, (request.end - 1) // tile_bytes * tile_bytes):
            assert any(counts[byte] for byte in range(edge, edge + tile_bytes)), "an end of a read is for nothing"
    assert all(count == 1 for count in read.values())
    wanted_bytes = {(index, byte) for index in SIZES_BYTES for byte in num_wanted(wanted, index)}
    assert wanted_bytes <= read.keys()
    over_read = read.keys() - needed_bytes(wanted, tile_bytes, max_gap_bytes)
    assert len(over_read) <= max_over_read * len(wanted_bytes)


@given(wanted=wants(), tile_bytes=st.integers(1, 20), request_bytes=st.integers(1, 100))
def test_held_ranges_are_read_without_a_break(wanted: list[WantedRange], tile_bytes: int, request_bytes: int) -> None:
    """If this fails, the memory of all Python objects of a load is taken at once, while their bytes trickle in (G7)."""
    requests = plan_reads(
        wanted,
        object_sizes_bytes=SIZES_BYTES,
        tile_bytes=tile_bytes,
        request_bytes=request_bytes,
        max_gap_bytes=0,
        max_over_read=0.0,
    )
    for want in wanted:
        places = [place for place, request in enumerate(requests) if intersects(want, request)]
        if want.is_held and places:
            between = requests[places[0] : places[-1] + 1]
            assert {request.object_index for request in between} == {want.object_index}
            assert [request.begin for request in between] == sorted(request.begin for request in between)


def ranges(
    wanted: list[WantedRange], *, request_bytes: int = 1000, max_gap_bytes: int = 0, max_over_read: float = 0.0
) -> object:
    requests = plan_reads(
        wanted,
        object_sizes_bytes={0: 10_000},
        tile_bytes=10,
        request_bytes=request_bytes,
        max_gap_bytes=max_gap_bytes,
        max_over_read=max_over_read,
    )
    return sorted((request.begin, request.end) for request in requests)


def test_near_ranges_are_read_as_one_and_far_ones_apart() -> None:
    """If this fails, many small tensors cost one request each, or a sparse load reads nearly everything."""
    wanted = [WantedRange(0, 0, 0, 100), WantedRange(1, 0, 200, 300)]
    assert ranges(wanted, max_gap_bytes=100) == [(0, 300)]
    assert ranges(wanted, max_gap_bytes=99) == [(0, 100), (200, 300)]


def test_the_smallest_gaps_are_read_first_and_as_many_as_the_share_allows() -> None:
    """If this fails, a load reads more for nothing than `max_over_read` allows, or makes requests it need not."""
    wanted = [
        WantedRange(0, 0, 0, 100),
        WantedRange(1, 0, 130, 200),
        WantedRange(2, 0, 220, 250),
        WantedRange(3, 0, 300, 400),
    ]
    assert ranges(wanted, max_over_read=0.0) == [(0, 100), (130, 200), (220, 250), (300, 400)]
    assert ranges(wanted, max_over_read=20 / 300) == [(0, 100), (130, 250), (300, 400)]
    assert ranges(wanted, max_over_read=49 / 300) == [(0, 100), (130, 250), (300, 400)]
    assert ranges(wanted, max_over_read=50 / 300) == [(0, 250), (300, 400)]
    assert ranges(wanted, max_over_read=100 / 300) == [(0, 400)]


def test_a_long_range_is_split_and_its_wants_are_named_in_each_piece() -> None:
    """If this fails, a large tensor is read by one connection, or its pieces do not know where they go."""
    want = WantedRange(7, 0, 5, 95)
    requests = plan_reads(
        [want], object_sizes_bytes={0: 97}, tile_bytes=10, request_bytes=39, max_gap_bytes=0, max_over_read=0.0
    )
    assert sorted((request.begin, request.end) for request in requests) == [(0, 30), (30, 60), (60, 90), (90, 97)]
    assert all(request.wanted == (want,) for request in requests)
