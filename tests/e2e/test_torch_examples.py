"""What PyTorch's own end-to-end tests of checkpoints do to a folder, done to a URI.

Pipeline stages that FSDP loads, and objects that speak with other ranks while they load. The others have their like in
the other modules here, and in ``tests/examples``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import CPU, assert_same
from tests.e2e.places import Place
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import cloudckpt

FEATURES = 6
NUM_LAYERS = 4


@contextmanager
def without_torchs_warnings() -> Iterator[None]:
    """FSDP1 uses calls of its own that are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    with without_torchs_warnings():
        return get_state_dict(model, optimizer or (), options=StateDictOptions(**options))


def set_state_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_state: dict[str, Any],
    optimizer_state: dict[str, Any],
    **options: Any,
) -> None:
    with without_torchs_warnings():
        set_state_dict(
            model,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=StateDictOptions(**options),
        )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    losses = []
    for number in range(start, stop):
        batch = torch.rand(4, FEATURES, generator=torch.Generator().manual_seed(number))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Pipeline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(NUM_LAYERS))

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch


def parameter_of(name: str, tensor: Tensor) -> Tensor:
    """What a test can tell from any other: each name's own numbers."""
    first = sum(map(ord, name))
    return torch.arange(first, first + tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)


def save_stages_and_load_shards(root: str) -> None:
    with torch.device("meta"):
        model = Pipeline()
    stage = model.layers[dist.get_rank()].to_empty(device=CPU)  # the other stages stay on meta
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            parameter.data.copy_(parameter_of(name, parameter))
    optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
    model_state, optimizer_state = state_of(model, optimizer)
    mine = {name: tensor for name, tensor in model_state.items() if not tensor.is_meta}
    assert len(mine) == 2
    cloudckpt.save({"model": mine, "optim": optimizer_state}, f"{root}/mine")
    load_shards(f"{root}/mine")
    try:  # torch leaves the others' in, and which rank is to write what several have is for the plan to say
        cloudckpt.save({"model": model_state, "optim": optimizer_state}, f"{root}/all")
    except CheckpointException as error:
        if "leave it out where another rank has it" not in str(error):
            raise
    else:
        load_shards(f"{root}/all")


def load_shards(uri: str) -> None:
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (NUM_LAYERS,))
    model = FullyShardedDataParallel(Pipeline(), device_mesh=mesh, device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model_state, optimizer_state = state_of(model, optimizer)
    cloudckpt.load({"model": model_state, "optim": optimizer_state}, uri)
    set_state_of(model, optimizer, model_state, optimizer_state)
    for name, tensor in state_of(model)[0].items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert_same(whole, parameter_of(name, whole))
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer, 0, 1)


@pytest.mark.multirank
def test_fsdp_loads_what_pipeline_stages_saved(place: Place) -> None:
    """If this fails, a model that was trained by stages, a rank with layers of its own, cannot be loaded otherwise."""
    run_ranks(save_stages_and_load_shards, place.root, world_size=NUM_LAYERS)
