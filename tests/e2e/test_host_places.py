"""Ranks whose fast place is a directory of each host die at any of their writes: the next job goes on from the newest
step that all hosts together have whole, or the bucket has, mixes nothing, and copies what the bucket is owed.

``CLOUDCKPT_KILLS=all`` kills at each write.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
import torch.distributed as dist
from tests.e2e.test_places import Unchanged, check_whole, left_by_gc, whole_steps
from tests.kit.options import make_options
from tests.kit.ranks import RankError, run_ranks
from tests.kit.two_places import damage
from tests.kit.wrapped import die

import cloudckpt
from cloudckpt import AsyncSave, CheckpointManager
from cloudckpt.errors import CheckpointError
from cloudckpt.testing.faults import Faults, Rule, Tell

pytestmark = [pytest.mark.faults, pytest.mark.multirank]

WAIT_S = 100.0
LAST_OF_FIRST = 4
LAST = 7
_WRITES = frozenset({"put", "create_multipart", "upload_part", "complete_multipart", "delete"})
Dying: TypeAlias = Literal["rank 0", "rank 1", "both"]
DYING: tuple[Dying, ...] = ("rank 0", "rank 1", "both")
Harm: TypeAlias = Literal["none", "replaced 0", "replaced 1", "damaged 0", "damaged 1"]
HARMS: tuple[Harm, ...] = ("none", "replaced 0", "none", "replaced 1")
IS_THOROUGH = os.environ.get("CLOUDCKPT_KILLS") == "all"
NUM_WRITES = 44
"""The writes of rank 1 in its first life, about. Rank 0 makes more."""
NUM_SENT = 6
"""Writes of one rank to the bucket in its first life, at least."""
LOSSES: tuple[Harm, ...] = ("none", "replaced 0", "none", "replaced 1", "damaged 0", "damaged 1")
SENDING_KILLS = [
    (at, dying, LOSSES[(at + 2 * number) % len(LOSSES)], order)
    for order in (0, 1)
    for at in range(1 + order, NUM_SENT, 1 if IS_THOROUGH else 3)
    for number, dying in enumerate(DYING)
]
KILLS = [
    (at, dying, HARMS[(at + number) % len(HARMS)])
    for at in range(2, NUM_WRITES, 1 if IS_THOROUGH else 7)
    for number, dying in enumerate(DYING)
]
NUM_WRITES_OF_REFERENCES = 56
KILLS_OF_REFERENCES = [
    (at, dying, LOSSES[(at + number) % len(LOSSES)])
    for at in range(2, NUM_WRITES_OF_REFERENCES, 1 if IS_THOROUGH else 4)
    for number, dying in enumerate(DYING)
]


def state_of(step: int) -> dict[str, Any]:
    """A shard of each rank, and what both hold: the larger tensors are spread over the ranks."""
    return {
        f"own-{dist.get_rank()}": torch.full((3000,), float(step)),
        "shared": torch.full((1500,), float(step)),
        "other": torch.full((1500,), float(step)),
        "step": step,
        f"frozen-{dist.get_rank()}": torch.full((2500,), float(min(step, 0))),
        "frozen-shared": torch.full((1500,), float(min(step, 0))),
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


def _first_life(directory: Path, kill: Rule, dying: Dying, of_place: str, how: tuple[bool, Unchanged]) -> None:
    rank, faults = dist.get_rank(), Faults(kill)
    async_, unchanged = how
    is_dying = dying in ("both", f"rank {rank}")
    options = make_options(
        tile_bytes=4096,
        object_bytes=8192,
        part_bytes=8192,
        timeout_s=5.0,
        unchanged=unchanged,
        wrap_store=lambda inner: faults(inner) if is_dying and of_place in inner.uri else inner,
    )
    with manager_of(directory, async_=async_, options=options) as manager:
        manager.restore(state_of(-1))
        for step in range(1, LAST_OF_FIRST + 1):
            made = manager.save(step, state_of(step))
            if isinstance(made, AsyncSave):
                made.result(WAIT_S)
            if rank == 0:
                (directory / f"committed-{step}").touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLife:
    """The results of the job that was started again."""

    restored: int | None
    in_bucket: frozenset[int]
    """The whole steps there, once what was owed by the first life is copied."""
    lack: str
    """The manager's words about what the bucket lacks at the end."""


def _second_life(directory: Path, unchanged: Unchanged) -> SecondLife:
    manager = manager_of(directory, options=make_options(tile_bytes=4096, timeout_s=16.0, unchanged=unchanged))
    state = state_of(-1)
    found = manager.restore(state)
    if found is not None:
        check_whole(state, found.step)
    manager.wait(WAIT_S)
    dist.barrier()
    in_bucket = frozenset(whole_steps(directory / "bucket"))
    for step in range(1 if found is None else found.step + 1, LAST + 1):
        manager.save(step, state_of(step), overwrite=True)
    lack = ""
    try:
        manager.close(WAIT_S)
    except CheckpointError as error:
        lack = str(error)
    dist.barrier()
    state = state_of(-1)
    last = manager_of(directory).restore(state)
    assert last is not None
    assert last.step == LAST
    check_whole(state, LAST)
    of_bucket = CheckpointManager(directory / "bucket")
    for info in of_bucket.steps():
        state = state_of(-1)
        of_bucket.restore(state, info.step)
        check_whole(state, info.step)
    return SecondLife(restored=None if found is None else found.step, in_bucket=in_bucket, lack=lack)


