"""Pass segments between the ranks of one machine during a load.

No rank depends on another: a rank that has waited too long for another, or sees that it has ended or left, reads the
segment itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any

import numpy as np

from cloudckpt.distributed.heartbeat import has_ended
from cloudckpt.distributed.shared_reads.plan import Segment
from cloudckpt.distributed.shared_reads.ring import FAILED, READY, RECEIVED, UNKNOWN, RingAddress, SharedMemoryRing
from cloudckpt.stores.base import Views

_MIN_PAUSE_S = 0.0002
_MAX_PAUSE_S = 0.005
_CHECK_INTERVAL_S = 0.05


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
    """What one rank publishes and receives in one load. Many threads may call `reserve`, one calls `arrivals`."""

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
