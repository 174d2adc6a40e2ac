"""The number of requests in flight, on simulated stores, without a clock, threads or sockets."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.options import make_options

from cloudckpt.io.hedging import ConcurrencyLimit
from cloudckpt.io.upload import choose_part_bytes
from cloudckpt.options import MIB
from cloudckpt.pipeline.context import Context
from cloudckpt.uri import parse_location


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    limits: list[int]
    """After each request."""
    num_refused: int


def transfer(
    limit: ConcurrencyLimit, *, num_requests: int, takes_at_once: list[int], seconds: list[int], now_s: float = 0.0
) -> Outcome:
    """Make so many requests, always as many at once as `limit` allows.

    The store refuses a request that begins beside as many as `takes_at_once` says, one value for each request, of which
    the last holds on. A refusal takes a second, any other request one of `seconds`, in turn.
    """
    num_begun, num_refused, left = 0, 0, num_requests
    running: list[tuple[float, int, float, bool]] = []
    limits: list[int] = []
    while left or running:
        while left and len(running) < limit.current:
            is_refused = len(running) >= takes_at_once[min(num_begun, len(takes_at_once) - 1)]
            ends_s = now_s + (1 if is_refused else seconds[num_begun % len(seconds)])
            heapq.heappush(running, (ends_s, num_begun, now_s, is_refused))
            num_begun, left = num_begun + 1, left - 1
        now_s, _, begun_s, is_refused = heapq.heappop(running)
        if is_refused:
            num_refused += 1
            left += 1
            limit.decrease(begun_s=begun_s, now_s=now_s)
        else:
            limit.record_success(begun_s=begun_s)
        limits.append(limit.current)
    return Outcome(limits=limits, num_refused=num_refused)


@given(
    most=st.integers(1, 40),
    takes_at_once=st.lists(st.integers(1, 50), min_size=1, max_size=100),
    seconds=st.lists(st.integers(1, 20), min_size=1, max_size=10),
)
def test_the_limit_falls_under_throttling_and_recovers(most: int, takes_at_once: list[int], seconds: list[int]) -> None:
    """If this fails, some store stops a transfer, gets more connections than allowed, or too few for ever after."""
    limit = ConcurrencyLimit(most)
    throttled = transfer(limit, num_requests=200, takes_at_once=takes_at_once, seconds=seconds)
    assert all(1 <= current <= most for current in throttled.limits)
    assert (min(throttled.limits) < most) == (throttled.num_refused > 0 and most > 1)
    calm = transfer(limit, num_requests=most * (most + 2), takes_at_once=[most], seconds=seconds, now_s=1e6)
    assert max(calm.limits) == calm.limits[-1] == most


def test_requests_that_were_under_way_together_count_once() -> None:
    """If this fails, sixteen refusals of one moment leave one connection, or their successes raise the limit."""
    limit = ConcurrencyLimit(16)
    for _ in range(8):
        limit.decrease(begun_s=0.0, now_s=1.0)
    assert limit.current == 8
    for _ in range(8):
        limit.record_success(begun_s=0.0)
    assert limit.current == 8
    for _ in range(8):
        limit.record_success(begun_s=1.5)
    assert limit.current == 9


def context_at(uri: str, **settings: int) -> Context:
    return Context(parse_location(uri), make_options(**settings), rank=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks_of_host", "expected"), [(None, 16), ("8", 16), ("16", 8), ("500", 1), ("0", 16), ("x", 16)]
)
def test_the_default_of_connections_follows_the_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch, ranks_of_host: str | None, expected: int
) -> None:
    """If this fails, `LOCAL_WORLD_SIZE` or `Options.connections` is ignored."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks_of_host is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_host)
    context = context_at("s3://bucket/run")
    assert context.max_connections == context.client.hedger.connections_now() == expected
    assert context_at("s3://bucket/run", connections=12).client.hedger.connections_now() == 12


@pytest.mark.parametrize(
    ("num_cores", "ranks_of_host", "expected"), [(2, 1, 4), (64, 8, 4), (3, 2, 3), (2, 2, 2), (4, 8, 1), (2, 8, 1)]
)
def test_ranks_that_share_cores_make_fewer_requests(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, ranks_of_host: int, expected: int
) -> None:
    """If this fails, ranks without cores to spare make small requests, or any rank leaves connections without work."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(num_cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_host))
    num_bytes = 16 * 128 * MIB
    part_bytes = choose_part_bytes(num_bytes, connections=16, max_bytes=num_bytes, buffer_bytes=None)
    assert num_bytes // part_bytes == 16 * expected
