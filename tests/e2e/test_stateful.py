"""Stateful objects, FSDP1 with its optimizer loaded apart, and torch's own calls by URI."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.e2e.harness import run_ranks
from tests.e2e.models import AppState, Parallelism, Training, assert_same, build
from tests.e2e.places import Place
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import cloudckpt

NUM_STEPS = 2


def assert_trains_on_alike(resumed: Training, original: Training) -> None:
    """Both take the same further steps to the same losses and parameters."""
    actual = resumed.losses(NUM_STEPS, 2 * NUM_STEPS)
    assert_same(actual, original.losses(NUM_STEPS, 2 * NUM_STEPS))
    assert_same(resumed.parameters(), original.parameters())


class Counter:
    """A Stateful with plain Python values."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.num_loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": [self.value, float(self.value), str(self.value)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]
        self.num_loads += 1
        assert state_dict["history"] == [self.value, float(self.value), str(self.value)]


def save_objects_as_they_are(uri: str, parallelism: Parallelism) -> None:
    """On each rank: module, optimizer and counter go into the state dict as objects, and come back into objects."""
    original = build(parallelism, seed=0)
    original.losses(0, NUM_STEPS)
    resumed = build(parallelism, seed=1)
    resumed.losses(0, 1)  # an optimizer has no state to load into before its first step
    if parallelism != "none":  # sharded: the objects' own state dicts are replaced by canonical ones
        for training in (original, resumed):
            _patch_model_state_dict(training.model)
            _patch_optimizer_state_dict(training.model, optimizers=training.optimizer)
    cloudckpt.save({"model": original.model, "optimizer": original.optimizer, "counter": Counter(7)}, uri)
    counter = Counter(0)
    cloudckpt.load({"model": resumed.model, "optimizer": resumed.optimizer, "counter": counter}, uri)
    assert (counter.value, counter.num_loads) == (7, 1)
    assert_trains_on_alike(resumed, original)


@pytest.mark.multirank
@pytest.mark.parametrize(("parallelism", "num_ranks"), [("none", 2), ("hsdp", 4)])
@pytest.mark.slow
def test_objects_go_into_the_state_dict_as_they_are(place: Place, parallelism: Parallelism, num_ranks: int) -> None:
    """If this fails, users must call state_dict() and load_state_dict() themselves, unlike with torch."""
    run_ranks(save_objects_as_they_are, place.uri(), parallelism, world_size=num_ranks)


def save_with_torch_by_uri(uri: str) -> None:
    cloudckpt.enable()
    try:
        original = build("fsdp2", seed=0)
        original.losses(0, NUM_STEPS)
        metadata = dcp.save({"app": AppState(original)}, checkpoint_id=uri)
        assert "app.model.up.weight" in metadata.state_dict_metadata
        resumed = build("fsdp2", seed=1)
        dcp.load({"app": AppState(resumed)}, checkpoint_id=uri)
        assert_trains_on_alike(resumed, original)
    finally:
        cloudckpt.disable()
    # what torch's call saved is a checkpoint like any other
    again = build("fsdp2", seed=2)
    cloudckpt.load({"app": AppState(again)}, uri)


@pytest.mark.multirank
def test_torch_understands_uris_once_enabled(place: Place) -> None:
    """If this fails, programs that call dcp.save and dcp.load must be changed to use an object store."""
    uri = place.uri() if "://" in place.root else f"file://{place.uri()}"
    run_ranks(save_with_torch_by_uri, uri, world_size=2)
    assert len(place.manifest_keys()) == 1


def save_fsdp1_and_load_the_optimizer_apart(uri: str) -> None:
    original = build("fsdp1", seed=0)
    original.losses(0, NUM_STEPS)
    resumed = build("fsdp1", seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own ShardedTensor and state dict types
        with FullyShardedDataParallel.state_dict_type(original.model, StateDictType.SHARDED_STATE_DICT):
            cloudckpt.save(
                {
                    "model": original.model.state_dict(),
                    "optim": FullyShardedDataParallel.optim_state_dict(original.model, original.optimizer),
                },
                uri,
            )
        with FullyShardedDataParallel.state_dict_type(resumed.model, StateDictType.SHARDED_STATE_DICT):
            state: dict[str, Any] = {"model": resumed.model.state_dict()}
            cloudckpt.load(state, uri)
            resumed.model.load_state_dict(state["model"])
            optimizer_state = load_sharded_optimizer_state_dict(
                model_state_dict=state["model"],
                optimizer_key="optim",
                storage_reader=cloudckpt.ObjectStoreReader(uri),
            )
            resumed.optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(
                    resumed.model, resumed.optimizer, optimizer_state["optim"]
                )
            )
        assert_trains_on_alike(resumed, original)


@pytest.mark.multirank
def test_fsdp1_loads_its_optimizer_apart(place: Place) -> None:
    """If this fails, FSDP1 users cannot resume the way that PyTorch's FSDP example does."""
    run_ranks(save_fsdp1_and_load_the_optimizer_apart, place.uri(), world_size=2)


def save_in_a_subgroup(uri: str) -> None:
    """Ranks 2 and 3 save on a group of their own, in which rank 2 of the job is rank 0; the others stand by."""
    group = dist.new_group([2, 3])
    if dist.get_rank() in {2, 3}:
        state = {"x": torch.arange(5), f"own-{dist.get_rank()}": torch.ones(2)}
        cloudckpt.save(state, uri, process_group=group)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        cloudckpt.load(loaded, uri, process_group=group)
        assert_same(loaded, state)
    dist.barrier()


@pytest.mark.multirank
def test_a_subgroup_of_ranks_saves_alone(place: Place) -> None:
    """If this fails, HSDP users who save on one replica alone hang, or lose what other group ranks hold."""
    run_ranks(save_in_a_subgroup, place.uri(), world_size=4)
