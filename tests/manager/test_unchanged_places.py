"""A fast place whose saves name what has not changed: what both places get, and what each can be loaded without."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.options import make_options
from tests.kit.two_places import Places, damage, names, unwritable, warnings
from tests.manager.conftest import WAIT_S

import cloudckpt
from cloudckpt import CheckpointManager
from cloudckpt.errors import CheckpointError
from cloudckpt.manager.drain import drain
from cloudckpt.options import KIB

NUM_FROZEN = 49_000
NUM_TRAINED = 1_000
MODEL_BYTES = 4 * (NUM_FROZEN + NUM_TRAINED)
_WRITES = ("put", "upload_part", "copy_from")


def state_of(step: int, frozen: float = 1.0) -> dict[str, Any]:
    """A model of which 2 % train."""
    return {
        **{f"frozen.{i}": torch.full((NUM_FROZEN // 7,), frozen + i) for i in range(7)},
        "trained": torch.full((NUM_TRAINED,), float(step)),
        "step": step,
    }


class Job:
    """One run in a directory: each `start` is a process that begins anew."""

    def __init__(self, directory: Path) -> None:
        self.fast, self.root, self.places = directory / "fast", directory / "bucket", Places()

    def start(self, **settings: Any) -> CheckpointManager:
        options = make_options(unchanged="reference", part_bytes=64 * KIB, tile_bytes=4 * KIB, wrap_store=self.places)
        usual: dict[str, Any] = {"fast": self.fast, "save_every": 2, "fast_every": 1, "fast_keep": 2, "keep_last": 2}
        return CheckpointManager(self.root, options=options, **usual | settings)

    def save(self, manager: CheckpointManager, step: int, frozen: float = 1.0) -> tuple[int, int]:
        """Save a step, and return the bytes of data that the fast place and the root get."""
        before = [self.places.num_bytes(place, *_WRITES) for place in (self.fast, self.root)]
        manager.save(step, state_of(step, frozen))
        manager.wait(WAIT_S)
        after = [self.places.num_bytes(place, *_WRITES) for place in (self.fast, self.root)]
        return after[0] - before[0], after[1] - before[1]

    def check(self, *steps: int, frozen: float = 1.0) -> None:
        """Load steps as a process without the fast place does, and with it."""
        for step, fast in itertools.product(steps, (self.fast, None)):
            state = state_of(-1, -1.0)
            with self.start(**{} if fast else {"fast": None, "fast_every": None, "fast_keep": 2}) as manager:
                assert manager.restore(state, step) is not None
            wanted = state_of(step, frozen)
            for name, value in state.items():
                assert torch.equal(value, wanted[name]) if isinstance(value, torch.Tensor) else value == wanted[name]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_both_places_get_what_trains(job: Job) -> None:
    """If this fails, each step of an adapter's training sends the whole model to the drive or to the bucket."""
    with job.start() as manager:
        sent = {step: job.save(manager, step) for step in range(2, 9)}
    with job.start() as manager:
        restored = manager.restore(state_of(-1))
        assert restored is not None
        assert restored.step == 8
        sent |= {step: job.save(manager, step) for step in range(9, 13)}
    assert min(sent.pop(2)) >= MODEL_BYTES
    for step, (to_fast, to_root) in sent.items():
        assert NUM_TRAINED * 4 <= to_fast <= 0.03 * MODEL_BYTES, step
        assert to_root <= 0.03 * MODEL_BYTES, step
        assert (to_root > 0) == (step % 2 == 0)
    assert (names(job.fast), names(job.root)) == (["step-11", "step-12"], ["step-10", "step-12"])
    for place in (job.fast, job.root):
        for _ in range(2):
            cloudckpt.gc(place, older_than=0, dry_run=False)
        for info in cloudckpt.list_checkpoints(place):
            cloudckpt.verify(info.uri)
    job.check(10, 12)
    shutil.rmtree(job.fast)
    with job.start() as manager:
        assert manager.restore(state_of(-1)) is not None


def test_a_change_is_sent_once(job: Job) -> None:
    """If this fails, the bucket has an old value of what was frozen, or gets the new one with each step."""
    with job.start() as manager:
        job.save(manager, 2)
        sent = {step: job.save(manager, step, frozen=5.0) for step in range(3, 9)}
    assert sent[3][0] >= MODEL_BYTES * 0.9
    assert sent[4][1] >= MODEL_BYTES * 0.9
    assert max(sent[6][1], sent[8][1]) <= 0.03 * MODEL_BYTES
    job.check(6, 8, frozen=5.0)


def test_debts_of_a_dead_process_cost_the_bucket_few_models(job: Job) -> None:
    """If this fails, `cloudckpt drain` in a node's shutdown hook sends whole steps, for which it has no time."""
    job.places.fail(job.root, unwritable)
    manager = job.start(fast_keep=5, keep_last=9)
    steps = range(2, 12, 2)
    for step in steps:
        manager.save(step, state_of(step))
    with pytest.raises(CheckpointError, match="does not have"):
        manager.close(WAIT_S)
    job.places.broken.clear()
    before = job.places.num_bytes(job.root, *_WRITES)
    drained = drain(job.fast, job.root, options=make_options(tile_bytes=4 * KIB, wrap_store=job.places)).drained
    assert [Path(uri).name for uri in drained] == [f"step-{step}" for step in reversed(steps)]
    # The newest one, which is first, and the oldest one, whose objects have all of it.
    assert job.places.num_bytes(job.root, *_WRITES) - before <= 2.2 * MODEL_BYTES
    job.check(*steps)


def test_a_step_that_was_read_from_its_copy_is_no_base(job: Job) -> None:
    """If this fails, all later steps of the fast place share its damaged file, and are lost with the bucket's copy."""
    with job.start(fast_keep=1) as manager:
        job.save(manager, 2)
    for path in (job.fast / "step-2/data").rglob("*.safetensors"):
        damage(path)
    with job.start(fast_keep=1) as manager:
        assert manager.restore(state_of(-1)) is not None
        assert min(job.save(manager, 4)) >= MODEL_BYTES
        assert max(job.save(manager, 6)) <= 0.03 * MODEL_BYTES
    cloudckpt.verify(job.fast / "step-6")
    job.check(4, 6)


@pytest.mark.parametrize("is_removed", [True, False])
def test_data_that_the_bucket_lost_is_sent_again(
    job: Job, caplog: pytest.LogCaptureFixture, *, is_removed: bool
) -> None:
    """If this fails, a step that the bucket is owed names data that only the fast place has, or is never copied."""
    with job.start() as manager:
        job.save(manager, 2)
        if is_removed:
            cloudckpt.delete(job.root / "step-2")
            cloudckpt.gc(job.root, older_than=0, dry_run=False)
        else:
            for path in (job.root / "step-2/data").rglob("*.safetensors"):
                path.unlink()
        _, to_root = job.save(manager, 4)
    assert to_root >= MODEL_BYTES
    assert "does not have" not in warnings(caplog)
    shutil.rmtree(job.fast)
    cloudckpt.verify(job.root / "step-4")


def test_saves_that_change_their_place_refer_within_it(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a save to the bucket refers to a step of the fast place, which is another folder, or sends all."""
    with job.start() as manager:
        job.save(manager, 2)
        job.places.fail(job.fast, unwritable)
        to_fast, to_root = job.save(manager, 4)
        assert (to_fast, to_root <= 0.03 * MODEL_BYTES) == (0, True)
        job.places.broken.clear()
        assert max(job.save(manager, 6)) <= 0.03 * MODEL_BYTES
    assert "is saved whole" not in warnings(caplog)
    job.check(4, 6)
