"""How large parts and reads are, for what a rank has to move and what bounds its memory."""

from __future__ import annotations

import pytest

from cloudckpt._pipeline import context as contexts
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.sizes import part_bytes_of, request_bytes_of
from cloudckpt._plan.reads import Want
from cloudckpt._transfer.width import KnownWidths
from cloudckpt._uri import parse_location
from cloudckpt.options import GIB, MIB, Options


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> KnownWidths:
    """What this process has found out about stores: nothing yet."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(contexts, "_known_widths", widths := KnownWidths())
    return widths


def context(uri: str = "s3://bucket/run", **options: int) -> Context:
    return Context(parse_location(uri), Options(**options), rank=0)


def wants(num_bytes: int) -> list[Want]:
    return [Want(0, 0, 0, num_bytes)]


@pytest.mark.parametrize(
    ("num_bytes", "expected_bytes"),
    [(1, 16 * MIB), (256 * MIB, 16 * MIB), (GIB, 32 * MIB), (2 * GIB, 64 * MIB), (80 * GIB, 64 * MIB)],
)
def test_parts_are_large_and_yet_enough(num_bytes: int, expected_bytes: int) -> None:
    """If this fails, a small save uses few of its connections, or a large one makes more requests than it has to."""
    assert part_bytes_of(context(), num_bytes, are_copied=False) == expected_bytes


def test_what_a_process_has_learned_does_not_change_the_parts(known: KnownWidths) -> None:
    """If this fails, a save that is taken up by a new process finds parts of another size and sends all anew."""
    before = part_bytes_of(context(), 2 * GIB, are_copied=False)
    known.note(("s3", "bucket", "None"), 32)
    assert context().known_connections == 16
    assert part_bytes_of(context(), 2 * GIB, are_copied=False) == before


def test_buffers_leave_room_for_every_connection() -> None:
    """If this fails, a save from a GPU sends less than its connections could, for its buffers are few and large."""
    assert part_bytes_of(context(), 80 * GIB, are_copied=True) == 16 * MIB
    assert part_bytes_of(context(connections=4), 80 * GIB, are_copied=True) == 64 * MIB
    asked = context()
    request_bytes = request_bytes_of(asked, wants(80 * GIB), [True], shares=False)
    assert asked.first_connections * request_bytes + asked.hedge_bytes <= asked.options.read_bytes
    assert request_bytes_of(asked, wants(80 * GIB), [False], shares=False) == 64 * MIB


def test_the_users_own_bounds_hold() -> None:
    """If this fails, `part_bytes` and `request_bytes` are no bounds."""
    small = context(part_bytes=5 * MIB, request_bytes=2 * MIB)
    assert part_bytes_of(small, 80 * GIB, are_copied=False) == 5 * MIB
    assert request_bytes_of(small, wants(80 * GIB), [False], shares=False) == 2 * MIB


def test_what_is_known_of_a_store_sizes_the_reads(known: KnownWidths) -> None:
    """If this fails, a load with many connections has fewer reads than these."""
    assert request_bytes_of(context(), wants(2 * GIB), [False], shares=False) == 64 * MIB
    known.note(("s3", "bucket", "None"), 32)
    assert request_bytes_of(context(), wants(2 * GIB), [False], shares=False) == 32 * MIB


@pytest.mark.parametrize(("known_width", "expected"), [(32, 16), (16, 8), (10, 8), (8, 8), (3, 3), (1, 1)])
def test_what_was_come_to_has_to_prove_itself_again(known: KnownWidths, known_width: int, expected: int) -> None:
    """If this fails, connections that seemed to pay once, by chance, are kept for all of a job; or those that a store
    asked to do without are not done without.
    """
    known.note(("s3", "bucket", "None"), known_width)
    assert context().known_connections == context().hedger.width() == expected


def test_stores_are_told_apart(known: KnownWidths) -> None:
    """If this fails, what one endpoint bears is asked of another."""
    known.note(("s3", "bucket", "None"), 32)
    assert context("s3://other/run").known_connections is None
    assert context("gs://bucket/run").known_connections is None
    options = Options(storage_options={"endpoint_url": "http://127.0.0.1:1"})
    assert Context(parse_location("s3://bucket/run"), options, rank=0).known_connections is None
