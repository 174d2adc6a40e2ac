"""From wanted byte ranges to requests, against a count of every single byte."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cloudckpt._plan.reads import Request, Want, plan_requests

SIZES_BYTES = {0: 97, 1: 64, 2: 1, 3: 0, 4: 200}


@st.composite
def wants(draw: st.DrawFn) -> list[Want]:
    made = []
    for consumer in range(draw(st.integers(0, 12))):
        object_index = draw(st.sampled_from(sorted(SIZES_BYTES)))
        begin = draw(st.integers(0, SIZES_BYTES[object_index]))
        end = draw(st.integers(begin, SIZES_BYTES[object_index]))
        made.append(Want(consumer=consumer, object_index=object_index, begin=begin, end=end))
    return made


def num_wanted(wanted: list[Want], object_index: int) -> Counter[int]:
    """How many of `wanted` want each byte of the object."""
    members = (want for want in wanted if want.object_index == object_index)
    return Counter(byte for want in members for byte in range(want.begin, want.end))


def intersects(want: Want, request: Request) -> bool:
    return want.object_index == request.object_index and max(want.begin, request.begin) < min(want.end, request.end)


@given(
    wanted=wants(),
    tile_bytes=st.integers(1, 20),
    request_bytes=st.integers(1, 100),
    max_gap_bytes=st.integers(0, 60),
)
def test_every_wanted_byte_comes_once(
    wanted: list[Want], tile_bytes: int, request_bytes: int, max_gap_bytes: int
) -> None:
    """If this fails, a load leaves bytes unread, reads them twice, past the end, or more than it may at once."""
    requests = plan_requests(
        wanted,
        object_sizes_bytes=SIZES_BYTES,
        tile_bytes=tile_bytes,
        request_bytes=request_bytes,
        max_gap_bytes=max_gap_bytes,
    )
    longest_bytes = max(request_bytes // tile_bytes, 1) * tile_bytes
    read: Counter[tuple[int, int]] = Counter()
    for request in requests:
        size_bytes = SIZES_BYTES[request.object_index]
        assert 0 <= request.begin < request.end <= size_bytes
        assert request.begin % tile_bytes == 0
        assert request.end % tile_bytes == 0 or request.end == size_bytes
        assert request.end - request.begin <= longest_bytes
        read.update((request.object_index, byte) for byte in range(request.begin, request.end))
        counts = num_wanted(wanted, request.object_index)
        assert request.overlapping == any(counts[byte] > 1 for byte in range(request.begin, request.end))
        expected = sorted(want.consumer for want in wanted if intersects(want, request))
        assert sorted(want.consumer for want in request.wants) == expected
        assert list(request.wants) == sorted(request.wants, key=lambda want: (want.begin, want.end))
        gap = longest_gap(counts, request.begin, request.end)
        assert gap <= max_gap_bytes + 2 * (tile_bytes - 1)
    assert all(count == 1 for count in read.values())
    needed = {(want.object_index, byte) for want in wanted for byte in range(want.begin, want.end)}
    assert needed <= read.keys()


def longest_gap(counts: Counter[int], begin: int, end: int) -> int:
    longest = current = 0
    for byte in range(begin, end):
        current = 0 if counts[byte] else current + 1
        longest = max(longest, current)
    return longest


def test_near_ranges_are_read_as_one_and_far_ones_apart() -> None:
    """If this fails, many small tensors cost one request each, or a sparse load reads nearly everything."""

    def ranges(max_gap_bytes: int) -> list[tuple[int, int]]:
        wanted = [
            Want(consumer=0, object_index=0, begin=0, end=100),
            Want(consumer=1, object_index=0, begin=200, end=300),
        ]
        requests = plan_requests(
            wanted,
            object_sizes_bytes={0: 1000},
            tile_bytes=10,
            request_bytes=1000,
            max_gap_bytes=max_gap_bytes,
        )
        return [(request.begin, request.end) for request in requests]

    assert ranges(100) == [(0, 300)]
    assert ranges(99) == [(0, 100), (200, 300)]


def test_a_long_range_is_split_and_its_wants_are_named_in_each_piece() -> None:
    """If this fails, a large tensor is read by one connection, or its pieces do not know where they go."""
    want = Want(consumer=7, object_index=0, begin=5, end=95)
    requests = plan_requests([want], object_sizes_bytes={0: 97}, tile_bytes=10, request_bytes=39, max_gap_bytes=0)
    assert [(request.begin, request.end) for request in requests] == [(0, 30), (30, 60), (60, 90), (90, 97)]
    assert all(request.wants == (want,) for request in requests)


def test_nothing_is_read_for_nothing() -> None:
    """If this fails, empty shards cost requests, or fail on objects that have no bytes."""
    empty = [Want(consumer=0, object_index=3, begin=0, end=0), Want(consumer=1, object_index=0, begin=5, end=5)]
    settings = {"tile_bytes": 10, "request_bytes": 10, "max_gap_bytes": 0}
    assert plan_requests(empty, object_sizes_bytes=SIZES_BYTES, **settings) == []
    assert plan_requests([], object_sizes_bytes={}, **settings) == []


def test_many_wants_are_planned_in_time_that_grows_with_them() -> None:
    """If this fails, the plan of a large model takes longer than its load. A quadratic plan would not end here."""
    num_wants = 100_000
    wanted = [
        Want(consumer=index, object_index=0, begin=index * 100, end=index * 100 + 50) for index in range(num_wants)
    ]
    requests = plan_requests(
        wanted,
        object_sizes_bytes={0: num_wants * 100},
        tile_bytes=1000,
        request_bytes=10_000,
        max_gap_bytes=50,
    )
    assert sum(len(request.wants) for request in requests) == num_wants
