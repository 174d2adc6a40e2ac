"""A job with a fast place dies at any of its writes, and loses what is in a place: the next one goes on from the newest
step that is whole somewhere, and the bucket gets what it is owed.

``CLOUDCKPT_KILLS=all`` kills at each write, with each kind of loss.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
import torch.distributed as dist
from tests.kit.options import make_options
from tests.kit.ranks import RankError, run_ranks
from tests.kit.wrapped import die

import cloudckpt
from cloudckpt import AsyncSave, CheckpointManager
from cloudckpt.errors import CheckpointError
from cloudckpt.stores.base import Store
from cloudckpt.testing.faults import Faults, Rule, Tell

pytestmark = [pytest.mark.faults, pytest.mark.multirank]

WAIT_S = 100.0
LAST = 7
"""Number of the last step of the second life."""
LAST_OF_FIRST = 4
_WRITES = frozenset({"put", "create_multipart", "upload_part", "complete_multipart", "delete"})
Harm: TypeAlias = Literal["none", "no fast place", "damaged nearby"]
Unchanged: TypeAlias = Literal["send", "reference"]
HARMS: tuple[Harm, ...] = ("none", "no fast place", "damaged nearby")
IS_THOROUGH = os.environ.get("CLOUDCKPT_KILLS") == "all"
NUM_WRITES = 74
"""The writes of one rank in its first life, about."""
NUM_WRITES_OF_REFERENCES = 78
KILLS = [
    (at, harm)
    for at in range(1, NUM_WRITES, 1 if IS_THOROUGH else 4)
    for number, harm in enumerate(HARMS)
    if IS_THOROUGH or at // 4 % len(HARMS) == number
]


def state_of(step: int) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        f"own-{rank}": torch.full((3000,), float(step)),
        "shared": torch.full((100,), float(step)),
        "step": step,
        f"frozen-{rank}": torch.full((2000,), float(min(step, 0))),
    }


def check_whole(state: dict[str, Any], step: int) -> None:
    for name, value in state.items():
        numbers = set(value.tolist()) if isinstance(value, torch.Tensor) else {value}
        assert numbers == {0 if name.startswith("frozen") else step}, name


def manager_of(directory: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(
        directory / "bucket",
        save_every=2,
        keep_last=1,
        fast=directory / "fast",
        fast_every=1,
        fast_keep=1,
        **settings,
    )


def _first_life(directory: Path, at: int, async_: bool, unchanged: Unchanged) -> None:  # noqa: FBT001
    rank = dist.get_rank() if dist.is_initialized() else 0
    kill = Rule(fault=Tell(after=die), operations=_WRITES, skip=at - 1)
    more: dict[str, Any] = {"wrap_store": Faults(kill)} if rank == 0 else {}
    options = make_options(tile_bytes=4096, object_bytes=8192, part_bytes=8192, unchanged=unchanged, **more)
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
    newest_in_bucket: int
    """The newest whole step there, once what was owed by the first life is copied."""
    lack: str
    """The manager's words about what the bucket lacks at the end."""


def _second_life(directory: Path, can_restore: bool, unchanged: Unchanged) -> SecondLife | None:  # noqa: FBT001
    manager = manager_of(directory, options=make_options(tile_bytes=4096, unchanged=unchanged))
    state = state_of(-1)
    if not can_restore:
        with pytest.raises(cloudckpt.CorruptCheckpointError):
            manager.restore(state)
        return None
    found = manager.restore(state)
    if found is not None:
        check_whole(state, found.step)
    manager.wait(WAIT_S)
    newest_in_bucket = max(whole_steps(directory / "bucket"), default=-1)
    for step in range(1 if found is None else found.step + 1, LAST + 1):
        # What is damaged, or was committed after the step that is gone, may be there.
        manager.save(step, state_of(step), overwrite=True)
    lack = ""
    try:
        manager.close(WAIT_S)
    except CheckpointError as error:
        lack = str(error)
    return SecondLife(restored=None if found is None else found.step, newest_in_bucket=newest_in_bucket, lack=lack)