def whole_steps_of_hosts(directory: Path) -> set[int]:
    """The steps that the directories of all hosts make up, put together in one and read by `verify` alone."""
    merged = directory / "merged"
    found: set[int] = set()
    for host in (0, 1):
        shutil.rmtree(merged, ignore_errors=True)
        for other in (1 - host, host):  # the manifests are those of `host`
            if fast_of(directory, other).exists():
                keep = shutil.ignore_patterns("manifest*") if other != host else None
                shutil.copytree(fast_of(directory, other), merged, ignore=keep, dirs_exist_ok=True)
        found |= whole_steps(merged).keys()
    shutil.rmtree(merged, ignore_errors=True)
    return found


def check_kill(
    directory: Path,
    kill: Rule,
    dying: Dying,
    harm: Harm,
    *,
    async_: bool,
    grace_s: float,
    of_place: str = "",
    unchanged: Unchanged = "send",
) -> None:
    with pytest.raises(RankError):  # else it made fewer writes, and nothing was tried
        run_ranks(_first_life, directory, kill, dying, of_place, (async_, unchanged), world_size=2, grace_s=grace_s)
    committed = [int(path.name.rpartition("-")[2]) for path in directory.glob("committed-*")]
    near, far = whole_steps_of_hosts(directory), set(whole_steps(directory / "bucket"))
    assert max(near | far, default=0) >= max(committed, default=0)
    assert 3 in near | far or max(committed, default=0) < 3  # it is owed
    what, _, host = harm.partition(" ")
    if what == "replaced":
        shutil.rmtree(fast_of(directory, int(host)), ignore_errors=True)
    elif what == "damaged":
        for path in sorted(fast_of(directory, int(host)).glob("step-3/data/*/*.safetensors"))[:1]:
            damage(path)
    near = whole_steps_of_hosts(directory)
    has_steps = any(
        cloudckpt.list_checkpoints(fast_of(directory, host)) for host in (0, 1) if fast_of(directory, host).exists()
    )
    if not near | far and has_steps:
        return  # it raises that no step can be loaded, as with any place
    lives = run_ranks(_second_life, directory, unchanged, world_size=2)
    assert {life.restored for life in lives} == {max(near | far, default=None)}
    if 3 in near | far:  # whatever one host, or the bucket, lacked of it
        assert 3 in lives[0].in_bucket
        assert lives[0].lack == lives[1].lack == ""
    elif lives[0].lack:
        assert "step-3: " in lives[0].lack
    else:  # it was saved again
        assert {3, 6} <= set(whole_steps(directory / "bucket"))
    for place in (fast_of(directory, 0), fast_of(directory, 1), directory / "bucket"):
        files, named = left_by_gc(place)
        assert files <= named


@pytest.mark.parametrize(("at", "dying", "harm"), KILLS)
def test_a_killed_job_resumes_from_the_newest_step_of_all_hosts(
    tmp_path: Path, at: int, dying: Dying, harm: Harm
) -> None:
    """If this fails, a crash in a save or a removal costs a step that the table of places.md promises, or mixes two."""
    kill = Rule(fault=Tell(after=die), operations=_WRITES, skip=at - 1)
    check_kill(tmp_path, kill, dying, harm, async_=at % 2 == 0, grace_s=0)


@pytest.mark.parametrize(("at", "dying", "harm", "order"), SENDING_KILLS)
def test_a_copy_that_is_killed_is_finished_by_the_next_job(
    tmp_path: Path, at: int, dying: Dying, harm: Harm, order: int
) -> None:
    """If this fails, a crash in a drain leaves the bucket without a step that the hosts have, or with a part of one."""
    fault = Tell(after=die) if order else Tell(before=die)
    kill = Rule(fault=fault, operations=_WRITES, skip=at - 1)
    check_kill(tmp_path, kill, dying, harm, async_=at % 2 == 0, grace_s=8.0 * (at % 2), of_place="/bucket/step-")


@pytest.mark.parametrize(("at", "dying", "harm"), KILLS_OF_REFERENCES)
def test_a_killed_job_that_names_what_has_not_changed_loses_nothing(
    tmp_path: Path, at: int, dying: Dying, harm: Harm
) -> None:
    """If this fails, a step names data that a crash has kept from a host or the bucket, or that a removal has taken."""
    kill = Rule(fault=Tell(after=die), operations=_WRITES, skip=at - 1)
    check_kill(tmp_path, kill, dying, harm, async_=at % 2 == 0, grace_s=0, unchanged="reference")


@pytest.mark.parametrize("dying", ["rank 0", "rank 1"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_ranks_that_outlive_a_death_at_the_manifest_keep_the_step(
    tmp_path: Path, dying: Dying, moment: Literal["before", "after"]
) -> None:
    """If this fails, a rank takes a save that is committed on another host for failed, and removes its part of it."""
    kill = Rule(fault=Tell(**{moment: die}), operations={"put"}, key="manifest", skip=1)
    check_kill(tmp_path, kill, dying, "none", async_=False, grace_s=20.0, of_place="/fast")
