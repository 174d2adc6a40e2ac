"""What each of many ranks does with all the others: saves, overwrites, saves in the background, fails, loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import Place
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros

import cloudckpt

NUM_ROWS = 211  # a prime: no number of ranks divides it
NUM_COLUMNS = 16
NUM_FEWER = 3
WAIT_S = 120.0


class InjectedError(Exception):
    """The fault. Defined here, importable by all ranks."""


class FailsToWrite(cloudckpt.ObjectStoreWriter):
    """On one rank."""

    def __init__(self, uri: str, rank: int) -> None:
        super().__init__(uri, overwrite=True)
        self.rank = rank

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == self.rank:
            raise InjectedError(f"rank {self.rank} cannot write")
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
        "version": version,
    }


def expect(uri: str, version: float) -> None:
    """That this is what all ranks load."""
    state = values(-1.0)
    cloudckpt.load(state, uri)
    assert_same(state, values(version))


def save_in_every_way(uri: str, failing_rank: int) -> None:
    """On each rank: the first save, one over it, one in the background, and one that fails on a single rank."""
    metadata = cloudckpt.save(values(1.0), uri)
    assert metadata.report is not None
    assert metadata.report.rank == dist.get_rank()
    expect(uri, 1.0)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.save(values(9.0), uri)
    cloudckpt.save(values(2.0), uri, overwrite=True)
    expect(uri, 2.0)
    handle = cloudckpt.async_save(values(3.0), uri, overwrite=True)
    handle.result(WAIT_S)
    dist.barrier()
    expect(uri, 3.0)
    with pytest.raises(dist.checkpoint.api.CheckpointException, match=rf"rank {failing_rank}\b") as caught:
        cloudckpt.save(values(4.0), storage_writer=FailsToWrite(uri, failing_rank))
    assert sorted(caught.value.failures) == [failing_rank]
    assert isinstance(caught.value.failures[failing_rank][0], InjectedError)
    expect(uri, 3.0)


def load_on_fewer(uri: str) -> None:
    """On each of other ranks than saved it: rows that lie across the bounds of theirs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        "rows": zeros(NUM_ROWS, NUM_COLUMNS, device_mesh=mesh, placements=[Shard(0)]),
        "shared": torch.zeros(100),
    }
    cloudckpt.load(state, uri)
    assert torch.equal(state["rows"].full_tensor(), rows(3.0))
    assert torch.equal(state["shared"], torch.full((100,), 3.0))


def check_many_ranks(place: Place, *, num_ranks: int, timeout_s: float) -> None:
    """All of the above, and that of what failed or was replaced nothing is left."""
    uri = place.uri()
    run_ranks(save_in_every_way, uri, num_ranks - 3, world_size=num_ranks, timeout_s=timeout_s)
    run_ranks(load_on_fewer, uri, world_size=NUM_FEWER)
    assert len(place.manifest_keys()) == 1
    assert len(place.data_keys()) == num_ranks
    assert place.num_unfinished_uploads() == 0
