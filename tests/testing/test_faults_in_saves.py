"""Faults of stores and of the network in real saves and loads: what may pass is overcome, and changes nothing."""

from __future__ import annotations

import contextlib
import http.client
import itertools
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from tests.kit.options import make_options
from tests.kit.wire import CutSomewhere, Reply, Wire, WireRule

import cloudckpt
from cloudckpt.errors import ThrottledError, TransientStoreError
from cloudckpt.testing.faults import Fails, Faults, FlippedBits, Rule, TruncatedBody
from cloudckpt.testing.servers import S3Server

pytestmark = pytest.mark.usefixtures("retries_at_once")

_numbers = itertools.count()
WRITES = {"put", "upload_part"}
RULES = (
    Rule(fault=Fails(TransientStoreError), probability=0.04, times=None),
    Rule(fault=Fails(ThrottledError), probability=0.04, times=None),
    Rule(fault=Fails(TransientStoreError, carried_out=True), probability=0.12, times=None),
    Rule(fault=TruncatedBody(), probability=0.2, times=None),
    Rule(fault=FlippedBits(), operations=WRITES, probability=0.1, times=None),
    Rule(fault=FlippedBits(), operations={"read_into"}, times=1, each_key=True),
)


@pytest.fixture
def server(s3_server: S3Server) -> S3Server:
    s3_server.reset()
    s3_server.create_bucket("bucket")
    return s3_server


def state_of(value: float, *, num_rows: int) -> dict[str, Any]:
    return {"w": torch.full((num_rows, 100), value), "b": torch.arange(num_rows) * value, "step": int(value)}


def assert_holds(uri: str, value: float, options: cloudckpt.Options, *, num_rows: int) -> None:
    state = state_of(-1.0, num_rows=num_rows)
    cloudckpt.load(state, uri, no_dist=True, options=options)
    assert state["step"] == int(value)
    for name, wanted in state_of(value, num_rows=num_rows).items():
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(wanted)), name


@pytest.mark.parametrize("seed", range(25))
def test_saves_and_loads_survive_faults(seed: int) -> None:
    """If this fails, a network that breaks now and then costs a save, or brings wrong weights into a load."""
    print(f"seed {seed}")
    uri = f"memory://faults-in-saves-{next(_numbers)}/run"
    faults = Faults(*RULES, seed=seed)
    options = make_options(
        wrap_store=faults, retries=30, connections=4, tile_bytes=4096, part_bytes=8192, request_bytes=8192
    )
    for value in (1.0, 2.0, 3.0):
        state = state_of(value, num_rows=90)
        cloudckpt.save(state, uri, no_dist=True, overwrite=value > 1.0, options=options)
        assert_holds(uri, value, options, num_rows=90)
    assert sum(faults.num_injected.values()) > 3


@pytest.mark.parametrize("seed", range(6))
def test_saves_and_loads_survive_cut_connections(server: S3Server, seed: int) -> None:
    """If this fails, a network that breaks now and then loses a save, or makes of one what it was not."""
    print(f"seed {seed}")
    cuts = WireRule(action=CutSomewhere(), times=None, probability=0.2, seed=seed)
    settings: dict[str, Any] = {"part_bytes": 5 << 20, "request_bytes": 1 << 20, "connections": 2, "timeout_s": 30.0}
    with Wire(server.endpoint_url, cuts) as wire:
        storage_options = {**server.storage_options, "endpoint_url": wire.url}
        options = make_options(storage_options=storage_options, retries=20, **settings)
        for value in (1.0, 2.0):
            state = state_of(value, num_rows=3000)
            cloudckpt.save(state, "s3://bucket/run", no_dist=True, options=options, overwrite=value > 1.0)
            assert_holds("s3://bucket/run", value, options, num_rows=3000)
        print(f"{wire.num_acted} of {len(wire.requests)} requests cut")
    options = make_options(storage_options=server.storage_options, **settings)
    assert_holds("s3://bucket/run", 2.0, options, num_rows=3000)


def test_the_first_due_wire_rule_acts_and_all_rules_count(server: S3Server) -> None:
    """If this fails, a fault hits another request than the one meant, or the wire changes what it passes on."""
    refused = Reply(status=503, body=b"slow down", headers=(("Retry-After", "1"),))
    other, content = Reply(status=429), bytes(range(256)) * 40
    rules = [
        WireRule(action=refused, method="PUT", path="^/bucket/data/", skip=1, times=2),
        WireRule(action=other, method="PUT", path="^/bucket/data/", skip=2, times=None),
    ]
    asked = [
        ("PUT", "/bucket/data/0", 200),
        ("GET", "/bucket/data/0", 200),
        ("PUT", "/bucket/other/data/1", 200),
        ("PUT", "/bucket/data/2", 503),
        ("PUT", "/bucket/data/3", 503),
        ("PUT", "/bucket/data/4", 429),
        ("GET", "/bucket/other/data%2F1?x-id=GetObject", 200),
        ("HEAD", "/bucket/data/2", 404),
    ]
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"}  # for moto
    with Wire(server.endpoint_url, *rules) as wire:
        connection = http.client.HTTPConnection(urlsplit(wire.url).netloc, timeout=30.0)
        with contextlib.closing(connection):
            for method, path, status in asked:
                connection.request(method, path, content if method == "PUT" else None, signed)
                with connection.getresponse() as answer:
                    body = answer.read()
                assert answer.status == status, path
                assert method != "GET" or body == content, path
        assert [seen.action for seen in wire.requests if seen.action] == [refused, refused, other]
        assert [(seen.method, seen.target) for seen in wire.requests] == [(method, path) for method, path, _ in asked]
