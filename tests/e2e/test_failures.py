"""`CheckpointManager(on_failure="warn")` on several ranks: whichever rank the store fails, all go on, or none does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.kit.options import make_options
from tests.kit.places import Place
from tests.kit.ranks import run_ranks
from tests.kit.wrapped import Call, FaultyStore
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt import CheckpointManager
from cloudckpt.errors import AccessDeniedError
from cloudckpt.stores.base import Store
from cloudckpt.testing.faults import Faults, Rule, Tell

pytestmark = pytest.mark.multirank

Broken = dict[int, tuple[str, str]]
"""For some steps: the operation that fails, and a part of the keys at which it does."""


def break_calls(inner: Store, broken: Broken) -> FaultyStore:
    """Refuse the calls that `broken` names; a listing, once the manifest has been put."""
    name = inner.uri.rpartition("/")[2]
    operation, part_of_key = next((what for step, what in broken.items() if name == f"step-{step}"), ("", ""))

    def find_error(call: Call) -> AccessDeniedError | None:
        has_manifest = any(one.operation == "put" and "manifest" in one.key for one in store.calls)
        if call.operation != operation or part_of_key not in call.key or (operation == "list" and not has_manifest):
            return None
        return AccessDeniedError("refused", key=call.key, operation=operation)

    store = FaultyStore(inner, find_error=find_error)
    return store


def train(root: str, broken_by_rank: dict[int, Broken], last: int, way: str) -> tuple[str, list[str], list[int]]:
    """Return what ended it, the failures that it survived or died of, and the steps that are there."""
    rank = dist.get_rank()
    options = make_options(wrap_store=lambda store: break_calls(store, broken_by_rank.get(rank, {})))
    manager = CheckpointManager(root, on_failure="warn", keep_last=2, async_=way == "async", options=options)
    end = "done"
    try:
        for step in range(1, last + 1):
            manager.save(step, {"shared": torch.full((9,), float(step)), f"own-{rank}": torch.ones(3)})
            dist.barrier()  # as training does: a rank that decides alone is missing here
        manager.wait()
    except CheckpointException as error:
        end = f"{type(error).__name__} at {step}"
    failures = [f"{failure.step} {type(failure.error).__name__}" for failure in manager.failures]
    dist.barrier()
    return end, failures, [info.step for info in manager.steps()]


DATA, COMMIT, LOOK = ("put", "data/"), ("put", "manifest"), ("list", "")


@pytest.mark.parametrize("way", ["async", "sync"])
def test_all_ranks_decide_alike(place: Place, way: str) -> None:
    """If this fails, one rank trains on and another stops, so that the job hangs; or a failed save costs others."""
    broken: dict[int, Broken] = {0: {2: DATA, 6: COMMIT, 7: LOOK, 11: DATA}, 1: {4: DATA, 10: DATA, 12: DATA}}
    results = run_ranks(train, place.root, broken, 13, way, world_size=2)
    failures = [f"{step} AccessDeniedError" for step in (2, 4, 6, 7, 10, 11, 12)]
    failures[3] = "7 CommitUnknownError"
    # The next save finds the failure of one in the background.
    end = "AccessDeniedError at 12" if way == "sync" else "AccessDeniedError at 13"
    assert results == [(end, failures, [8, 9])] * 2


def train_beside_a_slow_save(root: str, gate: Path) -> tuple[list[str], list[int], list[int]]:
    """Return what the saves returned, the steps that were skipped, and those that are there."""
    rank = dist.get_rank()
    # The data of the first step on rank 1 is put once somebody writes to `gate`.
    wait = Rule(fault=Tell(before=lambda _: gate.read_text()), operations={"put"}, key="data/")
    wrap_store = Faults(wait) if rank == 1 else None
    options = make_options(async_in_flight="raise", wrap_store=wrap_store)
    manager = CheckpointManager(root, on_failure="warn", max_failures=2, options=options)
    made = []
    for step in range(1, 6):
        made.append(type(manager.save(step, {f"own-{rank}": torch.ones(3)})).__name__)
        dist.barrier()
        if step == 4:
            if rank == 0:
                gate.write_text("go on")
            manager.wait()
    manager.close()
    dist.barrier()
    return made, [failure.step for failure in manager.failures], [info.step for info in manager.steps()]


def test_all_ranks_skip_alike(place: Place, tmp_path: Path) -> None:
    """If this fails, a save that takes long on one rank makes it skip other saves than its peers, or raise alone."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    results = run_ranks(train_beside_a_slow_save, place.root, gate, world_size=2)
    assert results == [(["AsyncSave", *["SaveFailure"] * 3, "AsyncSave"], [2, 3, 4], [1, 5])] * 2
