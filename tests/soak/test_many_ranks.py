"""50 ranks in one job save, overwrite, save in the background, fail and load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import torch.distributed as dist
from tests.kit.models import assert_same
from tests.kit.places import LocalPlace, Place, S3Place
from tests.kit.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros

import cloudckpt
from cloudckpt.testing.servers import Server

NUM_RANKS = 50
NUM_FEWER = 3
FAILING_RANK = 47
NUM_ROWS, NUM_COLUMNS = 211, 16  # a prime: no number of ranks divides it
TIMEOUT_S = 400.0

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(2 * TIMEOUT_S)]


class InjectedError(Exception):
    """The fault. Defined here, importable by all ranks."""


class FailsToWrite(cloudckpt.ObjectStoreWriter):
    """On one rank."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == FAILING_RANK:
            raise InjectedError
        return super().write_data(plan, planner)


def rows(version: float) -> torch.Tensor:
    """The whole of the sharded tensor, each element different from every other."""
    return torch.arange(NUM_ROWS * NUM_COLUMNS, dtype=torch.float32).reshape(NUM_ROWS, NUM_COLUMNS) * version


def values(version: float) -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "rows": distribute_tensor(rows(version), mesh, [Shard(0)]),
        "shared": torch.full((100,), version),
        f"own-{rank}": torch.full((10 + rank,), version + rank),
    }


def assert_holds(uri: str, version: float) -> None:
    state = values(-1.0)
    cloudckpt.load(state, uri)
    assert_same(state, values(version))


def save_in_every_way(uri: str) -> None:
    """On each rank: the first save, one over it, one in the background, and one that fails on a single rank."""
    cloudckpt.save(values(1.0), uri)
    assert_holds(uri, 1.0)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.save(values(9.0), uri)
    cloudckpt.save(values(2.0), uri, overwrite=True)
    assert_holds(uri, 2.0)
    cloudckpt.async_save(values(3.0), uri, overwrite=True).result(120.0)
    dist.barrier()
    with pytest.raises(dist.checkpoint.api.CheckpointException) as caught:
        cloudckpt.save(values(4.0), storage_writer=FailsToWrite(uri, overwrite=True))
    assert {rank: type(error) for rank, (error, _) in caught.value.failures.items()} == {FAILING_RANK: InjectedError}
    assert_holds(uri, 3.0)


def load_on_fewer(uri: str) -> None:
    """On each of other ranks than saved it: rows that lie across the bounds of theirs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"rows": zeros(NUM_ROWS, NUM_COLUMNS, device_mesh=mesh, placements=[Shard(0)])}
    cloudckpt.load(state, uri)
    assert torch.equal(state["rows"].full_tensor(), rows(3.0))


def check_fifty_ranks(place: Place) -> None:
    run_ranks(save_in_every_way, place.uri(), world_size=NUM_RANKS, timeout_s=TIMEOUT_S)
    run_ranks(load_on_fewer, place.uri(), world_size=NUM_FEWER)
    assert len(place.manifest_keys()) == 1
    assert len(place.data_keys()) == NUM_RANKS
    assert place.num_unfinished_uploads() == 0


def test_fifty_ranks_on_a_path(tmp_path: Path) -> None:
    """If this fails, a job of many ranks hangs, blames the wrong rank, or leaves what it replaced."""
    check_fifty_ranks(LocalPlace(tmp_path))


def test_fifty_ranks_on_ceph(rgw: Server, use: Callable[[Server], str]) -> None:
    """If this fails, they do so on an object store."""
    bucket = use(rgw).removeprefix("s3://")
    check_fifty_ranks(S3Place(boto3.client("s3"), bucket))
