"""What ranks tell each other with their plans, so that those of one machine can share what they read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cloudckpt._share.board import MOST_SEGMENTS, Address, Board
from cloudckpt._share.exchange import Exchange
from cloudckpt._share.plan import Range, num_repeated_bytes, plan_segments
from cloudckpt.options import MIB, Options

_SLOTS = 16
"""Segments that can be on their way from one rank at once."""
_LEAST_RANKS = 4
"""To hand bytes on costs fewer ranks more processor time than to read them again (docs/design/015-read-once.md)."""
_LEAST_REPEATED_BYTES = 16 * MIB
"""What is less is read sooner than agreed upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank wants, and where others find its board."""

    address: Address
    wanted: list[Range] = field(repr=False)
    verify: bool
    insists: bool
    """Share whatever can be shared, and not only where it pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Which commit a rank found, what it offers, and the deal that it gets; it travels with its plan."""

    attempt: str
    offer: Offer | None = None
    deal: Deal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The offers of ranks that share, by rank, and how they do. All of them plan the same segments from it."""

    offers: Mapping[int, Offer]
    segment_bytes: int
    min_bytes: int
    min_ranks: int

    def exchange(self, board: Board, *, rank: int, options: Options) -> Exchange:
        """The part of `rank` in it."""
        return Exchange(
            board,
            rank=rank,
            mates={mate: offer.address for mate, offer in self.offers.items()},
            segments=plan_segments(
                {mate: offer.wanted for mate, offer in self.offers.items()},
                segment_bytes=self.segment_bytes,
                min_bytes=self.min_bytes,
                min_ranks=self.min_ranks,
                num_segments=MOST_SEGMENTS,
            ),
            segment_bytes=self.segment_bytes,
            ring_bytes=_SLOTS * self.segment_bytes,
            timeout_s=options.timeout_s,
        )


def dealt(tickets: Sequence[Ticket | None], *, tile_bytes: int, options: Options) -> list[Ticket | None]:
    """The same tickets with their deals, without the offers of all ranks; None stays None."""
    offers = [None if ticket is None else ticket.offer for ticket in tickets]
    deals = deals_of(offers, tile_bytes=tile_bytes, options=options)
    return [
        None if ticket is None else Ticket(attempt=ticket.attempt, deal=deals.get(rank))
        for rank, ticket in enumerate(tickets)
    ]


def deals_of(offers: Sequence[Offer | None], *, tile_bytes: int, options: Options) -> dict[int, Deal]:
    """By rank, for those for which sharing pays or that insist: ranks of one machine want the same bytes."""
    segment_bytes = options.read_bytes // 2 // _SLOTS // tile_bytes * tile_bytes
    if not segment_bytes:  # there is no room for whole tiles
        return {}
    circles: defaultdict[tuple[str, bool], dict[int, Offer]] = defaultdict(dict)
    for rank, offer in enumerate(offers):
        if offer is not None:
            circles[offer.address.machine, offer.verify][rank] = offer
    found: dict[int, Deal] = {}
    for circle in circles.values():
        insists = any(offer.insists for offer in circle.values())
        min_ranks = 2 if insists else _LEAST_RANKS
        if len(circle) < min_ranks:
            continue
        if num_repeated_bytes(offer.wanted for offer in circle.values()) < (1 if insists else _LEAST_REPEATED_BYTES):
            continue
        min_bytes = 1 if insists else segment_bytes // 2
        deal = Deal(offers=circle, segment_bytes=segment_bytes, min_bytes=min_bytes, min_ranks=min_ranks)
        found |= dict.fromkeys(circle, deal)
    return found
