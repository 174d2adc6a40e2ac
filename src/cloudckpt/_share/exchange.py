"""The handing on of segments between ranks of one machine, while a load goes on.

No rank ever depends on another: who has waited too long for one, or sees that it has ended or left, reads for itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from cloudckpt._share.board import FAILED, READY, TAKEN, UNKNOWN, Address, Board
from cloudckpt._share.plan import Segment
from cloudckpt._signs import has_ended
from cloudckpt.stores.base import Views

_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.005
_LOOK_EVERY_S = 0.05
_LOOKAHEAD = 64


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
        self._stopped = threading.Event()
        self._segment_bytes = segment_bytes
        self._slots: list[Segment | None] = [None] * (ring_bytes // segment_bytes)
        self._busy: set[int] = set()

    @contextlib.contextmanager
    def place_for(self, segment: Segment) -> Iterator[Callable[[Views], None]]:
        """Waits for room; what it gives hands the segment's bytes on. Left without that, each reads them for itself.

        To be asked for before any buffer is taken: who takes the bytes that make the room may need one too.
        """
        slot = self._room()
        is_handed_on = False

        def hand_on(views: Views) -> None:
            nonlocal is_handed_on
            if slot is not None:
                try:
                    self._board.write(segment.number, views, place=slot * self._segment_bytes)
                    is_handed_on = True
                except OSError:  # no memory for it
                    pass

        try:
            yield hand_on
        finally:
            if not is_handed_on:
                self._board.set_state(segment.number, FAILED)
            if slot is not None:
                with self._lock:
                    self._slots[slot] = segment if is_handed_on else None
                    self._busy.discard(slot)

    def hands_on(self, segment: Segment) -> bool:
        """Whether this rank reads it for the others."""
        return segment.reader == self._rank

    def decline(self, segment: Segment) -> None:
        """Neither hand this one on nor take it."""
        self._board.set_state(segment.number, FAILED if self.hands_on(segment) else TAKEN)

    def arrivals(self, segments: Sequence[Segment]) -> Iterator[tuple[Segment, Callable[[Views], bool] | None]]:
        """Each of `segments`, once it is there, with what fills views with its bytes; None if it will not come.

        What fills them says whether the bytes were still there; they are let go with the next step. Ends early after
        `stop`.
        """
        waiting = list(segments)
        pause_s = _SHORTEST_PAUSE_S
        while waiting and not self._stopped.is_set():
            come: list[Segment] = []
            for segment in waiting[:_LOOKAHEAD]:
                mate = self._mates[segment.reader]
                board, number = mate.board, segment.number
                state = board.state(number) if board is not None else FAILED
                if state == UNKNOWN:
                    mate.look(self._timeout_s)
                    if not mate.is_gone:
                        continue
                    state = FAILED
                come.append(segment)
                if state == READY and board is not None:
                    yield segment, lambda views, board=board, number=number: board.read(number, views)  # type: ignore[misc]  # mypy cannot see the defaults
                else:
                    yield segment, None
                self._board.set_state(number, TAKEN)
                if self._stopped.is_set():
                    return
            if come:
                arrived = {segment.number for segment in come}
                near = waiting[:_LOOKAHEAD]
                waiting[:_LOOKAHEAD] = [segment for segment in near if segment.number not in arrived]
                pause_s = _SHORTEST_PAUSE_S
            else:
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def stop(self) -> None:
        """Nothing more is handed on or taken, and nobody need wait for it."""
        self._stopped.set()
        self._board.leave()

    def close(self) -> None:
        """When no rank needs this one's board any more."""
        for mate in self._mates.values():
            if mate.board is not None:
                mate.board.close()

    def _room(self) -> int | None:
        """A place in the ring that nobody needs any more; None where there is to be none."""
        pause_s = _SHORTEST_PAUSE_S
        while not self._stopped.is_set():
            with self._lock:
                for slot, segment in enumerate(self._slots):
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
        return True
