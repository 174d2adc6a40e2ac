"""Ranks that leave a save by force: by Ctrl-C, or by destroying the process group under it."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import Place
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt import api
from cloudckpt.background import runner
from cloudckpt.distributed.guarded_group import GuardedProcessGroup
from cloudckpt.distributed.rendezvous import Rendezvous

pytestmark = pytest.mark.multirank

WAIT_S = 90.0
TIMEOUT_S = 30.0
SHORT_S = 3.0
"""For what a broken connection takes."""


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


# --- An interrupt between two lines of async_save


def interrupted_at(moment: str) -> Any:
    """Have Ctrl-C come to `async_save` where nothing is under way yet but the call that all ranks make."""

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    patch = pytest.MonkeyPatch()
    if moment == "the call has begun":
        patch.setattr(api, "earlier_failure", interrupt)
    elif moment == "the copy has begun":
        patch.setattr(runner, "Cancellation", interrupt)
    elif moment == "the thread is about to start":
        patch.setattr(runner, "keep", lambda handle, thread: (runner_keep(handle, thread), interrupt()))
    return patch


runner_keep = runner.keep


def interrupt_one(root: str, moment: str, who: int) -> None:
    """On each rank: `who` is interrupted in its first async_save; all save again."""
    options = cloudckpt.Options(timeout_s=TIMEOUT_S)
    if dist.get_rank() == who:
        patch = interrupted_at(moment)
        with pytest.raises(KeyboardInterrupt):
            cloudckpt.async_save(values(1.0), f"{root}/not-made", options=options)
        patch.undo()
    else:
        with pytest.raises(cloudckpt.RankLostError, match="left before the end") as caught:
            cloudckpt.async_save(values(1.0), f"{root}/not-made", options=options).result(WAIT_S)
        assert caught.value.ranks == (who,)
    save_again(root)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("moment", ["the call has begun", "the copy has begun", "the thread is about to start"])
def test_an_interrupt_between_two_lines_keeps_nobody_waiting(local: Place, moment: str, who: int) -> None:
    """If this fails, Ctrl-C at the wrong moment makes a rank look alive to the others for ever, or the next save wait
    for one that was never made.
    """
    run_ranks(interrupt_one, local.root, moment, who, world_size=3)
    assert {key.partition("/")[0] for key in local.manifest_keys()} == {"next", "last"}


# --- A loss where groups for both purposes are there


class Interrupted:
    """A `Stateful` during which Ctrl-C comes, on one rank."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return {"x": torch.ones(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def lose_one_in_the(foreground_or_background: str, root: str) -> None:
    """On each rank: after saves of both kinds, rank 1 leaves one, twice."""
    save_again(f"{root}/before")
    options = cloudckpt.Options(timeout_s=TIMEOUT_S)
    for _ in range(2):
        with pytest.raises((KeyboardInterrupt, cloudckpt.RankLostError)):  # noqa: PT012  # one of two calls
            if foreground_or_background == "foreground":
                cloudckpt.save({"app": Interrupted()}, f"{root}/not-made", options=options)
            else:
                cloudckpt.async_save({"app": Interrupted()}, f"{root}/not-made", options=options).result(WAIT_S)
    save_again(root)


@pytest.mark.parametrize("purpose", ["foreground", "background"])
def test_saves_of_both_kinds_go_on_after_a_loss_in_either(local: Place, purpose: str) -> None:
    """If this fails, a job that saves in both ways never saves again once a rank was lost: torch has no name left for
    the new group, because it counts them, and the other one has that number.
    """
    run_ranks(functools.partial(lose_one_in_the, purpose), local.root, world_size=2)
    assert {key.rpartition("/")[0] for key in local.manifest_keys()} == {"before/next", "before/last", "next", "last"}


# --- Ctrl-C while the ranks wait for one another


def interrupt_while_waiting(root: str, who: int) -> None:
    """On each rank: Ctrl-C comes to `who` in each of its waits for the others, one save after the other."""
    save_again(f"{root}/before")
    options = cloudckpt.Options(timeout_s=TIMEOUT_S)
    barrier, run = Rendezvous.barrier, GuardedProcessGroup._run
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
                    GuardedProcessGroup,
                    "_run",
                    lambda one, work, press=press: (press(one.rendezvous), run(one, work))[1],
                )
            with pytest.raises(KeyboardInterrupt):
                cloudckpt.save(values(1.0), f"{root}/left-{number}", options=options)
            patch.undo()
        else:
            with pytest.raises(cloudckpt.RankLostError, match=r"left before the end .KeyboardInterrupt") as caught:
                cloudckpt.save(values(1.0), f"{root}/left-{number}", options=options)
            assert caught.value.ranks == (who,)
    save_again(root)


