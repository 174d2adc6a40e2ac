"""Ranks that save apart, each to a URI of its own with ``no_dist=True``; and the refused ``use_collectives=False``."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.models import assert_same
from tests.kit.ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cloudckpt
from cloudckpt.errors import InvalidOptionError

STATE = {"x": torch.arange(3.0)}


@on_ranks(2)
def test_each_rank_loads_the_checkpoint_that_it_saved(root: str) -> None:
    """If this fails, a rank commits a tensor with holes or loads another's values, or a load of all finds no advice."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    uri = f"{root}/rank-{rank}"
    sharded = {"w": distribute_tensor(torch.ones(5), mesh, [Shard(0)]), "n": rank}
    with pytest.raises(cloudckpt.errors.IncompleteSaveError, match=r"'w'.*\n?.*saved by all of their ranks together"):
        cloudckpt.save(sharded, uri, no_dist=True)
    values = {"x": torch.full((10,), float(rank + 1)), "y": torch.arange(rank, rank + 3)}
    cloudckpt.save({**values, "w": distribute_tensor(torch.ones(5), mesh, [Replicate()])}, uri, no_dist=True)
    state = {key: torch.zeros_like(tensor) for key, tensor in values.items()}
    cloudckpt.load(state, uri, no_dist=True)
    assert_same(state, values)
    for load in (
        lambda: cloudckpt.load(dict(state), root),
        lambda: dcp.load(dict(state), storage_reader=cloudckpt.ObjectStoreReader(root)),
    ):
        dist.barrier()
        with pytest.raises(CheckpointException, match=r"Load it by its own URI with no_dist=True, as .*/rank-0"):
            load()


def manage(uri: str) -> None:
    with cloudckpt.CheckpointManager(uri, use_collectives=False) as manager:
        manager.save(1, STATE)


SAVES: dict[str, Callable[[str], object]] = {
    "save": lambda uri: cloudckpt.save(STATE, uri, use_collectives=False),
    "async_save": lambda uri: cloudckpt.async_save(STATE, uri, use_collectives=False),
    "async_save by process": lambda uri: cloudckpt.async_save(
        STATE, uri, async_checkpointer_type=AsyncCheckpointerType.PROCESS, use_collectives=False
    ),
    "manager": manage,
    "torch": lambda uri: dcp.save(STATE, storage_writer=cloudckpt.ObjectStoreWriter(uri), use_collectives=False),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_save_without_collectives_is_refused(name: str, tmp_path: Path) -> None:
    """If this fails, each rank takes its own part for the checkpoint, or the user is not told what to do instead."""
    words = r"use_collectives=False is not supported.*save\(state_dict, f'{uri}/rank-{rank}', no_dist=True\)"
    with pytest.raises((InvalidOptionError, CheckpointException), match=words):
        SAVES[name](str(tmp_path / "c"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("saver", [0, 1])
@on_ranks(2)
def test_rank_that_loads_while_the_other_saves_is_named_under_enable(saver: int, root: str) -> None:
    """If this fails, the error of torch's own calls is an attribute that a plan lacks."""
    cloudckpt.enable()
    dcp.save(STATE, checkpoint_id=f"file://{root}/there")
    told = rf"rank 1 came to do something else than rank 0 \(rank 0: {'load' if saver else 'sav'}ing .*all ranks must"
    call, name = (dcp.save, "other") if dist.get_rank() == saver else (dcp.load, "there")
    with pytest.raises(CheckpointException, match=told):
        call(dict(STATE), checkpoint_id=f"file://{root}/{name}")
    dcp.load(dict(STATE), checkpoint_id=f"file://{root}/there")


@on_ranks(2)
def test_rank_that_restores_while_the_other_saves_is_named(root: str) -> None:
    """If this fails, the error of a save that waits for a rank says that a checkpoint is being found."""
    manager = cloudckpt.CheckpointManager(root, save_every=timedelta(seconds=1))
    told = rf"rank 0: asking if a step is due under {root}; rank 1: finding a checkpoint under {root}"
    with pytest.raises(CheckpointException, match=told):
        manager.restore(dict(STATE)) if dist.get_rank() else manager.save(1, dict(STATE))


@on_ranks(2)
def test_ranks_that_see_different_directories_are_told_so(root: str) -> None:
    """If this fails, a mount that one host lacks is told as a removal by gc or by another job."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    uri = "/proc/self/cwd/step-1"  # one text, and a directory of each rank
    for folder in ("0", "1"):
        Path(root, folder).mkdir(exist_ok=True)
    state = {"w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}
    os.chdir(f"{root}/{rank}")
    with pytest.raises(cloudckpt.errors.IncompleteSaveError, match=r"1-0\.safetensors is gone\. Do all ranks see the"):
        cloudckpt.save(state, uri)
    os.chdir(f"{root}/0")
    cloudckpt.save(state, uri)
    dist.barrier()
    os.chdir(f"{root}/{rank}")
    with pytest.raises(cloudckpt.errors.CheckpointChangedError, match="unless rank 1 sees another directory there"):
        cloudckpt.load(state, uri)
