"""The wire in front of moto's server: saves and loads over a network that is slow, or cut at random."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.options import make_options
from tests.wire import CutSomewhere, Wire, WireRule

import cloudckpt
from cloudckpt.testing.servers import S3Server, moto_server

URI = "s3://bucket/run"


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


@pytest.fixture
def server(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    monkeypatch.setattr("cloudckpt.io.retry._delay_s", lambda error, num_failures: 0.0)
    moto.reset()
    moto.create_bucket("bucket")
    return moto


def options_for(server: S3Server, wire: Wire | None = None, **settings: Any) -> cloudckpt.Options:
    endpoint_url = server.endpoint_url if wire is None else wire.url
    return make_options(
        storage_options={**server.storage_options, "endpoint_url": endpoint_url}, timeout_s=30.0, **settings
    )


def state_of(fill: float) -> dict[str, Any]:
    return {"w": torch.full((3000, 100), fill), "b": torch.arange(40_000) * fill, "step": int(fill)}


def assert_holds(uri: str, fill: float, options: cloudckpt.Options) -> None:
    state = state_of(-1.0)
    cloudckpt.load(state, uri, no_dist=True, options=options)
    assert state["step"] == int(fill)
    for name, wanted in state_of(fill).items():
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(wanted)), name


@pytest.mark.parametrize("seed", range(6))
def test_saves_and_loads_get_through_cuts(server: S3Server, seed: int) -> None:
    """If this fails, a network that breaks now and then loses a save, or makes of one what it was not."""
    print(f"seed {seed}")
    cuts = WireRule(action=CutSomewhere(), times=None, probability=0.2, seed=seed)
    with Wire(server.endpoint_url, cuts) as wire:
        options = options_for(server, wire, retries=20, part_bytes=5 << 20, request_bytes=1 << 20, connections=2)
        cloudckpt.save(state_of(1.0), URI, no_dist=True, options=options)
        assert_holds(URI, 1.0, options)
        cloudckpt.save(state_of(2.0), URI, no_dist=True, options=options, overwrite=True)
        assert_holds(URI, 2.0, options)
        print(f"{wire.num_acted} of {len(wire.requests)} requests cut")
    assert_holds(URI, 2.0, options_for(server))
