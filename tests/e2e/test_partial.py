"""Loads of a part, with other orders of keys, with and without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.models import (
    assert_same,
    build,
    state_dict_of,
)
from tests.kit.places import Place
from tests.kit.ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import cloudckpt
from cloudckpt.errors import StateDictMismatchError


@pytest.mark.every_store
@on_ranks(2)
def test_the_model_alone_is_loaded(uri: str) -> None:
    """If this fails, inference must load optimizer states that are three times the model."""
    original = build("fsdp2", seed=0)
    original.losses(0, 2)
    cloudckpt.save(state_dict_of(original), uri)
    other = build("fsdp2", seed=1)
    other.losses(0, 1)
    state = state_dict_of(other)
    optimizer_before = state["optimizer"]["state"]["up.weight"]["exp_avg"].clone()
    cloudckpt.load({"model": state["model"]}, uri)
    assert_same(state["model"], state_dict_of(original)["model"])
    assert_same(state["optimizer"]["state"]["up.weight"]["exp_avg"], optimizer_before)


def test_torch_loads_by_keys_through_our_reader(place: Place) -> None:
    """If this fails, a state dict cannot be rebuilt from the checkpoint alone, as conversion tools do it."""
    original = build("none", seed=0)
    original.losses(0, 2)
    state = state_dict_of(original)
    cloudckpt.save(dict(state), place.uri())

    def load(keys: set[str] | str | None) -> dict[str, Any]:
        reader = cloudckpt.ObjectStoreReader(place.uri())
        return _load_state_dict_from_keys(keys, storage_reader=reader)

    assert_same(load("model"), {"model": dict(state["model"])})
    assert_same(load("optimizer.state"), {"optimizer": {"state": state["optimizer"]["state"]}})
    assert_same(load({"model.up.weight", "model.up.bias"}), {
        "model": {name: state["model"][name] for name in ("up.weight", "up.bias")}
    })  # fmt: skip
    everything = load(None)
    assert_same(everything["model"], dict(state["model"]))
    assert_same(everything["optimizer"]["state"], state["optimizer"]["state"])


@on_ranks(2)
def test_ranks_may_order_their_keys_differently(uri: str) -> None:
    """If this fails, one rank's tensors are taken for another's by their position."""
    names = ["a", "b", "c", "d"]
    rank = dist.get_rank()
    order = names[rank:] + names[:rank]
    state = {name: torch.full((3,), float(names.index(name))) for name in order}
    state |= {f"own-{rank}": torch.full((2,), float(rank))}
    cloudckpt.save(state, uri)
    loaded = {name: torch.zeros_like(state[name]) for name in reversed(order)}
    loaded |= {f"own-{rank}": torch.zeros(2)}
    cloudckpt.load(loaded, uri)
    assert_same(loaded, state)


@on_ranks(2)
def test_ranks_may_have_nothing_to_save(root: str) -> None:
    """If this fails, pipeline stages without parameters break the saves of the others."""
    rank = dist.get_rank()
    for name, holders in {"nobody": [], "first": [0], "last": [dist.get_world_size() - 1]}.items():
        state = {"x": torch.full((3,), 7.0)} if rank in holders else {}
        cloudckpt.save(dict(state), f"{root}/{name}")
        loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        cloudckpt.load(loaded, f"{root}/{name}")
        assert_same(loaded, state)


class TakesMore:
    """Asks for one name while it is fresh, and takes what was saved under others."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"begun": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_load_that_fits_nothing_is_refused(place: Place) -> None:
    """If this fails, a mistyped name loads nothing, reports success, and training begins anew; or the error advises
    to pass the planner that does so.
    """
    cloudckpt.save({"model": {"w": torch.ones(4)}, "counter": {"seen": 7}}, place.uri())
    with pytest.raises(StateDictMismatchError, match=r"'net\.w' is not in it") as caught:
        cloudckpt.load({"net": {"w": torch.zeros(4)}}, place.uri())
    assert "allow_partial_load" not in str(caught.value)
    with pytest.raises(StateDictMismatchError, match=r"has none of 'net\.(w|weight)'.*, only .*'model\.w'"):
        cloudckpt.load({"net": {"w": torch.zeros(4)}}, place.uri(), planner=DefaultLoadPlanner(allow_partial_load=True))
    with pytest.raises(StateDictMismatchError, match=r"has none of 'net\.weight'.*, only .*'model\.w'"):
        cloudckpt.load({"net": nn.Linear(2, 2)}, place.uri(), planner=DefaultLoadPlanner(allow_partial_load=True))
    for empty in ({}, {"net": {}}):
        with pytest.raises(StateDictMismatchError, match=r"asks for nothing of .*cloudckpt\.read"):
            cloudckpt.load(empty, place.uri())
    state = {"counter": TakesMore()}  # a second plan asks for what fits
    cloudckpt.load(dict(state), place.uri(), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert state["counter"].state["seen"] == 7


@on_ranks(2)
def test_a_rank_may_ask_for_nothing_that_fits(uri: str) -> None:
    """If this fails, a partial load in which one rank wants nothing fails or hangs; or one in which no rank loads
    anything reports success on a rank.
    """
    rank = dist.get_rank()
    cloudckpt.save({"w": torch.ones(4)}, uri)
    loaded = {"added" if rank else "w": torch.zeros(4)}
    cloudckpt.load(loaded, uri, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert_same(loaded, {"added": torch.zeros(4)} if rank else {"w": torch.ones(4)})
    other: dict[str, Any] = {"added": torch.zeros(4)} if rank else {}
    with pytest.raises(CheckpointException, match="has none of 'added', only 'w'"):
        cloudckpt.load(other, uri, planner=DefaultLoadPlanner(allow_partial_load=True))


@on_ranks(4)
def test_a_subgroup_of_ranks_saves_alone(uri: str) -> None:
    """If this fails, HSDP users who save on one replica alone hang, or lose what other group ranks hold."""
    group = dist.new_group([2, 3])
    if dist.get_rank() in {2, 3}:
        state = {"x": torch.arange(5), f"own-{dist.get_rank()}": torch.ones(2)}
        cloudckpt.save(state, uri, process_group=group)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        cloudckpt.load(loaded, uri, process_group=group)
        assert_same(loaded, state)
    dist.barrier()
