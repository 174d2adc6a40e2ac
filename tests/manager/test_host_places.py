"""A fast place that is a directory of each host: what a restore puts together, and what the loss of a host costs.

Each test runs ranks on one machine, with a directory for each host of the story.
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.hosts import WAIT_S, Warnings, host_of, manager_of, on_rank, restore, save_all, state_of
from tests.kit.options import make_options
from tests.kit.ranks import on_ranks
from tests.kit.two_places import Places, damage, full, full_for_data, names, unreadable
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt._clock import note_commit_time_ns
from cloudckpt.dcp.ranks.hosts import HostTransfer, WantedAndHeld, choose_groups, plan_transfers
from cloudckpt.errors import CorruptCheckpointError, StoreError
from cloudckpt.testing.faults import Call


def objects_of(step: Path) -> set[str]:
    return {path.name for path in (step / "data").rglob("*") if path.is_file()}


@pytest.mark.parametrize("async_", [True, False])
@on_ranks(2)
def test_each_host_has_its_objects_and_the_manifest(tmp_path: Path, async_: bool) -> None:  # noqa: FBT001
    """If this fails, a job whose hosts share no directory saves nothing there, or cannot read what it has saved."""
    with manager_of(tmp_path, async_=async_, fast_keep=3) as manager:
        assert restore(manager) is None
        save_all(manager, 9, 10, 11)
    dist.barrier()
    mine = host_of(tmp_path)
    assert (names(mine), names(tmp_path / "bucket")) == (["step-9", "step-10", "step-11"], ["step-10"])
    manifests = [(host_of(tmp_path, host) / "step-11/manifest.json").read_bytes() for host in (0, 1)]
    assert manifests[0] == manifests[1]
    rank = dist.get_rank()
    assert {name.partition("-")[0] for name in objects_of(mine / "step-11")} == {str(rank)}
    dist.barrier()
    again = manager_of(tmp_path, fast_keep=3)
    assert restore(again) == (11, "fast")
    assert restore(again, step=9) == (9, "fast")
    assert [(info.step, info.place) for info in again.steps()] == [(9, "fast"), (10, "both"), (11, "fast")]


@on_ranks(2)
def test_a_load_moves_only_what_several_ranks_hold(tmp_path: Path) -> None:
    """If this fails, each restore sends whole shards to hosts that have no use for them."""
    with manager_of(tmp_path) as manager:
        save_all(manager, 1)
    before = sum(path.stat().st_size for path in host_of(tmp_path).rglob("*.safetensors"))
    dist.barrier()
    assert restore(manager_of(tmp_path)) == (1, "fast")
    after = sum(path.stat().st_size for path in host_of(tmp_path).rglob("*.safetensors"))
    assert after - before < 3000 * 4


@on_ranks(3)
def test_ranks_of_one_host_share_its_directory(tmp_path: Path) -> None:
    """If this fails, ranks of one host write manifests of their own, or miss what the other host has."""
    host = min(dist.get_rank(), 1)
    with manager_of(tmp_path, host) as manager:
        save_all(manager, 1, 2)
    dist.barrier()
    found = objects_of(host_of(tmp_path, 1) / "step-2")
    assert {name.partition("-")[0] for name in found} == {"1", "2"}
    assert restore(manager_of(tmp_path, host)) == (2, "fast")


@pytest.mark.parametrize("replaced", [0, 1])
@on_ranks(2)
def test_a_replaced_host_costs_the_steps_that_the_root_lacks(tmp_path: Path, replaced: int) -> None:
    """If this fails, a job with a new host resumes from a part of a step, or does not resume at all."""
    log = Warnings()
    with manager_of(tmp_path) as manager:
        save_all(manager, 10, 11, 12)
    on_rank(replaced, lambda: shutil.rmtree(host_of(tmp_path)))
    manager = manager_of(tmp_path)
    assert restore(manager) == (10, "bucket")
    if dist.get_rank() == 0:
        assert any("step-12" in text and f"/{replaced}-" in text and "is missing" in text for text in log.texts)
    with manager:
        save_all(manager, 11, 12, 13)
    dist.barrier()
    assert restore(manager_of(tmp_path)) == (13, "fast")


@on_ranks(2)
def test_replicas_outlive_the_host_that_did_not_write_them(tmp_path: Path) -> None:
    """If this fails, an older step is loaded although each wanted byte of the newest is on the host that wants it."""
    with manager_of(tmp_path) as manager:
        save_all(manager, 10, 11)
    assert restore(manager_of(tmp_path)) == (11, "fast")  # each host has what both want now
    on_rank(1, lambda: shutil.rmtree(host_of(tmp_path)))
    state = state_of(-1.0, 0)
    found = manager_of(tmp_path).restore(state, strict=None)
    assert found is not None
    assert (found.step, float(state["own-0"].sum()), state["step"]) == (11, 33000.0, 11)


@on_ranks(2)
def test_hosts_that_change_places_find_their_shards(tmp_path: Path) -> None:
    """If this fails, a restart that numbers the hosts in another order loses all steps of the fast place."""
    with manager_of(tmp_path) as manager:
        save_all(manager, 1)
    dist.barrier()
    assert restore(manager_of(tmp_path, 1 - dist.get_rank())) == (1, "fast")


@pytest.mark.parametrize("is_shared", [True, False])
@on_ranks(2)
def test_a_directory_lost_in_a_run_sends_all_ranks_to_the_root(tmp_path: Path, *, is_shared: bool) -> None:
    """If this fails, one host makes its lost directory anew, or ranks save the parts of a step in two places."""
    log, fast = Warnings(), host_of(tmp_path, 0 if is_shared else None)
    with manager_of(tmp_path, fast=fast) as manager:
        save_all(manager, 1)
        on_rank(1, lambda: shutil.rmtree(fast))
        save_all(manager, 2)
    dist.barrier()
    assert names(tmp_path / "bucket") == ["step-2"]
    on_rank(1, lambda: None if not fast.exists() else pytest.fail("the directory was made anew"))
    if dist.get_rank() == 0:
        assert any(f"rank {0 if is_shared else 1}: its directory" in text for text in log.texts)


@on_ranks(2)
def test_a_lost_disk_does_not_end_the_run(tmp_path: Path) -> None:
    """If this fails, a host whose drive is gone ends the job, or lets it resume from parts; or saves are lost there."""
    log, places = Warnings(), Places()
    with manager_of(tmp_path) as manager:
        save_all(manager, 10, 11)
    dist.barrier()
    if dist.get_rank() == 1:
        places.fail(host_of(tmp_path), unreadable)
    with manager_of(tmp_path, options=make_options(wrap_store=places)) as manager:
        assert restore(manager) == (10, "bucket")
        save_all(manager, 12)
    dist.barrier()
    assert names(tmp_path / "bucket") == ["step-10", "step-12"]
    if dist.get_rank() == 0:
        assert any("not to the fast place" in text for text in log.texts)


@on_ranks(2)
def test_a_step_of_another_run_on_one_host_is_not_taken(tmp_path: Path) -> None:
    """If this fails, a host that was used before makes the run continue another one's training."""
    log = Warnings()
    if dist.get_rank() == 1:
        with manager_of(tmp_path, root="another", no_dist=True) as other:
            other.save(99, state_of(99.0))
    dist.barrier()
    with manager_of(tmp_path) as manager:
        assert restore(manager) is None
        save_all(manager, 1, 2)
        assert restore(manager) == (2, "fast")
    assert any("of another run" in text for text in log.texts) == (dist.get_rank() == 1)
    if dist.get_rank() == 1:
        assert "step-99" in names(host_of(tmp_path))


