"""Which ranks share what they read: those of one machine, where it pays or one of them asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cloudckpt.distributed.shared_reads.exchange import ShareGroup, ShareOffer, group_offers
from cloudckpt.distributed.shared_reads.plan import Range
from cloudckpt.distributed.shared_reads.ring import RingAddress
from cloudckpt.options import MIB, Options

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
