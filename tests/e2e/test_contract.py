"""The expectations that torch's DCP and its own tests have of a storage backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.models import assert_same
from tests.kit.places import LocalPlace, Place
from tests.kit.ranks import on_ranks

import cloudckpt


def values(fill: float = 1.0) -> dict[str, Any]:
    return {
        "x": torch.full((50,), float(fill)),
        "nested": {"y": torch.full((3, 4), float(fill))},
        "n": int(fill),
    }


def load_zeros(uri: str, **keywords: Any) -> dict[str, Any]:
    state = values(0.0)
    cloudckpt.load(state, uri, **keywords)
    return state


def test_our_calls_take_torchs_name_of_the_place(place: Place) -> None:
    """If this fails, code that passes torch's checkpoint_id cannot move to our calls as it is."""
    cloudckpt.save(values(2.0), checkpoint_id=place.uri("here"))
    state = values(0.0)
    cloudckpt.load(state, checkpoint_id=place.uri("here"))
    assert_same(state, values(2.0))


@on_ranks(2)
def test_one_writer_serves_several_saves(root: str) -> None:
    """If this fails, a save inherits keys, counters or failures from the one before it."""
    writer = cloudckpt.ObjectStoreWriter(f"{root}/0")
    dcp.save(values(0.0), storage_writer=writer)
    for number in (1, 2):
        dcp.save(values(number), storage_writer=writer, checkpoint_id=f"{root}/{number}")
        assert writer.checkpoint_id == f"{root}/{number}"
    for number in (0, 1, 2):
        assert_same(load_zeros(f"{root}/{number}"), values(number))
    # the same writer again, with nothing reset
    with pytest.raises(dcp.api.CheckpointException, match="Checkpoint already exists"):
        dcp.save(values(3.0), storage_writer=writer)
    assert_same(load_zeros(f"{root}/2"), values(2.0))
    overwriting = cloudckpt.ObjectStoreWriter(f"{root}/2", overwrite=True)
    for number in (4, 5):
        dcp.save(values(number), storage_writer=overwriting)
        assert_same(load_zeros(f"{root}/2"), values(number))
        dist.barrier()
    reader = cloudckpt.ObjectStoreReader(f"{root}/0")
    for number, name in ((0, None), (1, f"{root}/1"), (5, f"{root}/2"), (5, None)):
        state = values(-1.0)
        dcp.load(state, storage_reader=reader, checkpoint_id=name)
        assert_same(state, values(number))


def test_plain_paths_stay_torchs_when_enabled(local: LocalPlace) -> None:
    """If this fails, enable() changes the format of checkpoints that were never meant for cloudckpt."""
    torchs, ours = local.uri("torchs"), local.uri("ours")
    cloudckpt.save(values(2.0), ours)
    cloudckpt.enable()
    try:
        dcp.save(values(1.0), checkpoint_id=torchs)
        assert local.read("torchs/.metadata")
        for uri, fill in ((torchs, 1.0), (ours, 2.0)):
            state = values(0.0)
            dcp.load(state, checkpoint_id=uri)
            assert_same(state, values(fill))
    finally:
        cloudckpt.disable()
