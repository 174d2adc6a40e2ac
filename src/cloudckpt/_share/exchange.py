"""The handing on of segments between ranks, while a load goes on: within a machine, and from there to others.

No rank ever depends on another: who has waited too long for one, or sees that it has ended or left, reads for itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cloudckpt._ranks.signs import has_ended
from cloudckpt._share.board import FAILED, READY, TAKEN, UNKNOWN, Address, Board
from cloudckpt._share.inlet import Inlet
from cloudckpt._share.outlet import Outlet
from cloudckpt._share.plan import Segment
from cloudckpt._threads import Event
from cloudckpt.stores.base import Views

_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.005
_LOOK_EVERY_S = 0.05


class _Mate:
    """Another rank, as this one sees it."""

    def __init__(self, address: Address, num_segments: int, *, ring_bytes: int) -> None:
        self.board: Board | None = None
        self._process = address.process
        self._num_known, self._known_s, self._looked_s = 0, time.monotonic(), 0.0
        self.is_gone = False
        try:
            self.board = Board.at(address)
            self.board.open(num_segments, ring_bytes=ring_bytes)
        except (OSError, ValueError):  # mmap has both
            if self.board is not None:
                self.board.close()
            self.board, self.is_gone = None, True

    def look(self, timeout_s: float) -> None:
        """Find out, now and then, whether it is still worth waiting for."""
        now_s = time.monotonic()
        if self.is_gone or self.board is None or now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        num_known = self.board.num_known()
        if num_known != self._num_known:
            self._num_known, self._known_s = num_known, now_s
        self.is_gone = self.board.has_left or has_ended(self._process) or now_s - self._known_s >= timeout_s

    def known(self, numbers: Any) -> Any:
        """Of which of these segments it is known what has become of them: of all, where nothing more will come."""
        if self.is_gone or self.board is None:
            return np.ones(len(numbers), dtype=bool)
        return self.board.states(numbers) != UNKNOWN

    def filling(self, number: int) -> Callable[[Views], bool] | None:
        """What fills views with the segment's bytes, if they are there."""
        board = self.board
        if board is None or board.state(number) != READY:
            return None
        return functools.partial(board.read, number)


