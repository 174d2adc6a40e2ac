"""The handing on between two ranks, here in one process, and what becomes of it where one of them goes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudckpt._share.board import READY, TAKEN, Address, Board
from cloudckpt._share.exchange import Exchange
from cloudckpt._share.outlet import Outlet
from cloudckpt._share.plan import Segment, plan_segments

SEGMENT_BYTES = 4096
WAIT_S = 60.0

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory are Linux's")


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    found = [board for board in (Board.new(), Board.new()) if board is not None]
    assert len(found) == 2
    yield found
    for board in found:
        board.close()


def segments(num_segments: int) -> list[Segment]:
    wanted = {key: [(0, 0, num_segments * SEGMENT_BYTES)] for key in (0, 1)}
    return plan_segments(wanted, segment_bytes=SEGMENT_BYTES, min_bytes=1, min_ranks=2, num_segments=1000)


def pair(
    boards: list[Board], num_segments: int, *, slots: int = 4, timeout_s: float = WAIT_S, **others: Address
) -> list[Exchange]:
    addresses = {rank: others.get(f"rank{rank}", board.address) for rank, board in enumerate(boards)}
    return [
        Exchange(
            board,
            rank=rank,
            mates=addresses,
            segments=segments(num_segments),
            segment_bytes=SEGMENT_BYTES,
            ring_bytes=slots * SEGMENT_BYTES,
            timeout_s=timeout_s,
        )
        for rank, board in enumerate(boards)
    ]


def content(segment: Segment) -> bytes:
    return bytes([segment.number % 251]) * SEGMENT_BYTES


def hand_on_all(exchange: Exchange) -> None:
    for segment in exchange.segments:
        if exchange.hands_on(segment):
            with exchange.place_for(segment) as hand_on:
                body = memoryview(bytearray(content(segment)))
                hand_on([body[:100], body[100:]])


def taken_by(exchange: Exchange) -> dict[int, bytes | None]:
    found: dict[int, bytes | None] = {}
    for segment, fill in exchange.arrivals([one for one in exchange.segments if not exchange.hands_on(one)]):
        view = memoryview(bytearray(SEGMENT_BYTES))
        found[segment.number] = bytes(view) if fill is not None and fill([view[:7], view[7:]]) else None
    return found


def test_all_that_is_handed_on_arrives_through_a_ring_much_smaller(boards: list[Board]) -> None:
    """If this fails, bytes are overwritten before they were taken, or ranks wait for each other for ever."""
    both = pair(boards, 100, slots=2)
    threads = [threading.Thread(target=hand_on_all, args=(exchange,)) for exchange in both]
    found: list[dict[int, bytes | None]] = [{}, {}]
    threads += [
        threading.Thread(target=lambda rank=rank: found[rank].update(taken_by(both[rank]))) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    for exchange, arrived in zip(both, found, strict=True):
        assert arrived == {one.number: content(one) for one in exchange.segments if not exchange.hands_on(one)}
        exchange.close()


def test_what_failed_is_left_to_each_rank(boards: list[Board]) -> None:
    """If this fails, a rank waits for bytes that another could not read."""
    both = pair(boards, 8)
    for segment in both[0].segments:
        if both[0].hands_on(segment):
            with pytest.raises(LookupError), both[0].place_for(segment):
                raise LookupError
    assert set(taken_by(both[1]).values()) == {None}


@pytest.mark.parametrize("has_come", [True, False])
def test_a_rank_that_leaves_is_not_waited_for(boards: list[Board], has_come: bool) -> None:  # noqa: FBT001  # pytest's
    """If this fails, ranks wait all of their patience for one that failed, or that never came to read."""
    if has_come:
        both = pair(boards, 20, slots=2)
        both[0].stop()
        other = both[1]
    else:
        boards[0].leave()
        other = pair(boards, 20, slots=2)[1]
    hand_on_all(other)  # more than the ring holds, and nobody takes it
    assert set(taken_by(other).values()) == {None}


def test_a_process_that_has_ended_is_not_waited_for(boards: list[Board]) -> None:
    """If this fails, a killed rank holds up those that would have had bytes from it for as long as one that hangs."""
    script = "from cloudckpt._ranks.signs import own_process; print(own_process(), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    process = child.stdout.readline().strip()
    address = dataclasses.replace(boards[0].address, process=process)
    child.kill()
    child.communicate(timeout=WAIT_S)
    (other,) = pair(boards, 20, slots=2, rank0=address)[1:]
    hand_on_all(other)
    assert set(taken_by(other).values()) == {None}


def test_a_rank_that_hangs_is_given_up_and_takes_no_wrong_bytes_when_it_goes_on(boards: list[Board]) -> None:
    """If this fails, a rank waits without end for one that hangs; or that one takes other bytes for those it missed."""
    slow, fast = pair(boards, 20, slots=2, timeout_s=0.2)
    arrivals = slow.arrivals([one for one in slow.segments if not slow.hands_on(one)])
    thread = threading.Thread(target=hand_on_all, args=(fast,))
    thread.start()
    _, fill = next(arrivals)
    thread.join(WAIT_S)  # it went on without the one that does not take
    assert not thread.is_alive()
    assert fill is not None
    assert not fill([memoryview(bytearray(SEGMENT_BYTES))])


def test_a_file_that_has_the_number_of_a_closed_board_is_left_alone(boards: list[Board], tmp_path: Path) -> None:
    """If this fails, a rank that has gone on has a file of its own cut, which it opened where its board was."""
    address = boards[0].address
    boards[0].close()
    path = tmp_path / "dataset"
    path.write_bytes(b"precious")
    opened = os.open(path, os.O_RDONLY)
    if opened != address.file:
        os.dup2(opened, address.file)
        os.close(opened)
    try:
        other = Exchange(
            boards[1],
            rank=1,
            mates={0: address, 1: boards[1].address},
            segments=segments(20),
            segment_bytes=SEGMENT_BYTES,
            ring_bytes=2 * SEGMENT_BYTES,
            timeout_s=WAIT_S,
        )
        assert path.read_bytes() == b"precious"
        hand_on_all(other)
        assert set(taken_by(other).values()) == {None}
    finally:
        os.close(address.file)


def test_a_board_that_cannot_be_looked_at_is_done_without(boards: list[Board], monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a rank that has no memory for another's board cannot load at all."""
    opened = Board.open

    def fails_for_mates(self: Board, num_segments: int, *, ring_bytes: int) -> None:
        if self not in boards:
            raise OSError(12, "no memory")
        opened(self, num_segments, ring_bytes=ring_bytes)

    monkeypatch.setattr(Board, "open", fails_for_mates)
    other = pair(boards, 20, slots=2)[1]
    hand_on_all(other)
    assert set(taken_by(other).values()) == {None}


