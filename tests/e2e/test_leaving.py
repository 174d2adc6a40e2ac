"""Ranks that leave a save by force: by Ctrl-C, or by destroying the process group under it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import Place
from tests.in_memory import Gate

import cloudckpt
from cloudckpt.distributed.collectives import CollectiveCall
from cloudckpt.distributed.rendezvous import Rendezvous

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


def interrupt_while_waiting(root: str, who: int) -> None:
    """On each rank: Ctrl-C comes to `who` in each of its waits for the others, one save after the other."""
    save_again(f"{root}/before")
    options = cloudckpt.Options(timeout_s=TIMEOUT_S)
    barrier, meet = Rendezvous.barrier, CollectiveCall._meet
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
                patch.setattr(
                    CollectiveCall,
                    "_meet",
                    lambda one, work, press=press: meet(one, lambda: (press(one._rendezvous), work())[1]),
                )
            with pytest.raises(KeyboardInterrupt):
                cloudckpt.save(values(1.0), f"{root}/left-{number}", options=options)
            patch.undo()
        else:
            with pytest.raises(cloudckpt.RankLostError, match=r"left before the end .KeyboardInterrupt") as caught:
                cloudckpt.save(values(1.0), f"{root}/left-{number}", options=options)
            assert caught.value.ranks == (who,)
    save_again(root)


def test_an_interrupt_fails_one_save_on_all_ranks_and_the_next_is_made(local: Place) -> None:
    """If this fails, Ctrl-C on one rank leaves the others in gloo for half an hour, or ends all later saves."""
    run_ranks(interrupt_while_waiting, local.root, 1, world_size=3, timeout_s=WAIT_S)
    committed = {"before", "left-4", "next", "last"}  # of the interrupted ones, that of which rank 0 had all results
    assert {key.partition("/")[0] for key in local.manifest_keys()} == committed


def destroy_the_group(root: str, rendezvous: str, moment: str) -> None:
    """On each rank: the group goes while the save is at `moment`. The save ends well, and the next has a new group."""
    gate = Gate()
    options = cloudckpt.Options(timeout_s=TIMEOUT_S, on_event=gate.at_event(moment))
    handle = cloudckpt.async_save(values(1.0), f"{root}/begun", options=options)
    assert gate.reached.wait(WAIT_S)
    dist.barrier()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    gate.opened.set()
    handle.result(WAIT_S)
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, size), rank=rank, world_size=size)
    save_again(root)


def test_a_save_outlives_its_process_group(local: Place, tmp_path: Path) -> None:
    """If this fails, a script that ends its group too early loses its last checkpoint, or hangs."""
    run_ranks(destroy_the_group, local.root, os.fspath(tmp_path / "rendezvous"), "save.object_uploaded", world_size=2)
    assert {key.partition("/")[0] for key in local.manifest_keys()} == {"begun", "next", "last"}
