"""A fast place of each host whose saves name what has not changed: what each gets, and what a lost host costs."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.hosts import WAIT_S, Warnings, host_of, manager_of, on_rank
from tests.kit.options import make_options
from tests.kit.ranks import on_ranks
from tests.kit.two_places import Places, names, unwritable
from tests.kit.wrapped import Call

import cloudckpt
from cloudckpt import CheckpointManager
from cloudckpt.errors import AccessDeniedError, StoreError
from cloudckpt.manager.drain import drain
from cloudckpt.options import KIB

NUM_FROZEN = 24_000
NUM_TRAINED = 500
MODEL_BYTES = 4 * (NUM_FROZEN + NUM_TRAINED)
"""Bytes of the shard of one rank. The tensors that all ranks hold have as many frozen bytes again."""
SMALL_BYTES = 0.03 * 3 * MODEL_BYTES
_WRITES = ("put", "upload_part", "copy_from")


def state_of(step: int, frozen: float = 1.0, rank: int | None = None) -> dict[str, Any]:
    own = dist.get_rank() if rank is None else rank
    return {
        **{f"frozen-{own}.{i}": torch.full((NUM_FROZEN // 6,), frozen + i + own) for i in range(6)},
        **{f"shared.{i}": torch.full((NUM_FROZEN // 6,), frozen - i) for i in range(6)},
        f"trained-{own}": torch.full((NUM_TRAINED,), float(step)),
        "step": step,
    }


class Job:
    """One run: each `start` is a job that begins anew, with the ranks on the hosts in any order."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.places = directory, Places()

    def start(self, host: int | None = None, **settings: Any) -> CheckpointManager:
        options = make_options(
            unchanged="reference", part_bytes=64 * KIB, tile_bytes=4 * KIB, timeout_s=20.0, wrap_store=self.places
        )
        usual: dict[str, Any] = {"save_every": 2, "fast_keep": 2, "keep_last": 2, "options": options}
        return manager_of(self.directory, host, **usual | settings)

    def num_bytes(self, place: Path) -> int:
        return self.places.num_bytes(place, *_WRITES)

    def save(self, manager: CheckpointManager, step: int, frozen: float = 1.0) -> tuple[int, int]:
        """Save a step, and return the bytes of data that all hosts and the root get."""
        hosts, root = self.directory / "host-", self.directory / "bucket"
        before = self.num_bytes(hosts), self.num_bytes(root)
        manager.save(step, state_of(step, frozen), overwrite=True)
        manager.wait(WAIT_S)
        dist.barrier()
        mine = torch.tensor([self.num_bytes(hosts) - before[0], self.num_bytes(root) - before[1]])
        dist.all_reduce(mine)
        return int(mine[0]), int(mine[1])

    def restore(self, manager: CheckpointManager, step: int | None = None, frozen: float = 1.0) -> tuple[int, str]:
        state = state_of(-1, -1.0)
        found = manager.restore(state, step)
        assert found is not None
        for name, value in state_of(found.step, frozen).items():
            assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value, name
        return found.step, Path(found.uri).parent.name

    def collect_garbage(self, *places: Path) -> None:
        """Remove what a day makes garbage."""
        for place in places:
            for _ in range(2):
                cloudckpt.gc(place, older_than=0, dry_run=False)


@on_ranks(2)
def test_each_host_and_the_root_get_what_trains(tmp_path: Path) -> None:
    """If this fails, each step of an adapter's training writes the whole model to the drives, or sends it to the
    bucket; or a removal or gc on one host takes what later steps name.
    """
    job, log = Job(tmp_path), Warnings()
    with job.start() as manager:
        sent = {step: job.save(manager, step) for step in range(2, 8)}
    assert min(sent.pop(2)) >= 3 * MODEL_BYTES * 0.9
    for step, (to_hosts, to_root) in sent.items():
        assert 8 * NUM_TRAINED <= to_hosts <= SMALL_BYTES, (step, sent)
        assert to_root <= SMALL_BYTES, (step, sent)
        assert (to_root > 0) == (step % 2 == 0)
    assert not [text for text in log.texts if "is saved whole" in text]
    mine, root = host_of(tmp_path), tmp_path / "bucket"
    assert (names(mine), names(root)) == (["step-6", "step-7"], ["step-4", "step-6"])
    job.collect_garbage(mine)
    on_rank(0, lambda: job.collect_garbage(root))
    assert job.restore(job.start()) == (7, "fast")
    with job.start() as manager:  # one that has restored an earlier one's step
        assert job.restore(manager) == (7, "fast")
        for step in (8, 9):
            assert max(job.save(manager, step)) <= SMALL_BYTES
    on_rank(0, lambda: cloudckpt.verify(root / "step-8"))
    job.collect_garbage(mine)
    assert job.restore(job.start()) == (9, "fast")


