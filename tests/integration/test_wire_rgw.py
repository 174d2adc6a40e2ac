"""The wire in front of Ceph's RADOS Gateway, which checks signatures and holds to conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.options import make_options

import cloudckpt
from cloudckpt.testing.servers import Server
from cloudckpt.testing.wire import CutSomewhere, LoseAnswer, Wire, WireRule


def options_for(server: Server, wire: Wire | None = None, **settings: Any) -> cloudckpt.Options:
    through = {} if wire is None else {"endpoint_url": wire.url}
    return make_options(storage_options={**server.storage_options, **through}, timeout_s=60.0, **settings)


def state_of(fill: float) -> dict[str, Any]:
    return {"w": torch.full((3000, 1000), fill), "step": int(fill)}


def assert_holds(uri: str, fill: float, options: cloudckpt.Options) -> None:
    state = state_of(-1.0)
    cloudckpt.load(state, uri, no_dist=True, options=options)
    assert (state["step"], bool((state["w"] == fill).all())) == (int(fill), True)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudckpt.io.retry._delay_s", lambda error, num_failures: 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_saves_and_loads_get_through_cuts(rgw: Server, use: Callable[[Server], str], seed: int) -> None:
    """If this fails, a network that breaks now and then loses a save, or makes of one what it was not."""
    print(f"seed {seed}")
    uri = f"{use(rgw)}/run"
    cuts = WireRule(action=CutSomewhere(), times=None, probability=0.2, seed=seed)
    with Wire(rgw.endpoint_url, cuts) as wire:
        options = options_for(rgw, wire, retries=20, part_bytes=5 << 20, request_bytes=1 << 20, connections=4)
        for fill in (1.0, 2.0, 3.0):
            cloudckpt.save(state_of(fill), uri, no_dist=True, options=options, overwrite=fill > 1.0)
            assert_holds(uri, fill, options)
        print(f"{wire.num_acted} of {len(wire.requests)} requests cut")
        assert wire.num_acted > 0
    assert_holds(uri, 3.0, options_for(rgw))


def test_a_commit_whose_answer_is_lost_is_recognised(rgw: Server, use: Callable[[Server], str]) -> None:
    """If this fails, a save on a server that keeps the condition takes its own commit for another's."""
    uri = f"{use(rgw)}/run"
    rule = WireRule(action=LoseAnswer(), method="PUT", path=r"/manifest\.json")
    with Wire(rgw.endpoint_url, rule) as wire:
        cloudckpt.save(state_of(1.0), uri, no_dist=True, options=options_for(rgw, wire))
        assert wire.num_acted == 1
    assert_holds(uri, 1.0, options_for(rgw))
