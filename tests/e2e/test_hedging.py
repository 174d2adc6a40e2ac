"""One part or range that stalls, on a store that is otherwise well: a second request brings it, bit for bit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from tests.kit.moto import locked_s3_server
from tests.kit.options import make_options
from tests.kit.wire import CutRequest, Throttle, Wire, WireRule

import cloudckpt
from cloudckpt.io import hedging
from cloudckpt.options import MIB
from cloudckpt.testing.servers import Server, fake_gcs_server

NUM_BEFORE = 4
"""Requests that come through before one stalls, so that it has peers."""
TIMEOUT_S = 90.0
"""A third of it is the longest that a connection may be silent: nobody waits so long here."""
_numbers = itertools.count()


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with locked_s3_server() if request.param == "s3" else fake_gcs_server() as started:
        yield started


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of these would take seconds; and on a busy machine others may be slow, too."""
    monkeypatch.setattr(hedging, "MIN_PATIENCE_S", 0.2)
    monkeypatch.setattr(hedging, "MIN_HEDGES", 100)


def options_at(server: Server, url: str) -> cloudckpt.Options:
    # Few connections: of many, no request might have ended yet when one stalls.
    return make_options(
        storage_options={**server.storage_options, "endpoint_url": url},
        timeout_s=TIMEOUT_S,
        connections=2,
        part_bytes=5 * MIB,
        request_bytes=8 * MIB,
    )


def values() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(10 * MIB, dtype=torch.float32)}  # 40 MiB


def uri_at(server: Server) -> str:
    bucket = f"hedging-{next(_numbers)}"
    server.create_bucket(bucket)
    return f"{server.scheme}://{bucket}/run"


PARTS = {"s3": ("PUT", r"/data/.*partNumber="), "gs": ("POST", r"/upload/.*uploadType=multipart")}
RANGES = {"s3": ("GET", r"/data/"), "gs": ("GET", r"/download/.*data")}


def test_a_part_that_stalls_is_sent_by_a_second_request(server: Server) -> None:
    """If this fails, one dead connection holds a save up until its timeout, or what it had sent is stored."""
    uri = uri_at(server)
    method, path = PARTS[server.scheme]
    rule = WireRule(action=CutRequest(after_bytes=MIB, stalls=True), method=method, path=path, skip=NUM_BEFORE)
    with Wire(server.endpoint_url, rule) as wire:
        report = cloudckpt.save(values(), uri, options=options_at(server, wire.url)).report
        assert wire.num_acted == 1
    assert report is not None
    assert report.num_hedges >= 1
    assert report.num_retries == 0
    loaded = {"w": torch.zeros(10 * MIB)}
    cloudckpt.load(loaded, uri, options=options_at(server, server.endpoint_url))
    assert torch.equal(loaded["w"], values()["w"])
    assert cloudckpt.verify(uri, options=options_at(server, server.endpoint_url)).num_tensors == 1
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("cloudckpt-upload", "cloudckpt-hedge"))]


def test_a_range_that_stalls_is_read_by_a_second_request(server: Server) -> None:
    """If this fails, one dead or slow connection holds a load up, or what it had brought is taken for the tensor's."""
    uri = uri_at(server)
    cloudckpt.save(values(), uri, options=options_at(server, server.endpoint_url))
    method, path = RANGES[server.scheme]
    rule = WireRule(action=Throttle(bytes_per_s=1000), method=method, path=path, skip=NUM_BEFORE)
    loaded = {"w": torch.zeros(10 * MIB)}
    with Wire(server.endpoint_url, rule) as wire:
        report = cloudckpt.load(loaded, uri, options=options_at(server, wire.url))
        assert wire.num_acted == 1
    assert torch.equal(loaded["w"], values()["w"])
    assert report is not None
    assert report.num_hedges >= 1
    assert report.num_retries == 0
