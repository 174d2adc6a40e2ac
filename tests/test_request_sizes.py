"""How large parts and reads are, for what a rank has to move and what bounds its memory."""

from __future__ import annotations

import pytest

from cloudckpt.io.reads import WantedRange
from cloudckpt.options import GIB, MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.load import request_bytes_of
from cloudckpt.pipeline.save import part_bytes_of
from cloudckpt.uri import parse_location


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is the only one of its host."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def context(uri: str = "s3://bucket/run", **options: int) -> Context:
    return Context(parse_location(uri), Options(**options), rank=0)


def wants(num_bytes: int) -> list[WantedRange]:
    return [WantedRange(0, 0, 0, num_bytes)]


@pytest.mark.parametrize(
    ("num_bytes", "expected_bytes"),
    [(1, 16 * MIB), (GIB, 16 * MIB), (2 * GIB, 32 * MIB), (4 * GIB, 64 * MIB), (80 * GIB, 64 * MIB)],
)
def test_parts_are_large_and_yet_enough(num_bytes: int, expected_bytes: int) -> None:
    """If this fails, a small save uses few of its connections, or a large one makes more requests than it has to."""
    assert part_bytes_of(context(), num_bytes, are_copied=False) == expected_bytes


def test_buffers_leave_room_for_every_connection() -> None:
    """If this fails, a save from a GPU sends less than its connections could, for its buffers are few and large."""
    assert part_bytes_of(context(), 80 * GIB, are_copied=True) == 32 * MIB
    assert part_bytes_of(context(connections=4), 80 * GIB, are_copied=True) == 64 * MIB
    asked = context()
    request_bytes = request_bytes_of(asked, wants(80 * GIB), [True], is_shared=False)
    assert asked.connections * request_bytes + asked.hedge_bytes <= asked.options.read_bytes
    assert request_bytes_of(asked, wants(80 * GIB), [False], is_shared=False) == 64 * MIB


def test_the_users_own_bounds_hold() -> None:
    """If this fails, `part_bytes` and `request_bytes` are no bounds."""
    small = context(part_bytes=5 * MIB, request_bytes=2 * MIB)
    assert part_bytes_of(small, 80 * GIB, are_copied=False) == 5 * MIB
    assert request_bytes_of(small, wants(80 * GIB), [False], is_shared=False) == 2 * MIB


def test_reads_are_large_and_yet_enough() -> None:
    """If this fails, a load with many connections has fewer reads than these, or a shared one makes small ones."""
    assert request_bytes_of(context(), wants(2 * GIB), [False], is_shared=False) == 32 * MIB
    assert request_bytes_of(context(), wants(80 * GIB), [False], is_shared=True) == 8 * MIB
