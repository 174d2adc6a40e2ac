"""A fast place in front of the root: which saves it takes, what the root is owed, what a restore finds in both."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.in_memory import assert_holds, state_of
from tests.kit.options import make_options
from tests.kit.ranks import on_ranks
from tests.kit.two_places import (
    Places,
    damage,
    full,
    full_for_data,
    full_for_manifest,
    names,
    unreadable,
    unwritable,
    warnings,
)
from tests.kit.wrapped import Call, WrappedStore
from tests.manager.conftest import WAIT_S, save_all

import cloudckpt
from cloudckpt import AsyncSave, CheckpointManager
from cloudckpt.dcp.save_and_load import SavedMetadata
from cloudckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidOptionError,
    InvalidURIError,
    SaveCancelledError,
    StoreError,
    UnsupportedValueError,
)
from cloudckpt.events import Event
from cloudckpt.manager.drain import drain


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def restore(manager: CheckpointManager, step: int | None = None) -> tuple[int, str] | None:
    """The step and the name of its place; checks that it is whole and of one save."""
    state = state_of(-1.0)
    found = manager.restore(state, step)
    if found is None:
        return None
    assert_holds(state, float(found.step))
    return found.step, Path(found.uri).parent.name


def data_of(step: Path) -> Path:
    (path,) = (path for path in (step / "data").rglob("*") if path.is_file())
    return path


def with_debt(fast: Path, root: Path, *steps: int, **settings: Any) -> None:
    """A process that commits steps in the fast place and ends before one of them is in the bucket."""
    places = Places()
    places.fail(root, unwritable)
    manager = CheckpointManager(root, fast=fast, options=make_options(wrap_store=places), **settings)
    save_all(manager, *steps, force=True)
    with pytest.raises(CheckpointError, match="does not have"):
        manager.close(WAIT_S)


# --- where a save is made


@pytest.mark.parametrize("async_", [True, False])
def test_each_save_is_made_in_the_fast_place_and_copied_if_it_is_due(fast: Path, root: Path, *, async_: bool) -> None:
    """If this fails, a fast place is not used, or the bucket lacks what was saved for it."""
    with CheckpointManager(root, save_every=4, fast=fast, fast_every=2, fast_keep=2, async_=async_) as manager:
        assert [step for step in range(9) if manager.is_due(step)] == [0, 2, 4, 6, 8]
        save_all(manager, *range(9))
        save_all(manager, 9, force=True)
        assert [info.step for info in manager.steps()] == [0, 4, 8, 9]
        assert restore(manager) == (9, "fast")
        assert restore(manager, 4) == (4, "bucket")
    assert (names(fast), names(root)) == (["step-8", "step-9"], ["step-0", "step-4", "step-8", "step-9"])
    for uri in (fast / "step-9", root / "step-4"):
        cloudckpt.verify(uri)


def test_copies_are_the_same_save(fast: Path, root: Path) -> None:
    """If this fails, a restore orders a step and its copy, or takes parts of one for those of another save."""
    with CheckpointManager(root, fast=fast) as manager:
        save_all(manager, 1, metrics={"loss": 0.5})
        (info,) = manager.steps()
        assert (info.uri, info.copy_uri) == (str(fast / "step-1"), str(root / "step-1"))
        assert manager.best("loss") == manager.latest() == info
    near, far = (json.loads((place / "step-1/manifest.json").read_bytes()) for place in (fast, root))
    for name in ("save_id", "committed_at_ns", "metadata"):
        assert near[name] == far[name], name
    cloudckpt.copy(root / "step-1", root.with_name("copied") / "step-1")
    places = (fast, root, root.with_name("copied"))
    saved, *copies = [info.save_s for place in places for info in cloudckpt.list_checkpoints(place, all=True)]
    assert saved is not None
    assert 0 <= saved < WAIT_S
    assert copies == [saved, saved], "the plots of a root show how long its saves took"


def test_reports_events_and_timelines_say_in_which_place_a_step_is(fast: Path, root: Path, tmp_path: Path) -> None:
    """If this fails, a dashboard takes what the drive of a host has for what the bucket has."""
    events: list[cloudckpt.Event] = []
    options = make_options(on_event=events.append, trace=tmp_path / "{verb}.json")
    with CheckpointManager(
        root, save_every=2, fast=fast, fast_every=1, fast_keep=1, async_=False, options=options
    ) as m:
        for step in (1, 2):
            saved = m.save(step, state_of(float(step)))
            assert isinstance(saved, SavedMetadata)
            assert saved.report is not None
            assert saved.report.place == "fast"
        m.wait(WAIT_S)
        for step, place in ((2, "fast"), (1, "root")):
            if place == "root":
                m.save(3, state_of(3.0), force=True)
                m.wait(WAIT_S)
                shutil.rmtree(fast)
            restored = m.restore(state_of(-1.0), 3 if place == "root" else step)
            assert restored is not None
            assert restored.report.place == place
            assert json.loads((tmp_path / "load.json").read_text())["otherData"]["place"] == place
    assert json.loads((tmp_path / "save.json").read_text())["otherData"]["place"] == "fast"
    for event in events:
        is_fast = event.uri.startswith(str(fast))
        assert (event.place == "fast") == is_fast, event
    assert {"save.done", "load.done", "retention.removed", "drain.committed"} <= {event.name for event in events}


def test_removed_steps_cost_later_saves_nothing(fast: Path, root: Path) -> None:
    """If this fails, training waits longer with each step of the day, because each removed one is looked at again."""
    places = Places()
    options = make_options(wrap_store=places)
    listed = []
    with CheckpointManager(root, save_every=10**6, fast=fast, fast_every=1, fast_keep=1, options=options) as manager:
        for step in range(1, 31):
            before = places.num_calls(fast, "list")
            save_all(manager, step)
            manager.wait(WAIT_S)
            listed.append(places.num_calls(fast, "list") - before)
    assert len([*fast.iterdir()]) == 30
    assert max(listed[20:]) <= max(listed[5:15]) + 10, listed  # a removal may end during the next save


def test_intervals_of_time_choose_the_place(fast: Path, root: Path) -> None:
    """If this fails, `fast_every` as a time saves each step or none, or sends all of them to the bucket."""
    with CheckpointManager(
        root, save_every=timedelta(hours=1), fast=fast, fast_every=timedelta(microseconds=1)
    ) as manager:
        save_all(manager, 1, 2)
    assert names(fast) != []
    assert names(root) == []


@pytest.mark.parametrize("inside", ["root", "fast"])
def test_places_inside_one_another_are_refused(tmp_path: Path, inside: str) -> None:
    """If this fails, the retention of one place removes the steps of the other."""
    outer, inner = tmp_path / "run", tmp_path / "run/inner"
    root, fast = (inner, outer) if inside == "root" else (outer, inner)
    with pytest.raises(
        InvalidURIError, match=r"the fast place .* and the root .* are the same, or one is inside the other"
    ):
        CheckpointManager(root, fast=fast)


def test_settings_of_a_place_that_is_not_there_are_refused(tmp_path: Path) -> None:
    """If this fails, a run that forgot `fast` saves ten times as often to its bucket, or never."""
    with pytest.raises(InvalidOptionError, match="fast"):
        CheckpointManager(tmp_path / "bucket", fast_every=10)
    with pytest.raises(InvalidOptionError, match="fast_every must be a positive"):
        CheckpointManager(tmp_path / "bucket", fast=tmp_path / "fast", fast_every=0)
    with pytest.raises(InvalidOptionError, match="fast_keep"):
        CheckpointManager(tmp_path / "bucket", fast=tmp_path / "fast", fast_keep=0)
    hour, day = timedelta(hours=1), timedelta(days=1)
    for save_every, fast_every in [(None, 5), (4, 10), (hour, day), (4, 4), (10, 4), (day, hour), (4, day), (hour, 4)]:
        is_refused = (save_every, fast_every) in [(None, 5), (4, 10), (hour, day)]
        with pytest.raises(InvalidOptionError, match="is of no use") if is_refused else contextlib.nullcontext():
            CheckpointManager(tmp_path / "bucket", save_every=save_every, fast=tmp_path / "fast", fast_every=fast_every)


def test_forced_save_of_a_step_that_only_the_fast_place_has_reaches_the_bucket(fast: Path, root: Path) -> None:
    """If this fails, the last step of a job is lost with its host."""
    with CheckpointManager(root, save_every=10, fast=fast, fast_every=1) as manager:
        save_all(manager, 3)
        assert names(root) == []
        save_all(manager, 3, force=True)
        save_all(manager, 3, force=True)
    assert names(root) == ["step-3"]
    with CheckpointManager(root, save_every=10, fast=fast, fast_every=1) as manager:
        save_all(manager, 4)
    with CheckpointManager(root, save_every=10, fast=fast, fast_every=1) as manager:
        assert restore(manager) == (4, "fast")
        save_all(manager, 4, force=True)
    assert names(root) == ["step-3", "step-4"]


def test_a_save_for_the_bucket_makes_training_wait_for_no_request_there(fast: Path, root: Path) -> None:
    """If this fails, each save that is due at the root holds training up for a few round trips to it."""
    threads: set[str] = set()

    def note_thread(_call: Call) -> None:
        threads.add(threading.current_thread().name)

    places = Places()
    with CheckpointManager(root, fast=fast, options=make_options(wrap_store=places)) as manager:
        save_all(manager, 1)  # the first one looks at all steps, once
        places.fail(root, note_thread)
        save_all(manager, 2)
    assert threads  # of the copy
    assert threading.current_thread().name not in threads


@pytest.mark.parametrize("made_by", ["an earlier run", "a copy", "a save straight to the root"])
def test_step_that_the_bucket_has_is_refused_at_once(fast: Path, root: Path, made_by: str) -> None:
    """If this fails, a job that comes back to an earlier step trains on, and learns at its end that the bucket lacks
    it.
    """
    places = Places()
    options = make_options(wrap_store=places)
    if made_by == "an earlier run":
        save_all(CheckpointManager(root, options=options), 1)
    with CheckpointManager(root, fast=fast, options=options) as manager:
        save_all(manager, 0)  # the first one looks at all steps, once
        if made_by == "a save straight to the root":
            places.fail(fast, full)
        if made_by != "an earlier run":
            save_all(manager, 1)
        places.broken.clear()
        shutil.rmtree(fast / "step-1", ignore_errors=True)
        with pytest.raises(CheckpointExistsError, match="step-1"):
            save_all(manager, 1)


@pytest.mark.parametrize("async_", [True, False])
def test_step_that_only_the_bucket_has_is_not_saved_without_overwrite(fast: Path, root: Path, *, async_: bool) -> None:
    """If this fails, a job that goes over old steps finds out at its end that none of them is in the bucket."""
    save_all(CheckpointManager(root), 1)
    manager = CheckpointManager(root, fast=fast, async_=async_)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        save_all(manager, 1)
    save_all(manager, 1, overwrite=True)
    manager.close(WAIT_S)
    (info,) = manager.steps()
    assert info.copy_uri == str(root / "step-1")


# --- owed steps


def test_step_owed_by_an_earlier_process_is_copied_by_the_next(
    fast: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, what was saved for the bucket never reaches it after a crash."""
    with_debt(fast, root, 1, 2)
    assert "does not have the step that was saved to" in warnings(caplog)
    assert names(root) == []
    with CheckpointManager(root, fast=fast) as manager:
        assert restore(manager) == (2, "fast")
    assert names(root) == ["step-1", "step-2"]