def whole_steps(place: Path) -> dict[int, str]:
    """The steps there of which each byte is right, read by `verify` alone."""
    found = {}
    for info in cloudckpt.list_checkpoints(place) if place.exists() else []:
        with contextlib.suppress(cloudckpt.CorruptCheckpointError):
            cloudckpt.verify(info.uri)
            found[int(info.name.split("-")[1])] = info.uri
    return found


def names_in(place: Path) -> list[str]:
    return [info.name for info in cloudckpt.list_checkpoints(place)] if place.exists() else []


def is_owed(step: Path) -> bool:
    """The manifest says that the bucket is to have the step."""
    content = max(step.glob("manifest*.json"), key=lambda path: path.stat().st_size).read_bytes()
    return bool(json.loads(content)["metadata"]["fast"]["is_owed"])


def num_attempts(step: Path) -> int:
    return len(list((step / "data").iterdir()))


def damage_newest(fast: Path) -> None:
    steps = whole_steps(fast)
    if not steps:
        return
    path = max(path for path in Path(steps[max(steps)], "data").rglob("*") if path.is_file())
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def left_by_gc(place: Path) -> tuple[set[str], set[str]]:
    """Return the files after a day, which gc with an age of 0 stands for, and the files that the manifests name."""
    for _ in range(2):  # the first may leave fences
        cloudckpt.gc(place, older_than=0, dry_run=False)
    named = set()
    for path in place.glob("step-*/manifest*.json"):
        name, manifest = path.parent.name, json.loads(path.read_bytes())
        objects = [(stored.get("folder") or name, stored["key"]) for stored in manifest.get("objects", [])]
        named |= {f"{name}/{path.name}", *(f"{holder}/{key}" for holder, key in objects)}  # a fence has none
        holders = {holder for holder, _ in objects} - {name}
        named |= {f"{holder}/data/{manifest['attempt']}/{name}.claim" for holder in holders}
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}, named


def check_kill(
    directory: Path, at: int, harm: Harm, world_size: int, *, async_: bool, unchanged: Unchanged = "send"
) -> None:
    fast, root = directory / "fast", directory / "bucket"
    with pytest.raises(RankError):  # else it made fewer writes than `at`, and nothing was tried
        run_ranks(
            _first_life,
            directory,
            at,
            async_,
            unchanged,
            world_size=world_size,
            grace_s=0,
            process_group=world_size > 1,
        )
    if harm == "no fast place":
        shutil.rmtree(fast, ignore_errors=True)
    elif harm == "damaged nearby":
        damage_newest(fast)
    near, far = whole_steps(fast), whole_steps(root)
    expected = max([*near, *far], default=None)
    # The bucket keeps the newest of all that was saved for it.
    promised = max([*(step for step, uri in near.items() if is_owed(Path(uri))), *far], default=-1)
    committed = [int(path.name.rpartition("-")[2]) for path in directory.glob("committed-*")]
    if harm == "none":
        assert (expected or 0) >= max(committed, default=0)
    can_restore = expected is not None or not names_in(fast)
    life, *_ = run_ranks(
        _second_life, directory, can_restore, unchanged, world_size=world_size, process_group=world_size > 1
    )
    if not can_restore:
        return
    assert life.restored == expected
    assert life.newest_in_bucket >= promised  # what a dead copy had sent may complete one that is damaged nearby
    assert life.lack == "" or (harm == "damaged nearby" and "is damaged" in life.lack)
    kept = whole_steps(root)
    assert LAST - 1 in kept
    # For a day, what the dead have left in a step's folder could be of a save that lives, and keeps it.
    assert all(num_attempts(Path(kept[step])) > 1 for step in kept.keys() - {LAST - 1})
    for place in (fast, root):
        files, named = left_by_gc(place)
        assert files == named
    assert whole_steps(root) == kept


