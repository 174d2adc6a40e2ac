"""What ranks tell each other with their plans, so that they can share what they read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cloudckpt._share.board import MOST_SEGMENTS, Address, Board
from cloudckpt._share.door import Door, Entrance
from cloudckpt._share.exchange import Exchange
from cloudckpt._share.inlet import Inlet
from cloudckpt._share.league import leagues_of, plan_between, rest_of, together
from cloudckpt._share.outlet import Outlet
from cloudckpt._share.plan import Range, Segment, num_bytes_in, num_repeated_bytes, plan_segments
from cloudckpt.options import MIB, Options

_SLOTS = 16
"""Segments that can be on their way from one rank at once."""
_LEAST_RANKS = 4
"""To hand bytes on costs fewer ranks more processor time than to read them again (docs/design/015-read-once.md)."""
LEAST_MACHINES = 16
"""Between fewer machines a load may take longer than where each reads for itself (ibid.)."""
_LEAST_REPEATED_BYTES = 16 * MIB
"""What is less is read sooner than agreed upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank wants, and where others find it."""

    address: Address
    """For those on the same machine."""
    wanted: list[Range] = field(repr=False)
    verify: bool
    insists: bool
    """Share whatever can be shared, and not only where it pays."""
    door: Door | None = None
    """For those on other machines, if it is to share with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Which commit a rank found, what it offers, and the deal that it gets; it travels with its plan."""

    attempt: str
    offer: Offer | None = None
    deal: Deal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """How a rank shares with other machines."""

    machine: int
    """The number of its own among them."""
    common: tuple[list[Range], ...] = field(repr=False)
    """What is wanted on all of them, by the place of a rank among those of its machine."""
    doors: Mapping[int, Door] = field(repr=False)
    """Of the ranks at the same place on each machine, by the machine's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The offers of the ranks of one machine that share, by rank, and how they do. All of them plan the same segments
    from it, and so do those of other machines as far as they share with them.
    """

    offers: Mapping[int, Offer]
    segment_bytes: int
    min_bytes: int
    min_ranks: int | None
    """None: what no other machine wants is not shared."""
    between: Between | None = None

    def exchange(self, board: Board, entrance: Entrance | None, *, rank: int, options: Options) -> Exchange:
        """The part of `rank` in it."""
        segments = self.segments()
        inlet = outlet = None
        if self.between is not None and entrance is not None:
            machine = self.between.machine
            outlet = Outlet(
                entrance,
                [one for one in segments if one.machine == machine and one.reader == rank],
                machines=[other for other in self.between.doors if other != machine],
                timeout_s=options.timeout_s,
            )
            inlet = Inlet(self.between.doors, machine=machine, timeout_s=options.timeout_s, on_gone=outlet.forget)
        try:
            return Exchange(
                board,
                rank=rank,
                mates={mate: offer.address for mate, offer in self.offers.items()},
                segments=segments,
                segment_bytes=self.segment_bytes,
                ring_bytes=_SLOTS * self.segment_bytes,
                timeout_s=options.timeout_s,
                machine=self.between.machine if self.between is not None else None,
                inlet=inlet,
                outlet=outlet,
            )
        except BaseException:
            if outlet is not None:
                outlet.close()
            raise

    def segments(self) -> list[Segment]:
        """All that these ranks share, the same for each of them."""
        wanted: dict[int, list[Range]] = {rank: offer.wanted for rank, offer in self.offers.items()}
        between: list[Segment] = []
        if self.between is not None:
            between = plan_between(
                dict(zip(sorted(wanted), self.between.common, strict=True)),
                num_machines=len(self.between.doors),
                segment_bytes=self.segment_bytes,
                min_bytes=self.min_bytes,
                num_segments=MOST_SEGMENTS,
            )
            wanted = rest_of(wanted, between)
        within: list[Segment] = []
        if self.min_ranks is not None:
            within = plan_segments(
                wanted,
                segment_bytes=self.segment_bytes,
                min_bytes=self.min_bytes,
                min_ranks=self.min_ranks,
                num_segments=MOST_SEGMENTS,
            )
        return together(between, within, num_segments=MOST_SEGMENTS)


def dealt(tickets: Sequence[Ticket | None], *, tile_bytes: int, options: Options) -> list[Ticket | None]:
    """The same tickets with their deals, without the offers of all ranks; None stays None."""
    offers = [None if ticket is None else ticket.offer for ticket in tickets]
    deals = deals_of(offers, tile_bytes=tile_bytes, options=options)
    return [
        None if ticket is None else Ticket(attempt=ticket.attempt, deal=deals.get(rank))
        for rank, ticket in enumerate(tickets)
    ]


def deals_of(offers: Sequence[Offer | None], *, tile_bytes: int, options: Options) -> dict[int, Deal]:
    """By rank, for those for which sharing pays or that insist."""
    segment_bytes = options.read_bytes // 2 // _SLOTS // tile_bytes * tile_bytes
    if not segment_bytes:  # there is no room for whole tiles
        return {}
    circles: defaultdict[tuple[str, bool], dict[int, Offer]] = defaultdict(dict)
    for rank, offer in enumerate(offers):
        if offer is not None:
            circles[offer.address.machine, offer.verify][rank] = offer
    every = list(circles.values())
    parts = _parts_between(every)
    found: dict[int, Deal] = {}
    for circle in every:
        insists = any(offer.insists for offer in circle.values())
        min_ranks = 2 if insists else _LEAST_RANKS
        repeated_bytes = num_repeated_bytes(offer.wanted for offer in circle.values())
        pays = len(circle) >= min_ranks and repeated_bytes >= (1 if insists else _LEAST_REPEATED_BYTES)
        deal = Deal(
            offers=circle,
            segment_bytes=segment_bytes,
            min_bytes=1 if insists else segment_bytes // 2,
            min_ranks=min_ranks if pays else None,
        )
        for rank in circle:
            if rank in parts:
                found[rank] = replace(deal, between=parts[rank])
            elif pays:
                found[rank] = deal
    return found


def _parts_between(circles: Sequence[Mapping[int, Offer]]) -> dict[int, Between]:
    """By rank, where machines want the same, and enough of them do."""
    found: dict[int, Between] = {}
    for insists in (True, False):
        able = [
            circle
            for circle in circles
            if all(offer.door is not None for offer in circle.values())
            and any(offer.insists for offer in circle.values()) == insists
        ]
        for league in leagues_of([[circle[rank].wanted for rank in sorted(circle)] for circle in able]):
            num_machines = len(league.machines)
            repeated_bytes = sum(map(num_bytes_in, league.common)) * (num_machines - 1)
            if not insists and (num_machines < LEAST_MACHINES or repeated_bytes < _LEAST_REPEATED_BYTES):
                continue
            members = [able[number] for number in league.machines]
            for ranks in zip(*map(sorted, members), strict=True):
                doors = {
                    machine: door
                    for machine, (circle, rank) in enumerate(zip(members, ranks, strict=True))
                    if (door := circle[rank].door) is not None
                }
                for machine, rank in enumerate(ranks):
                    found[rank] = Between(machine=machine, common=league.common, doors=doors)
    return found
