"""No rank saves much more than the others of what all of them hold."""

from __future__ import annotations

import torch
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import Place
from torch import Tensor

import cloudckpt


def replicated_state() -> dict[str, Tensor]:
    """As DDP has it: large tensors of several sizes, and small ones before and after them."""
    generator = torch.Generator().manual_seed(5)
    rows = {"first": 100, **{f"layer-{n}": (n % 5 + 1) * 128 for n in range(20)}, "last": 100}
    return {name: torch.randn(count, 256, generator=generator) for name, count in rows.items()}


def save_replicated(uri: str) -> int:
    metadata = cloudckpt.save({"model": replicated_state()}, uri)
    assert metadata.report is not None
    return metadata.report.num_bytes


def test_replicated_tensors_are_spread_by_bytes(place: Place) -> None:
    """If this fails, a DDP job waits for the rank that saves the largest tensors while the others are idle."""
    uri, num_ranks = place.uri(), 2
    sent_bytes = run_ranks(save_replicated, uri, world_size=num_ranks)
    assert sum(sent_bytes) < 1.01 * sum(tensor.nbytes for tensor in replicated_state().values())
    assert max(sent_bytes) <= 1.1 * sum(sent_bytes) / num_ranks, sent_bytes
    loaded = {name: torch.zeros_like(tensor) for name, tensor in replicated_state().items()}
    cloudckpt.load({"model": loaded}, uri)
    assert_same(loaded, replicated_state())
