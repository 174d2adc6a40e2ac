"""`CheckpointManager(on_failure="warn")` on several ranks: whichever rank the store fails, all go on, or none does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from tests.kit.options import make_options
from tests.kit.places import Place
from tests.kit.ranks import run_ranks
from tests.kit.wrapped import Call, WrappedStore
from torch.distributed.checkpoint.api import CheckpointException

from cloudckpt import CheckpointManager
from cloudckpt.errors import AccessDeniedError
from cloudckpt.stores.base import Store

pytestmark = pytest.mark.multirank

_T = TypeVar("_T")
Broken = dict[int, tuple[str, str]]
"""For some steps: the operation that fails, and a part of the keys at which it does."""


class BreakingStore(WrappedStore):
    """Refuses the calls that `broken` names; a listing, once the manifest has been put."""

    def __init__(self, inner: Store, broken: Broken) -> None:
        super().__init__(inner)
        name = inner.uri.rpartition("/")[2]
        self._broken = next((what for step, what in broken.items() if name == f"step-{step}"), ("", ""))
        self._has_manifest = False

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        operation, part_of_key = self._broken
        is_due = operation != "list" or self._has_manifest
        if call.operation == operation and part_of_key in call.key and is_due:
            raise AccessDeniedError("refused", key=call.key, operation=operation)
        self._has_manifest |= call.operation == "put" and "manifest" in call.key
        return action()


def train(root: str, broken_by_rank: dict[int, Broken], last: int, way: str) -> tuple[str, list[str], list[int]]:
    """What ended it, the failures that it survived or died of, and the steps that are there."""
    rank = dist.get_rank()
    options = make_options(wrap_store=lambda store: BreakingStore(store, broken_by_rank.get(rank, {})))
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


class WaitingStore(WrappedStore):
    """Puts the data of the first step once somebody writes to `gate`."""

    def __init__(self, inner: Store, gate: Path) -> None:
        super().__init__(inner)
        self._gate = gate

    def around(self, call: Call, action: Callable[[], _T]) -> _T:
        if call.operation == "put" and "data/" in call.key and self.inner.uri.endswith("step-1"):
            self._gate.read_text()
        return action()


def train_beside_a_slow_save(root: str, gate: Path) -> tuple[list[str], list[int], list[int]]:
    """What the saves returned, the steps that were skipped, and those that are there."""
    rank = dist.get_rank()
    wrap_store = (lambda store: WaitingStore(store, gate)) if rank == 1 else None
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
