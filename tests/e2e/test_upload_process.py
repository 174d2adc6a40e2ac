"""Saves of several ranks, each with an upload process of its own: as by threads, and none hangs where one dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import AppState, assert_same, build
from tests.e2e.places import Place
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt import Event, Options
from cloudckpt._commit import commit_time
from cloudckpt._process.host import upload_process

pytestmark = pytest.mark.multirank

WAIT_S = 120.0  # each process has to import torch, on a machine that may be busy
Mode = Literal["thread", "process"]


def save_by_both(root: str) -> None:
    """On each rank: one state dict in both ways, training going on beside them with its own collectives."""
    training = build("fsdp2", seed=0)
    expected = training.parameters()
    reports, events = {}, {}
    modes: tuple[Mode, ...] = ("thread", "process")
    for mode in modes:
        training = build("fsdp2", seed=0)
        told: list[Event] = []
        handle = cloudckpt.async_save(
            {"app": AppState(training), "step": 7, f"own-{dist.get_rank()}": torch.full((9,), float(dist.get_rank()))},
            f"{root}/{mode}",
            options=Options(async_mode=mode, on_event=told.append),
        )
        training.losses(0, 2)
        reports[mode] = handle.result(WAIT_S).report
        events[mode] = sorted((event.name, event.num_bytes) for event in told if event.name != "retry")
    for mode in modes:
        training = build("fsdp2", seed=1)
        state = {"app": AppState(training), "step": -1, f"own-{dist.get_rank()}": torch.zeros(9)}
        cloudckpt.load(state, f"{root}/{mode}")
        assert state["step"] == 7
        assert_same(training.parameters(), expected)
        assert_same(state[f"own-{dist.get_rank()}"], torch.full((9,), float(dist.get_rank())))
    one, other = reports["thread"], reports["process"]
    assert one is not None
    assert other is not None
    assert (one.rank, one.num_bytes, one.num_objects) == (other.rank, other.num_bytes, other.num_objects)
    assert events["thread"] == events["process"]
    assert upload_process().pid is not None
    cloudckpt.close()
    assert upload_process().pid is None


def test_saves_by_thread_and_by_process_are_alike(place: Place) -> None:
    """If this fails, what is saved, told or reported depends on who uploads."""
    run_ranks(save_by_both, place.root, world_size=2)


def test_the_process_commits_later_than_all_that_this_one_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a save by process is older than the step that the job restored, where a clock went back."""
    ahead_ns = time.time_ns() + 3600 * 10**9
    monkeypatch.setattr(commit_time, "_newest_ns", ahead_ns)
    cloudckpt.async_save({"w": torch.ones(3)}, tmp_path / "a", options=Options(async_mode="process")).result(WAIT_S)
    cloudckpt.close()
    known_ns = commit_time.newest_commit_time_ns()
    newest = cloudckpt.latest(tmp_path)
    assert newest is not None
    assert newest.committed_at == commit_time.datetime_of(known_ns) > commit_time.datetime_of(ahead_ns)


def lose_the_process_of_one(root: str, victim: int, moment: str) -> None:
    """On each rank: a save in which the process of one dies, and another after it."""
    state = {"shared": torch.ones(500), f"own-{dist.get_rank()}": torch.full((70_000,), float(dist.get_rank()))}

    def kill(event: Event) -> None:
        if event.name == moment and event.rank == victim:
            pid = upload_process().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    options = Options(async_mode="process", on_event=kill, part_bytes=5 << 20)
    handle = cloudckpt.async_save(state, f"{root}/lost", options=options)
    error = handle.exception(WAIT_S)
    assert isinstance(error, CheckpointException)
    assert isinstance(error, cloudckpt.UploadProcessError)
    assert list(error.failures) == [victim]
    assert f"the upload process of rank {victim} was killed by SIGKILL" in str(error)
    assert cloudckpt.latest(root) is None
    dist.barrier()
    handle = cloudckpt.async_save(state, f"{root}/next", options=Options(async_mode="process"))
    handle.result(WAIT_S)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    cloudckpt.load(loaded, f"{root}/next")
    assert_same(loaded, state)
    newest = cloudckpt.latest(root)
    assert newest is not None
    assert newest.name == "next"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "moment"), [(1, "save.object_uploaded"), (0, "save.set_up"), (0, "save.committing"), (1, "save.written")]
)
def test_all_ranks_learn_that_the_process_of_one_is_gone(place: Place, victim: int, moment: str) -> None:
    """If this fails, ranks wait for one whose upload process ran out of memory, or can save no more after it."""
    run_ranks(lose_the_process_of_one, place.root, victim, moment, world_size=2)


def raise_on_one(root: str) -> None:
    """On each rank: a function of the user's raises on one of them."""

    def refuse(event: Event) -> None:
        if event.name == "save.part_uploaded" and event.rank == 1:
            raise LookupError("not this time")

    handle = cloudckpt.async_save(
        {f"own-{dist.get_rank()}": torch.ones(70_000)},
        f"{root}/c",
        options=Options(async_mode="process", on_event=refuse),
    )
    error = handle.exception(WAIT_S)
    assert isinstance(error, CheckpointException)
    (failure,) = error.failures.values()
    assert isinstance(failure[0], LookupError)
    assert cloudckpt.latest(root) is None


def test_an_error_of_the_users_function_reaches_all_ranks(place: Place) -> None:
    """If this fails, a program that stops a save by process stops one rank of it."""
    run_ranks(raise_on_one, place.root, world_size=2)
    assert place.keys() == []
