"""Ranks whose fast place is a directory of each host die at any of their writes: the next job goes on from the newest
step that all hosts together have whole, or the bucket has, and mixes nothing.

``CLOUDCKPT_KILLS=all`` kills at each write.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
import torch.distributed as dist
from tests.e2e.test_places import check_whole, files_in, whole_steps
from tests.kit.options import make_options
from tests.kit.ranks import RankError, run_ranks
from tests.kit.wrapped import die

import cloudckpt
from cloudckpt import AsyncSave, CheckpointManager
from cloudckpt.testing.faults import Faults, Rule, Tell

pytestmark = [pytest.mark.faults, pytest.mark.multirank]

WAIT_S = 100.0
LAST_OF_FIRST = 4
LAST = 7
_WRITES = frozenset({"put", "create_multipart", "upload_part", "complete_multipart", "delete"})
Dying: TypeAlias = Literal["rank 0", "rank 1", "both"]
DYING: tuple[Dying, ...] = ("rank 0", "rank 1", "both")
Harm: TypeAlias = Literal["none", "replaced 0", "replaced 1"]
HARMS: tuple[Harm, ...] = ("none", "replaced 0", "none", "replaced 1")
IS_THOROUGH = os.environ.get("CLOUDCKPT_KILLS") == "all"
NUM_WRITES = 40
"""Of rank 1, which makes fewer than rank 0, in its first life, about."""
KILLS = [
    (at, dying, HARMS[(at + number) % len(HARMS)])
    for at in range(2, NUM_WRITES, 1 if IS_THOROUGH else 7)
    for number, dying in enumerate(DYING)
]


def state_of(step: int) -> dict[str, Any]:
    """A shard of each rank, and what both hold: the larger tensors are spread over the ranks."""
    return {
        f"own-{dist.get_rank()}": torch.full((3000,), float(step)),
        "shared": torch.full((1500,), float(step)),
        "other": torch.full((1500,), float(step)),
        "step": step,
    }


def fast_of(directory: Path, host: int) -> Path:
    return directory / f"host-{host}" / "fast"


def manager_of(directory: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(
        directory / "bucket",
        save_every=3,
        fast=fast_of(directory, dist.get_rank()),
        fast_every=1,
        fast_keep=1,
        **settings,
    )


def _first_life(directory: Path, kill: Rule, dying: Dying, async_: bool) -> None:  # noqa: FBT001
    rank = dist.get_rank()
    more: dict[str, Any] = {"wrap_store": Faults(kill)} if dying in ("both", f"rank {rank}") else {}
    options = make_options(tile_bytes=4096, object_bytes=8192, part_bytes=8192, timeout_s=5.0, **more)
    with manager_of(directory, async_=async_, options=options) as manager:
        manager.restore(state_of(-1))
        for step in range(1, LAST_OF_FIRST + 1):
            made = manager.save(step, state_of(step))
            if isinstance(made, AsyncSave):
                made.result(WAIT_S)
            if rank == 0:
                (directory / f"committed-{step}").touch()


def _second_life(directory: Path) -> int | None:
    """Return the step that was restored."""
    with manager_of(directory) as manager:
        state = state_of(-1)
        found = manager.restore(state)
        if found is not None:
            check_whole(state, found.step)
        for step in range(1 if found is None else found.step + 1, LAST + 1):
            manager.save(step, state_of(step), overwrite=True)
    dist.barrier()
    state = state_of(-1)
    last = manager_of(directory).restore(state)
    assert last is not None
    assert last.step == LAST
    check_whole(state, LAST)
    return None if found is None else found.step


def whole_steps_of_hosts(directory: Path) -> set[int]:
    """The steps that the directories of all hosts make up, put together in one and read by `verify` alone."""
    merged = directory / "merged"
    found: set[int] = set()
    for host in (0, 1):
        for info in cloudckpt.list_checkpoints(fast_of(directory, host)) if fast_of(directory, host).exists() else []:
            shutil.rmtree(merged, ignore_errors=True)
            for other in (1 - host, host):  # the manifest is that of `host`
                source = fast_of(directory, other) / info.name
                if source.exists():
                    keep = shutil.ignore_patterns("manifest*") if other != host else None
                    shutil.copytree(source, merged, ignore=keep, dirs_exist_ok=True)
            with contextlib.suppress(cloudckpt.CorruptCheckpointError):
                cloudckpt.verify(merged)
                found.add(int(info.name.split("-")[1]))
    shutil.rmtree(merged, ignore_errors=True)
    return found


def check_nothing_left(place: Path) -> None:
    """After a day, which gc with an age of 0 stands for, a host has only what its manifests name."""
    for _ in range(2):  # the first may leave fences
        cloudckpt.gc(place, older_than=0, dry_run=False)
    named = set()
    for path in place.glob("step-*/manifest*.json"):
        keys = [stored["key"] for stored in json.loads(path.read_bytes()).get("objects", [])]  # a fence has none
        named |= {f"{path.parent.name}/{path.name}", *(f"{path.parent.name}/{key}" for key in keys)}
    assert files_in(place) <= named


def check_kill(directory: Path, kill: Rule, dying: Dying, harm: Harm, *, async_: bool, grace_s: float) -> None:
    with pytest.raises(RankError):  # else it made fewer writes, and nothing was tried
        run_ranks(_first_life, directory, kill, dying, async_, world_size=2, grace_s=grace_s)
    committed = [int(path.name.rpartition("-")[2]) for path in directory.glob("committed-*")]
    near, far = whole_steps_of_hosts(directory), set(whole_steps(directory / "bucket"))
    if harm == "none":
        assert max(near | far, default=0) >= max(committed, default=0)
    else:
        shutil.rmtree(fast_of(directory, int(harm[-1])), ignore_errors=True)
        near = whole_steps_of_hosts(directory)
        assert max(far, default=0) >= max((step for step in committed if step % 3 == 0), default=0)
    has_steps = any(
        cloudckpt.list_checkpoints(fast_of(directory, host)) for host in (0, 1) if fast_of(directory, host).exists()
    )
    if not near | far and has_steps:
        return  # it raises that no step can be loaded, as with any place
    restored, again = run_ranks(_second_life, directory, world_size=2)
    assert restored == again == max(near | far, default=None)
    for host in (0, 1):
        check_nothing_left(fast_of(directory, host))


@pytest.mark.parametrize(("at", "dying", "harm"), KILLS)
def test_a_killed_job_resumes_from_the_newest_step_of_all_hosts(
    tmp_path: Path, at: int, dying: Dying, harm: Harm
) -> None:
    """If this fails, a crash in a save or a removal costs a step that the table of places.md promises, or mixes two."""
    kill = Rule(fault=Tell(after=die), operations=_WRITES, skip=at - 1)
    check_kill(tmp_path, kill, dying, harm, async_=at % 2 == 0, grace_s=0)


@pytest.mark.parametrize("dying", ["rank 0", "rank 1"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_ranks_that_outlive_a_death_at_the_manifest_keep_the_step(
    tmp_path: Path, dying: Dying, moment: Literal["before", "after"]
) -> None:
    """If this fails, a rank takes a save that is committed on another host for failed, and removes its part of it."""
    kill = Rule(fault=Tell(**{moment: die}), operations={"put"}, key="manifest", skip=1)
    check_kill(tmp_path, kill, dying, "none", async_=False, grace_s=20.0)
