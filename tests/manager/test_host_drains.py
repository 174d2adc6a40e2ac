"""The copy to the root from a fast place of each host: each host sends its part, and one commits."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.hosts import (
    NUM_OBJECTS,
    WAIT_S,
    Warnings,
    host_of,
    hosts_of,
    manager_of,
    on_rank,
    restore,
    save_all,
    state_of,
)
from tests.kit.options import make_options
from tests.kit.ranks import on_ranks
from tests.kit.two_places import Places, damage, full, names, unreadable

import cloudckpt
from cloudckpt.errors import CheckpointError, StoreError
from cloudckpt.manager.drain import DrainReport, drain
from cloudckpt.testing.faults import Fails, Faults, Rule, Tell

_WRITES = frozenset({"put", "create_multipart", "upload_part", "complete_multipart", "delete"})


# --- the protocol, without a job: each host is a directory, and its drain a call


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def drain_of(host: Path, root: Path, **settings: Any) -> DrainReport:
    return drain(host, root, options=make_options(retries=0, **settings))


def collect_garbage(root: Path) -> None:
    """Remove what a day covers."""
    for _ in range(2):  # the first may leave fences
        cloudckpt.gc(root, older_than=0, dry_run=False)


def assert_copied(root: Path, value: float = 1.0) -> None:
    """The step is whole, of one save, and no other data is there."""
    report = cloudckpt.verify(root / "step-5")
    state = {f"t{number}": torch.zeros(1000) for number in range(NUM_OBJECTS)}
    cloudckpt.load(state, root / "step-5", no_dist=True)
    assert [set(tensor.tolist()) for tensor in state.values()] == [{value + number} for number in range(NUM_OBJECTS)]
    assert len([path for path in (root / "step-5/data").rglob("*") if path.is_file()]) == report.num_objects


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_last_host_that_sends_its_part_commits(tmp_path: Path, root: Path, order: tuple[int, int]) -> None:
    """If this fails, a step whose hosts have all sent their parts never exists at the root, or exists too early."""
    hosts = hosts_of(tmp_path, root)
    first = drain_of(hosts[order[0]], root)
    assert (first.drained, len(first.failed), names(root)) == ((), 1, [])
    assert "no other host has sent them: data/" in first.failed[0].reason
    last = drain_of(hosts[order[1]], root)
    assert (last.drained, last.failed) == ((f"{root}/step-5",), ())
    assert_copied(root)
    assert drain_of(hosts[order[0]], root).failed == ()


@pytest.mark.parametrize("at", range(14))
def test_drain_that_dies_at_any_write_is_finished_by_the_next(tmp_path: Path, root: Path, at: int) -> None:
    """If this fails, a crash in a drain leaves a step that is not whole, or one that no drain finishes."""
    hosts = hosts_of(tmp_path, root)
    dying = Faults(Rule(fault=Fails(StoreError), operations=_WRITES, skip=at, times=None))
    with_death = Places()

    def wrap(inner: Any) -> Any:
        return dying(inner) if inner.uri.startswith(str(root)) else with_death(inner)

    for host in hosts if at % 2 else hosts[::-1]:
        drain_of(host, root, wrap_store=wrap)
    if names(root):
        cloudckpt.verify(root / "step-5")
    failed = [drain_of(host, root).failed for host in (*hosts, hosts[0])]
    assert failed[-1] == ()
    collect_garbage(root)
    assert_copied(root)


def test_objects_that_a_host_has_sent_are_not_sent_again(tmp_path: Path, root: Path) -> None:
    """If this fails, a host that waits for another one sends its part with each look."""
    hosts, places = hosts_of(tmp_path, root), Places()
    drain_of(hosts[0], root)
    drain_of(hosts[0], root, wrap_store=places)
    assert places.num_bytes(root, "put", "upload_part") == 0
    assert places.num_bytes(root, "read_into") == 0
    shutil.rmtree(hosts[0])  # it has sent its part, so the step no longer needs this host
    drain_of(hosts[1], root)
    assert_copied(root)


def test_object_without_a_receipt_is_compared_before_it_counts(tmp_path: Path, root: Path) -> None:
    """If this fails, an object that a drain has sent wrongly, or not to its end, is in the committed step."""
    hosts = hosts_of(tmp_path, root)
    dying = Faults(Rule(fault=Fails(StoreError), operations={"put"}, key="receipt$", times=None))
    drain_of(hosts[0], root, wrap_store=lambda inner: dying(inner) if inner.uri.startswith(str(root)) else inner)
    sent = sorted((root / "step-5/data").rglob("*.safetensors"))
    damage(sent[0])
    drain_of(hosts[1], root)
    assert names(root) == []
    drain_of(hosts[0], root)
    collect_garbage(root)
    assert_copied(root)


def test_receipt_that_cannot_be_read_counts_for_nothing(tmp_path: Path, root: Path) -> None:
    """If this fails, a damaged receipt blocks a step for ever, or lets it be committed without its data."""
    hosts = hosts_of(tmp_path, root)
    drain_of(hosts[0], root)
    (receipt,) = (root / "step-5/data").rglob("*.receipt")
    number = next(path.stem.partition("-")[2] for path in (hosts[1] / "step-5/data").rglob("*.safetensors"))
    for content in (b"{", b'{"99": "data/x"}', f'{{"{number}": "manifest.json"}}'.encode()):
        receipt.write_bytes(content)
        assert names(root) == []
        drain_of(hosts[1], root)
    drain_of(hosts[0], root)
    collect_garbage(root)
    assert_copied(root)


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_object_that_no_host_has_undamaged_is_named(tmp_path: Path, root: Path, what: str) -> None:
    """If this fails, a step with damage is committed at the root, or the owner of the file is not told."""
    hosts = hosts_of(tmp_path, root)
    path = next((hosts[0] / "step-5/data").rglob("*.safetensors"))
    kept = path.read_bytes()
    damage(path) if what == "damaged" else path.unlink()
    failed = drain_of(hosts[0], root).failed + drain_of(hosts[1], root).failed
    assert names(root) == []
    assert all(path.name in one.reason for one in failed), failed
    copied = hosts[1] / path.relative_to(hosts[0])  # a restore has brought it there before
    copied.write_bytes(kept)
    drain_of(hosts[1], root)
    drain_of(hosts[0], root)
    collect_garbage(root)
    assert_copied(root)


def test_a_damaged_file_keeps_back_no_other_one(tmp_path: Path, root: Path) -> None:
    """If this fails, a damaged file on a drive costs all parts of that host, also where another one has the file."""
    hosts = hosts_of(tmp_path, root)
    path = max((hosts[1] / "step-5/data").rglob("*.safetensors"))
    whole = hosts[0] / path.relative_to(hosts[1])
    shutil.copyfile(path, whole)
    damage(path)
    (failed,) = drain_of(hosts[1], root).failed
    assert path.name in failed.reason
    assert len(data_in(root / "step-5")) == len(data_in(hosts[1] / "step-5")) - 1
    shutil.rmtree(hosts[1])
    assert drain_of(hosts[0], root).failed == ()
    assert_copied(root)


def test_parts_of_two_saves_of_one_step_are_not_mixed(tmp_path: Path, root: Path) -> None:
    """If this fails, the root gets a step of which one half is of another save."""
    old, new = hosts_of(tmp_path / "old", root), hosts_of(tmp_path / "new", root, value=50.0)
    drain_of(old[0], root)
    drain_of(new[1], root)
    assert names(root) == []
    drain_of(new[0], root)
    assert cloudckpt.verify(root / "step-5").num_objects == NUM_OBJECTS
    assert drain_of(old[1], root).failed == ()  # the root has a later save of the step
    collect_garbage(root)
    assert_copied(root, 50.0)


def test_gc_between_two_parts_costs_only_a_second_sending(tmp_path: Path, root: Path) -> None:
    """If this fails, a commit names objects that gc has removed."""
    hosts = hosts_of(tmp_path, root)
    drain_of(hosts[0], root)
    cloudckpt.gc(root, older_than=0, dry_run=False)
    assert drain_of(hosts[1], root).drained == ()
    drain_of(hosts[0], root)
    collect_garbage(root)
    assert_copied(root)


def test_two_hosts_that_commit_at_once_leave_one_step(tmp_path: Path, root: Path) -> None:
    """If this fails, the host that loses the commit reports a failure, or removes what the winner has committed."""
    hosts = hosts_of(tmp_path, root)
    drain_of(hosts[0], root)
    before = Tell(before=lambda _: drain_of(hosts[0], root))
    rule = Rule(fault=before, operations={"put"}, key="manifest")
    ended = drain_of(hosts[1], root, wrap_store=Faults(rule))
    assert ended.failed == ()
    assert_copied(root)


# --- in a job


def data_in(bucket: Path) -> list[Path]:
    return sorted((bucket / "data").rglob("*.safetensors"))


@on_ranks(2)
def test_bucket_that_is_down_fails_no_save_and_gets_the_steps_later(tmp_path: Path) -> None:
    """If this fails, a bucket that is down ends the job, or lacks a step once it is back."""
    places, log = Places(), Warnings()
    manager = manager_of(tmp_path, fast_keep=1, options=make_options(wrap_store=places, retries=0))
    assert restore(manager) is None
    places.fail(tmp_path / "bucket", unreadable)
    save_all(manager, 10, 11, 12)
    dist.barrier()
    assert names(host_of(tmp_path)) == ["step-10", "step-12"]  # one is owed, one is the newest
    assert any("does not have the step" in text for text in log.texts)
    places.broken.clear()
    dist.barrier()
    with manager:
        save_all(manager, 13)
        assert manager.drains is not None
        assert manager.drains.failed == ()
        if dist.get_rank() == 0:
            assert manager.drains.drained == (f"{tmp_path}/bucket/step-10",)
    dist.barrier()
    bucket = tmp_path / "bucket/step-10"
    assert cloudckpt.verify(bucket).num_objects == len(data_in(bucket))
    assert not list(bucket.rglob("*.receipt"))
    with manager:  # the look after the next save finds the copy, also on the host that did not commit it
        save_all(manager, 14)
    dist.barrier()
    assert names(host_of(tmp_path)) == ["step-14"]


@on_ranks(2)
def test_each_host_sends_what_it_has_and_no_more(tmp_path: Path) -> None:
    """If this fails, one host sends all, or a host sends what a restore has brought there from another one."""
    places = Places()
    broken = manager_of(tmp_path, options=make_options(wrap_store=places, retries=0))
    assert restore(broken) is None
    places.fail(tmp_path / "bucket", unreadable)
    save_all(broken, 10)
    on_rank(0, lambda: None)
    own = sum(path.stat().st_size for path in data_in(host_of(tmp_path) / "step-10"))
    seen = Places()
    with manager_of(tmp_path, options=make_options(wrap_store=seen)) as manager:
        assert restore(manager) == (10, "fast")
        assert sum(path.stat().st_size for path in data_in(host_of(tmp_path) / "step-10")) > own
    assert 0 < seen.num_bytes(tmp_path / "bucket", "put", "upload_part") - own < 1000  # and a receipt
    dist.barrier()
    assert restore(manager_of(tmp_path, fast=tmp_path / f"new-{dist.get_rank()}")) == (10, "bucket")


def owe(tmp_path: Path, *steps: int, host: int | None = None) -> None:
    """A job whose bucket is down, so that `steps` are owed."""
    places = Places()
    manager = manager_of(tmp_path, host, options=make_options(wrap_store=places, retries=0, timeout_s=3.0))
    assert restore(manager) is None
    places.fail(tmp_path / "bucket", full)
    save_all(manager, *steps)
    with pytest.raises(CheckpointError, match="does not have all"):
        manager.close()
    dist.barrier()


@on_ranks(2)
def test_hosts_that_change_places_send_their_parts(tmp_path: Path) -> None:
    """If this fails, a restart that numbers the hosts in another order leaves the root without the step."""
    owe(tmp_path, 10)
    with manager_of(tmp_path, 1 - dist.get_rank()) as manager:
        assert restore(manager) == (10, "fast")
    dist.barrier()
    cloudckpt.verify(tmp_path / "bucket/step-10")


@pytest.mark.parametrize("replaced", [0, 1])
@on_ranks(2)
def test_part_that_is_lost_with_its_host_is_named_and_a_later_save_pays(tmp_path: Path, replaced: int) -> None:
    """If this fails, the loss of an owed step is silent, blocks the job, or is never made good."""
    owe(tmp_path, 10)
    on_rank(replaced, lambda: shutil.rmtree(host_of(tmp_path)))
    manager = manager_of(tmp_path, options=make_options(timeout_s=300.0))  # the loss is known without a wait
    with pytest.raises(CheckpointError, match="can be loaded"):
        restore(manager)
    manager = manager_of(tmp_path, on_damaged="replace", options=make_options(timeout_s=3.0))
    with pytest.raises(CheckpointError):
        restore(manager)
    save_all(manager, 9)
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="step-10: "):
            manager.close()
    else:
        manager.wait(WAIT_S)
    dist.barrier()
    assert names(tmp_path / "bucket") == []
    with manager:
        manager.save(10, state_of(10.0), overwrite=True)
    dist.barrier()
    assert restore(manager_of(tmp_path)) == (10, "fast")
    cloudckpt.verify(tmp_path / "bucket/step-10")


@pytest.mark.slow
@on_ranks(2)
def test_wait_for_a_part_that_is_lost_is_bounded_and_its_host_is_named(tmp_path: Path) -> None:
    """If this fails, each save of a job with a new host waits for what can never come, or no one says what to do."""
    owe(tmp_path, 10)
    on_rank(1, lambda: shutil.rmtree(host_of(tmp_path)))
    manager = manager_of(tmp_path, options=make_options(timeout_s=20.0))
    # What is lost is not asked for, so no restore finds the step damaged.
    assert manager.restore({"own-0": torch.zeros(3000)}) is not None
    waits_s = []
    for step in (11, 12, 13):
        begun_s = time.monotonic()
        save_all(manager, step)
        waits_s.append(time.monotonic() - begun_s)
    if dist.get_rank() == 0:
        assert manager.drains is not None
        (failed,) = manager.drains.failed
        assert f"the drive of {socket.gethostname()}, or run 'cloudckpt drain {host_of(tmp_path)}" in failed.reason
        assert "replace step 10 by another save, or delete it on each host" in failed.reason
        assert max(waits_s[1:]) < 0.5 * waits_s[0], waits_s
        with pytest.raises(CheckpointError, match="step-10: "):
            manager.close()
    dist.barrier()
    with manager:
        manager.save(10, state_of(10.0), overwrite=True)  # as the message says
    dist.barrier()
    cloudckpt.verify(tmp_path / "bucket/step-10")


@on_ranks(2)
def test_host_without_the_manifest_sends_its_part_after_a_restore(tmp_path: Path) -> None:
    """If this fails, a crash between the manifests of two hosts leaves a step owed for ever."""
    owe(tmp_path, 10, 11)
    on_rank(1, (host_of(tmp_path) / "step-10/manifest.json").unlink)
    with manager_of(tmp_path) as manager:
        assert restore(manager) == (11, "fast")
    dist.barrier()
    cloudckpt.verify(tmp_path / "bucket/step-10")
    assert names(host_of(tmp_path)) == ["step-10", "step-11"]


@on_ranks(2)
def test_rank_0_tells_of_a_step_of_which_only_others_have_the_manifest(tmp_path: Path) -> None:
    """If this fails, `close` ends well although the root lacks a step that it is owed."""
    owe(tmp_path, 10, 11)
    on_rank(0, (host_of(tmp_path) / "step-10/manifest.json").unlink)
    places = Places()
    places.fail(host_of(tmp_path) / "step-10", full)
    manager = manager_of(tmp_path, options=make_options(timeout_s=3.0, wrap_store=places))
    assert restore(manager) == (11, "fast")
    places.broken.clear()
    manager.wait(WAIT_S)
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="step-10: only other hosts have its manifest"):
            manager.close()
    dist.barrier()
    with manager:
        assert restore(manager, step=10) == (10, "fast")
    dist.barrier()
    cloudckpt.verify(tmp_path / "bucket/step-10")


@on_ranks(2)
def test_job_on_one_host_and_a_drain_on_the_other_complete_the_step(tmp_path: Path) -> None:
    """If this fails, a step can reach the root only with as many hosts as have saved it."""
    owe(tmp_path, 10)
    if dist.get_rank() == 0:
        alone = manager_of(tmp_path, no_dist=True)
        alone.save(11, {"x": 1})
        alone.wait(WAIT_S)
        assert alone.drains is not None
        assert "step-10" in alone.drains.failed[0].uri
        assert "no other host has sent them" in alone.drains.failed[0].reason
    dist.barrier()
    if dist.get_rank() == 1:
        assert drain(host_of(tmp_path), tmp_path / "bucket").failed == ()
    dist.barrier()
    cloudckpt.verify(tmp_path / "bucket/step-10")


@on_ranks(4)
def test_ranks_of_a_host_share_the_sending(tmp_path: Path) -> None:
    """If this fails, one process sends all that a host of eight has, or several send the same."""
    rank, seen = dist.get_rank(), Places()
    host = 0 if rank == 0 else 1
    with manager_of(tmp_path, host, options=make_options(wrap_store=seen)) as manager:
        save_all(manager, 9, 10)
    bucket = tmp_path / "bucket/step-10"
    sent = [0] * dist.get_world_size()
    dist.all_gather_object(sent, seen.num_bytes(tmp_path / "bucket", "put", "upload_part"))
    assert cloudckpt.verify(bucket).num_objects == len(data_in(bucket))
    own = [sum(path.stat().st_size for path in data_in(host_of(tmp_path, number) / "step-10")) for number in (0, 1)]
    assert 0 < sum(sent[1:]) - own[1] < 2000  # and a receipt of each
    assert min(sent[1:]) > 0
    assert 0 < sent[0] - own[0] < 1000


@on_ranks(2)
def test_host_that_stays_away_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    """If this fails, a host whose bucket is down makes `wait` hang on rank 0, or delays newer steps."""
    places = Places()
    manager = manager_of(tmp_path, options=make_options(wrap_store=places, retries=0, timeout_s=3.0))
    assert restore(manager) is None
    if dist.get_rank() == 1:
        places.fail(tmp_path / "bucket", unreadable)
    save_all(manager, 10, 11)
    if dist.get_rank() == 0:
        assert manager.drains is not None
        assert "/1-" in manager.drains.failed[0].reason
    places.broken.clear()
    dist.barrier()
    with manager:
        save_all(manager, 20)
    dist.barrier()
    assert names(tmp_path / "bucket") == ["step-10", "step-20"]


@on_ranks(2)
def test_verify_first_takes_the_copy_of_what_a_lost_host_had(tmp_path: Path) -> None:
    """If this fails, a restore with verify_first goes back to an older step, although the root has the newest whole."""
    with manager_of(tmp_path) as manager:
        save_all(manager, 9, 10)
    on_rank(1, lambda: shutil.rmtree(host_of(tmp_path)))
    assert restore(manager_of(tmp_path, verify_first=True)) == (10, "fast")