@pytest.mark.parametrize("rank", [0, 1])
@on_ranks(2)
def test_a_damaged_object_on_one_host_leads_to_the_step_before(tmp_path: Path, rank: int) -> None:
    """If this fails, ranks restore different steps, or a damaged one."""
    with manager_of(tmp_path) as manager:
        save_all(manager, 1, 2)
    on_rank(rank, lambda: damage(next((host_of(tmp_path) / "step-2/data").rglob("*.safetensors"))))
    manager = manager_of(tmp_path)
    assert restore(manager) == (1, "fast")
    with manager:
        save_all(manager, 2)
    dist.barrier()
    assert "step-2-again-1" in names(host_of(tmp_path))


@on_ranks(2)
def test_step_is_verified_on_all_hosts_before_a_tensor_is_touched(tmp_path: Path) -> None:
    """If this fails, a partial load is filled from a damaged step, and an older one leaves that in place."""
    with manager_of(tmp_path) as manager:
        save_all(manager, 1, 2, 3)
    dist.barrier()
    assert restore(manager_of(tmp_path, verify_first=True)) == (3, "fast")
    on_rank(1, lambda: damage(next((host_of(tmp_path) / "step-3/data").rglob("1-*.safetensors"))))
    manager = manager_of(tmp_path, verify_first=True)
    assert restore(manager) == (2, "fast")
    on_rank(1, lambda: shutil.rmtree(host_of(tmp_path) / "step-2/data"))
    touched = state_of(-1.0)
    with pytest.raises(CorruptCheckpointError):
        manager_of(tmp_path, verify_first=True).restore(touched)
    assert touched["step"] == -1
    assert set(touched["shared"].tolist()) == {-1.0}


