"""Saves by torch's background process on several ranks: as by threads, and none hangs where a process dies."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.models import AppState, assert_same, build
from tests.kit.places import Place
from tests.kit.ranks import on_ranks, run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import Event, Options
from cloudckpt.background import process
from cloudckpt.errors import InvalidOptionError, UnsupportedValueError

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

WAIT_S = 120.0  # each process has to import torch, on a machine that may be busy

save_by_process = functools.partial(cloudckpt.async_save, async_checkpointer_type=AsyncCheckpointerType.PROCESS)


def state_of(value: float) -> dict[str, Any]:
    """The state of one rank; its own tensor has several parts."""
    rank = dist.get_rank()
    return {"shared": torch.full((500,), float(value)), f"own-{rank}": torch.full((70_000,), float(value + rank))}


def assert_loads(uri: str, value: float) -> None:
    """The checkpoint at `uri` is `state_of(value)`, to the bit."""
    loaded = state_of(-1.0)
    cloudckpt.load(loaded, uri)
    assert_same(loaded, state_of(value))


@on_ranks(2)
def test_saves_by_process_hold_what_the_model_was(root: str) -> None:
    """If this fails, a save by process stores other values, or the ranks disagree about whose processes still run."""
    for number, save in enumerate([save_by_process, cloudckpt.async_save, save_by_process]):
        training = build("fsdp2", seed=number)
        expected = training.parameters()
        handle = save({"app": AppState(training), **state_of(number)}, f"{root}/{number}")
        training.losses(0, 2)
        handle.result(WAIT_S)
        assert not handle.cancel()
        training = build("fsdp2", seed=-1)
        state = {"app": AppState(training), **state_of(-1.0)}
        cloudckpt.load(state, f"{root}/{number}")
        del state["app"]
        assert_same(training.parameters(), expected)
        assert_same(state, state_of(number))
    if dist.get_rank() == 0:
        cloudckpt.close()  # the other rank still has its process
    dist.barrier()
    save_by_process(state_of(9.0), f"{root}/closed").result(WAIT_S)
    assert_loads(f"{root}/closed", 9.0)
    cloudckpt.close()
    assert process._process() is None
    cloudckpt.verify(f"{root}/2")


class Die:
    """Kills the process that saves, on one rank at one moment."""

    def __init__(self, rank: int, moment: str) -> None:
        self.rank, self.moment = rank, moment

    def __call__(self, event: Event) -> None:
        if (event.rank, event.name) == (self.rank, self.moment):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("victim", "moment", "is_committed"), [(1, "save.object_uploaded", False), (0, "save.committed", True)]
)
@on_ranks(2)
def test_all_ranks_learn_that_the_process_of_one_is_gone(
    root: str, victim: int, moment: str, *, is_committed: bool
) -> None:
    """If this fails, ranks wait for one whose process ran out of memory, or can save no more after it."""
    begun_s = time.monotonic()
    handle = save_by_process(state_of(1.0), f"{root}/lost", options=Options(on_event=Die(victim, moment)))
    error = handle.exception(WAIT_S)
    assert isinstance(error, CheckpointException)
    assert isinstance(error, cloudckpt.RankLostError)
    assert list(error.failures) == [victim]
    assert f"the background process of rank {victim} was killed by SIGKILL" in str(error)
    assert time.monotonic() - begun_s < WAIT_S
    dist.barrier()
    assert (cloudckpt.latest(root) is not None) == is_committed
    if is_committed:
        assert_loads(f"{root}/lost", 1.0)
    for number in range(2):
        save_by_process(state_of(number), f"{root}/{number}").result(WAIT_S)
        assert_loads(f"{root}/{number}", number)
    cloudckpt.close()


class Refuse:
    """Ends a save on one rank with an error of the program's own."""

    def __call__(self, event: Event) -> None:
        if event.name == "save.part_uploaded" and event.rank == 1:
            raise LookupError("not this time")


def fail_and_go_on(root: str) -> None:
    """On each rank: saves that fail on rank 1 in different ways, and one that nobody asks about."""
    refusing = Options(on_event=Refuse())
    handle = save_by_process(state_of(1.0), f"{root}/refused", options=refusing)
    error = handle.exception(WAIT_S)
    assert isinstance(error, CheckpointException)
    assert {rank: type(cause) for rank, (cause, _) in error.failures.items()} == {1: LookupError}

    stranger = {"x": threading.Lock()} if dist.get_rank() == 1 else {}
    with pytest.raises(CheckpointException) as caught:
        save_by_process({**state_of(1.0), **stranger}, f"{root}/uncopied")
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value, UnsupportedValueError)

    unseen = save_by_process(state_of(1.0), f"{root}/unseen", options=refusing)
    unseen.committed.wait(WAIT_S)
    dist.barrier()
    with pytest.raises(CheckpointException, match="not this time"):
        save_by_process(state_of(1.0), f"{root}/next")
    assert cloudckpt.latest(root) is None
    save_by_process(state_of(2.0), f"{root}/good").result(WAIT_S)
    assert_loads(f"{root}/good", 2.0)
    cloudckpt.close()


def test_a_failure_on_one_rank_reaches_all(s3: Place) -> None:
    """If this fails, a save by process that fails on one rank hangs the others, or loses the cause."""
    run_ranks(fail_and_go_on, s3.root, world_size=2, timeout_s=240.0)  # it starts eight processes


@on_ranks(1)
def test_a_save_that_a_process_cannot_make_is_refused(root: str) -> None:
    """If this fails, a save succeeds in the memory of another process, or fails with an error of pickle's."""
    with pytest.raises(InvalidOptionError, match="memory of this process"):
        save_by_process({"w": torch.ones(3)}, "memory://process/a")
    with pytest.raises(InvalidOptionError, match="cannot pickle on_event"):
        save_by_process({"w": torch.ones(3)}, f"{root}/a", options=Options(on_event=lambda event: None))
    part: Any = torch.ones(3)
    part.global_shape, part.global_offsets = (6,), ((3,),)
    for is_async in (False, True):
        stager = DefaultStager(StagingOptions(False, True, is_async, False))  # noqa: FBT003  # torch's own order
        with pytest.raises(UnsupportedValueError, match=r"copy of 'w\.1' has attributes .* does not get them"):
            save_by_process({"w": [1, part]}, f"{root}/a", async_stager=stager).result(WAIT_S)
        stager.close()
    assert list(Path(root).iterdir()) == []
