"""``use_collectives=False``: each rank saves and loads its own, and nobody takes one rank's part for the whole."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import Place
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cloudckpt


def values(rank: int) -> dict[str, torch.Tensor]:
    """The same names on every rank, with values of its own: what one rank could mistake for its own."""
    return {"x": torch.full((10,), float(rank + 1)), "y": torch.arange(rank, rank + 3)}


def save_without_collectives(root: str) -> None:
    rank = dist.get_rank()
    calls = {
        "ours": lambda uri: cloudckpt.save(values(rank), uri, use_collectives=False),
        "torchs": lambda uri: dcp.save(
            values(rank), storage_writer=cloudckpt.ObjectStoreWriter(uri), use_collectives=False
        ),
    }
    for name, save in calls.items():
        uri = f"{root}/{name}"
        save(uri)
        dist.barrier()
        for load in (
            lambda state: cloudckpt.load(state, uri),  # noqa: B023
            lambda state: dcp.load(state, storage_reader=cloudckpt.ObjectStoreReader(uri)),  # noqa: B023
        ):
            state = {key: torch.zeros_like(tensor) for key, tensor in values(rank).items()}
            load(state)
            assert_same(state, values(rank))
        dist.barrier()
        with pytest.raises((CheckpointException, cloudckpt.CheckpointExistsError), match="Checkpoint already exists"):
            save(uri)


@pytest.mark.multirank
def test_each_rank_loads_back_its_own(place: Place) -> None:
    """If this fails, ranks write to one key, and one loads another's values without an error."""
    run_ranks(save_without_collectives, place.root, world_size=2)


def save_sharded_alone(uri: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    for use in ({"use_collectives": False}, {"no_dist": True}):
        sharded = {"w": distribute_tensor(torch.ones(5), mesh, [Shard(0)]), "n": rank}
        target = f"{uri}/{next(iter(use))}" + (f"/{rank}" if "no_dist" in use else "")
        with pytest.raises(
            cloudckpt.errors.IncompleteSaveError, match=r"'w'.*\n?.*saved by all of their ranks together"
        ):
            cloudckpt.save(sharded, target, **use)
        replicated = {"w": distribute_tensor(torch.ones(5), mesh, [Replicate()]), "n": rank}
        cloudckpt.save(replicated, target, **use)


@pytest.mark.multirank
def test_shards_are_refused_and_replicas_are_kept(place: Place) -> None:
    """If this fails, a rank commits a tensor with holes, or the document says otherwise than the code."""
    run_ranks(save_sharded_alone, place.root, world_size=2)


def fail_on_one_rank(root: str) -> None:
    """On each rank: the save of rank 1 fails, which only that rank learns of, with its next save."""
    rank = dist.get_rank()

    def refuse(event: cloudckpt.Event) -> None:
        if (event.rank, event.name) == (1, "save.object_uploaded"):
            raise CheckpointException("rank 1 has no disk", {1: (OSError("no disk"), None)})  # type: ignore[arg-type]

    options = cloudckpt.Options(timeout_s=60.0, on_event=refuse)
    save = functools.partial(cloudckpt.async_save, values(rank), use_collectives=False)
    first = save(f"{root}/first", options=options)
    first.committed.wait()
    if rank:
        with pytest.raises(CheckpointException, match="rank 1 has no disk"):
            save(f"{root}/second")
    else:
        assert first.exception() is None
        assert save(f"{root}/second").exception() is None
    save(f"{root}/third").result()


@pytest.mark.multirank
def test_a_failure_of_one_rank_fails_no_other(tmp_path: Path) -> None:
    """If this fails, a rank that raises its earlier failure leaves the others waiting, or fails their saves."""
    run_ranks(fail_on_one_rank, str(tmp_path), world_size=2)
    assert sorted(path.parent.name for path in tmp_path.glob("second/*/manifest.json")) == ["rank-0"]
    assert sorted(path.parent.name for path in tmp_path.glob("third/*/manifest.json")) == ["rank-0", "rank-1"]
