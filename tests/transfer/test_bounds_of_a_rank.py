"""What one rank of a job may use, from its options and from how many ranks its host has."""

from __future__ import annotations

import pytest

from cloudckpt._pipeline.context import Context
from cloudckpt._uri import parse_location
from cloudckpt.options import MIB, Options


def context_at(uri: str, **settings: int) -> Context:
    return Context(parse_location(uri), Options(**settings), rank=0)  # type: ignore[arg-type]


def climbed(context: Context) -> int:
    """The width after many requests, each as fast as if it were the only one."""
    for number in range(1000):
        context.hedger._width.done(begun_s=float(number), ended_s=number + 0.5, num_bytes=MIB)
    return context.hedger.width()


@pytest.mark.parametrize("uri", ["s3://bucket/run", "gs://bucket/run"])
@pytest.mark.parametrize(("ranks_of_host", "most"), [(None, 32), ("1", 32), ("8", 16), ("16", 8), ("", 32), ("x", 32)])
def test_an_object_store_gets_as_many_as_pay_and_the_host_may_use(
    monkeypatch: pytest.MonkeyPatch, uri: str, ranks_of_host: str | None, most: int
) -> None:
    """If this fails, the number of connections never adapts, or eight ranks of a host take eight times its share."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks_of_host is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_host)
    context = context_at(uri)
    assert context.hedger.width() == context.first_connections == 8
    assert climbed(context) == most


def test_a_disk_gets_no_more_than_to_begin_with(tmp_path: object) -> None:
    """If this fails, threads that bring nothing crowd a local disk."""
    context = context_at(str(tmp_path))
    assert climbed(context) == context.first_connections


def test_a_number_is_that_number_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, Options.connections does not mean what it says."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert climbed(context_at("s3://bucket/run", connections=12)) == 12


def test_second_requests_come_out_of_what_a_load_may_hold() -> None:
    """If this fails, a load holds more than Options.read_bytes (G7)."""
    assert context_at("s3://bucket/run").hedge_bytes == 64 * MIB
    small = context_at("s3://bucket/run", read_bytes=32 * MIB, request_bytes=32 * MIB)
    assert small.hedge_bytes == 0  # else there would be no room for the first ones
