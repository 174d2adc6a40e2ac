"""Which machines read for each other, and which bytes: held against counting byte by byte."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st
from tests.share.test_plan import bytes_of, ranges

from cloudckpt._share.board import Address
from cloudckpt._share.deal import LEAST_MACHINES, Deal, Offer, deals_of
from cloudckpt._share.door import Door
from cloudckpt._share.league import common_ranges, leagues_of, plan_between, ranges_without
from cloudckpt._share.plan import Range, merged
from cloudckpt.options import MIB, Options

TILE_BYTES = 4096
OPTIONS = Options(tile_bytes=TILE_BYTES, request_bytes=TILE_BYTES, read_bytes=2 * 16 * 3 * TILE_BYTES)
Machines: TypeAlias = list[list[list[Range]]]
"""What each rank of each wants, in tiles."""

machines_mostly_alike = st.integers(1, 3).flatmap(
    lambda num_ranks: st.builds(
        lambda alike, own: [[[*both, *extra] for both, extra in zip(alike, extras, strict=True)] for extras in own],
        st.lists(ranges, min_size=num_ranks, max_size=num_ranks),
        st.lists(
            st.lists(
                st.lists(st.tuples(st.just(3), st.integers(0, 9)), max_size=2), min_size=num_ranks, max_size=num_ranks
            ),
            min_size=1,
            max_size=4,
        ).map(lambda own: [[[(i, b, b + 1) for i, b in some] for some in extras] for extras in own]),
    )
)


def offers_of(machines: Machines, *, insists: bool, tile_bytes: int = TILE_BYTES) -> list[Offer]:
    return [
        Offer(
            address=Address(process=f"1:1:machine-{number}", file=0, identity=(0, 0)),
            wanted=merged((index, begin * tile_bytes, end * tile_bytes) for index, begin, end in wanted),
            verify=True,
            insists=insists,
            door=Door(host="127.0.0.1", port=rank, key=b"", answer=b""),
        )
        for number, wanted_by_ranks in enumerate(machines)
        for rank, wanted in enumerate(wanted_by_ranks)
    ]


@given(ranges, ranges)
def test_ranges_are_cut_to_the_byte(one: list[Range], other: list[Range]) -> None:
    """If this fails, machines plan for bytes that one of them does not want, or leave out some that all want."""
    left, right = merged(one), merged(other)
    assert bytes_of(common_ranges(left, right)) == bytes_of(left) & bytes_of(right)
    assert bytes_of(ranges_without(left, right)) == bytes_of(left) - bytes_of(right)
    for found in (common_ranges(left, right), ranges_without(left, right)):
        assert sum(end - begin for _, begin, end in found) == len(bytes_of(found))
        assert found == sorted(found)


def tiles_of(object_index: int, begin: int, end: int) -> list[tuple[int, int]]:
    return [(object_index, at // TILE_BYTES) for at in range(begin, end, TILE_BYTES)]


@given(machines_mostly_alike)
def test_all_machines_cut_what_they_share_alike_and_no_rank_gets_a_byte_twice(machines: Machines) -> None:
    """If this fails, a rank waits for a segment that no other machine knows, or fills a tensor's bytes twice."""
    offers = offers_of(machines, insists=True)
    deals = deals_of(offers, tile_bytes=TILE_BYTES, options=OPTIONS)
    cuts: list[tuple[tuple[int, ...], ...]] = []
    num_in_leagues = 0
    for rank, deal in deals.items():
        segments = deal.segments()
        mine = [one for one in segments if rank == one.reader or rank in one.takers]
        places = [(one.object_index, one.begin, one.end) for one in mine]
        assert places == sorted(places)
        brought = Counter(tile for place in places for tile in tiles_of(*place))
        assert not brought or max(brought.values()) == 1
        assert set(brought) <= {tile for one in offers[rank].wanted for tile in tiles_of(*one)}
        assert [one.number for one in segments] == list(range(len(segments)))
        if deal.between is not None:
            num_in_leagues += 1
            order = sorted(deal.offers)
            cuts.append(
                tuple(
                    (one.object_index, one.begin, one.end, one.machine, order.index(one.reader))
                    for one in segments
                    if one.machine is not None
                )
            )
            assert deal.between.doors[deal.between.machine] == offers[rank].door
            place = order.index(rank)
            assert {door.port for door in deal.between.doors.values()} == {place}
            for one in mine:
                if one.machine is not None:
                    assert {*tiles_of(one.object_index, one.begin, one.end)} <= {
                        tile for common in deal.between.common[place] for tile in tiles_of(*common)
                    }
    if len(leagues_of([[merged(wanted) for wanted in one] for one in machines])) == 1:
        assert len(set(cuts)) <= 1
        assert num_in_leagues


