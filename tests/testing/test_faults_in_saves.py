"""The fault kit before real saves and loads: what fails in passing is got over, and nothing else becomes of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.options import make_options

import cloudckpt
from cloudckpt.errors import ThrottledError, TransientStoreError
from cloudckpt.testing.faults import Fails, Faults, FlippedBits, Rule, TruncatedBody

_numbers = itertools.count()
READS, WRITES = {"read", "read_into"}, {"put", "upload_part"}
RULES = (
    Rule(fault=Fails(TransientStoreError), probability=0.04, times=None),
    Rule(fault=Fails(ThrottledError), probability=0.04, times=None),
    Rule(fault=Fails(TransientStoreError, carried_out=True), probability=0.12, times=None),
    Rule(fault=TruncatedBody(), probability=0.2, times=None),
    Rule(fault=FlippedBits(), operations=WRITES, probability=0.1, times=None),
    Rule(fault=FlippedBits(), operations={"read_into"}, times=1, each_key=True),
)


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((9000,), value), "b": torch.full((3,), value)}


@pytest.mark.parametrize("seed", range(25))
def test_saves_and_loads_get_over_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a network that breaks now and then costs a save, or brings wrong weights into a load."""
    print(f"seed {seed}")
    monkeypatch.setattr("cloudckpt.io.retry._delay_s", lambda error, num_failures: 0.0)
    uri = f"memory://faults-in-saves-{next(_numbers)}/run"
    faults = Faults(*RULES, seed=seed)
    options = make_options(
        wrap_store=faults, retries=30, connections=4, tile_bytes=4096, part_bytes=8192, request_bytes=8192
    )
    for value in (1.0, 2.0, 3.0):
        cloudckpt.save(state_of(value), uri, no_dist=True, overwrite=value > 1.0, options=options)
        state = state_of(-1.0)
        cloudckpt.load(state, uri, no_dist=True, options=options)
        assert all(bool((tensor == value).all()) for tensor in state.values()), value
    assert sum(faults.num_injected.values()) > 3
