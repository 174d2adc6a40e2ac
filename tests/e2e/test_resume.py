"""Saves that go on from what a killed one has left: they send what is missing, and are as whole as any."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.places import LocalPlace, Place
from tests.e2e.resuming import check_kill, die, succeed, tried
from tests.in_memory import assert_holds, loaded, state_of
from tests.options import make_options

import cloudckpt
from cloudckpt.errors import CloudckptError

pytestmark = pytest.mark.faults


@pytest.mark.multirank
@pytest.mark.every_store
def test_a_save_that_was_killed_sends_only_what_is_missing(place: Place, tmp_path: Path) -> None:
    """If this fails, a job that is killed again and again never gets a large checkpoint up, or gets a mixed one."""
    check_kill(place, tmp_path / "scratch")


@pytest.mark.multirank
def test_nothing_is_taken_up_unless_both_saves_say_so(local: LocalPlace, tmp_path: Path) -> None:
    """If this fails, a save is resumed of which a failing rank may still remove everything."""
    die(tried(local, tmp_path / "1", victims=(0, 1), after_num_parts=5, resume=False))
    assert succeed(tried(local, tmp_path / "2", resume=True)) == 0


@pytest.mark.multirank
def test_an_overwrite_that_was_killed_goes_on(local: LocalPlace, tmp_path: Path) -> None:
    """If this fails, only a first save can be resumed; or the checkpoint that was there does not outlive the kill."""
    assert succeed(tried(local, tmp_path / "0", changed=("a", "b", "c"))) == 0
    die(tried(local, tmp_path / "1", victims=(0, 1), after_num_parts=5, overwrite=True))
    assert succeed(tried(local, tmp_path / "2", overwrite=True)) > 0
    assert len(local.manifest_keys()) == 1


# In one process, where the one that was thought dead is alive

SIZES = {"part_bytes": 4096, "tile_bytes": 4096, "object_bytes": 8192, "connections": 1, "resume": True}


class Interrupted(Exception):  # noqa: N818  # it is none
    """The process is gone, as far as this save is concerned."""


def save(fill: float, uri: str, *, on_event: Callable[[cloudckpt.Event], None] | None = None, **more: Any) -> Any:
    """Two objects: one is put whole, and the other goes up in parts."""
    options = make_options(**{**SIZES, **more.pop("options", {})}, on_event=on_event)
    return cloudckpt.save(state_of(fill), uri, no_dist=True, options=options, **more).report


def num_events() -> int:
    """Of a whole save, once it has looked at what lies there."""
    events: list[cloudckpt.Event] = []
    save(1.0, "memory://resume-counted/checkpoint", on_event=events.append, overwrite=True)
    assert events[0].name == "save.begun"
    return len(events) - 1


NUM_EVENTS = num_events()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("step", range(NUM_EVENTS))
def test_overtaken_job_changes_nothing(step: int, *, same: bool, overwrite: bool) -> None:
    """If this fails, a process that was cut off for a while, and then goes on, damages the checkpoint of the job that
    was started in its place and took up what it had sent; or makes one of its own that is none.

    The first save is stopped at each of its steps, a second one runs from beginning to end, and then the first goes on.
    """
    uri = f"memory://resume-zombie-{step}-{same}-{overwrite}/checkpoint"
    if overwrite:
        save(9.0, uri, options={"resume": False})
    count = itertools.count()
    fill = 1.0 if same else 2.0
    outcomes: list[Any] = []

    def come_between(event: cloudckpt.Event) -> None:
        # Before its set-up, a save knows of nothing that lies there: what comes then came first.
        if event.name != "save.begun" and next(count) == step:
            try:
                outcomes.append(save(fill, uri, overwrite=overwrite))
            except CloudckptError as error:
                outcomes.append(error)
            if not isinstance(outcomes[0], Exception):
                assert_holds(loaded(uri), fill)

    try:
        outcomes.append(save(1.0, uri, on_event=come_between, overwrite=overwrite))
    except CloudckptError as error:
        outcomes.append(error)
    second, first = outcomes
    won = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    assert won
    if not overwrite:
        assert len(won) == 1
    assert_holds(loaded(uri), 1.0 if isinstance(second, Exception) else fill)
    if not isinstance(second, Exception) and isinstance(first, Exception) and not same:
        assert second.num_reused_bytes < second.num_bytes


@pytest.mark.parametrize("step", range(NUM_EVENTS))
def test_data_taken_over_by_a_later_save_is_kept_by_the_earlier(step: int) -> None:
    """If this fails, a save that fails because it was overtaken takes the other's data with it."""
    uri = f"memory://resume-fails-{step}/checkpoint"
    count = itertools.count()

    def break_off(_: cloudckpt.Event) -> None:
        if next(count) == step:
            raise Interrupted

    try:
        save(1.0, uri, on_event=break_off)
    except Exception as error:  # noqa: BLE001  # torch's, with ours in it
        assert "Interrupted" in repr(error)  # noqa: PT017
        report = save(1.0, uri)
        assert report.num_reused_bytes > 0 or step <= 1
    assert_holds(loaded(uri), 1.0)


def test_all_is_there_already() -> None:
    """If this fails, a save that was killed just before its commit sends everything once more."""
    uri = "memory://resume-all/checkpoint"

    def break_off(event: cloudckpt.Event) -> None:
        if event.name == "save.committing":
            raise Interrupted

    with pytest.raises(Exception, match="Interrupted"):
        save(1.0, uri, on_event=break_off)
    report = save(1.0, uri)
    assert (report.num_bytes, report.num_objects) == (0, 2)
    assert report.num_reused_bytes > 0
    assert_holds(loaded(uri), 1.0)


def test_a_checkpoint_that_was_replaced_is_not_taken_up() -> None:
    """If this fails, a save names objects that the overwrite before it is still removing."""
    uri = "memory://resume-replaced/checkpoint"
    save(1.0, uri)
    save(2.0, uri, overwrite=True, options={"resume": False})
    assert save(1.0, uri, overwrite=True).num_reused_bytes == 0
    assert_holds(loaded(uri), 1.0)
