"""Two ranks that share what they read, here in one process, and what each does when the other leaves, ends or hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from cloudckpt.distributed.shared_reads.exchange import Exchange
from cloudckpt.distributed.shared_reads.plan import Segment, plan_segments
from cloudckpt.distributed.shared_reads.ring import RingAddress, SharedMemoryRing, has_ended, own_process

SEGMENT_BYTES = 4096
WAIT_S = 60.0

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory are Linux's")


@pytest.fixture
def rings() -> Iterator[list[SharedMemoryRing]]:
    found = [ring for ring in (SharedMemoryRing.create(), SharedMemoryRing.create()) if ring is not None]
    assert len(found) == 2
    yield found
    for ring in found:
        ring.close()


def segments(num_segments: int) -> list[Segment]:
    wanted = {key: [(0, 0, num_segments * SEGMENT_BYTES)] for key in (0, 1)}
    return plan_segments(wanted, segment_bytes=SEGMENT_BYTES, min_bytes=1, min_ranks=2, num_segments=1000)


def pair(
    rings: list[SharedMemoryRing],
    num_segments: int,
    *,
    slots: int = 4,
    timeout_s: float = WAIT_S,
    **others: RingAddress,
) -> list[Exchange]:
    addresses = {rank: others.get(f"rank{rank}", ring.address) for rank, ring in enumerate(rings)}
    return [
        Exchange(
            ring,
            rank=rank,
            addresses=addresses,
            segments=segments(num_segments),
            segment_bytes=SEGMENT_BYTES,
            ring_bytes=slots * SEGMENT_BYTES,
            timeout_s=timeout_s,
        )
        for rank, ring in enumerate(rings)
    ]


def content(segment: Segment) -> bytes:
    return bytes([segment.number % 251]) * SEGMENT_BYTES


def publish_all(exchange: Exchange) -> None:
    for segment in exchange.segments:
        if exchange.reads(segment):
            with exchange.reserve(segment) as publish:
                body = memoryview(bytearray(content(segment)))
                publish([body[:100], body[100:]])


def received_by(exchange: Exchange) -> dict[int, bytes | None]:
    found: dict[int, bytes | None] = {}
    for segment, fill in exchange.arrivals([one for one in exchange.segments if not exchange.reads(one)]):
        view = memoryview(bytearray(SEGMENT_BYTES))
        found[segment.number] = bytes(view) if fill is not None and fill([view[:7], view[7:]]) else None
    return found


def test_all_that_is_published_arrives_through_a_ring_much_smaller(rings: list[SharedMemoryRing]) -> None:
    """If this fails, bytes are overwritten before they were copied, or ranks wait for each other for ever."""
    both = pair(rings, 100, slots=2)
    threads = [threading.Thread(target=publish_all, args=(exchange,)) for exchange in both]
    found: list[dict[int, bytes | None]] = [{}, {}]
    threads += [
        threading.Thread(target=lambda rank=rank: found[rank].update(received_by(both[rank]))) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    for exchange, arrived in zip(both, found, strict=True):
        assert arrived == {one.number: content(one) for one in exchange.segments if not exchange.reads(one)}
        exchange.close()


@pytest.mark.parametrize("has_come", [True, False])
def test_a_rank_that_leaves_is_not_waited_for(rings: list[SharedMemoryRing], has_come: bool) -> None:  # noqa: FBT001  # pytest's
    """If this fails, ranks wait all of their patience for one that failed, or that never came to read."""
    if has_come:
        both = pair(rings, 20, slots=2)
        both[0].stop()
        other = both[1]
    else:
        rings[0].leave()
        other = pair(rings, 20, slots=2)[1]
    publish_all(other)  # more than the ring holds, and nobody copies it
    assert set(received_by(other).values()) == {None}


def test_a_rank_that_hangs_is_given_up_and_gets_no_wrong_bytes_when_it_goes_on(rings: list[SharedMemoryRing]) -> None:
    """If this fails, a rank waits without end for one that hangs; or that one gets other bytes for those it missed."""
    slow, fast = pair(rings, 20, slots=2, timeout_s=0.2)
    arrivals = slow.arrivals([one for one in slow.segments if not slow.reads(one)])
    thread = threading.Thread(target=publish_all, args=(fast,))
    thread.start()
    _, fill = next(arrivals)
    thread.join(WAIT_S)  # it went on without the one that does not copy
    assert not thread.is_alive()
    assert fill is not None
    assert not fill([memoryview(bytearray(SEGMENT_BYTES))])


def test_what_a_rank_has_not_copied_yet_keeps_its_place(rings: list[SharedMemoryRing]) -> None:
    """If this fails, a rank gets the bytes of another segment, or reads again what another has read for it."""
    reader, receiver = pair(rings, 8, slots=2)
    thread = threading.Thread(target=publish_all, args=(reader,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()  # the ring holds two of four
    assert received_by(receiver) == {one.number: content(one) for one in reader.segments if reader.reads(one)}
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_process_that_has_ended_is_known() -> None:
    """If this fails, a rank waits for bytes of one that was killed, or takes one that lives for dead."""
    script = "from cloudckpt.distributed.shared_reads.ring import own_process; print(own_process())"
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
    pid, start, namespace = own_process().split(":", 2)
    assert has_ended(ended)
    assert not has_ended(own_process())
    assert has_ended(f"{pid}:{int(start) + 1}:{namespace}")  # another process, under the same number
    assert not has_ended(f"{ended.partition(':')[0]}:{start}:another-machine:1")
