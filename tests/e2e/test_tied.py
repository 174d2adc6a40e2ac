"""Tied weights of several ranks: uploaded once by all of them together, and right under each name."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tests.kit.places import LocalPlace
from tests.kit.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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


def state_of(kind: str, *, seed: int, is_tied: bool = True) -> tuple[nn.Module, dict[str, Any]]:
    model = Model(seed=seed, is_tied=is_tied)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model, mesh=mesh)
        return model, get_model_state_dict(model)
    wrapped = DistributedDataParallel(model)
    return wrapped, {"module." + name: tensor for name, tensor in model.state_dict().items()}


KINDS = ("ddp", "fsdp2")


def save_and_load(root: str) -> dict[str, int]:
    """On each rank: each kind by each verb. The bytes that were sent."""
    sent_bytes = {}
    for kind, verb in itertools.product(KINDS, ("save", "async_save")):
        uri = f"{root}/{kind}-{verb}"
        _, state = state_of(kind, seed=1)
        if verb == "async_save":
            metadata = cloudckpt.async_save({"model": state}, uri).result(120)
        else:
            metadata = cloudckpt.save({"model": state}, uri)
        assert metadata.report is not None
        sent_bytes[uri] = metadata.report.num_bytes
    for kind, is_tied in itertools.product(KINDS, (True, False)):
        _, state = state_of(kind, seed=2, is_tied=is_tied)
        _, expected = state_of(kind, seed=1)
        cloudckpt.load({"model": state}, f"{root}/{kind}-save")
        for name, tensor in expected.items():
            mine, its = (t.to_local() if isinstance(t, DTensor) else t for t in (state[name], tensor))
            assert torch.equal(mine, its), (kind, name)
    return sent_bytes


def test_tied_weights_are_uploaded_once(local: LocalPlace) -> None:
    """If this fails, a rank sends the largest matrix of a model a second time, or one of its names is another's."""
    results = run_ranks(save_and_load, local.root, world_size=2)
    own_bytes = sum(parameter.nbytes for parameter in Model(seed=1, is_tied=True).parameters())
    for uri in results[0]:
        assert own_bytes <= sum(sent_bytes[uri] for sent_bytes in results) <= own_bytes + 20_000, uri
        cloudckpt.verify(uri)
    named = Model(seed=3, is_tied=False).state_dict()
    cloudckpt.load({"model": named}, f"{local.root}/fsdp2-save")
    for name, tensor in Model(seed=1, is_tied=True).state_dict().items():
        assert torch.equal(named[name], tensor), name
