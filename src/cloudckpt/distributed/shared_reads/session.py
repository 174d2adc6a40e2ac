"""The agreement of ranks on what they share in one load, and one rank's part in it."""

from __future__ import annotations

import contextlib
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cloudckpt.distributed.shared_reads.exchange import Exchange
from cloudckpt.distributed.shared_reads.plan import Range, count_repeated_bytes, plan_segments
from cloudckpt.distributed.shared_reads.ring import MAX_SEGMENTS, RingAddress, SharedMemoryRing
from cloudckpt.options import MIB, Options

_NUM_SLOTS = 16
"""Segments that a rank's ring holds at once."""
_AUTO_MIN_RANKS = 4
"""Fewer ranks take more processor time to share bytes than to read them again (docs/design/015-read-once.md)."""
_AUTO_MIN_BYTES = 16 * MIB
"""Repeated reads of fewer bytes take less time than sharing them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOffer:
    """The ranges that one rank reads, and the address of its shared memory."""

    address: RingAddress
    wanted: list[Range] = field(repr=False)
    verify: bool
    is_forced: bool
    """Share all that can be shared, and not only where it pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGroup:
    """The offers, by rank, of ranks of one machine that share. Each of them plans the same segments from it."""

    offers: Mapping[int, ShareOffer]
    segment_bytes: int
    min_bytes: int
    min_ranks: int

    def new_exchange(self, ring: SharedMemoryRing, *, rank: int, timeout_s: float) -> Exchange:
        """Plan the segments, and map the memory of all ranks. Raises `OSError` or `ValueError` without memory."""
        segments = plan_segments(
            {member: offer.wanted for member, offer in self.offers.items()},
            segment_bytes=self.segment_bytes,
            min_bytes=self.min_bytes,
            min_ranks=self.min_ranks,
            num_segments=MAX_SEGMENTS,
        )
        return Exchange(
            ring,
            rank=rank,
            addresses={member: offer.address for member, offer in self.offers.items()},
            segments=segments,
            segment_bytes=self.segment_bytes,
            ring_bytes=_NUM_SLOTS * self.segment_bytes,
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlanData:
    """What travels with the plan of a rank: the commit that it found, its offer, and later the group that it is in."""

    attempt: str
    offer: ShareOffer | None = None
    group: ShareGroup | None = None


def assign_groups(
    ranks: Sequence[RankPlanData | None], *, tile_bytes: int, options: Options
) -> list[RankPlanData | None]:
    """Replace each rank's offer by its group, on the coordinator; None stays None."""
    groups = group_offers(
        [None if rank is None else rank.offer for rank in ranks], tile_bytes=tile_bytes, options=options
    )
    return [
        None if rank is None else RankPlanData(attempt=rank.attempt, group=groups.get(number))
        for number, rank in enumerate(ranks)
    ]


def group_offers(offers: Sequence[ShareOffer | None], *, tile_bytes: int, options: Options) -> dict[int, ShareGroup]:
    """Group the ranks of each machine, where sharing pays or one of them forces it. Returns the group of each rank."""
    segment_bytes = options.read_bytes // 2 // _NUM_SLOTS // tile_bytes * tile_bytes
    if not segment_bytes:  # there is no room for whole tiles
        return {}
    by_machine: defaultdict[tuple[str, bool], dict[int, ShareOffer]] = defaultdict(dict)
    for rank, offer in enumerate(offers):
        if offer is not None:
            by_machine[offer.address.machine, offer.verify][rank] = offer
    groups: dict[int, ShareGroup] = {}
    for members in by_machine.values():
        is_forced = any(offer.is_forced for offer in members.values())
        min_ranks = 2 if is_forced else _AUTO_MIN_RANKS
        if len(members) < min_ranks:
            continue
        if count_repeated_bytes(offer.wanted for offer in members.values()) < (1 if is_forced else _AUTO_MIN_BYTES):
            continue
        group = ShareGroup(
            offers=members,
            segment_bytes=segment_bytes,
            min_bytes=1 if is_forced else segment_bytes // 2,
            min_ranks=min_ranks,
        )
        groups.update(dict.fromkeys(members, group))
    return groups


class ShareSession:
    """One rank's part in one load of all ranks: opened before the plans, closed when all ranks have loaded."""

    def __init__(self) -> None:
        self._ring: SharedMemoryRing | None = None
        self._exchange: Exchange | None = None

    def offer(self, wanted: Callable[[], list[Range]], *, scheme: str, options: Options) -> ShareOffer | None:
        """Create this rank's shared memory, and offer it. Returns None if the rank must not or cannot share."""
        mode = options.advanced.share_reads
        # The page cache shares what one rank reads from a file system.
        if mode == "never" or (mode == "auto" and scheme == "file"):
            return None
        # Other processors may show READY to another process before the bytes, which only a checksum notices.
        if not options.verify and platform.machine() not in ("x86_64", "AMD64"):
            return None
        self._ring = SharedMemoryRing.create()
        if self._ring is None:
            return None
        return ShareOffer(
            address=self._ring.address, wanted=wanted(), verify=options.verify, is_forced=mode == "always"
        )

    def join(self, group: ShareGroup | None, *, rank: int, timeout_s: float) -> Exchange | None:
        """Begin to share with `group`. Returns None, and tells the others, if this rank reads all by itself."""
        exchange = None
        if group is not None and self._ring is not None:
            with contextlib.suppress(OSError, ValueError):  # there is no memory for it here
                exchange = group.new_exchange(self._ring, rank=rank, timeout_s=timeout_s)
        if exchange is not None and not exchange.segments:
            exchange.close()
            exchange = None
        self._exchange = exchange
        if exchange is None:
            self.leave()
        return exchange

    def leave(self) -> None:
        """Tell the other ranks that this one publishes and receives nothing more."""
        if self._exchange is not None:
            self._exchange.stop()
        elif self._ring is not None:
            self._ring.leave()

    def close(self) -> None:
        """Free the shared memory, once all ranks have loaded or no rank needs this one any more."""
        self.leave()
        if self._exchange is not None:
            self._exchange.close()
        if self._ring is not None:
            self._ring.close()
        self._ring = self._exchange = None
