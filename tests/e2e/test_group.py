"""The ranks' group, as torch looks at it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from torch.distributed.checkpoint.utils import _DistWrapper

import cloudckpt
from cloudckpt.distributed import guarded_group

pytestmark = pytest.mark.multirank


def own_group() -> Any:
    (guard,) = guarded_group._guards
    return guard._group()


def make_each_collective(root: str) -> None:
    cloudckpt.save({f"own-{dist.get_rank()}": torch.ones(10)}, f"{root}/c")
    group = own_group()
    met: list[str] = []
    group.rendezvous.barrier = lambda: met.append(name)  # type: ignore[method-assign]  # the save is over: nobody gives signs
    wrapper = _DistWrapper(group, use_dist=True, coordinator_rank=0)
    rank, is_first = wrapper.get_rank(), wrapper.is_coordinator
    calls: dict[str, tuple[Callable[[], object], object]] = {
        "broadcast_object": (lambda: wrapper.broadcast_object("of 0" if is_first else None), "of 0"),
        "gather_object": (lambda: wrapper.gather_object(rank), [0, 1] if is_first else None),
        "all_gather_object": (lambda: wrapper.all_gather_object(rank), [0, 1]),
        "scatter_object": (lambda: wrapper.scatter_object([5, 6] if is_first else None), 5 + rank),
        "reduce_scatter": (lambda: wrapper.reduce_scatter("step", lambda: rank, lambda ranks: [sum(ranks)] * 2), 1),
        "all_reduce": (lambda: wrapper.all_reduce("step", lambda: rank, sum), 1),
        "all_gather": (lambda: wrapper.all_gather("step", lambda: rank), [0, 1]),
        "broadcast": (lambda: wrapper.broadcast("step", lambda: "of 0"), "of 0"),
    }
    assert {name for name in dir(_DistWrapper) if not name.startswith(("_", "get_"))} == calls.keys() | {"barrier"}
    for name, (call, expected) in calls.items():
        assert call() == expected, name
        assert name in met


def test_ranks_meet_before_each_collective_of_dcps(tmp_path: Path) -> None:
    """If this fails, torch makes a collective in another way, in which a lost rank is waited for for half an hour."""
    run_ranks(make_each_collective, str(tmp_path), world_size=2)