class Exchange:
    """What one rank hands on and takes in one load. `publish` is for many threads, `arrivals` for one."""

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        mates: Mapping[int, Address],
        segments: Sequence[Segment],
        segment_bytes: int,
        ring_bytes: int,
        timeout_s: float,
        machine: int | None = None,
        inlet: Inlet | None = None,
        outlet: Outlet | None = None,
    ) -> None:
        num_segments = len(segments)
        board.open(num_segments, ring_bytes=ring_bytes)
        self._board = board
        self._timeout_s = timeout_s
        self._mates = {
            number: _Mate(address, num_segments, ring_bytes=ring_bytes)
            for number, address in mates.items()
            if number != rank
        }
        self.segments = [segment for segment in segments if rank == segment.reader or rank in segment.takers]
        """Those that this rank hands on or takes."""
        self._rank = rank
        self.ring_bytes = ring_bytes
        self._lock = threading.Lock()
        self._stopped = Event()
        self._segment_bytes = segment_bytes
        self._slots: list[Segment | None] = [None] * (ring_bytes // segment_bytes)
        self._busy: set[int] = set()
        self._machine = machine
        self.inlet = inlet
        """From where other machines' segments come."""
        self._outlet = outlet

    @contextlib.contextmanager
    def place_for(self, segment: Segment, *, is_last_try: bool = True) -> Iterator[Callable[[Views], None]]:
        """Waits for room; what it gives hands the segment's bytes on. Left without that, each reads them for itself,
        unless this rank is to try once more.

        To be asked for before any buffer is taken: who takes the bytes that make the room may need one too.
        """
        if not segment.takers and self.relays(segment):
            yield lambda _: None
            return
        slot = self._room(self._slots_for(segment))
        is_handed_on = False

        def hand_on(views: Views) -> None:
            nonlocal is_handed_on
            if slot is not None:
                try:
                    self._board.write(segment.number, views, place=slot * self._segment_bytes)
                    is_handed_on = True
                    self._send(segment, self._board.written(slot * self._segment_bytes, sum(map(len, views))))
                except OSError:  # no memory for it
                    pass

        try:
            yield hand_on
        finally:
            if not is_handed_on and is_last_try:
                self._fail(segment)
            if slot is not None:
                with self._lock:
                    self._slots[slot] = segment if is_handed_on else None
                    self._busy.discard(slot)

    def hands_on(self, segment: Segment) -> bool:
        """Whether this rank reads it for the others."""
        return segment.reader == self._rank

    def relays(self, segment: Segment) -> bool:
        """Whether this rank is to receive it from another machine, for itself and for others of its own."""
        return self.hands_on(segment) and segment.machine is not None and segment.machine != self._machine

    def decline(self, segment: Segment) -> None:
        """Neither hand this one on nor take it."""
        if self.hands_on(segment):
            self._fail(segment)
        else:
            self._board.set_state(segment.number, TAKEN)

    def arrivals(self, segments: Sequence[Segment]) -> Iterator[tuple[Segment, Callable[[Views], bool] | None]]:
        """Each of `segments`, once it is there, with what fills views with its bytes; None if it will not come.

        What fills them says whether the bytes were still there; they are let go with the next step. Ends early after
        `stop`.
        """
        by_number = {segment.number: segment for segment in segments}
        waiting = {
            reader: np.array([segment.number for segment in segments if segment.reader == reader])
            for reader in {segment.reader for segment in segments}
        }
        pause_s = _SHORTEST_PAUSE_S
        while waiting and not self._stopped.is_set():
            has_come = False
            for reader in list(waiting):
                mate = self._mates[reader]
                mate.look(self._timeout_s)
                # In whatever order they come: what waits for room may be waiting for this one.
                is_known = mate.known(waiting[reader])
                for number in waiting[reader][is_known].tolist():
                    has_come = True
                    yield by_number[number], mate.filling(number)
                    self._board.set_state(number, TAKEN)
                    if self._stopped.is_set():
                        return
                waiting[reader] = waiting[reader][~is_known]
                if not len(waiting[reader]):
                    del waiting[reader]
            if has_come:
                pause_s = _SHORTEST_PAUSE_S
            elif waiting:
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def stop(self) -> None:
        """Nothing more is handed on or taken, and nobody need wait for it."""
        self._stopped.set()
        self._board.leave()
        if self.inlet is not None:
            self.inlet.stop()
        if self._outlet is not None:
            # Not all may know by now that this rank takes nothing: from this they do.
            self._outlet.break_off()

    def leave(self) -> None:
        """At the end of this rank's load: what it has not handed on by now will not come."""
        if self._outlet is not None and self.inlet is not None and self.inlet.has_ended:
            self._board.leave()
            self._outlet.leave()
        else:
            self.stop()

    def close(self) -> None:
        """When no rank needs this one's board any more."""
        if self._outlet is not None:
            self._outlet.close()
        for mate in self._mates.values():
            if mate.board is not None:
                mate.board.close()

    def _send(self, segment: Segment, view: memoryview | None) -> None:
        if self._outlet is not None and segment.machine is not None and segment.machine == self._machine:
            self._outlet.send(segment.number, view)

    def _fail(self, segment: Segment) -> None:
        self._board.set_state(segment.number, FAILED)
        self._send(segment, None)

    def _slots_for(self, segment: Segment) -> range:
        """What comes from other machines has half of the places, since it makes room on those: without, two machines
        whose places are all full of what the other wants would wait for each other.
        """
        half, num_slots = len(self._slots) // 2, len(self._slots)
        if self._machine is None:
            return range(num_slots)
        return range(half, num_slots) if self.relays(segment) else range(half)

    def _room(self, slots: range) -> int | None:
        """A place in the ring that nobody needs any more; None where there is to be none."""
        pause_s = _SHORTEST_PAUSE_S
        while not self._stopped.is_set():
            with self._lock:
                for slot in slots:
                    segment = self._slots[slot]
                    if slot not in self._busy and (segment is None or self._is_done(segment)):
                        if segment is not None:
                            # Who is taken for gone and comes after all must not take other bytes for these.
                            self._board.set_state(segment.number, FAILED)
                        self._busy.add(slot)
                        return slot
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    def _is_done(self, segment: Segment) -> bool:
        for taker in segment.takers:
            mate = self._mates[taker]
            mate.look(self._timeout_s)
            if not mate.is_gone and mate.board is not None and mate.board.state(segment.number) != TAKEN:
                return False
        return self._outlet is None or segment.machine != self._machine or self._outlet.is_done(segment.number)