@on_ranks(2)
def test_hosts_that_change_places_refer_to_what_a_restore_has_brought(tmp_path: Path) -> None:
    """If this fails, a host keeps objects of another one for later steps, and a removal takes them all the same."""
    job = Job(tmp_path)
    with job.start() as manager:
        for step in (2, 3, 4):
            job.save(manager, step)
    dist.barrier()
    host = 1 - dist.get_rank()
    with job.start(host) as manager:
        assert job.restore(manager) == (4, "fast")
        sent = [job.save(manager, step) for step in (5, 6, 7, 8)]
    assert max(max(of_step) for of_step in sent) <= SMALL_BYTES
    dist.barrier()
    mine = host_of(tmp_path, host)
    assert names(mine) == ["step-7", "step-8"]
    job.collect_garbage(mine)
    dist.barrier()
    assert job.restore(job.start(host)) == (8, "fast")
    assert job.restore(job.start()) == (8, "fast")  # each host has what the other one had before


@pytest.mark.parametrize("replaced", [0, 1])
@on_ranks(2)
def test_a_replaced_host_gets_whole_data_again(tmp_path: Path, replaced: int) -> None:
    """If this fails, the steps after the loss of a host name data that went with it, or the run cannot go on."""
    job = Job(tmp_path)
    with job.start() as manager:
        for step in (2, 3, 4, 5):
            job.save(manager, step)
    on_rank(replaced, lambda: shutil.rmtree(host_of(tmp_path)))
    with job.start() as manager:
        # The root has what the host had of step 4, whose objects the host that is left has besides.
        assert job.restore(manager) == (4, "fast")
        assert job.save(manager, 5)[0] >= 3 * MODEL_BYTES * 0.9
        assert job.save(manager, 6)[0] <= SMALL_BYTES
        assert max(job.save(manager, 7)) <= SMALL_BYTES
    dist.barrier()
    job.collect_garbage(host_of(tmp_path))
    assert job.restore(job.start()) == (7, "fast")
    on_rank(0, lambda: cloudckpt.verify(tmp_path / "bucket/step-6"))


@pytest.mark.parametrize("is_deleted", [True, False])
@on_ranks(2)
def test_another_base_on_one_host_is_not_referred_to(tmp_path: Path, *, is_deleted: bool) -> None:
    """If this fails, a host refers to another save than the others, and its claims do not keep what theirs name."""
    job, log = Job(tmp_path), Warnings()

    def change_base() -> None:
        base = host_of(tmp_path) / "step-3"
        if is_deleted:
            cloudckpt.delete(base)
            return
        fast = {"root": str(tmp_path / "bucket"), "is_owed": False, "may_overwrite": False}
        options = make_options(unchanged="reference", tile_bytes=4 * KIB, metadata={"step": 3, "fast": fast})
        cloudckpt.save(state_of(3), base, no_dist=True, overwrite=True, options=options)

    with job.start() as manager:
        job.save(manager, 2)
        job.save(manager, 3)
        on_rank(1, change_base)
        to_hosts, _ = job.save(manager, 4)
    assert to_hosts >= MODEL_BYTES
    words = "there is no checkpoint at" if is_deleted else "is not the checkpoint of the other hosts"
    assert any("is saved whole" in text and words in text for text in log.texts) == (dist.get_rank() == 1)
    job.collect_garbage(host_of(tmp_path))
    dist.barrier()
    assert job.restore(job.start(), 4) == (4, "fast")


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@on_ranks(2)
def test_data_that_vanishes_from_a_drive_during_a_save_is_sent(
    tmp_path: Path,
    rank: int,
    is_shared: bool,  # noqa: FBT001
) -> None:
    """If this fails, a step names a file that its host has lost, or the save is lost with the file."""
    log, job = Warnings(), Job(tmp_path)
    host = 0 if is_shared else None
    fast = host_of(tmp_path, host)

    def remove_base(call: Call) -> None:
        if call.operation in ("put", "create_multipart") and call.key.startswith("data/") and "claim" not in call.key:
            for path in (fast / "step-2").rglob(f"{rank}-*.safetensors"):
                path.unlink(missing_ok=True)

    with job.start(host) as manager:
        job.save(manager, 2)
        if dist.get_rank() == rank:
            job.places.fail(fast / "step-3", remove_base)
        assert job.save(manager, 3)[0] > MODEL_BYTES
        job.places.broken.clear()
        assert job.save(manager, 4)[0] <= SMALL_BYTES
    dist.barrier()
    assert any("again, whole" in text for text in log.texts) == (dist.get_rank() == 0)
    manager = job.start(host)
    assert job.restore(manager, 3) == (3, "fast")
    assert job.restore(manager) == (4, "fast")