def test_machines_read_about_as_much_and_so_do_their_ranks() -> None:
    """If this fails, one machine reads what all the others wait for."""
    common = {rank: [(0, 0, 1000), (1, 100 * rank, 100 * rank + 100)] for rank in range(4)}
    segments = plan_between(common, num_machines=3, segment_bytes=10, min_bytes=1, num_segments=1000)
    by_machine: Counter[int | None] = Counter()
    by_rank: Counter[tuple[int | None, int]] = Counter()
    for segment in segments:
        by_machine[segment.machine] += segment.end - segment.begin
        by_rank[segment.machine, segment.reader] += segment.end - segment.begin
    assert sum(by_machine.values()) == 1400
    assert max(by_machine.values()) - min(by_machine.values()) <= 40
    assert max(by_rank.values()) - min(by_rank.values()) <= 20
    few = plan_between(common, num_machines=100, segment_bytes=400, min_bytes=1, num_segments=1000)
    assert len({segment.machine for segment in few}) == 4  # each rank's first reads are on another machine


def deals(machines: Machines, *, insists: bool, tile_bytes: int = MIB) -> list[Deal]:
    return list(
        deals_of(
            offers_of(machines, insists=insists, tile_bytes=tile_bytes), tile_bytes=MIB, options=Options()
        ).values()
    )


def test_machines_share_by_themselves_only_where_it_pays() -> None:
    """If this fails, a load between few machines, or of few bytes, waits for other machines and gets slower."""
    wanted: list[list[Range]] = [[(0, 0, 64)], [(0, 64, 128)]]
    assert deals([wanted] * (LEAST_MACHINES - 1), insists=False) == []
    assert all(deal.between is not None for deal in deals([wanted] * LEAST_MACHINES, insists=False))
    assert deals([[[(0, 0, 1)]]] * LEAST_MACHINES, insists=False) == []
    assert all(deal.between is not None for deal in deals([wanted] * 2, insists=True))


def test_machines_that_want_different_things_do_not_share() -> None:
    """If this fails, shards of one model are taken for replicas, and machines wait for bytes that nobody reads."""
    sharded: Machines = [[[(0, 64 * number, 64 * number + 64)]] for number in range(8)]
    assert deals(sharded, insists=True) == []
    replicated: Machines = [*sharded, *sharded]
    found = deals(replicated, insists=True)
    assert len(found) == 16
    assert all(deal.between is not None and len(deal.between.doors) == 2 for deal in found)
    other_ranks: Machines = [[[(0, 0, 64)]], [[(0, 0, 64)], [(0, 0, 64)]]]
    assert [deal.between for deal in deals(other_ranks, insists=True)] == [None, None]


def test_no_league_takes_more_connections_than_a_process_has() -> None:
    """If this fails, the ranks of a large job run out of files, and cannot even reach the store any more."""
    wanted: list[list[Range]] = [[(0, 0, 64)]]
    for num_machines in (64, 65, 1000):
        found = leagues_of([wanted] * num_machines)
        assert sorted(number for one in found for number in one.machines) == list(range(num_machines))
        assert all(16 < len(one.machines) <= 64 and one.common == tuple(wanted) for one in found)
