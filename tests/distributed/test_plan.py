"""Who reads what several ranks want: held against counting byte by byte."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.distributed.shared_reads.exchange import ShareGroup, ShareOffer, group_offers
from cloudckpt.distributed.shared_reads.plan import Range, Segment, count_repeated_bytes, merge_ranges, plan_segments
from cloudckpt.distributed.shared_reads.ring import RingAddress
from cloudckpt.io.reads import WantedRange
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.load import divide_wants

ranges = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 12)).map(lambda r: (r[0], r[1], r[1] + r[2])),
    max_size=5,
)
wanted_by_ranks = st.lists(ranges, min_size=1, max_size=5)
Byte = tuple[int, int]


def bytes_of(some: Sequence[Range]) -> set[Byte]:
    return {(index, at) for index, begin, end in some for at in range(begin, end)}


def planned(wanted: Mapping[int, Sequence[Range]], **settings: int) -> list[Segment]:
    defaults = {"segment_bytes": 7, "min_bytes": 1, "min_ranks": 2, "num_segments": 1000}
    return plan_segments(wanted, **defaults | settings)


@given(wanted_by_ranks, st.integers(1, 9), st.integers(2, 4), st.integers(1, 6))
def test_each_byte_that_enough_ranks_want_is_read_once_by_one_of_them(
    wanted_lists: list[list[Range]], segment_bytes: int, min_ranks: int, min_bytes: int
) -> None:
    """If this fails, bytes are read twice, reach a rank that did not ask, or never reach one that waits for them."""
    wanted = {rank: merge_ranges(some) for rank, some in enumerate(wanted_lists)}
    wants: defaultdict[Byte, set[int]] = defaultdict(set)
    for rank, some in wanted.items():
        for byte in bytes_of(some):
            wants[byte].add(rank)
    segments = planned(wanted, segment_bytes=segment_bytes, min_ranks=min_ranks, min_bytes=min_bytes)
    brought: Counter[Byte] = Counter()
    for segment in segments:
        assert 0 < segment.end - segment.begin <= segment_bytes
        for at in range(segment.begin, segment.end):
            byte = (segment.object_index, at)
            brought[byte] += 1
            assert wants[byte] == {segment.reader, *segment.receivers}
            assert segment.reader not in segment.receivers
    assert not brought or max(brought.values()) == 1
    if min_bytes == 1:
        assert set(brought) == {byte for byte, ranks in wants.items() if len(ranks) >= min_ranks}
    assert [segment.number for segment in segments] == list(range(len(segments)))
    places = [(segment.object_index, segment.begin, segment.end) for segment in segments]
    assert places == sorted(places)
    repeated = sum(map(len, wants.values())) - len(wants)
    assert count_repeated_bytes(wanted.values()) == repeated


@given(wanted_by_ranks, ranges)
def test_wants_are_divided_between_the_segments_and_the_rest(wanted_lists: list[list[Range]], own: list[Range]) -> None:
    """If this fails, some bytes of a tensor are not filled, or filled twice."""
    segments = planned({rank: merge_ranges(some) for rank, some in enumerate(wanted_lists)})
    wants = [WantedRange(consumer=n, object_index=r[0], begin=r[1], end=r[2]) for n, r in enumerate(own)]
    inside, rest = divide_wants(wants, segments)
    found: Counter[tuple[int, Byte]] = Counter()
    for want in [*rest, *(want for members in inside.values() for want in members)]:
        found.update((want.consumer, (want.object_index, at)) for at in range(want.begin, want.end))
    assert found == Counter((n, byte) for n, r in enumerate(own) for byte in bytes_of([r]))
    for number, members in inside.items():
        segment = segments[number]
        for want in members:
            assert want.object_index == segment.object_index
            assert segment.begin <= want.begin < want.end <= segment.end
    covered = {(s.object_index, at) for s in segments for at in range(s.begin, s.end)}
    assert not covered & {(want.object_index, at) for want in rest for at in range(want.begin, want.end)}


ALL: list[Range] = [(0, 0, 8 * MIB)]


def offer_of(machine: str, wanted: list[Range] = ALL, *, is_forced: bool = False, verify: bool = True) -> ShareOffer:
    address = RingAddress(process=f"1:1:{machine}", file_number=0, file_identity=(0, 0))
    return ShareOffer(address=address, wanted=wanted, verify=verify, is_forced=is_forced)


def groups_of(offers: Sequence[ShareOffer | None]) -> dict[int, ShareGroup]:
    return group_offers(offers, tile_bytes=MIB, options=Options())


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([offer_of("a")] * 4, [{0, 1, 2, 3}]),
        ([offer_of("a")] * 3, []),
        ([offer_of("a"), None, offer_of("a"), offer_of("a")], []),
        ([offer_of("a", [(0, 0, 5 * MIB)])] * 4, []),  # 15 MiB would be read again
        ([offer_of("a"), offer_of("b")] * 4, [{0, 2, 4, 6}, {1, 3, 5, 7}]),
        ([offer_of("a"), offer_of("b")] * 3, []),  # none shares with another machine
        ([offer_of(name, is_forced=True) for name in "ab"], []),
        ([offer_of("a", is_forced=True), offer_of("a")], [{0, 1}]),
        ([offer_of("a", [(0, 0, 1)], is_forced=True)] * 2, [{0, 1}]),
        ([offer_of("a", [(0, rank, rank + 1)], is_forced=True) for rank in range(2)], []),
        ([offer_of("a", verify=rank % 2 == 0, is_forced=True) for rank in range(3)], [{0, 2}]),
    ],
)
def test_ranks_of_one_machine_share_where_it_pays(offers: list[ShareOffer | None], expected: list[set[int]]) -> None:
    """If this fails, small loads wait for each other, or ranks wait for one on another machine."""
    groups = groups_of(offers)
    members = {rank: set(group.offers) for rank, group in groups.items()}
    assert members == {rank: group for group in expected for rank in group}
