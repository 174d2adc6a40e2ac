"""Training with `CheckpointManager(on_failure="warn")` while the store is down, or hangs, and comes back.

What is promised: an outage costs the saves that were due in it, and nothing else. No step is removed meanwhile, no rank
stops, training waits for no longer than documented, a restore afterwards finds the newest step, and gc the rest.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.servers import Servers
from tests.integration.switch import Killer, ask, switch_of
from tests.kit.options import make_options
from tests.kit.ranks import run_ranks

import cloudckpt
from cloudckpt import CheckpointManager
from cloudckpt.options import MIB

PART_BYTES = 5 * MIB
TIMEOUT_S = 2.0
WAITS = 5
"""Four timeouts are what docs/manager.md says of a save that fails. The machine may be slow."""
FIRST_DOWN, LAST_DOWN, LAST = 4, 8, 12


def values(step: int) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    small = {f"small-{rank}-{n}": torch.full((MIB // 4,), float(step)) for n in range(2)}
    return {**small, f"own-{rank}": torch.full((3 * PART_BYTES // 4,), float(step)), "step": step}


def numbers(manager: CheckpointManager) -> list[int]:
    return [info.step for info in manager.steps()]


class KillsInSave:
    """Kills the server in the middle of the save of one step."""

    def __init__(self, address: str) -> None:
        self._killer = Killer(address=address, rank=1, moment="save.part_uploaded", nth=2, restarts=False)

    def __call__(self, event: cloudckpt.Event) -> None:
        if event.uri.endswith(f"/step-{FIRST_DOWN}"):
            self._killer(event)


def train(root: str, storage_options: dict[str, Any], address: str, way: str) -> tuple[list[int], list[list[int]]]:
    """The steps that were not saved, and those that are there when the store is back, and in the end."""
    options = make_options(
        storage_options=storage_options,
        timeout_s=10 * TIMEOUT_S,  # ranks wait for each other, too
        retries=1,
        connections=1,
        part_bytes=PART_BYTES,
        on_event=KillsInSave(address),
    )
    there = []
    with CheckpointManager(
        root, on_failure="warn", max_failures=10, keep_last=2, async_=way == "async", options=options
    ) as manager:
        for step in range(1, LAST + 1):
            if step == LAST_DOWN + 1:
                manager.wait()
                dist.barrier()
                if dist.get_rank() == 0:
                    ask(address, "restart")
                dist.barrier()
                there.append(numbers(manager))
            manager.save(step, values(step))
            dist.barrier()  # as training does
            if step == FIRST_DOWN - 1:
                manager.wait()
                dist.barrier()
        manager.wait()
    dist.barrier()
    there.append(numbers(manager))
    state = values(-1)
    restored = CheckpointManager(root, options=options).restore(state)
    assert restored is not None
    assert restored.step == LAST == state["step"]
    assert torch.equal(state[f"own-{dist.get_rank()}"], values(LAST)[f"own-{dist.get_rank()}"])
    return [failure.step for failure in manager.failures], there


@pytest.mark.multirank
@pytest.mark.parametrize("way", ["async", "sync"])
def test_an_outage_costs_its_saves_and_nothing_else(servers: Servers, tmp_path: Path, way: str) -> None:
    """If this fails, ten minutes without a store end a training, or cost older or later checkpoints."""
    server = servers.up("rgw")
    bucket = f"down-{uuid.uuid4().hex}"
    server.create_bucket(bucket)
    root = f"s3://{bucket}/run"
    with switch_of(server, tmp_path) as switch:
        results = run_ranks(train, root, server.storage_options, switch.address, way, world_size=2, timeout_s=300.0)
        assert switch.has_killed
        assert switch.has_restarted
    lost = list(range(FIRST_DOWN, LAST_DOWN + 1))
    before, after = [FIRST_DOWN - 2, FIRST_DOWN - 1], [LAST - 1, LAST]
    assert results == [(lost, [before, after])] * 2
    options = make_options(storage_options=server.storage_options)
    found = cloudckpt.gc(root, older_than=0, options=options, dry_run=False)
    assert any(f"/step-{FIRST_DOWN}/" in key for key in found.keys) or found.num_uploads, found
    # If rank 0 had sent a whole object before the kill, gc has put a fence before it removed that.
    fences = cloudckpt.gc(root, older_than=0, options=options, dry_run=False)
    assert set(fences.keys) <= {f"step-{FIRST_DOWN}/manifest.json"}
    assert fences.num_uploads == 0
    again = cloudckpt.gc(root, older_than=0, options=options)
    assert (again.keys, again.num_uploads) == ((), 0)


@pytest.mark.parametrize("moment", ["save.set_up", "save.object_uploaded", "save.part_uploaded", "save.committing"])
def test_training_waits_no_longer_than_documented(servers: Servers, moment: str) -> None:
    """If this fails, a store that hangs holds up training for longer than docs/manager.md says."""
    server = servers.up("moto")
    bucket = f"hangs-{uuid.uuid4().hex}"
    server.create_bucket(bucket)
    pid = server.pid

    def hang(event: cloudckpt.Event) -> None:
        if event.name == moment and event.uri.endswith("step-2"):
            os.kill(pid, signal.SIGSTOP)

    options = make_options(
        storage_options=server.storage_options,
        timeout_s=TIMEOUT_S,
        connections=1,
        part_bytes=PART_BYTES,
        object_bytes=MIB,
        on_event=hang,
    )
    manager = CheckpointManager(f"s3://{bucket}/run", on_failure="warn", options=options)
    manager.save(1, values(1))
    manager.wait()
    waits_s = []
    try:
        for step in (2, 3, 4):
            begun_s = time.monotonic()
            manager.save(step, values(step)) if step < 4 else manager.wait()
            waits_s.append(time.monotonic() - begun_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    manager.save(4, values(4))
    manager.close()
    assert [failure.step for failure in manager.failures] == [2, 3]
    assert set(numbers(manager)) - {2} == {1, 4}  # a commit that was sent may arrive once the server goes on
    assert waits_s[0] < TIMEOUT_S  # it goes on beside training
    assert max(waits_s) < WAITS * TIMEOUT_S
