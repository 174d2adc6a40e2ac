"""Ranks that leave a save by force: by Ctrl-C, or by destroying the process group under it."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.models import assert_same
from tests.kit.places import LocalPlace
from tests.kit.ranks import on_ranks, run_ranks
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt.dcp.ranks.rendezvous import Rendezvous

pytestmark = pytest.mark.multirank

WAIT_S = 90.0
TIMEOUT_S = 30.0


def values(fill: float) -> dict[str, torch.Tensor]:
    return {f"own-{dist.get_rank()}": torch.full((1000,), fill)}


def save_again(root: str) -> None:
    """At once, and whatever the others are at."""
    options = cloudckpt.Options(timeout_s=TIMEOUT_S)
    cloudckpt.async_save(values(2.0), f"{root}/next", options=options).result(WAIT_S)
    cloudckpt.save(values(3.0), f"{root}/last", options=options)
    for name, fill in (("next", 2.0), ("last", 3.0)):
        state = values(0.0)
        cloudckpt.load(state, f"{root}/{name}", options=options)
        assert_same(state, values(fill))


@on_ranks(3, timeout_s=WAIT_S)
def test_an_interrupt_fails_one_save_on_all_ranks_and_the_next_is_made(root: str, local: LocalPlace) -> None:
    """If this fails, Ctrl-C on one rank leaves the others in gloo for half an hour, or ends all later saves."""
    who = 1  # is interrupted in each of its waits for the others, one save after the other
    save_again(f"{root}/before")
    options = cloudckpt.Options(timeout_s=TIMEOUT_S)
    barrier = Rendezvous.barrier
    patch = pytest.MonkeyPatch()
    for number in range(6):
        left = [number // 2]

        def press(rendezvous: Rendezvous, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
                while rendezvous._failure is None:  # the main thread notes it where it waits
                    os.sched_yield()

        if dist.get_rank() == who:
            if number % 2:
                patch.setattr(Rendezvous, "barrier", lambda one, press=press: (press(one), barrier(one))[1])
            else:
                patch.setattr(Rendezvous, "barrier", lambda one, press=press: (barrier(one), press(one))[0])
            with pytest.raises(KeyboardInterrupt):
                cloudckpt.save(values(1.0), f"{root}/left-{number}", options=options)
            patch.undo()
        else:
            with pytest.raises(cloudckpt.RankLostError, match=r"left before the end .KeyboardInterrupt") as caught:
                cloudckpt.save(values(1.0), f"{root}/left-{number}", options=options)
            assert caught.value.ranks == (who,)
    save_again(root)
    dist.barrier()
    committed = {"before", "left-4", "next", "last"}  # of the interrupted ones, that of which rank 0 had all results
    assert {key.partition("/")[0] for key in local.manifest_keys()} == committed


@dataclass
class Paused:
    """Hold a save at its first object, in whichever process it runs, until somebody opens `fifo` to write."""

    fifo: str
    is_over: bool = False

    def __call__(self, event: cloudckpt.Event) -> None:
        if event.name == "save.object_uploaded" and not self.is_over:
            self.is_over = True
            Path(self.fifo).read_bytes()


def destroy_the_group(root: str, rendezvous: str, setting: dict[str, Any]) -> None:
    """On each rank: the group goes while a save runs. The save ends well, and the next has a new group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.mkfifo(fifo := f"{rendezvous}-{rank}")
    options = cloudckpt.Options(timeout_s=TIMEOUT_S, on_event=Paused(fifo))
    uri = f"{root}/begun" + (f"-{rank}" if "no_dist" in setting else "")
    handle = cloudckpt.async_save(values(1.0), uri, options=options, **setting)
    dist.destroy_process_group()
    Path(fifo).write_bytes(b"")
    handle.result(WAIT_S)
    cloudckpt.close()
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, size), rank=rank, world_size=size)
    state = {name: torch.zeros_like(tensor) for name, tensor in values(1.0).items()}
    cloudckpt.load(state, uri, no_dist="no_dist" in setting)
    assert_same(state, values(1.0))
    save_again(f"{root}/again")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"no_dist": True},
        pytest.param({"async_checkpointer_type": AsyncCheckpointerType.PROCESS}, marks=pytest.mark.slow),
    ],
    ids=["together", "no_dist", "by_process"],
)
def test_a_save_outlives_its_process_group(tmp_path: Path, setting: dict[str, Any], world_size: int) -> None:
    """If this fails, a script that ends its group before the save loses its last checkpoint, or hangs."""
    rendezvous = os.fspath(tmp_path / "rendezvous")
    run_ranks(destroy_the_group, os.fspath(tmp_path / "root"), rendezvous, setting, world_size=world_size)