@on_ranks(2)
def test_each_host_keeps_the_newest_steps(tmp_path: Path) -> None:
    """If this fails, the drives of all hosts but one fill up."""
    with manager_of(tmp_path, fast_keep=2) as manager:
        save_all(manager, 1, 2, 3, 4)
    dist.barrier()
    mine = host_of(tmp_path)
    assert names(mine) == ["step-3", "step-4"]
    assert not objects_of(mine / "step-1") if (mine / "step-1").exists() else True


@on_ranks(2)
def test_a_full_drive_of_one_host_sends_the_save_to_the_root(tmp_path: Path) -> None:
    """If this fails, a full drive ends the job, or its ranks save to different places."""
    log, places = Warnings(), Places()
    with manager_of(tmp_path, options=make_options(wrap_store=places)) as manager:
        save_all(manager, 1)
        if dist.get_rank() == 1:
            places.fail(host_of(tmp_path), full)
        save_all(manager, 2)
        places.broken.clear()
        save_all(manager, 3)
    dist.barrier()
    assert names(tmp_path / "bucket") == ["step-2"]
    assert names(host_of(tmp_path)) == ["step-1", "step-3"]
    assert any("rank 1: " in text and "No space left" in text for text in log.texts) == (dist.get_rank() == 0)


@pytest.mark.parametrize("async_", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@on_ranks(2)
def test_a_drive_that_fills_up_during_a_save_of_one_rank_sends_it_to_the_root(
    tmp_path: Path,
    rank: int,
    is_shared: bool,  # noqa: FBT001
    async_: bool,  # noqa: FBT001
) -> None:
    """If this fails, one full drive costs a checkpoint that the bucket could have taken, or ranks save apart."""
    log, places = Warnings(), Places()
    fast = host_of(tmp_path, 0 if is_shared else None)
    options = make_options(wrap_store=places, retries=0)
    with manager_of(tmp_path, 0 if is_shared else None, async_=async_, options=options) as manager:
        save_all(manager, 1)
        if dist.get_rank() == rank:
            places.fail(fast, full_for_data)
        manager.save(2, state_of(2.0))
        manager.wait(WAIT_S)
        places.broken.clear()
        assert manager.failures == ()
        dist.barrier()
        assert names(tmp_path / "bucket") == ["step-2"]
        assert not objects_of(fast / "step-2")
        assert restore(manager) == (2, "bucket")
        save_all(manager, 3)
    dist.barrier()
    assert (names(fast), names(tmp_path / "bucket")) == (["step-1", "step-3"], ["step-2"])
    told = [text for text in log.texts if "because the fast place failed" in text]
    assert len(told) == (dist.get_rank() == 0)
    assert all(f"rank {rank}" in text and "No space left" in text for text in told)


@on_ranks(2)
def test_a_save_that_no_place_takes_fails_on_all_ranks_with_both_reasons(tmp_path: Path) -> None:
    """If this fails, ranks wait for one another after both places have failed, or each has another error."""
    places = Places()
    places.fail(host_of(tmp_path) if dist.get_rank() else tmp_path / "bucket", full_for_data)
    manager = manager_of(tmp_path, options=make_options(wrap_store=places, retries=0))
    with pytest.raises(StoreError) as raised:
        save_all(manager, 1)
    text = str(raised.value)
    assert f"saving {tmp_path}/bucket/step-1 (after saving " in text
    assert text.count("No space left") == 2
    assert [failure.uri for failure in manager.failures] == [f"{tmp_path}/bucket/step-1"]


@on_ranks(2)
def test_a_host_that_cannot_write_the_manifest_costs_no_step(tmp_path: Path) -> None:
    """If this fails, a save that is committed on one host is reported as failed, and its data is removed."""

    def no_manifest(call: Call) -> Exception | None:
        is_it = call.operation == "put" and "manifest" in call.key
        return StoreError("Input/output error", key=call.key, operation=call.operation) if is_it else None

    log, places = Warnings(), Places()
    if dist.get_rank() == 1:
        places.fail(host_of(tmp_path), no_manifest)
    with manager_of(tmp_path, options=make_options(wrap_store=places)) as manager:
        save_all(manager, 1)
    dist.barrier()
    assert names(host_of(tmp_path)) == ["step-1"][: 1 - dist.get_rank()]
    assert any("not in the directory of rank 1" in text for text in log.texts) == (dist.get_rank() == 1)
    assert restore(manager_of(tmp_path)) == (1, "fast")


@on_ranks(2)
def test_a_host_that_removes_an_older_save_of_the_name_meanwhile_commits_the_new_one(tmp_path: Path) -> None:
    """If this fails, a host has a part of a step and no manifest, so that the root is owed the step for long."""
    step, removals = host_of(tmp_path) / "step-11", list[bool]()
    lock = threading.Lock()  # a deletion also removes the objects that a save puts meanwhile

    def remove_first(call: Call) -> None:
        if call.operation in ("put", "create_multipart") and call.key.startswith("data/"):
            with lock:
                if not removals:
                    removals.append(True)
                    cloudckpt.delete(step)

    places = Places()
    with manager_of(tmp_path, async_=False, options=make_options(wrap_store=places)) as manager:
        save_all(manager, 11)
        if dist.get_rank() == 1:
            places.fail(step, remove_first)
        manager.save(11, state_of(11.0), overwrite=True)
    dist.barrier()
    assert removals == [True][: dist.get_rank()]
    assert names(host_of(tmp_path)) == ["step-11"]
    assert restore(manager_of(tmp_path)) == (11, "fast")


@on_ranks(2)
def test_a_commit_is_later_than_those_that_other_hosts_know(tmp_path: Path) -> None:
    """If this fails, a host whose clock is behind commits steps that a restore takes for older ones."""
    if dist.get_rank() == 1:
        note_commit_time_ns(time.time_ns() + 3600 * 10**9)
        with manager_of(tmp_path, no_dist=True) as alone:
            alone.save(1, state_of(1.0))
    dist.barrier()
    with manager_of(tmp_path) as manager:
        save_all(manager, 2)
    assert restore(manager_of(tmp_path)) == (2, "fast")


@on_ranks(2)
def test_an_interrupt_after_the_commit_removes_nothing(tmp_path: Path) -> None:
    """If this fails, Ctrl-C on one host, once another has committed, removes a part of the step from all hosts."""

    def interrupt(call: Call) -> Any:
        return KeyboardInterrupt() if call.operation == "put" and "manifest" in call.key else None

    places = Places()
    if dist.get_rank() == 1:
        places.fail(host_of(tmp_path), interrupt)
    manager = manager_of(tmp_path, async_=False, options=make_options(wrap_store=places))
    with pytest.raises((KeyboardInterrupt, CheckpointException)):
        manager.save(1, state_of(1.0))
    dist.barrier()
    assert names(host_of(tmp_path)) == ["step-1"][: 1 - dist.get_rank()]
    assert restore(manager_of(tmp_path)) == (1, "fast")


@on_ranks(2)
def test_a_host_that_has_the_save_before_under_the_same_name_mixes_nothing(tmp_path: Path) -> None:
    """If this fails, a crash between the two manifests of an overwrite lets ranks load two saves of one step."""
    with manager_of(tmp_path) as manager:
        save_all(manager, 10, 11)
    kept = tmp_path / "kept"
    on_rank(1, lambda: shutil.copytree(host_of(tmp_path) / "step-11", kept))
    with manager_of(tmp_path) as manager:
        manager.save(11, state_of(12.0) | {"step": 11}, overwrite=True)
    dist.barrier()

    def go_back() -> None:
        """Put the manifest and the data of the save before in the place of the new manifest."""
        mine = host_of(tmp_path) / "step-11"
        (mine / "manifest.1.json").unlink()
        shutil.copytree(kept, mine, dirs_exist_ok=True)

    on_rank(1, go_back)
    state = state_of(-1.0)
    found = manager_of(tmp_path).restore(state)
    assert found is not None
    assert (found.step, state["step"]) == (11, 11)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert {number for tensor in tensors for number in tensor.tolist()} == {12.0}
    on_rank(0, lambda: shutil.rmtree(host_of(tmp_path)))  # the new save's objects of rank 0 are gone, and the old ones
    assert restore(manager_of(tmp_path)) == (10, "fast")


@on_ranks(2)
def test_forced_save_reaches_the_root(tmp_path: Path) -> None:
    """If this fails, the last save before a host goes away stays on that host."""
    with manager_of(tmp_path) as manager:
        save_all(manager, 1)
        manager.save(1, state_of(1.0), force=True)
        manager.save(2, state_of(2.0), force=True)
    dist.barrier()
    assert names(tmp_path / "bucket") == names(host_of(tmp_path)) == ["step-1", "step-2"]
    on_rank(1, lambda: shutil.rmtree(host_of(tmp_path)))
    assert restore(manager_of(tmp_path)) == (2, "fast")  # with the root's copy of what is gone


@on_ranks(2)
def test_steps_of_a_job_on_one_host_are_loaded_on_two(tmp_path: Path) -> None:
    """If this fails, a job that gets a second host starts from scratch, or from an older step."""
    if dist.get_rank() == 0:
        with manager_of(tmp_path, no_dist=True) as manager:
            manager.save(1, {"shared": torch.full((3000,), 1.0), "step": 1})
    dist.barrier()
    state = {"shared": torch.zeros(3000), "step": -1}
    found = manager_of(tmp_path).restore(state)
    assert found is not None
    assert (found.step, state["step"], float(state["shared"].sum())) == (1, 1, 3000.0)


def test_transfers_bring_each_object_where_it_is_wanted_from_the_lowest_rank_that_has_it() -> None:
    """If this fails, a host gets what it has, or waits for what no host has."""
    leaders = (0, 0, 2, 3)

    def held(wanted: set[int], found: set[int]) -> WantedAndHeld:
        return WantedAndHeld(wanted=frozenset(wanted), found=frozenset(found))

    ranks = [held({0}, {0, 4}), held({1, 9}, set()), held({0, 2}, {1, 2, 4}), held({4}, {1})]
    assert plan_transfers(ranks, leaders) == [
        HostTransfer(object_index=0, source=0, targets=frozenset({2})),
        HostTransfer(object_index=1, source=2, targets=frozenset({0})),
        HostTransfer(object_index=4, source=0, targets=frozenset({3})),
    ]


def test_ranks_that_see_one_another_only_partly_are_no_groups() -> None:
    """If this fails, ranks take a directory for shared that is not."""
    groups = choose_groups(1, [frozenset({0}), frozenset({1, 2}), frozenset({1, 2})])
    assert groups is not None
    assert (groups.leaders, groups.leads) == ((0, 1, 1), True)
    assert choose_groups(0, [frozenset({0}), frozenset({0, 1})]) is None
    assert choose_groups(0, [frozenset({0, 1}), frozenset({1})]) is None
