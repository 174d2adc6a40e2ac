"""A checkpoint on a path that one process overwrites again and again, and what others see of it."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt import CheckpointManager
from cloudckpt.errors import CheckpointChangedError

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
]

DURATION_S = 8.0


def state_of(number: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(number)), "number": number}


def overwrite(root: str, ends_at_s: float) -> int:
    torch.set_num_threads(1)
    number = 0
    while time.time() < ends_at_s:
        number += 1
        cloudckpt.save(state_of(number), f"{root}/step-2", no_dist=True, overwrite=True)
    return number


def load(root: str) -> bool:
    state = state_of(-1)
    cloudckpt.load(state, f"{root}/step-2", no_dist=True)
    return bool((state["w"] == state["number"]).all()) and state["number"] >= 0


def load_latest(root: str) -> bool:
    state = state_of(-1)
    report = cloudckpt.load_latest(state, root, no_dist=True)
    return report.uri.endswith("step-2") and not report.skipped


def restore(root: str) -> bool:
    with CheckpointManager(root, no_dist=True) as manager:
        restored = manager.restore(state_of(-1))
    return restored is not None and restored.step == 2 and not restored.skipped


def latest(root: str) -> bool:
    found = cloudckpt.latest(root)
    return found is not None and found.name == "step-2"


def list_all(root: str) -> bool:
    return [one.name for one in cloudckpt.list_checkpoints(root)] == ["step-1", "step-2"]


READERS: list[Callable[[str], bool]] = [load, load_latest, restore, latest, list_all]


def read(reader: Callable[[str], bool], root: str, ends_at_s: float) -> Counter[str]:
    """What came of each read; one that was overtaken again and again says so."""
    torch.set_num_threads(1)
    seen = Counter[str]()
    while time.time() < ends_at_s:
        try:
            seen["found" if reader(root) else "not found"] += 1
        except CheckpointChangedError:  # noqa: PERF203  # each read is many calls
            seen["changed"] += 1
    return seen


def test_readers_beside_a_hammering_overwriter_always_find_it(tmp_path: Path) -> None:
    """If this fails, a job that starts while its checkpoint is overwritten may start afresh, or go back a step."""
    root = str(tmp_path)
    cloudckpt.save(state_of(0), f"{root}/step-1", no_dist=True)
    cloudckpt.save(state_of(0), f"{root}/step-2", no_dist=True)
    ends_at_s = time.time() + DURATION_S
    with multiprocessing.get_context("forkserver").Pool(len(READERS) + 1) as pool:
        overwrites = pool.apply_async(overwrite, (root, ends_at_s))
        reads = {reader.__name__: pool.apply_async(read, (reader, root, ends_at_s)) for reader in READERS}
        seen = {name: answer.get(DURATION_S + 60) for name, answer in reads.items()}
        assert overwrites.get(60) > 0
    for name, counts in seen.items():
        assert set(counts) <= {"found", "changed"}, (name, counts)
        assert counts["found"], (name, counts)
