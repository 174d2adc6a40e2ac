"""`CheckpointManager` on several ranks and in several jobs: elastic restarts, damage, readers, preemption, deaths."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.options import make_options
from tests.kit.places import Place
from tests.kit.ranks import RankError, run_ranks
from tests.kit.wrapped import die, watching
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import cloudckpt
from cloudckpt import CheckpointManager

WAIT_S = 100.0


def state_of(value: float) -> dict[str, Any]:
    """A tensor that all ranks share, one that each has, and a number."""
    whole = torch.full((13, 4), value)
    if dist.is_initialized():
        whole = distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return {"sharded": whole, "replicated": torch.full((5,), value), "step": int(value)}


def value_in(state: dict[str, Any]) -> float:
    """The one value that all of it holds."""
    sharded = state["sharded"]
    local = sharded.to_local() if isinstance(sharded, DTensor) else sharded
    values = {*local.flatten().tolist(), *state["replicated"].tolist(), float(state["step"])}
    assert len(values) == 1, "parts of several saves"
    return float(values.pop())


def restored(manager: CheckpointManager, step: int | None = None) -> int | None:
    state = state_of(-1.0)
    found = manager.restore(state, step)
    assert value_in(state) == (-1.0 if found is None else found.step)
    return None if found is None else found.step


def save_all(manager: CheckpointManager, *steps: int, **settings: Any) -> None:
    for step in steps:
        manager.save(step, state_of(float(step)), **settings)
        manager.wait(WAIT_S)


def numbers(manager: CheckpointManager) -> list[int]:
    return [info.step for info in manager.steps()]


# --- several ranks of one job


def _first_life(root: str) -> list[str]:
    with CheckpointManager(root, save_every=10, keep_last=2, keep_best=("loss", "min", 1)) as manager:
        assert restored(manager) is None
        for step in range(41):
            manager.save(step, state_of(float(step)), metrics={"loss": abs(step - 10)})
        manager.wait(WAIT_S)
        # It looks at what was committed when it began; the coordinator's is the one that removes.
        save_all(manager, 45, force=True)
    assert (manager.retention is not None) == (dist.get_rank() == 0)
    return [] if manager.retention is None else list(manager.retention.kept)


def _second_life(root: str) -> None:
    with CheckpointManager(root, keep_last=2) as manager:
        assert restored(manager) == 45
        with pytest.raises(
            cloudckpt.CheckpointNotFoundError, match=r"step 20 is not committed .* committed there: steps 10, 40, 45"
        ):
            manager.restore(state_of(-1.0), 20)
        assert restored(manager, 40) == 40
        best = manager.best("loss")
        assert best is not None
        assert (best.step, best.metrics) == (10, {"loss": 0.0})
        handle = manager.save(45, state_of(45.0))
        assert isinstance(handle, cloudckpt.AsyncSave)
        with pytest.raises(cloudckpt.CheckpointExistsError):
            handle.result(WAIT_S)
        save_all(manager, 50)
    dist.barrier()
    assert numbers(manager) == [45, 50]


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.every_store
def test_a_job_resumes_with_another_number_of_ranks(place: Place) -> None:
    """If this fails, an elastic restart loses its checkpoints, or ranks begin at different steps."""
    kept, *others = run_ranks(_first_life, place.root, world_size=2)
    assert others == [[]]
    assert kept == [f"{place.root}/step-{step}" for step in (45, 40, 10)]
    run_ranks(_second_life, place.root, world_size=3)
    run_ranks(_alone, place.root, world_size=1, process_group=False)


def _saves_by_time(root: str) -> list[int]:
    state = state_of(0.0)
    with CheckpointManager(root, save_every=timedelta(seconds=0.2)) as manager:
        manager.prepare(state)
        saved = []
        while len(saved) < 3:  # the ranks' clocks differ by what each waits for the other
            step = len(saved) and saved[-1] + 1
            while manager.save(step, state) is None:
                dist.barrier()
                step += 1
            saved.append(step)
    return saved


@pytest.mark.multirank
def test_ranks_save_the_same_steps_by_the_clock_of_one(place: Place) -> None:
    """If this fails, one rank saves and the others train on, each by its own clock."""
    one, other = run_ranks(_saves_by_time, place.root, world_size=2)
    assert one == other
    assert len({*one}) == 3
    with CheckpointManager(place.root) as manager:
        assert numbers(manager) == one


def _alone(root: str) -> None:
    assert restored(CheckpointManager(root)) == 50


def _passes_over_damage(root: str) -> list[str]:
    manager = CheckpointManager(root, keep_last=2, on_damaged="replace")
    state = state_of(-1.0)
    found = manager.restore(state)
    assert found is not None
    assert (found.step, value_in(state)) == (2, 2.0)
    save_all(manager, 3, 4)
    manager.close(WAIT_S)
    dist.barrier()
    assert numbers(manager) == [3, 4]
    assert restored(manager, 3) == 3
    return [one.uri for one in found.skipped]


def _saves(root: str, *steps: int) -> None:
    with CheckpointManager(root) as manager:
        save_all(manager, *steps)


@pytest.mark.multirank
def test_ranks_agree_on_what_is_damaged(place: Place) -> None:
    """If this fails, one rank that finds damage goes back a step and the others do not, or saves to another place."""
    run_ranks(_saves, place.root, 1, 2, 3, world_size=2)
    key = max(key for key in place.data_keys() if key.startswith("step-3/"))  # of the last rank
    place.write(key, place.read(key)[:-1])
    assert run_ranks(_passes_over_damage, place.root, world_size=2) == [[f"{place.root}/step-3"]] * 2
    assert {info.name for info in cloudckpt.list_checkpoints(place.root)} == {"step-3", "step-4"}


def _saves_its_restored_step(root: str) -> None:
    for async_ in (False, True):
        manager = CheckpointManager(root, async_=async_)
        assert restored(manager) == 2
        with pytest.raises(cloudckpt.CheckpointExistsError, match=r"restored step 2: continue .*step \+ 1"):
            save_all(manager, 2)


@pytest.mark.multirank
def test_ranks_that_save_their_restored_step_are_told_the_next(place: Place) -> None:
    """If this fails, a loop that is off by one after a restart is told to save to another root."""
    run_ranks(_saves, place.root, 2, world_size=2)
    run_ranks(_saves_its_restored_step, place.root, world_size=2)


# --- several jobs


def meet(scratch: Path, number: int, name: str) -> None:
    """Wait for the other process, with a bound."""
    (scratch / f"{name}-{number}").touch()
    store = dist.FileStore(str(scratch / f"{name}-store"), 2)
    store.set(str(number), "here")
    store.wait([str(1 - number)])


def _writes_or_reads(root: str, scratch: Path) -> int:
    number = int(os.environ["RANK"])
    last = 12
    if number == 0:
        with CheckpointManager(root, keep_last=1) as manager:
            save_all(manager, 0)
            meet(scratch, 0, "begin")
            save_all(manager, *range(1, last + 1))
        return last
    meet(scratch, 1, "begin")
    manager = CheckpointManager(root)
    seen = [-1]
    while seen[-1] != last:
        with contextlib.suppress(cloudckpt.CorruptCheckpointError):  # all that it found were gone, eight times
            step = restored(manager)  # which also looks that all of it is of one save
            assert step is not None, "it was taken for a fresh start"
            seen.append(step)
    assert seen == sorted(seen), "it went back"
    return len(seen)


@pytest.mark.faults
@pytest.mark.multirank
def test_retention_does_not_disturb_a_reader(place: Place, tmp_path: Path) -> None:
    """If this fails, evaluating beside training meets damage that is none, half a checkpoint, or a fresh start."""
    last, num_loads = run_ranks(_writes_or_reads, place.root, tmp_path, world_size=2, process_group=False)
    assert last == 12
    assert num_loads >= 2


# --- deaths


KILLS = [
    ("put", "manifest.1.json"),
    ("delete", "manifest.json"),
    ("delete", ".safetensors"),
]


def _dies_in_retention(root: str, operation: str, part_of_key: str) -> None:
    save_all(CheckpointManager(root), 1, 2, 3)
    options = make_options(wrap_store=watching(operation, key=re.escape(part_of_key), after=die))
    manager = CheckpointManager(root, keep_last=1, options=options)
    restored(manager)
    save_all(manager, 4)


@pytest.mark.faults
@pytest.mark.multirank
@pytest.mark.parametrize(("operation", "part_of_key"), KILLS, ids=["fence", "manifest", "data"])
def test_a_death_in_retention_loses_no_checkpoint(place: Place, operation: str, part_of_key: str) -> None:
    """If this fails, such a death leaves half a checkpoint for a whole one, loses a newer one, or blocks the next."""
    with pytest.raises(RankError, match=f"exit code -{int(signal.SIGKILL)}"):
        run_ranks(_dies_in_retention, place.root, operation, part_of_key, world_size=1, process_group=False, grace_s=0)
    for info in cloudckpt.list_checkpoints(place.root):
        cloudckpt.verify(info.uri)
    manager = CheckpointManager(place.root, keep_last=1)
    assert restored(manager) == 4
    assert set(numbers(manager)) - {1} == {2, 3, 4}
    save_all(manager, 5)
    assert manager.retention is not None
    assert manager.retention.failed == ()
    assert numbers(manager) == [5]
    for _ in range(2):  # where data had been left, the first puts a fence, which the second removes
        cloudckpt.gc(place.root, older_than=0, dry_run=False)
    assert {key.split("/")[0] for key in place.contents()} == {"step-5"}
    assert place.num_unfinished_uploads() == 0