@on_ranks(2)
def test_objects_that_a_restore_has_brought_stay(tmp_path: Path) -> None:
    """If this fails, a deletion takes what a restore has brought to a host, and the host that had it is lost next."""
    job, rank = Job(tmp_path), dist.get_rank()
    with job.start(fast_keep=5, save_every=100) as manager:
        job.save(manager, 2)
        job.save(manager, 3)
        on_rank(1, lambda: cloudckpt.delete(host_of(tmp_path) / "step-3"))
        on_rank(1, lambda: job.collect_garbage(host_of(tmp_path)))  # the claims of step 3
        job.save(manager, 4)  # host 0 refers to step 2, and host 1, which has it, too, claims nothing there
    dist.barrier()
    assert job.restore(job.start(1 - rank, fast_keep=5, save_every=100)) == (4, "fast")
    on_rank(1, lambda: cloudckpt.delete(host_of(tmp_path, 1) / "step-2"))
    on_rank(0, lambda: shutil.rmtree(host_of(tmp_path, 0)))
    if rank == 0:
        with job.start(1, no_dist=True, fast_keep=5, save_every=100) as alone:
            assert job.restore(alone, 4) == (4, "fast")
    dist.barrier()


@on_ranks(2)
def test_a_host_without_the_manifest_keeps_what_the_step_names(tmp_path: Path) -> None:
    """If this fails, a drive that cannot take one manifest loses data of a step that another host has committed."""
    job = Job(tmp_path)

    def no_manifest(call: Call) -> Exception | None:
        is_it = call.operation == "put" and "manifest" in call.key
        return AccessDeniedError("Permission denied", key=call.key, operation=call.operation) if is_it else None

    with job.start(save_every=100) as manager:
        job.save(manager, 2)
        if dist.get_rank() == 1:
            job.places.fail(host_of(tmp_path) / "step-3", no_manifest)
        job.save(manager, 3)
    job.places.broken.clear()
    mine = host_of(tmp_path)
    assert names(mine) == ["step-2", "step-3"][: 2 - dist.get_rank()]
    dist.barrier()
    cloudckpt.delete(mine / "step-2")
    dist.barrier()
    assert job.restore(job.start(save_every=100)) == (3, "fast")


@pytest.mark.parametrize("lost", [0, 1])
@on_ranks(2)
def test_debts_are_paid_with_references_by_drains_of_each_host(tmp_path: Path, lost: int) -> None:
    """If this fails, `cloudckpt drain` sends the model once for each owed step, or one host's drain needs the other."""
    job = Job(tmp_path)
    with job.start(fast_keep=5) as manager:
        job.save(manager, 2)
    job.places.fail(tmp_path / "bucket", unwritable)
    manager = job.start(fast_keep=5, options=make_options(
        unchanged="reference", tile_bytes=4 * KIB, timeout_s=2.0, retries=0, wrap_store=job.places
    ))  # fmt: skip
    assert job.restore(manager) == (2, "fast")
    for step in (4, 6):
        manager.save(step, state_of(step))
        manager.wait(WAIT_S)
    job.places.broken.clear()
    dist.barrier()
    if dist.get_rank() == 0:
        seen, root = Places(), tmp_path / "bucket"
        options = make_options(tile_bytes=4 * KIB, wrap_store=seen)
        for host in (lost, 1 - lost):
            failed = drain(host_of(tmp_path, host), root, options=options).failed
            shutil.rmtree(host_of(tmp_path, host))
        assert failed == ()
        assert seen.num_bytes(root, *_WRITES) <= 2 * SMALL_BYTES
        job.collect_garbage(root)
        for step in (4, 6):
            cloudckpt.verify(root / f"step-{step}")
    dist.barrier()
    assert job.restore(job.start()) == (6, "bucket")


