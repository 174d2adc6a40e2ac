"""Loading runs no code from the store unless the caller consents, and says what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.models import assert_same
from tests.kit.places import Place
from tests.kit.ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros

import cloudckpt

pytestmark = pytest.mark.filterwarnings("ignore:.* unpickling it could run any code, so a load refuses it")


class Custom:
    """An object of a class that no load knows."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_objects_that_need_code_are_refused_by_name(place: Place) -> None:
    """If this fails, a load either runs code unasked, or leaves the user guessing which value stopped it."""
    cloudckpt.save({"model": torch.ones(3), "config": {"custom": Custom(5)}}, place.uri())
    state: dict[str, Any] = {"model": torch.zeros(3), "config": {"custom": None}}
    with pytest.raises(cloudckpt.errors.UnsafePickleError, match=r"config\.custom") as caught:
        cloudckpt.load(state, place.uri())
    assert "allow_pickle=True" in str(caught.value)
    assert state["config"]["custom"] is None
    cloudckpt.load(state, place.uri(), allow_pickle=True)
    assert state["config"]["custom"].value == 5
    only_model = {"model": torch.zeros(3)}
    cloudckpt.load(only_model, place.uri())  # what is not asked for does not stand in the way
    assert_same(only_model, {"model": torch.ones(3)})


def sharded(fill: float) -> dict[str, Any]:
    full = torch.full((7, 3), fill)
    return {
        "w": distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)]),
        "b": torch.full((4,), fill, dtype=torch.bfloat16),
        "step": int(fill),
    }


def save_with_torch(path: str) -> None:
    dcp.save(sharded(3.0), storage_writer=dcp.FileSystemWriter(path, thread_count=2))


def load_what_torch_saved(uri: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def blank() -> dict[str, Any]:
        return {
            "w": zeros(7, 3, device_mesh=mesh, placements=[Shard(1)]),
            "b": torch.zeros(4, dtype=torch.bfloat16),
            "step": None,
        }

    with pytest.raises(cloudckpt.errors.UnsafePickleError, match="allow_pickle=True") as caught:
        cloudckpt.load(blank(), uri)
    assert isinstance(caught.value, CheckpointException)
    for load in (
        lambda state: cloudckpt.load(state, uri, allow_pickle=True),
        lambda state: dcp.load(state, storage_reader=cloudckpt.ObjectStoreReader(uri, allow_pickle=True)),
    ):
        state = blank()
        load(state)
        loaded = state.pop("w")
        assert isinstance(loaded, DTensor)
        assert_same(loaded.full_tensor(), torch.full((7, 3), 3.0))
        assert_same(state, {"b": torch.full((4,), 3.0, dtype=torch.bfloat16), "step": 3})


def torchs_checkpoint(place: Place, tmp_path: Path) -> str:
    """A checkpoint that torch's FileSystemWriter wrote on two ranks, at a path or uploaded to a bucket."""
    directory = tmp_path / "torchs"
    run_ranks(save_with_torch, str(directory), world_size=2)
    for path in directory.iterdir():
        place.write(f"checkpoint/{path.name}", path.read_bytes())
    return place.uri()


@pytest.mark.multirank
def test_torchs_checkpoints_load_with_consent(place: Place, tmp_path: Path) -> None:
    """If this fails, users must convert every checkpoint they have before they can move to cloudckpt."""
    run_ranks(load_what_torch_saved, torchs_checkpoint(place, tmp_path), world_size=2)
