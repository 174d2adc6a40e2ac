"""Agree which ranks of one machine share their reads of a load, and pass segments between them.

No rank depends on another: a rank that has waited too long for another, or sees that it has ended or left, reads the
segment itself.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np

from cloudckpt.distributed.shared_reads.plan import Range, Segment, count_repeated_bytes, plan_segments
from cloudckpt.distributed.shared_reads.ring import (
    FAILED,
    MAX_SEGMENTS,
    READY,
    RECEIVED,
    UNKNOWN,
    RingAddress,
    SharedMemoryRing,
    has_ended,
)
from cloudckpt.options import MIB, Options
from cloudckpt.stores.base import Views

_MIN_PAUSE_S = 0.0002
_MAX_PAUSE_S = 0.005
_CHECK_INTERVAL_S = 0.05
_NUM_SLOTS = 16
"""Segments that a rank's ring holds at once."""
_AUTO_MIN_RANKS = 4
"""Fewer ranks take more processor time to share bytes than to read them again (docs/design/015-read-once.md)."""
_AUTO_MIN_BYTES = 16 * MIB
"""Repeated reads of fewer bytes take less time than sharing them."""


class _Peer:
    """Another rank: its shared memory, and whether it still makes progress."""

    def __init__(self, address: RingAddress, num_segments: int, *, ring_bytes: int) -> None:
        self.ring: SharedMemoryRing | None = None
        self.is_gone = False
        self._process = address.process
        self._num_known, self._progress_s, self._checked_s = 0, time.monotonic(), 0.0
        try:
            self.ring = SharedMemoryRing.attach(address)
            self.ring.map(num_segments, ring_bytes=ring_bytes)
        except (OSError, ValueError):  # mmap raises both
            if self.ring is not None:
                self.ring.close()
            self.ring, self.is_gone = None, True

    def check(self, timeout_s: float) -> None:
        """Update `is_gone`: the rank has left, has ended, or has made no progress for `timeout_s`."""
        now_s = time.monotonic()
        if self.is_gone or self.ring is None or now_s - self._checked_s < _CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        num_known = self.ring.count_known()
        if num_known != self._num_known:
            self._num_known, self._progress_s = num_known, now_s
        self.is_gone = self.ring.has_left or has_ended(self._process) or now_s - self._progress_s >= timeout_s

    def are_known(self, numbers: Any) -> Any:
        """For each of these segments, True if its state will not change for the better: all, once the rank is gone."""
        if self.is_gone or self.ring is None:
            return np.ones(len(numbers), dtype=bool)
        return self.ring.states(numbers) != UNKNOWN

    def copier_of(self, number: int) -> Callable[[Views], bool] | None:
        """A function that fills views with the segment's bytes; None if they are not there."""
        ring = self.ring
        if ring is None or ring.state(number) != READY:
            return None
        return functools.partial(ring.read, number)

    def needs(self, number: int) -> bool:
        """True if the rank may still copy this segment."""
        return not self.is_gone and self.ring is not None and self.ring.state(number) != RECEIVED


