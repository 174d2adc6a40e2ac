"""Ranks that leave a save by force: by Ctrl-C at any moment, or by destroying the process group under it."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import Place
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt import _ranks, api
from cloudckpt._background import runner
from cloudckpt._ranks.met_group import MetGroup

pytestmark = pytest.mark.multirank

WAIT_S = 90.0
TIMEOUT_S = 30.0
SHORT_S = 3.0
"""For what gloo holds ranks for."""


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
        patch.setattr(runner, "Steering", interrupt)
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


# --- An interrupt between a meeting and the collective for which the ranks met


def leave_a_collective(root: str, who: int) -> None:
    """On each rank: `who` is interrupted where gloo then holds the others, and its next save is of the other kind."""
    save_again(f"{root}/before")
    options = cloudckpt.Options(timeout_s=SHORT_S)
    patch = pytest.MonkeyPatch()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    if dist.get_rank() == who:
        patch.setattr(MetGroup, "_done", interrupt)
    with pytest.raises((KeyboardInterrupt, cloudckpt.RankLostError)):
        cloudckpt.save(values(1.0), f"{root}/not-made", options=options)
    patch.undo()
    cloudckpt.async_save(values(1.0), f"{root}/made", options=options).result(WAIT_S)
    save_again(f"{root}/after")


@pytest.mark.parametrize("who", [0, 1])
def test_who_leaves_a_collective_waits_for_those_whom_gloo_holds(local: Place, who: int) -> None:
    """If this fails, a rank that was interrupted gives up the others, in a save of the other kind, just before they
    come.
    """
    run_ranks(leave_a_collective, local.uri(), who, world_size=3, timeout_s=WAIT_S)


# --- An interrupt at any line of what waits, and in the next call another one


class InterruptAtLine:
    """Ctrl-C at the line of this number of what waits for ranks, from where a call has its number on."""

    FOLDER = Path(_ranks.__file__).parent

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_counting = False

    def __enter__(self) -> None:
        sys.settrace(self._traced)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _traced(self, frame: FrameType, event: str, _: object) -> Any:
        path = Path(frame.f_code.co_filename)
        if path.parent != self.FOLDER or path.name == "signs.py":
            return None
        self.is_counting |= frame.f_code.co_name == "_founded"
        if event == "line" and self.is_counting:
            self.number -= 1
            if self.number == 0:
                raise KeyboardInterrupt
        return self._traced


def interrupt_lines(root: str, purpose: str, seed: int) -> None:
    """On each rank: one of them is interrupted in two calls in a row; the next one is made, in each round."""
    drawn = random.Random(seed)

    def save(name: str, timeout_s: float = TIMEOUT_S) -> None:
        options = cloudckpt.Options(timeout_s=timeout_s)
        if purpose == "background":
            cloudckpt.async_save(values(1.0), f"{root}/{name}", options=options).result(WAIT_S)
        else:
            cloudckpt.save(values(1.0), f"{root}/{name}", options=options)

    save("first")
    for number in range(6):
        who, lines = drawn.randrange(2), [drawn.randrange(1, 250), drawn.randrange(1, 120)]
        for line in lines:
            interrupt = InterruptAtLine(line) if dist.get_rank() == who else contextlib.nullcontext()
            with (
                contextlib.suppress(KeyboardInterrupt, CheckpointException),
                interrupt,
            ):  # what it came to, is seen below
                save(f"{number}-{line}", SHORT_S)
        with contextlib.suppress(CheckpointException):  # as long as gloo holds a rank
            save(f"{number}-again", SHORT_S)
        dist.barrier()
        save(f"{number}-made")


@pytest.mark.parametrize("purpose", ["foreground", "background"])
def test_two_interrupts_in_a_row_put_no_rank_out_of_step(local: Place, purpose: str) -> None:
    """If this fails, a second Ctrl-C at the wrong line makes every later save fail on all ranks."""
    seed = int(os.environ.get("CLOUDCKPT_SEED", "3"))
    print("seed", seed)
    run_ranks(interrupt_lines, local.uri(), purpose, seed, world_size=2, timeout_s=2 * WAIT_S)


# --- A rank that misses a call


def miss_one(root: str, absent: tuple[int, ...]) -> None:
    """On each rank: some fail before a save, by an error of their own; all meet, and save again."""
    cloudckpt.save(values(1.0), f"{root}/first")
    if dist.get_rank() not in absent:
        with pytest.raises(cloudckpt.RankLostError, match="no sign of life"):
            cloudckpt.save(values(1.0), f"{root}/missed", options=cloudckpt.Options(timeout_s=SHORT_S))
    dist.barrier()
    save_again(root)


@pytest.mark.parametrize("absent", [(0,), (1,), (0, 2)])
def test_a_rank_that_missed_a_save_makes_the_next_one(local: Place, absent: tuple[int, ...]) -> None:
    """If this fails, one error on one rank, which the program survives, makes every later save fail on all ranks."""
    run_ranks(miss_one, local.root, absent, world_size=3, timeout_s=WAIT_S)
    assert {key.partition("/")[0] for key in local.manifest_keys()} == {"first", "next", "last"}


def miss_one_and_go_on(root: str, purpose: str, absent: int) -> None:
    """On each rank: a loop that goes on after a save that failed. One misses one; nothing else joins them."""
    options = cloudckpt.Options(timeout_s=TIMEOUT_S)
    for number in range(6):
        if number == 1 and dist.get_rank() == absent:
            continue
        with contextlib.suppress(CheckpointException):  # what it came to, is seen below
            if purpose == "background":
                cloudckpt.async_save(values(1.0), f"{root}/{number}", options=options).result(WAIT_S)
            else:
                cloudckpt.save(values(1.0), f"{root}/{number}", options=options)


@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.parametrize("purpose", ["foreground", "background"])
def test_a_rank_that_missed_a_save_and_is_ahead_is_met_again(local: Place, purpose: str, absent: int) -> None:
    """If this fails, ranks that only saves join fail in each one, for ever, once one of them has missed one."""
    run_ranks(miss_one_and_go_on, local.root, purpose, absent, world_size=2, timeout_s=WAIT_S)
    assert {key.partition("/")[0] for key in local.manifest_keys()} >= {"0", "3", "4", "5"}


# --- A rank whose connection fails when the others have all that they need


def lose_the_last_word(root: str, purpose: str, who: int) -> None:
    """On each rank: `who` fails in the last collective of its first save; all save again, in both ways."""
    options = cloudckpt.Options(timeout_s=TIMEOUT_S)
    save_again(f"{root}/before")  # as often on all ranks
    patch, waits = pytest.MonkeyPatch(), [0]
    done = MetGroup._done

    def broken(group: MetGroup, collective: Any) -> Any:
        work = done(group, collective)
        waits[0] += 1
        if waits[0] == count:
            raise group.meetings.explain(RuntimeError("the connection is gone"))
        return work

    def saved_as(name: str) -> None:
        if purpose == "background":
            cloudckpt.async_save(values(1.0), f"{root}/{name}", options=options).result(WAIT_S)
        else:
            cloudckpt.save(values(1.0), f"{root}/{name}", options=options)

    count = 0
    patch.setattr(MetGroup, "_done", broken)
    saved_as("counted")
    count, waits[0] = waits[0] if dist.get_rank() == who else 0, 0
    if dist.get_rank() == who:
        with pytest.raises(cloudckpt.RankLostError):
            saved_as("first")
        patch.undo()
    else:
        saved_as("first")
    saved_as("second")
    save_again(f"{root}/after")


@pytest.mark.parametrize(("purpose", "who"), [("foreground", 1), ("background", 1), ("background", 2)])
def test_a_rank_that_fails_after_all_others_have_ended_is_met_in_the_next_save(
    local: Place, purpose: str, who: int
) -> None:
    """If this fails, the others begin a save without knowing that it has given them up: no later one is ever made."""
    run_ranks(lose_the_last_word, local.uri(), purpose, who, world_size=3, timeout_s=WAIT_S)


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
