"""Pipeline stages, each on a rank of its own, that FSDP loads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import CPU, FEATURES, Training, assert_same, set_state, state_dict_of
from tests.e2e.places import Place
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import cloudckpt

NUM_LAYERS = 4


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(NUM_LAYERS)))


def parameter_of(name: str, tensor: Tensor) -> Tensor:
    """What a test can tell from any other: each name's own numbers."""
    first = sum(map(ord, name))
    return torch.arange(first, first + tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)


def save_stages_and_load_shards(root: str) -> None:
    with torch.device("meta"):
        model = layers()
    stage = model.get_submodule(str(dist.get_rank())).to_empty(device=CPU)  # the other stages stay on meta
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            parameter.data.copy_(parameter_of(name, parameter))
    state = state_dict_of(Training(model=model, optimizer=torch.optim.Adam(stage.parameters(), lr=0.01)))
    mine = {name: tensor for name, tensor in state["model"].items() if not tensor.is_meta}
    assert len(mine) == 2
    cloudckpt.save({**state, "model": mine}, f"{root}/mine")
    load_shards(f"{root}/mine")
    try:  # torch leaves the others' in, and which rank is to write what several have is for the plan to say
        cloudckpt.save(state, f"{root}/all")
    except CheckpointException as error:
        if "leave it out where another rank has it" not in str(error):
            raise
    else:
        load_shards(f"{root}/all")


def load_shards(uri: str) -> None:
    mesh = init_device_mesh("cpu", (NUM_LAYERS,))
    model = FullyShardedDataParallel(layers(), device_mesh=mesh, device_id=CPU, use_orig_params=True)
    training = Training(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.5))
    state = state_dict_of(training)
    cloudckpt.load(state, uri)
    set_state(training, state)
    for name, tensor in state_dict_of(training)["model"].items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert_same(whole, parameter_of(name, whole))
    assert training.optimizer.param_groups[0]["lr"] == 0.01
    training.step(0)


@pytest.mark.multirank
def test_fsdp_loads_what_pipeline_stages_saved(place: Place) -> None:
    """If this fails, a model that was trained by stages, a rank with layers of its own, cannot be loaded otherwise."""
    run_ranks(save_stages_and_load_shards, place.root, world_size=NUM_LAYERS)