class Exchange:
    """Bytes that one rank publishes and receives in a load. Many threads may call `reserve`, one calls `arrivals`."""

    def __init__(
        self,
        ring: SharedMemoryRing,
        *,
        rank: int,
        addresses: Mapping[int, RingAddress],
        segments: Sequence[Segment],
        segment_bytes: int,
        ring_bytes: int,
        timeout_s: float,
    ) -> None:
        ring.map(len(segments), ring_bytes=ring_bytes)
        self.segments = [segment for segment in segments if rank == segment.reader or rank in segment.receivers]
        """The segments that this rank publishes or receives."""
        self.ring_bytes = ring_bytes
        self._rank = rank
        self._ring = ring
        self._peers = {
            peer: _Peer(address, len(segments), ring_bytes=ring_bytes)
            for peer, address in addresses.items()
            if peer != rank
        }
        self._segment_bytes = segment_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stopped = Event()
        self._slots: list[Segment | None] = [None] * (ring_bytes // segment_bytes)
        """The segment in each place of the ring."""
        self._reserved: set[int] = set()

    def reads(self, segment: Segment) -> bool:
        """True if this rank reads the segment for the others."""
        return segment.reader == self._rank

    def decline(self, segment: Segment) -> None:
        """Neither publish nor receive this segment."""
        self._ring.set_state(segment.number, FAILED if self.reads(segment) else RECEIVED)

    @contextlib.contextmanager
    def reserve(self, segment: Segment) -> Iterator[Callable[[Views], None]]:
        """Wait for a place in the ring. Yields the function that publishes the segment's bytes there.

        If the context ends without that call, each receiver reads the segment itself. Reserve before taking a buffer:
        a receiver may need a buffer to make room in the ring.
        """
        slot = self._reserve_slot()
        is_published = False

        def publish(views: Views) -> None:
            nonlocal is_published
            if slot is not None:
                with contextlib.suppress(OSError):  # no memory for it
                    self._ring.write(segment.number, views, position=slot * self._segment_bytes)
                    is_published = True

        try:
            yield publish
        finally:
            if not is_published:
                self._ring.set_state(segment.number, FAILED)
            if slot is not None:
                with self._lock:
                    self._slots[slot] = segment if is_published else None
                    self._reserved.discard(slot)

    def arrivals(self, segments: Sequence[Segment]) -> Iterator[tuple[Segment, Callable[[Views], bool] | None]]:
        """Each of `segments` in the order in which their readers publish them, with the function that copies its bytes.

        That function fills views, and returns False if the bytes were not there any more; it is valid until the next
        step. It is None for a segment that will not come. The iterator ends early after `stop`.
        """
        by_number = {segment.number: segment for segment in segments}
        waiting = {
            reader: np.array([segment.number for segment in segments if segment.reader == reader])
            for reader in {segment.reader for segment in segments}
        }
        pause_s = _MIN_PAUSE_S
        while waiting and not self._stopped.is_set():
            has_arrived = False
            for reader in list(waiting):
                peer = self._peers[reader]
                peer.check(self._timeout_s)
                # In any order: a reader whose ring is full may be waiting for this one.
                are_known = peer.are_known(waiting[reader])
                for number in waiting[reader][are_known].tolist():
                    has_arrived = True
                    yield by_number[number], peer.copier_of(number)
                    self._ring.set_state(number, RECEIVED)
                    if self._stopped.is_set():
                        return
                waiting[reader] = waiting[reader][~are_known]
                if not len(waiting[reader]):
                    del waiting[reader]
            if has_arrived:
                pause_s = _MIN_PAUSE_S
            elif waiting:
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def stop(self) -> None:
        """Publish and receive nothing more, and tell the other ranks so. What lies in the ring stays readable."""
        self._stopped.set()
        self._ring.leave()

    def close(self) -> None:
        """Detach from the memory of the other ranks."""
        for peer in self._peers.values():
            if peer.ring is not None:
                peer.ring.close()

    def _reserve_slot(self) -> int | None:
        """Wait for a place in the ring that no rank needs any more. Returns None after `stop`."""
        pause_s = _MIN_PAUSE_S
        while not self._stopped.is_set():
            with self._lock:
                for slot, segment in enumerate(self._slots):
                    if slot not in self._reserved and (segment is None or self._is_done(segment)):
                        if segment is not None:
                            # A rank that seemed gone and goes on must not take other bytes for these.
                            self._ring.set_state(segment.number, FAILED)
                        self._reserved.add(slot)
                        return slot
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return None

    def _is_done(self, segment: Segment) -> bool:
        for receiver in segment.receivers:
            peer = self._peers[receiver]
            peer.check(self._timeout_s)
            if peer.needs(segment.number):
                return False
        return True


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
    """Travels with the plan of a rank: the commit that it found, its offer, and later the group that it is in."""

    attempt: str
    offer: ShareOffer | None = None
    group: ShareGroup | None = None
    unused: Sequence[str] = ()
    """Paths in the checkpoint that this rank's objects have no use for."""
    objects: Sequence[str] = ()
    """Top-level keys of this rank's ``Stateful`` objects, which can take more than they ask for."""
    left: Sequence[str] = ()
    """Names of what was saved of such objects and no rank asks for, so that all ranks plan again."""


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
        if self._ring is not None:  # of a plan that is made anew
            self._ring.close()
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
