"""Tied weights of several ranks: uploaded once by all of them together, and right under each name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.e2e.harness import run_ranks
from tests.e2e.places import LocalPlace
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import cloudckpt

VOCABULARY, WIDTH = 3001, 64


class Model(nn.Module):
    """Its head is its embedding, which is most of it."""

    def __init__(self, *, seed: int, is_tied: bool) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mid = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.mid(self.embed(words)))
        return outputs


def state_of(kind: str, *, seed: int, is_tied: bool = True) -> tuple[nn.Module | None, dict[str, Any]]:
    model = Model(seed=seed, is_tied=is_tied)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model, mesh=mesh)
        return model, get_model_state_dict(model)
    if kind == "replicated":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        made: dict[int, DTensor] = {}
        state = {
            name: made.setdefault(tensor.data_ptr(), distribute_tensor(tensor, mesh, [Replicate()]))
            for name, tensor in model.state_dict().items()
        }
        return None, state
    wrapped = DistributedDataParallel(model)
    return wrapped, {"module." + name: tensor for name, tensor in model.state_dict().items()}


def save(uri: str, kind: str, verb: str) -> int:
    _, state = state_of(kind, seed=1)
    if verb == "async_save":
        metadata = cloudckpt.async_save({"model": state}, uri).result(120)
    else:
        metadata = cloudckpt.save({"model": state}, uri)
    assert metadata.report is not None
    return metadata.report.num_bytes


def load(uri: str, kind: str, into: str) -> None:
    _, state = state_of(kind, seed=2, is_tied=into == "tied")
    _, expected = state_of(kind, seed=1)
    cloudckpt.load({"model": state}, uri)
    for name, tensor in expected.items():
        mine, its = (t.to_local() if isinstance(t, DTensor) else t for t in (state[name], tensor))
        assert torch.equal(mine, its), name


@pytest.mark.parametrize(
    ("kind", "verb"),
    [("ddp", "save"), ("ddp", "async_save"), ("fsdp2", "save"), ("fsdp2", "async_save"), ("replicated", "save")],
)
def test_tied_weights_are_uploaded_once(local: LocalPlace, kind: str, verb: str) -> None:
    """If this fails, a rank sends the largest matrix of a model a second time, or one of its names is another's."""
    uri = local.uri()
    sent_bytes = run_ranks(save, uri, kind, verb, world_size=2)
    own_bytes = sum(parameter.nbytes for parameter in Model(seed=1, is_tied=True).parameters())
    assert own_bytes <= sum(sent_bytes) <= own_bytes + 20_000
    for into in ("tied", "untied"):
        run_ranks(load, uri, kind, into, world_size=2)
    cloudckpt.verify(uri)
    whole = Model(seed=3, is_tied=False).state_dict()
    prefix = "module." if kind == "ddp" else ""
    cloudckpt.load({"model": (named := {prefix + name: tensor for name, tensor in whole.items()})}, uri)
    for name, tensor in Model(seed=1, is_tied=True).state_dict().items():
        assert torch.equal(named[prefix + name], tensor), name