@on_ranks(2)
def test_file_that_steps_share_costs_all_of_them_and_no_byte_of_the_root(tmp_path: Path) -> None:
    """If this fails, a damaged file of a host's drive reaches the bucket, or is loaded."""
    job = Job(tmp_path)
    with job.start() as manager:
        for step in (2, 3, 4, 5):
            job.save(manager, step)

    def damage_shared() -> None:
        paths = (host_of(tmp_path) / "step-2/data").rglob("1-*.safetensors")
        path = max(paths, key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1  # of a frozen tensor
        path.write_bytes(content)

    on_rank(1, damage_shared)
    with job.start() as manager:
        assert job.restore(manager) == (4, "fast")  # the damaged object is read from the root's copy
        to_hosts, _ = job.save(manager, 6)
        assert to_hosts >= MODEL_BYTES  # no later step shares the damaged file
    on_rank(0, lambda: cloudckpt.verify(tmp_path / "bucket/step-6"))
    assert job.restore(job.start(), 6) == (6, "fast")


# --- hosts that differ


@on_ranks(2)
def test_drive_that_takes_no_claim_sends_the_save_to_the_root(tmp_path: Path) -> None:
    """If this fails, a drive that becomes read-only in a save ends the job, or leaves a step without a part."""
    job, log = Job(tmp_path), Warnings()

    def no_claim(call: Call) -> Exception | None:
        is_it = call.operation == "put" and call.key.endswith(".claim")
        return StoreError("Read-only file system", key=call.key, operation=call.operation) if is_it else None

    with job.start(async_=False) as manager:
        job.save(manager, 2)
        if dist.get_rank() == 1:
            job.places.fail(host_of(tmp_path), no_claim)
        job.save(manager, 3)
        job.places.broken.clear()
        assert max(job.save(manager, 4)) <= SMALL_BYTES
    assert names(tmp_path / "bucket") == ["step-2", "step-3", "step-4"][1:]
    assert names(host_of(tmp_path)) == ["step-2", "step-4"]
    if dist.get_rank() == 0:
        assert any("Read-only file system" in text for text in log.texts)
    job.collect_garbage(host_of(tmp_path))
    claims = {path.name for path in host_of(tmp_path).rglob("*.claim")}
    assert claims == {"step-4.claim"}
    dist.barrier()
    assert job.restore(job.start()) == (4, "fast")


@on_ranks(2)
def test_host_that_is_empty_at_the_drain_costs_what_trains_alone(tmp_path: Path) -> None:
    """If this fails, a drain commits a step without the part of a lost host, or does not say which part is lost."""
    job, root = Job(tmp_path), tmp_path / "bucket"
    with job.start() as manager:
        job.save(manager, 2)
    job.places.fail(root, unwritable)
    options = make_options(unchanged="reference", tile_bytes=4 * KIB, timeout_s=2.0, retries=0, wrap_store=job.places)
    manager = job.start(options=options)
    assert job.restore(manager) == (2, "fast")
    manager.save(4, state_of(4))
    manager.wait(WAIT_S)
    on_rank(1, lambda: shutil.rmtree(host_of(tmp_path)))
    if dist.get_rank() == 0:
        (failed,) = drain(host_of(tmp_path), root, options=make_options(tile_bytes=4 * KIB)).failed
        assert "1 of its objects are not here" in failed.reason
        assert "/1-0.safetensors" in failed.reason
        job.collect_garbage(root)
        assert names(root) == ["step-2"]
    dist.barrier()
    assert job.restore(job.start()) == (2, "fast")


@on_ranks(3)
def test_job_of_another_size_goes_on_from_references(tmp_path: Path) -> None:
    """If this fails, a job with more or fewer hosts cannot load a step that names data of older ones, or refers to data
    that one of its hosts does not have.
    """
    job, rank = Job(tmp_path), dist.get_rank()
    two = dist.new_group([0, 1])
    if rank < 2:
        with job.start(process_group=two) as manager:
            for step in (2, 3, 4, 5):
                manager.save(step, state_of(step))
                manager.wait(WAIT_S)
    dist.barrier()

    def restore(manager: CheckpointManager, own: int) -> int:
        state = state_of(-1, -1.0, own)
        found = manager.restore(state)
        assert found is not None
        for name, value in state_of(found.step, 1.0, own).items():
            assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value, name
        return found.step

    with job.start() as manager:
        assert restore(manager, min(rank, 1)) == 5
        for step in (6, 7, 8, 9):
            manager.save(step, state_of(step))
            manager.wait(WAIT_S)
    assert names(host_of(tmp_path)) == ["step-8", "step-9"]
    job.collect_garbage(host_of(tmp_path))
    dist.barrier()
    if rank < 2:
        with job.start(process_group=two) as manager:
            assert restore(manager, rank) == 8  # rank 2 has data of step 9, and the root none
    on_rank(0, lambda: cloudckpt.verify(tmp_path / "bucket/step-8"))


@on_ranks(2)
def test_slower_host_gets_its_part_into_the_step(tmp_path: Path) -> None:
    """If this fails, `close` on rank 0 reports a step as lost that a slower host is still sending."""
    job, first_look = Job(tmp_path), tmp_path / "first-look"

    def report(call: Call) -> None:
        if call.operation == "put" and call.key.endswith(".receipt"):
            first_look.touch()

    def be_late(call: Call) -> None:
        if call.operation == "put":
            ends_at_s = time.monotonic() + WAIT_S
            while not first_look.exists() and time.monotonic() < ends_at_s:
                threading.Event().wait(0.01)

    job.places.fail(tmp_path / "bucket", be_late if dist.get_rank() else report)
    with job.start() as manager:
        for step in (2, 4):
            job.save(manager, step)
            if dist.get_rank() == 0:
                assert manager.drains is not None
                assert manager.drains.failed == ()
    dist.barrier()
    assert first_look.exists()
    assert names(tmp_path / "bucket") == ["step-2", "step-4"]