def test_newest_owed_step_is_copied_first(fast: Path, root: Path) -> None:
    """If this fails, a host that has little time left saves the older step."""
    with_debt(fast, root, 1, 2, 3, fast_keep=3)
    copied: list[str] = []

    def note(event: cloudckpt.Event) -> None:
        if event.name == "drain.committed":
            copied.append(Path(event.uri).name)

    with CheckpointManager(root, fast=fast, options=make_options(on_event=note)) as manager:
        restore(manager)
    assert copied == ["step-3", "step-2", "step-1"]


def test_drain_that_fails_is_tried_again_after_the_next_save(fast: Path, root: Path) -> None:
    """If this fails, one outage of the bucket costs a checkpoint for good."""
    places = Places()
    places.fail(root, unwritable)
    with CheckpointManager(root, fast=fast, options=make_options(wrap_store=places)) as manager:
        save_all(manager, 1)
        with pytest.raises(CheckpointError, match="step-1"):
            manager.close(WAIT_S)
        places.broken.clear()
        save_all(manager, 2)
    assert names(root) == ["step-1", "step-2"]


def test_debt_is_copied_while_the_fast_place_takes_no_save(fast: Path, root: Path) -> None:
    """If this fails, a full drive keeps the steps that the root is owed until the job starts again."""
    places = Places()
    places.fail(root, unwritable)
    with CheckpointManager(root, fast=fast, options=make_options(wrap_store=places, retries=0)) as manager:
        save_all(manager, 1)
        assert manager.drains is not None
        assert len(manager.drains.failed) == 1
        places.broken.clear()
        places.fail(fast, full)
        save_all(manager, 2)
        assert (names(fast), names(root)) == (["step-1"], ["step-1", "step-2"])


