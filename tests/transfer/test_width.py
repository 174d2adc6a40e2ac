"""How many requests are in flight, on simulated networks: no clock, no thread, no socket."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt._transfer.width import Bounds, KnownWidths, Width, bounds_of

MB = 1_000_000
PART_BYTES = 32 * MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What limits requests that are made side by side."""

    latency_s: float = 0.06
    each_mb_s: float = 80.0
    all_mb_s: float = 10_000.0
    most_at_once: int = 10_000
    """Of more requests than these, each further one is asked to slow down, after its latency."""
    served_at_once: int = 10_000
    """Further ones wait until one of these is done."""
    timeout_s: float = 20.0
    """Of a request that waits."""

    def takes_s(self, num_bytes: int, num_at_once: int) -> float:
        return self.latency_s + num_bytes / MB / min(self.each_mb_s, self.all_mb_s / num_at_once)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    elapsed_s: float
    widths: list[int]
    num_throttled: int
    num_timeouts: int

    @property
    def last_widths(self) -> list[int]:
        return self.widths[len(self.widths) // 2 :]


@dataclass(slots=True)
class Request:
    begun_s: float
    latency_left_s: float
    bytes_left: float
    is_refused: bool


def transfer(network: Network, width: Width, *, num_parts: int, heeds_timeouts: bool = True) -> Outcome:
    """Move so many parts, with as many requests in flight as `width` says at each moment; they share the wire."""
    now_s, left, num_throttled, num_timeouts = 100.0, num_parts, 0, 0
    running: list[Request] = []
    widths = []
    while left or running:
        while left and len(running) < width.width:
            is_refused = len(running) >= network.most_at_once
            size_bytes = 0 if is_refused else PART_BYTES
            running.append(Request(now_s, network.latency_s, size_bytes, is_refused))
            left -= 1
        served, waiting = running[: network.served_at_once], running[network.served_at_once :]
        rate = min(network.each_mb_s, network.all_mb_s / len(served)) * MB
        step_s = min(request.latency_left_s + request.bytes_left / rate for request in served)
        step_s = min([step_s, *(request.begun_s + network.timeout_s - now_s for request in waiting)])
        now_s += step_s
        for request in waiting:
            if now_s - request.begun_s > network.timeout_s - 1e-6:
                running.remove(request)
                num_timeouts += 1
                left += 1
                if heeds_timeouts:
                    width.timed_out(begun_s=request.begun_s, ended_s=now_s)
                widths.append(width.width)
        for request in served:
            moving_s = max(step_s - request.latency_left_s, 0)
            request.latency_left_s = max(request.latency_left_s - step_s, 0)
            request.bytes_left -= moving_s * rate
        for request in [request for request in running if request.latency_left_s == 0 and request.bytes_left < 1]:
            running.remove(request)
            if request.is_refused:
                num_throttled += 1
                left += 1
                width.throttled(begun_s=request.begun_s, ended_s=now_s)
            else:
                width.done(begun_s=request.begun_s, ended_s=now_s, num_bytes=PART_BYTES)
            widths.append(width.width)
    return Outcome(elapsed_s=now_s - 100.0, widths=widths, num_throttled=num_throttled, num_timeouts=num_timeouts)


def climber(first: int = 8, most: int = 32) -> Width:
    return Width(Bounds(first=first, most=most))


def test_where_each_connection_is_slow_there_are_as_many_as_allowed() -> None:
    """If this fails, a checkpoint goes to a real object store at the pace of a few connections."""
    outcome = transfer(Network(), climber(), num_parts=64)
    assert max(outcome.widths) == 32
    of_eight = 64 * PART_BYTES / (8 * 80 * MB)
    assert outcome.elapsed_s < 0.9 * of_eight  # more than what eight connections would give without any latency


def test_where_more_connections_bring_nothing_there_are_no_more() -> None:
    """If this fails, threads that bring nothing take the cores from the training."""
    outcome = transfer(Network(latency_s=0.0005, each_mb_s=5000, all_mb_s=2500), climber(), num_parts=1000)
    assert max(outcome.widths) == 16  # tried, once
    assert outcome.last_widths.count(8) > 0.8 * len(outcome.last_widths)


def test_a_wire_that_fills_up_on_the_way_is_used_and_not_crowded() -> None:
    """If this fails, the climb stops far below what the wire takes, or never stops."""
    network = Network(all_mb_s=1200)  # 15 connections' worth
    outcome = transfer(network, climber(), num_parts=4000)
    assert 12 <= outcome.widths[-1] <= 20
    assert outcome.elapsed_s < 1.2 * 4000 * PART_BYTES / MB / 1200


def test_it_slows_down_at_once_where_it_is_asked_to() -> None:
    """If this fails, a store that answers 503 SlowDown is asked just as often, and bans or bills the job."""
    width = climber(first=16, most=32)
    width.throttled(begun_s=1.0, ended_s=2.0)
    assert width.width == 8
    width.throttled(begun_s=1.5, ended_s=2.1)  # it was under way when the first was answered
    assert width.width == 8
    width.throttled(begun_s=2.5, ended_s=2.6)
    assert width.width == 4
    for _ in range(10):
        width.throttled(begun_s=3.0 + _, ended_s=3.5 + _)
    assert width.width == 1


def test_a_store_that_throttles_is_asked_little_more_than_it_takes() -> None:
    """If this fails, most requests are refused, or hardly any is made."""
    outcome = transfer(Network(most_at_once=6), climber(), num_parts=3000)
    assert outcome.num_throttled < 0.05 * 3000
    assert sum(outcome.last_widths) / len(outcome.last_widths) > 3
    assert max(outcome.last_widths) <= 8


def test_what_passed_is_forgotten() -> None:
    """If this fails, one bad moment makes the rest of a long save slow."""
    width = climber()
    for index in range(3):
        width.throttled(begun_s=10.0 + index, ended_s=10.5 + index)
    assert width.width == 1
    assert transfer(Network(), width, num_parts=3000).widths[-1] == 32


def test_a_server_that_leaves_requests_waiting_is_asked_less() -> None:
    """If this fails, a server of few threads, which refuses nothing, lets requests time out until their retries end."""
    network = Network(each_mb_s=1.0, served_at_once=4)  # a part takes 32 s
    heeding = transfer(network, climber(), num_parts=400)
    deaf = transfer(network, climber(), num_parts=400, heeds_timeouts=False)
    assert deaf.num_timeouts > 400
    assert heeding.num_timeouts < 0.15 * 400
    assert heeding.elapsed_s < 1.05 * deaf.elapsed_s
    assert heeding.last_widths.count(4) > 0.7 * len(heeding.last_widths)


def test_a_connection_that_died_is_no_reason_to_ask_less() -> None:
    """If this fails, one dead connection in a while keeps a long save at half of what the network gives."""
    width = climber(first=32)
    for number in range(400):
        begun_s = 100.0 + number
        width.timed_out(begun_s=begun_s - 0.5, ended_s=begun_s)
        for _ in range(16):  # half of the width, a round
            width.done(begun_s=begun_s, ended_s=begun_s + 0.4, num_bytes=PART_BYTES)
        assert width.width == 32


def test_what_times_out_together_counts_once() -> None:
    """If this fails, a line that is cut for a moment leaves one request in flight."""
    width = climber(first=32)
    for number in range(32):
        width.timed_out(begun_s=10.0, ended_s=30.0 + number / 100)
    assert width.width == 16
    assert transfer(Network(), width, num_parts=200).widths[-1] == 32


def test_a_number_stays_that_number() -> None:
    """If this fails, somebody who has set Options.connections gets more than that."""
    outcome = transfer(Network(), climber(first=5, most=5), num_parts=200)
    assert set(outcome.widths) == {5}


@given(
    latency_s=st.floats(0.0, 0.5),
    each_mb_s=st.floats(1, 2000),
    all_mb_s=st.floats(10, 20_000),
    most_at_once=st.integers(1, 100),
    bounds=st.tuples(st.integers(1, 16), st.integers(0, 48)),
)
def test_it_stays_within_its_bounds_and_gets_everything_there(
    latency_s: float, each_mb_s: float, all_mb_s: float, most_at_once: int, bounds: tuple[int, int]
) -> None:
    """If this fails, some network stops a transfer, or gets more connections than anybody allowed."""
    first, most = bounds[0], sum(bounds)
    network = Network(latency_s=latency_s, each_mb_s=each_mb_s, all_mb_s=all_mb_s, most_at_once=most_at_once)
    outcome = transfer(network, climber(first, most), num_parts=300)
    assert min(outcome.widths) >= 1
    assert max(outcome.widths) <= most


@given(latency_s=st.floats(0.001, 0.3), each_mb_s=st.floats(20, 200), all_mb_s=st.floats(200, 6000))
def test_it_never_ends_far_below_what_the_wire_takes(latency_s: float, each_mb_s: float, all_mb_s: float) -> None:
    """If this fails, there are networks on which a number set by hand is much faster than none."""
    network = Network(latency_s=latency_s, each_mb_s=each_mb_s, all_mb_s=all_mb_s)
    outcome = transfer(network, climber(), num_parts=2000)
    best_mb_s = max(width * PART_BYTES / MB / network.takes_s(PART_BYTES, width) for width in range(1, 33))
    last = outcome.last_widths
    mean_mb_s = sum(width * PART_BYTES / MB / network.takes_s(PART_BYTES, width) for width in last) / len(last)
    assert mean_mb_s > 0.5 * best_mb_s  # where each further one brings less than half of what it could, it stops


@pytest.mark.parametrize(
    ("ranks_of_host", "expected"),
    [(1, (8, 32)), (4, (8, 32)), (8, (8, 16)), (16, (8, 8)), (64, (2, 2)), (1000, (1, 1))],
)
def test_ranks_of_one_host_share_what_it_may_use(ranks_of_host: int, expected: tuple[int, int]) -> None:
    """If this fails, eight ranks open as many connections each as one alone would, and each gets an eighth."""
    assert bounds_of(None, ranks_of_host=ranks_of_host, is_remote=True) == expected
    assert bounds_of(None, ranks_of_host=ranks_of_host, is_remote=False) == (expected[0], expected[0])
    assert bounds_of(5, ranks_of_host=ranks_of_host, is_remote=True) == (5, 5)


def test_a_width_that_is_on_trial_is_not_settled() -> None:
    """If this fails, each short load tries more connections, and the next begins with them whether they paid or not."""
    width = climber()
    network = Network(latency_s=0.0005, each_mb_s=5000, all_mb_s=2500)
    for _ in range(4):
        transfer(network, width, num_parts=5)  # ends in the trial's round
    assert width.settled == 8


def test_what_a_store_bore_is_where_the_next_save_begins() -> None:
    """If this fails, each save of a job climbs anew from few connections to as many as the line wants."""
    width = climber()
    transfer(Network(), width, num_parts=200)
    known = KnownWidths()
    known.note("bucket", width.settled)
    again = Width(Bounds(first=8, most=32), begin_at=known.of("bucket"))
    assert again.width == width.width == 32
    assert known.of("another") is None


@pytest.mark.parametrize(("begin_at", "expected"), [(0, 1), (3, 3), (500, 32), (None, 8)])
def test_no_width_begins_out_of_bounds(begin_at: int | None, expected: int) -> None:
    """If this fails, what one rank of few came to breaks the bound that many ranks of a host have."""
    assert Width(Bounds(first=8, most=32), begin_at=begin_at).width == expected


def test_not_every_store_is_remembered_for_ever() -> None:
    """If this fails, a process that visits many buckets keeps a note of each until it ends."""
    known = KnownWidths()
    for number in range(1000):
        known.note(number, number)
    assert known.of(999) == 999
    assert known.of(0) is None


def test_short_rounds_decide_nothing() -> None:
    """If this fails, connections that are opened, or a moment's other work, pass for a line that wants more of them."""
    width = climber()
    now_s = 50.0
    for _ in range(8):  # the first ones are slow, and the later ones twice as fast
        width.done(begun_s=now_s, ended_s=now_s + 0.02, num_bytes=MB)
    for number in range(9):
        begun_s = now_s + 0.02 * (1 + number)
        for _ in range(8):
            width.done(begun_s=begun_s, ended_s=begun_s + 0.01, num_bytes=MB)
    assert width.width == 8
    width.done(begun_s=now_s + 0.24, ended_s=now_s + 0.25, num_bytes=MB)
    assert width.width == 16  # on trial, as there is something to compare it with now