def _life_that_is_told_to_stop(directory: Path, deadline_s: float, bucket_answers: bool) -> None:  # noqa: FBT001
    """A job that saves to the fast place alone until SIGTERM comes, and then uses the time that is left."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another handler, such as that of coverage, would end it
    never = threading.Event()
    hang = Rule(fault=Tell(before=lambda _: never.wait()), operations=_WRITES, times=None)

    def wrap(store: Store) -> Store:
        return store if bucket_answers or "/bucket" not in store.uri else Faults(hang)(store)

    manager = CheckpointManager(
        directory / "bucket",
        save_every=10**6,
        fast=directory / "fast",
        fast_every=1,
        options=make_options(wrap_store=wrap),
    )
    with cloudckpt.on_sigterm(deadline_s=deadline_s) as preemption:
        for step in itertools.count(1):
            manager.save(step, state_of(step))
            manager.wait(WAIT_S)
            (directory / f"saved-{step}").touch()
            if preemption.agreed():
                report = preemption.finish(lambda step=step: manager.save(step, state_of(step), force=True))
                (directory / f"last-{step}-{report.last}").touch()
                with contextlib.suppress(TimeoutError):
                    manager.close(preemption.remaining_s)
                os.kill(os.getpid(), signal.SIGKILL)  # as the scheduler does


@pytest.mark.parametrize("bucket_answers", [True, False])
def test_the_last_save_before_a_host_goes_away_uses_the_time_that_is_left(
    tmp_path: Path, *, bucket_answers: bool
) -> None:
    """If this fails, a job that is told to stop sends its last step to the bucket alone, and has too little time for
    it; or it does not copy it there in the time that is left; or the next job does not copy it.
    """
    deadline_s = WAIT_S if bucket_answers else 3.0
    job = multiprocessing.get_context("spawn").Process(
        target=_life_that_is_told_to_stop, args=(tmp_path, deadline_s, bucket_answers)
    )
    job.start()
    try:
        ends_at_s = time.monotonic() + WAIT_S
        while not (tmp_path / "saved-2").exists():
            assert job.is_alive()
            assert time.monotonic() < ends_at_s
        job.terminate()
        job.join(WAIT_S)
    finally:
        job.kill()
    assert job.exitcode == -signal.SIGKILL
    (last,) = tmp_path.glob("last-*")
    _, number, outcome = last.name.split("-")
    step = int(number)
    assert outcome == "committed"
    assert is_owed(Path(whole_steps(tmp_path / "fast")[step]))
    assert list(whole_steps(tmp_path / "bucket")) == ([step] if bucket_answers else [])
    can_restore = True
    (life,) = run_ranks(_second_life, tmp_path, can_restore, "send", world_size=1, process_group=False)
    assert (life.restored, life.newest_in_bucket) == (step, step)


@pytest.mark.parametrize(("at", "harm"), KILLS)
def test_a_killed_job_resumes_from_the_newest_step_of_both_places(tmp_path: Path, at: int, harm: Harm) -> None:
    """If this fails, a crash in a save, a copy to the bucket or a removal costs a step that the table of places.md
    promises, mixes two steps, or leaves the bucket without what was saved for it.
    """
    check_kill(tmp_path, at, harm, 1, async_=at % 2 == 0)


@pytest.mark.parametrize("at", range(2, NUM_WRITES, 6 if IS_THOROUGH else 18))
def test_two_ranks_that_die_go_on_from_the_newest_step_of_both_places(tmp_path: Path, at: int) -> None:
    """If this fails, what holds for one rank does not hold for two."""
    check_kill(tmp_path, at, "none", 2, async_=at % 4 == 0)


@pytest.mark.parametrize("at", range(2, NUM_WRITES_OF_REFERENCES, 1 if IS_THOROUGH else 9))
def test_a_killed_job_that_names_what_has_not_changed_loses_nothing(tmp_path: Path, at: int) -> None:
    """If this fails, a step of the bucket names data that a crash has kept from it, or that a removal has taken."""
    check_kill(tmp_path, at, HARMS[at % len(HARMS)], 1, async_=at % 2 == 0, unchanged="reference")