def test_mistyped_fast_place_is_named(fast: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a job goes back to the last step of the bucket without a word, or each restore warns."""
    with CheckpointManager(root, save_every=10, fast=fast, fast_every=2) as manager:
        assert restore(manager) is None
        save_all(manager, 10, 12)
        assert restore(manager) == (12, "fast")
        assert restore(manager, 10) == (10, "fast")
    assert warnings(caplog).startswith("step 12, the last one, is in the fast place alone")
    caplog.clear()
    with CheckpointManager(root, fast=fast) as manager:
        cloudckpt.delete(f"{fast}/step-10")
        assert restore(manager, 10) == (10, "bucket")
    assert warnings(caplog) == ""
    with CheckpointManager(root, fast=fast.with_name("fsat")) as manager:
        assert restore(manager) == (10, "bucket")
    assert warnings(caplog).startswith(
        f"no step of this run is in the fast place {fast.with_name('fsat')}, so the steps"
    )


@pytest.mark.parametrize("restores", [True, False])
def test_retention_spares_what_the_bucket_is_owed(fast: Path, root: Path, *, restores: bool) -> None:
    """If this fails, the fast place removes the only copy of a step that was promised to the bucket; or a job that has
    restored nothing removes the steps of an earlier one, in either place, or never copies them.
    """
    with_debt(fast, root, 1, 2, 3, 4, fast_keep=1)
    assert names(fast) == ["step-1", "step-2", "step-3", "step-4"]
    with CheckpointManager(root, fast=fast, fast_keep=1, keep_last=None if restores else 1) as manager:
        if restores:
            assert restore(manager) == (4, "fast")
        save_all(manager, 5, 6)
    assert names(fast) == ["step-6"] if restores else names(root)
    assert names(root) == [f"step-{step}" for step in range(1, 7) if restores or step != 5]


def test_step_that_the_bucket_has_removed_is_not_copied_again(fast: Path, root: Path) -> None:
    """If this fails, each start of a job uploads the checkpoints that retention has just removed."""
    settings: dict[str, Any] = {"fast": fast, "fast_keep": 3, "keep_last": 1}
    with CheckpointManager(root, **settings) as manager:
        save_all(manager, 1, 2, 3)
    assert (len(names(fast)), names(root)) == (3, ["step-3"])
    places = Places()
    with CheckpointManager(root, **settings, options=make_options(wrap_store=places)) as manager:
        assert restore(manager) == (3, "fast")
    assert places.num_bytes(root, "put", "upload_part", "copy_from") == 0
    assert names(root) == ["step-3"]


def test_drain_that_was_ended_sends_nothing_twice(fast: Path, root: Path) -> None:
    """If this fails, a bucket that is slow is sent the same gigabytes at each start, and never gets a commit."""
    places = Places()
    places.fail(root, lambda call: unwritable(call) if "manifest" in call.key else None)
    manager = CheckpointManager(root, fast=fast, options=make_options(wrap_store=places))
    save_all(manager, 1)
    with pytest.raises(CheckpointError):
        manager.close(WAIT_S)
    assert places.num_bytes(root, "put", "upload_part") > 0
    again = Places()
    with CheckpointManager(root, fast=fast, options=make_options(wrap_store=again)) as manager:
        restore(manager)
    assert names(root) == ["step-1"]
    assert again.num_bytes(root, "put", "upload_part") == 0


class Gate:
    """Requests that write data to the root wait here until they are let through."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_let_through = 0
        self._is_open = False
        self.num_begun = self.num_in_flight = 0

    def __call__(self, call: Call) -> Exception | None:
        if "data/" not in call.key or call.operation not in ("put", "upload_part"):
            return None
        with self._changed:
            self.num_begun += 1
            self.num_in_flight += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open or self._num_let_through > 0, WAIT_S)
            self._num_let_through -= 1
            self.num_in_flight -= 1
        return None

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_reached, WAIT_S)

    def let_through(self, number: int) -> None:
        with self._changed:
            self._num_let_through += number
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


@pytest.mark.parametrize("urged_by", ["wait", "the next step that is due"])
def test_copy_uses_few_connections_until_something_waits_for_it(fast: Path, root: Path, urged_by: str) -> None:
    """If this fails, a copy to the bucket slows training down; or it falls behind, or a host that goes away waits for a
    slow one.
    """
    num_connections, num_beside_training = 6, 2
    gate, places = Gate(), Places()
    places.fail(root, gate)
    options = make_options(
        wrap_store=places, connections=num_connections, tile_bytes=4096, object_bytes=8192, part_bytes=8192
    )
    with CheckpointManager(root, save_every=1, fast=fast, options=options, async_=False) as manager:
        manager.save(1, {f"w{number}": torch.full((2048,), float(number)) for number in range(30)})
        for num_done in range(20):
            gate.wait_until(lambda num_done=num_done: gate.num_begun >= num_beside_training + num_done)
            assert gate.num_in_flight <= num_beside_training
            gate.let_through(1)
        waiting = threading.Thread(target=manager.wait, args=(WAIT_S,))
        if urged_by == "wait":
            waiting.start()
        else:
            manager.save(2, state_of(2.0))
        gate.let_through(1)  # a thread looks for more work when its request has ended
        gate.wait_until(lambda: gate.num_in_flight == num_connections)
        gate.open()
    if urged_by == "wait":
        waiting.join()
    assert "step-1" in names(root)