def test_segments_are_taken_in_whatever_order_they_come(boards: list[Board]) -> None:
    """If this fails, a rank's ring fills up with what the others look at only after what that rank reads later."""
    reader, taker = pair(boards, 400)
    some = [one for one in reader.segments if reader.hands_on(one)]
    arrivals = taker.arrivals(some)
    with reader.place_for(some[-1]) as hand_on:
        hand_on([memoryview(bytearray(content(some[-1])))])
    segment, fill = next(arrivals)
    assert segment.number == some[-1].number
    assert fill is not None
    reader.stop()
    assert {one.number for one, fill in arrivals if fill is None} == {one.number for one in some[:-1]}


class NobodyTakes(Outlet):
    """Sends nothing, to machines that want everything."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.was_asked = threading.Event()

    def send(self, number: int, view: memoryview | None) -> None:
        self.sent.append(number)

    def is_done(self, number: int) -> bool:
        self.was_asked.set()
        return False

    def break_off(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_what_other_machines_leave_lying_takes_no_room_from_what_comes_from_them(boards: list[Board]) -> None:
    """If this fails, two machines whose rings are full of what the other wants wait for each other."""
    own, other = (
        [dataclasses.replace(one, reader=0, takers=(1,), machine=machine) for one in segments(5)[half]]
        for machine, half in ((0, slice(0, 3)), (1, slice(3, 5)))
    )
    outlet = NobodyTakes()
    exchange = Exchange(
        boards[0],
        rank=0,
        mates={rank: board.address for rank, board in enumerate(boards)},
        segments=[*own, *other],
        segment_bytes=SEGMENT_BYTES,
        ring_bytes=4 * SEGMENT_BYTES,
        timeout_s=WAIT_S,
        machine=0,
        outlet=outlet,
    )

    def hand_on(segment: Segment) -> None:
        with exchange.place_for(segment) as hand:
            hand([memoryview(bytearray(content(segment)))])

    boards[1].open(5, ring_bytes=4 * SEGMENT_BYTES)
    for one in own[:2]:
        hand_on(one)
        boards[1].set_state(one.number, TAKEN)
    waiting = threading.Thread(target=hand_on, args=(own[2],))  # there is room, but not for this one
    waiting.start()
    assert outlet.was_asked.wait(WAIT_S)
    coming = threading.Thread(target=lambda: [hand_on(one) for one in other], daemon=True)
    coming.start()
    coming.join(WAIT_S)
    assert not coming.is_alive()
    assert outlet.sent == [one.number for one in own[:2]]
    assert [boards[0].state(one.number) for one in other] == [READY, READY]
    exchange.stop()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    exchange.close()