@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupt_fails_one_save_on_all_ranks_and_the_next_is_made(local: Place, who: int) -> None:
    """If this fails, Ctrl-C on one rank leaves the others in gloo for half an hour, or ends all later saves."""
    run_ranks(interrupt_while_waiting, local.root, who, world_size=3, timeout_s=WAIT_S)
    assert {key.partition("/")[0] for key in local.manifest_keys()} == {"before", "next", "last"}


# --- A rank whose connection fails


def lose_the_connection(root: str, who: int) -> None:
    """On each rank: a collective breaks on `who`; all later calls in the group fail at once."""
    options = cloudckpt.Options(timeout_s=SHORT_S)
    cloudckpt.save(values(1.0), f"{root}/before", options=options)
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == who:
        patch.setattr(GuardedProcessGroup, "_run", _break)
    for number in range(2):
        with pytest.raises(cloudckpt.RankLostError, match="make a new one, or restart the job"):
            cloudckpt.save(values(1.0), f"{root}/not-made-{number}", options=options)
        patch.undo()
    dist.barrier()
    cloudckpt.save(values(1.0), f"{root}/made", process_group=dist.new_group(), options=options)


def _break(group: GuardedProcessGroup, _collective: object) -> None:
    raise group.rendezvous.explain(RuntimeError("the connection is gone"))


def test_a_broken_connection_ends_the_group_on_all_ranks(local: Place) -> None:
    """If this fails, ranks mix up the bytes of two collectives after one has broken."""
    run_ranks(lose_the_connection, local.root, 1, world_size=3, timeout_s=WAIT_S)
    assert {key.partition("/")[0] for key in local.manifest_keys()} == {"before", "made"}


# --- The process group is destroyed


def destroy_the_group(root: str, rendezvous: str, moment: str) -> None:
    """On each rank: the group goes while the save is at `moment`; a new one is made, and the next save runs on it."""
    reached, opened = threading.Event(), threading.Event()

    def gate(event: cloudckpt.Event) -> None:
        if event.name == moment:
            reached.set()
            assert opened.wait(WAIT_S)

    options = cloudckpt.Options(timeout_s=TIMEOUT_S, on_event=gate)
    handle = cloudckpt.async_save(values(1.0), f"{root}/not-made", options=options)
    assert reached.wait(WAIT_S)
    dist.barrier()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    opened.set()
    with pytest.raises(cloudckpt.RankLostError, match=r"destroyed meanwhile.*wait for the handle") as caught:
        handle.result(WAIT_S)
    assert isinstance(caught.value, CheckpointException)
    assert caught.value.uri == f"{root}/not-made"
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, size), rank=rank, world_size=size)
    save_again(root)


@pytest.mark.parametrize("moment", ["save.set_up", "save.object_uploaded"])
def test_a_save_that_loses_its_group_says_what_to_do(local: Place, tmp_path: Path, moment: str) -> None:
    """If this fails, a script that ends its group too early gets torch's ValueError from a thread, or a hang."""
    run_ranks(destroy_the_group, local.root, os.fspath(tmp_path / "rendezvous"), moment, world_size=2)
    assert {key.partition("/")[0] for key in local.manifest_keys()} == {"next", "last"}


# --- A rank that is interrupted before its call has begun


def leave_before_the_call(root: str, purpose: str, who: int) -> None:
    """On each rank: one is interrupted while it waits for its turn, and goes on; nothing else joins them."""
    options = cloudckpt.Options(timeout_s=TIMEOUT_S)

    def save(name: str) -> None:
        if purpose == "background":
            cloudckpt.async_save(values(1.0), f"{root}/{name}", options=options).result(WAIT_S)
        else:
            writer = cloudckpt.ObjectStoreWriter(f"{root}/{name}", options=options)
            cloudckpt.save(values(1.0), storage_writer=writer)

    save("first")
    if dist.get_rank() == who:
        patch = pytest.MonkeyPatch()
        patch.setattr(api, "await_turn", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            save("left")
        patch.undo()
    else:
        with pytest.raises(cloudckpt.RankLostError, match="left before the end"):
            save("left")
    save("second")
    save_again(root)


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("purpose", ["foreground", "background"])
def test_an_interrupt_before_a_call_has_begun_is_of_that_call(local: Place, purpose: str, who: int) -> None:
    """If this fails, Ctrl-C while an earlier save is waited for makes the next save fail on all ranks, too."""
    run_ranks(leave_before_the_call, local.root, purpose, who, world_size=2, timeout_s=WAIT_S)
    assert {key.partition("/")[0] for key in local.manifest_keys()} == {"first", "second", "next", "last"}