def test_debt_that_was_damaged_is_named(fast: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a job ends well although a checkpoint that was promised to the bucket is lost."""
    with_debt(fast, root, 1, 2, 3, fast_keep=3)
    damage(data_of(fast / "step-1"))
    damage(fast / "step-2/manifest.json")
    manager = CheckpointManager(root, fast=fast)
    assert restore(manager) == (3, "fast")
    with pytest.raises(CheckpointError, match=r"step-1.* is damaged"):
        manager.close(WAIT_S)
    assert f"cannot tell if {root} is owed {fast / 'step-2'}" in warnings(caplog)
    assert names(root) == ["step-3"]
    assert manager.drains is not None
    assert [Path(one.uri) for one in manager.drains.failed] == [fast / "step-1"]


def test_debt_that_vanished_is_named(fast: Path, root: Path) -> None:
    """If this fails, a job ends well although its disk was emptied before a checkpoint reached the bucket."""
    places = Places()
    places.fail(root, unwritable)
    manager = CheckpointManager(root, fast=fast, options=make_options(wrap_store=places))
    save_all(manager, 1)
    places.broken.clear()
    shutil.rmtree(fast / "step-1")
    save_all(manager, 2)
    with pytest.raises(CheckpointError, match=r"step-1: it is not there any more"):
        manager.close(WAIT_S)
    assert names(root) == ["step-2"]


@pytest.mark.parametrize("far", [[], [2]])
def test_the_close_of_a_run_names_a_last_step_that_the_bucket_never_gets(
    fast: Path, root: Path, far: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a run ends well, its host is given back, and the end of the training is gone with it."""
    with CheckpointManager(root, save_every=100, fast=fast, fast_every=1) as manager:
        save_all(manager, *far, force=True)
        save_all(manager, 3)
        assert warnings(caplog) == ""
    newest = "has step 2 as its newest" if far else "has no step"
    assert f"step 3, the last one, is in the fast place alone, at {fast}/step-3, and {root} {newest}" in warnings(
        caplog
    )
    caplog.clear()
    with CheckpointManager(root, save_every=100, fast=fast, fast_every=1) as manager:
        manager.restore(state_of(-1.0))
        save_all(manager, 4)
        save_all(manager, 4, force=True)
    assert warnings(caplog) == ""


# --- what a restore takes


@pytest.mark.parametrize(
    ("near", "far", "expected"),
    [
        ([1, 2], [1], (2, "fast")),
        ([1, 2], [2], (2, "fast")),
        ([1], [1, 2], (2, "bucket")),
        ([], [1, 2], (2, "bucket")),
        ([1, 2], [], (2, "fast")),
        ([], [], None),
    ],
    ids=["newer nearby", "the same", "newer in the bucket", "no fast place", "no bucket", "neither"],
)
def test_newest_step_of_both_places_is_restored(
    fast: Path, root: Path, near: list[int], far: list[int], expected: tuple[int, str] | None
) -> None:
    """If this fails, a host that was replaced, or a bucket that lags, takes the run back."""
    save_all(CheckpointManager(root, fast=fast, fast_keep=2), 1, 2)
    for place, kept in ((fast, near), (root, far)):
        for step in {1, 2} - set(kept):
            shutil.rmtree(place / f"step-{step}")
    assert restore(CheckpointManager(root, fast=fast)) == expected


def test_lost_fast_place_costs_only_what_the_bucket_lacks(fast: Path, root: Path) -> None:
    """If this fails, a host without its old disk starts from scratch or does not start."""
    with CheckpointManager(root, save_every=2, fast=fast, fast_every=1) as manager:
        save_all(manager, 1, 2, 3)
    shutil.rmtree(fast)
    with CheckpointManager(root, save_every=2, fast=fast, fast_every=1) as manager:
        assert restore(manager) == (2, "bucket")
        save_all(manager, 3, 4)
    assert (names(fast), names(root)) == (["step-3", "step-4"], ["step-2", "step-4"])


@pytest.mark.parametrize("harm", ["damaged", "cut", "missing"])
@pytest.mark.parametrize("on_damaged", ["skip", "replace", "raise"])
def test_an_object_damaged_nearby_is_read_from_the_bucket(
    fast: Path, root: Path, harm: str, on_damaged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a bad sector of the fast place costs a step that the bucket has."""
    with CheckpointManager(root, fast=fast) as manager:
        save_all(manager, 1, 2)
    path = data_of(fast / "step-2")
    if harm == "damaged":
        damage(path)
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    for verify_first in (False, True):
        manager = CheckpointManager(root, fast=fast, on_damaged=on_damaged, verify_first=verify_first)
        assert restore(manager) == (2, "fast")
        assert f"reading the copy of {path}" in warnings(caplog)


def test_a_step_damaged_nearby_and_not_in_the_bucket_is_skipped(
    fast: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a damaged step of the fast place is loaded, or ends the job, or is written over."""
    with CheckpointManager(root, save_every=2, fast=fast, fast_every=1) as manager:
        save_all(manager, 1, 2, 3)
    damage(data_of(fast / "step-3"))
    before = data_of(fast / "step-3").read_bytes()
    with CheckpointManager(root, save_every=2, fast=fast, fast_every=1) as manager:
        assert restore(manager) == (2, "fast")
        assert f"skipping {fast / 'step-3'}" in warnings(caplog)
        save_all(manager, 3)
        assert restore(manager) == (3, "fast")
    assert data_of(fast / "step-3").read_bytes() == before
    assert "step-3-again-1" in names(fast)
    shutil.rmtree(fast / "step-3-again-1")
    with pytest.raises(cloudckpt.CorruptCheckpointError):
        restore(CheckpointManager(root, fast=fast, on_damaged="raise"))
    with CheckpointManager(root, save_every=2, fast=fast, fast_every=1, on_damaged="replace") as manager:
        assert restore(manager) == (2, "fast")
        save_all(manager, 3)
    cloudckpt.verify(fast / "step-3")


def test_error_names_both_places_that_were_looked_at(fast: Path, root: Path) -> None:
    """If this fails, a user looks for the step or the damage in one of the places alone."""
    with CheckpointManager(root, save_every=2, fast=fast, fast_every=1) as manager:
        save_all(manager, 2, 3)
    for path in (fast / "step-2", fast / "step-3", root / "step-2"):
        damage(data_of(path))
    manager = CheckpointManager(root, fast=fast)
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=f"no checkpoint under {root} or {fast} can be loaded"):
        restore(manager)
    with pytest.raises(CheckpointNotFoundError, match=f"step 5 is not committed under {root} or {fast}: "):
        manager.restore(state_of(), step=5)


def test_step_of_the_same_name_and_another_save_is_no_copy(fast: Path, root: Path) -> None:
    """If this fails, tensors of two saves are mixed without a word."""
    with CheckpointManager(root, fast=fast) as manager:
        save_all(manager, 1, 2)
    shutil.rmtree(fast / "step-2")
    with CheckpointManager(root, save_every=10, fast=fast, fast_every=1) as manager:
        save_all(manager, 2)
    assert [info.uri for info in CheckpointManager(root, fast=fast).steps()][-1] == str(fast / "step-2")
    damage(data_of(fast / "step-2"))
    manager = CheckpointManager(root, fast=fast)
    assert restore(manager) == (2, "bucket")
    state = state_of(-1.0)
    found = manager.restore(state)
    assert found is not None
    assert [Path(one.uri) for one in found.skipped] == [fast / "step-2"]


def test_step_of_another_run_is_neither_restored_nor_copied_nor_removed(
    fast: Path, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a host that was used before makes a job continue another one's training."""
    with CheckpointManager(tmp_path / "other", fast=fast) as manager:
        save_all(manager, 1, 9)
    with CheckpointManager(root, fast=fast, fast_keep=1) as manager:
        assert restore(manager) is None
        assert f"{fast / 'step-9'}" in warnings(caplog)
        assert manager.latest() is None
        save_all(manager, 2, 3)
        assert restore(manager) == (3, "fast")
    assert names(fast) == ["step-1", "step-9", "step-3"]
    assert names(root) == ["step-2", "step-3"]


def test_renamed_parts_are_read_from_the_copy_too(fast: Path, root: Path) -> None:
    """If this fails, a load with other names from a damaged fast place fails, or mixes up names."""
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(1, {"old": {"w": torch.full((64,), 7.0)}})
    damage(data_of(fast / "step-1"))
    state = {"new": {"w": torch.zeros(64)}}
    found = CheckpointManager(root, fast=fast).restore(state, rename={"old": "new"})
    assert found is not None
    assert bool((state["new"]["w"] == 7.0).all())
    assert found.report.num_objects_of_copy == 1


# --- a fast place that cannot be used


def make_drive(beside: Path) -> Path:
    """Make a folder on another device than `beside`. The test removes it."""
    drive = Path(tempfile.mkdtemp(dir="/dev/shm"))
    if drive.stat().st_dev == beside.stat().st_dev:
        drive.rmdir()
        pytest.skip("the memory is no file system of its own here")
    return drive


@pytest.mark.parametrize("loss", ["removed", "unmounted"])
def test_a_directory_that_is_lost_in_a_run_is_not_made_anew(
    tmp_path: Path, root: Path, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, the steps after the loss of a drive fill the system's disk, and no warning says so."""
    fast, drive, disk = tmp_path / "fast", tmp_path / "drive", tmp_path / "disk"
    if loss == "unmounted":  # the mount point, an empty directory of the system's disk, is what is left
        drive = make_drive(tmp_path)
        disk.mkdir()
        fast.symlink_to(drive)
    with CheckpointManager(root, save_every=4, fast=fast, fast_every=1) as manager:
        save_all(manager, 1)  # makes the directory if it is not there
        if loss == "unmounted":
            fast.unlink()
            fast.symlink_to(disk)
        else:
            fast.rename(drive)
        save_all(manager, 2, 3)
        assert (names(root), names(disk), fast.exists()) == (["step-2", "step-3"], [], loss == "unmounted")
        assert warnings(caplog).count("its directory, where this run has saved, was removed, or its drive") == 1
        fast.unlink(missing_ok=True)
        fast.symlink_to(drive)
        save_all(manager, 5)
    assert names(drive) == ["step-1", "step-5"]
    shutil.rmtree(drive)


def test_drive_that_is_mounted_as_another_device_is_used(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a drive that comes back under another device number is taken for lost until the next start."""
    fast, disk, drive = tmp_path / "fast", tmp_path / "disk", make_drive(tmp_path)
    fast.symlink_to(drive)
    with CheckpointManager(root, save_every=4, fast=fast, fast_every=1) as manager:
        save_all(manager, 1)
        shutil.copytree(drive, disk)
        shutil.rmtree(drive)
        fast.unlink()
        fast.symlink_to(disk)
        save_all(manager, 2)
    assert (names(root), names(disk)) == ([], ["step-1", "step-2"])
    assert "its directory" not in warnings(caplog)


@pytest.mark.parametrize("async_", [True, False])
@pytest.mark.parametrize("trouble", [full, unreadable])
def test_save_that_the_fast_place_cannot_take_is_sent_to_the_bucket(
    fast: Path, root: Path, trouble: Any, caplog: pytest.LogCaptureFixture, *, async_: bool
) -> None:
    """If this fails, a full disk of a host costs a checkpoint that the bucket could have taken."""
    places = Places()
    places.fail(fast, trouble)
    options = make_options(wrap_store=places, retries=0)
    with CheckpointManager(root, save_every=2, fast=fast, fast_every=1, async_=async_, options=options) as manager:
        save_all(manager, 1, 2)
    assert f"not to the fast place {fast}" in warnings(caplog)
    assert (names(fast), names(root)) == ([], ["step-1", "step-2"])


def test_place_that_cannot_be_made_is_not_used(tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a host without the mount, with real files in the way, ends the job."""
    (tmp_path / "file").write_text("in the way")
    with CheckpointManager(root, fast=tmp_path / "file/fast") as manager:
        save_all(manager, 1)
        assert restore(manager) == (1, "bucket")
        assert names(root) == ["step-1"]
        save_all(manager, 2)
        told = [one for one in warnings(caplog).splitlines() if "not to the fast place" in one]
        assert len(told) == 1, "once, and not with each save"
        assert "saving step-1, and all others until this changes, to" in told[0]
        assert warnings(caplog).count("could not look at the steps under") == 1
        (tmp_path / "file").unlink()
        save_all(manager, 3, 4)
    assert warnings(caplog).count(f"saving step-3 to the fast place {tmp_path / 'file/fast'} again") == 1
    assert "saving step-4" not in warnings(caplog)


@pytest.mark.parametrize("async_", [True, False])
@pytest.mark.parametrize("trouble", [full_for_data, full_for_manifest])
def test_a_save_during_which_the_fast_place_fills_up_is_made_in_the_bucket(
    fast: Path, root: Path, trouble: Any, caplog: pytest.LogCaptureFixture, *, async_: bool
) -> None:
    """If this fails, a disk that fills up during a save costs a checkpoint that the bucket could have taken."""
    places = Places()
    places.fail(fast, trouble)
    options = make_options(wrap_store=places, retries=0)
    manager = CheckpointManager(root, save_every=10, fast=fast, fast_every=1, async_=async_, options=options)
    state = state_of(1.0)
    made = manager.save(1, state)
    if isinstance(made, AsyncSave):
        made.staged.result(WAIT_S)
        for value in state.values():  # training goes on: what is saved in the bucket is the snapshot
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.fill_(5.0)
        assert made.result(WAIT_S).report is not None
        assert made.uri == str(root / "step-1")
    assert (names(fast), names(root)) == ([], ["step-1"])
    left = [path for path in (fast / "step-1").rglob("*") if path.is_file()]
    assert len(left) == (trouble is full_for_manifest), "data stays only if the manifest may be there"
    assert "because the fast place failed" in warnings(caplog)
    assert "No space left" in warnings(caplog)
    assert manager.failures == ()
    assert restore(manager) == (1, "bucket")
    places.broken.clear()
    save_all(manager, 2, 10)
    manager.close(WAIT_S)
    assert (names(fast), names(root)) == (["step-2", "step-10"], ["step-1", "step-10"])


@pytest.mark.parametrize("trouble", [full_for_data, full_for_manifest])
@pytest.mark.parametrize("cancels", [True, False])
def test_a_background_save_with_metrics_goes_on_in_the_bucket(
    fast: Path, root: Path, trouble: Callable[[Call], Exception | None], *, cancels: bool
) -> None:
    """If this fails, a save whose drive fills up after the call waits for its own end, or cannot be cancelled."""
    has_returned = threading.Event()
    handles: list[AsyncSave] = []

    def fail_after_the_call(call: Call) -> Exception | None:
        error = trouble(call)
        assert error is None or has_returned.wait(WAIT_S)
        return error

    def cancel(event: Event) -> None:
        if cancels and event.name == "save.planned" and event.uri == str(root / "step-1"):
            assert handles[0].cancel()

    places = Places()
    places.fail(fast, fail_after_the_call)
    options = make_options(wrap_store=places, on_event=cancel, retries=0)
    manager = CheckpointManager(root, save_every=2, fast=fast, fast_every=1, keep_last=3, options=options)
    made = manager.save(1, state_of(1.0), metrics={"loss": 1.0})
    assert isinstance(made, AsyncSave)
    handles.append(made)
    has_returned.set()
    if cancels:
        with pytest.raises(SaveCancelledError):
            made.result(WAIT_S)
    else:
        made.result(WAIT_S)
    assert names(root) == ["step-1"] * (not cancels)


@pytest.mark.parametrize("async_", [True, False])
def test_a_save_that_both_places_refuse_names_both(fast: Path, root: Path, *, async_: bool) -> None:
    """If this fails, a checkpoint is lost without an error, or its error hides one of the two reasons."""
    places = Places()
    places.fail(fast, full_for_data)
    places.fail(root, unwritable)
    options = make_options(wrap_store=places, retries=0)
    manager = CheckpointManager(root, fast=fast, fast_every=1, save_every=2, async_=async_, options=options)
    with pytest.raises(StoreError) as raised:
        save_all(manager, 1)
    text = str(raised.value)
    assert f"saving {root}/step-1 (after saving {fast}/step-1 failed: " in text
    assert "No space left" in text
    assert "the bucket takes nothing now" in text
    assert [(failure.step, failure.uri) for failure in manager.failures] == [(1, str(root / "step-1"))]
    assert (names(fast), names(root)) == ([], [])
    places.broken.clear()
    save_all(manager, 1)
    manager.close(WAIT_S)
    assert names(fast) == ["step-1"]


def test_a_save_that_goes_on_in_the_bucket_can_be_cancelled(fast: Path, root: Path) -> None:
    """If this fails, a job that is told to stop waits for a whole upload to the bucket."""
    places, begun, is_told = Places(), threading.Event(), threading.Event()

    def wait(call: Call) -> None:
        if call.operation in ("put", "create_multipart") and call.key.startswith("data/"):
            begun.set()
            is_told.wait(WAIT_S)

    places.fail(fast, full_for_data)
    places.fail(root, wait)
    manager = CheckpointManager(root, fast=fast, options=make_options(wrap_store=places, retries=0))
    handle = manager.save(1, state_of(1.0))
    assert isinstance(handle, AsyncSave)
    assert begun.wait(WAIT_S)
    assert handle.cancel()
    is_told.set()
    assert isinstance(handle.exception(WAIT_S), SaveCancelledError)
    assert (names(fast), names(root)) == ([], [])


def test_a_save_that_fails_for_another_reason_is_not_tried_again(fast: Path, root: Path) -> None:
    """If this fails, a state that no place can take is planned for each, and the error speaks of the bucket."""
    manager = CheckpointManager(root, fast=fast, async_=False)
    with pytest.raises(UnsupportedValueError, match="surrogate"):
        manager.save(1, {"bad \ud800 name": torch.ones(1)})
    assert not root.exists()


def test_free_space_is_looked_at_before_a_save(fast: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, each save first fills the last bytes of the disk, and fails."""

    class Small(WrappedStore):
        def free_bytes(self) -> int | None:
            return 1000

    with CheckpointManager(root, save_every=10, fast=fast, fast_every=1) as manager:
        save_all(manager, 1)
    with CheckpointManager(
        root, save_every=10, fast=fast, fast_every=1, options=make_options(wrap_store=Small)
    ) as manager:
        save_all(manager, 2)
    assert (names(fast), names(root)) == (["step-1"], ["step-2"])
    assert "is free, which a step needs" in warnings(caplog)


def test_fast_place_that_cannot_be_read_costs_only_its_own_steps(
    fast: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a broken disk ends a job that the bucket could go on with, or makes it begin again."""
    with CheckpointManager(root, save_every=2, fast=fast, fast_every=1) as manager:
        save_all(manager, 1, 2, 3)
    places = Places()
    places.fail(fast, unreadable)
    manager = CheckpointManager(root, fast=fast, options=make_options(wrap_store=places, retries=0))
    assert restore(manager) == (2, "bucket")
    assert "ignoring the fast place" in warnings(caplog)
    shutil.rmtree(root)
    manager = CheckpointManager(root, fast=fast, options=make_options(wrap_store=places, retries=0))
    with pytest.raises(
        BaseException, match=f"the fast place {fast} cannot be read, and .* has no step: .*Input/output error"
    ):
        restore(manager)


def test_bucket_that_cannot_be_read_is_no_reason_to_go_back(fast: Path, root: Path) -> None:
    """If this fails, an outage of the bucket makes a job restore an older step of the fast place."""
    with CheckpointManager(root, fast=fast) as manager:
        save_all(manager, 1)
    places = Places()
    places.fail(root, unreadable)
    manager = CheckpointManager(root, fast=fast, options=make_options(wrap_store=places, retries=0))
    with pytest.raises(BaseException, match="Input/output error"):
        restore(manager)


# --- ranks


def _ranks_state(value: float) -> dict[str, Any]:
    return {f"own-{dist.get_rank()}": torch.full((300,), value), "step": int(value)}


@on_ranks(2)
def test_ranks_save_and_restore_through_one_fast_place(tmp_path: Path) -> None:
    """If this fails, ranks choose different places, or restore different steps."""
    fast, root = tmp_path / "fast", tmp_path / "bucket"
    with CheckpointManager(root, save_every=2, fast=fast, fast_every=1) as manager:
        assert manager.restore(_ranks_state(-1.0)) is None
        for step in (1, 2, 3):
            manager.save(step, _ranks_state(float(step)))
    dist.barrier()
    assert (names(fast), names(root)) == (["step-2", "step-3"], ["step-2"])
    state = _ranks_state(-1.0)
    found = CheckpointManager(root, fast=fast).restore(state)
    assert found is not None
    assert (found.uri, state["step"]) == (str(fast / "step-3"), 3)
    dist.barrier()
    if dist.get_rank() == 0:  # all objects of the newest step
        shutil.rmtree(fast / "step-3")
        for path in (fast / "step-2/data").rglob("*"):
            if path.is_file():
                damage(path)
    dist.barrier()
    state = _ranks_state(-1.0)
    found = CheckpointManager(root, fast=fast).restore(state)
    assert found is not None
    assert (found.uri, state["step"], float(state[f"own-{dist.get_rank()}"].sum())) == (str(fast / "step-2"), 2, 600.0)


def _hidden(call: Call) -> Exception | None:
    """A directory in which a rank does not see what the others put there, though they see its own."""
    is_look = call.operation in ("head", "list") and ".cloudckpt-probe" in call.key
    return StoreError("Stale file handle", key=call.key, operation=call.operation) if is_look else None


@on_ranks(3)
def test_place_that_ranks_see_differently_is_not_used(tmp_path: Path) -> None:
    """If this fails, ranks take a directory for shared, or for their host's, that is neither."""
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("cloudckpt").addHandler(Handler(logging.WARNING))
    rank, places = dist.get_rank(), Places()
    fast, root = tmp_path / "fast", tmp_path / "bucket"
    if rank:
        places.fail(fast, _hidden)
    settings: dict[str, Any] = {"fast": fast, "options": make_options(wrap_store=places)}
    with CheckpointManager(root, save_every=10, fast_every=1, **settings) as manager:
        for step in (9, 10):
            manager.save(step, _ranks_state(float(step)))
    dist.barrier()
    assert names(root) == ["step-10"]
    assert names(fast) == []
    state = _ranks_state(-1.0)
    found = CheckpointManager(root, **settings).restore(state)
    assert found is not None
    assert found.step == 10
    assert sum("ranks 1-2 cannot see" in text for text in records) == (2 if rank == 0 else 0)


# --- what another run, another process, or damage may not do


def _manager(root: Path, fast: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"fast": fast, "fast_every": 5, "save_every": 20, **settings})


def test_steps_of_another_run_cost_this_run_none_of_its_own(tmp_path: Path, fast: Path) -> None:
    """If this fails, two runs with one fast place remove each other's newest steps, and one starts from scratch."""
    with _manager(tmp_path / "a", fast, save_every=1000) as manager:
        save_all(manager, 10, 15)
    with _manager(tmp_path / "b", fast, save_every=1000) as manager:
        save_all(manager, 6005, 6010)
    for _ in range(2):
        with _manager(tmp_path / "a", fast, save_every=1000) as manager:
            restored = manager.restore(state_of(-1.0))
            assert restored is not None
            assert restored.step == 15
    assert names(fast) == ["step-10", "step-15", "step-6005", "step-6010"]


def test_overwrite_spares_the_step_of_another_run(tmp_path: Path, fast: Path) -> None:
    """If this fails, a run that saves with overwrite=True destroys a step that another run's root is owed."""
    with_debt(fast, tmp_path / "a", 20)
    with _manager(tmp_path / "b", fast) as manager:
        save_all(manager, 20, overwrite=True)
    assert names(tmp_path / "b") == ["step-20"]
    with _manager(tmp_path / "a", fast) as manager:
        assert manager.restore(state_of(-1.0)) is not None
    assert names(tmp_path / "a") == ["step-20"]


def test_a_copy_that_another_process_has_made_is_no_failure(root: Path, fast: Path) -> None:
    """If this fails, `cloudckpt drain` beside a run makes its end fail, and its step stays in the fast place."""
    places = Places()

    def drain_first(call: Call) -> Exception | None:
        if call.operation == "put" and "manifest" in call.key:
            places.broken.clear()
            assert drain(fast, root).failed == ()
        return None

    manager = _manager(root, fast, options=make_options(wrap_store=places))
    places.fail(root, drain_first)
    save_all(manager, 20)
    assert manager.drains is not None
    assert manager.drains.failed == ()
    save_all(manager, 25, 30)
    manager.close(WAIT_S)
    assert names(root) == ["step-20"]
    assert names(fast) == ["step-25", "step-30"]


def test_a_step_saved_again_beside_a_damaged_one_settles_the_debt(root: Path, fast: Path) -> None:
    """If this fails, each later start of a run ends with an error because of a step that the root has long again."""
    with_debt(fast, root, 20, 40)
    damage(data_of(fast / "step-40"))
    manager = _manager(root, fast)
    restored = manager.restore(state_of(-1.0))
    assert restored is not None
    assert restored.step == 20
    save_all(manager, 40)
    manager.close(WAIT_S)
    assert "step-40-again-1" in names(root)
    with _manager(root, fast) as manager:
        assert manager.restore(state_of(-1.0)) is not None


def test_a_damaged_step_of_the_root_voids_no_debt(root: Path, fast: Path) -> None:
    """If this fails, the step that a run resumed from is dropped for one at the root that cannot be loaded."""
    with_debt(fast, root, 30, keep_last=1)
    cloudckpt.save(state_of(40.0), root / "step-40")
    damage(data_of(root / "step-40"))
    with _manager(root, fast, keep_last=1) as manager:
        restored = manager.restore(state_of(-1.0))
        assert restored is not None
        assert restored.step == 30
    assert "step-30" in names(root)


def test_a_debt_that_a_restore_has_seen_is_not_forgotten(root: Path, fast: Path) -> None:
    """If this fails, a run whose fast place breaks ends well, and a step never reaches the root."""
    with_debt(fast, root, 20)
    places, is_read = Places(), False

    def unlisted_once_read(call: Call) -> Exception | None:
        nonlocal is_read
        is_read |= "data/" in call.key
        return unreadable(call) if is_read and call.operation.startswith("list") else None

    places.fail(fast, unlisted_once_read)
    manager = _manager(root, fast, options=make_options(wrap_store=places))
    assert manager.restore(state_of(-1.0)) is not None
    with pytest.raises(CheckpointError, match="does not have all steps"):
        manager.close(WAIT_S)
    assert names(root) == []


@pytest.mark.parametrize("is_copied", [True, False])
def test_overwrite_replaces_a_step_in_both_places(root: Path, fast: Path, *, is_copied: bool) -> None:
    """If this fails, the root keeps the old step, or is never given the one that it was owed."""
    if is_copied:
        with _manager(root, fast) as manager:
            save_all(manager, 35, force=True)
    else:
        with_debt(fast, root, 35)
    with _manager(root, fast) as manager:
        manager.save(35, state_of(99.0), overwrite=True)
    found = state_of(-1.0)
    cloudckpt.load(found, root / "step-35")
    assert_holds(found, 99.0)


def test_a_manifest_that_cannot_be_read_leaves_the_step_to_the_root(root: Path, fast: Path) -> None:
    """If this fails, damage in the fast place makes a step unusable that the root has whole."""
    with _manager(root, fast) as manager:
        save_all(manager, 20)
    (fast / "step-20" / "manifest.json").write_bytes(b"")
    with _manager(root, fast, on_damaged="raise") as manager:
        restored = manager.restore(state_of(-1.0), step=20)
        assert restored is not None
        assert restored.uri == str(root / "step-20")


@on_ranks(2)
def test_ranks_that_do_not_see_the_only_steps_do_not_start_from_scratch(tmp_path: Path) -> None:
    """If this fails, a rank that does not see the place makes a run forget all that it has saved, with one warning."""
    fast, root, rank, places = tmp_path / "fast", tmp_path / "bucket", dist.get_rank(), Places()
    if rank == 0:
        with _manager(root, fast, save_every=1000, no_dist=True) as manager:
            save_all(manager, 10)
    dist.barrier()
    if rank:
        places.fail(fast, _hidden)
    manager = _manager(root, fast, save_every=1000, options=make_options(wrap_store=places))
    with pytest.raises(CheckpointNotFoundError, match="rank 1 cannot see"):
        manager.restore(state_of(-1.0))


def test_drain_names_a_mistyped_place(root: Path, fast: Path, tmp_path: Path) -> None:
    """If this fails, a hook before the loss of a host ends well, and has copied nothing because of a typo."""
    with_debt(fast, root, 20)
    with pytest.raises(CheckpointNotFoundError, match="no step of a run"):
        drain(tmp_path / "fasst", root)
    with pytest.raises(CheckpointNotFoundError, match=f"of {root}, not of"):
        drain(fast, tmp_path / "buckett")
    assert drain(fast, root).drained == (str(root / "step-20"),)
