"""`CheckpointManager` on one rank: what is saved, found again, kept and removed."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.kit.clock import set_time, set_time_in_new_process
from tests.kit.in_memory import Gate, Memory, assert_holds, state_of
from tests.kit.options import make_options
from tests.kit.wrapped import Lies, permanent
from tests.manager.conftest import WAIT_S, save_all

import cloudckpt
from cloudckpt import AsyncSave, CheckpointManager, Options, _clock
from cloudckpt._clock import datetime_of
from cloudckpt.commit.entries import encode_fence, new_fence
from cloudckpt.errors import AccessDeniedError, StateDictMismatchError
from cloudckpt.manager import save_history
from cloudckpt.manager.policies import RetentionPolicy
from cloudckpt.manager.retention import Retention
from cloudckpt.manager.steps import Steps
from cloudckpt.stores.base import crc32c_of
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.uri import parse_location


def committed(manager: CheckpointManager, step: int, **settings: Any) -> None:
    made = manager.save(step, state_of(float(step)), **settings)
    if isinstance(made, AsyncSave):
        made.result(WAIT_S)


def numbers(manager: CheckpointManager) -> list[int]:
    return [info.step for info in manager.steps()]


def break_data(memory: Memory, name: str) -> None:
    (key,) = memory.data_keys(name)
    data = memory.at(name).inner.read(key, max_bytes=2**30)[:-1]
    memory.at(name).inner.put(key, [memoryview(data)], crc32c=crc32c_of([memoryview(data)]))


def denied(operation: str) -> AccessDeniedError:
    return AccessDeniedError("not for you", key="memory://tests/key", operation=operation)


def names(found: Iterable[Any]) -> list[str]:
    """Return the last names of the URIs in a report."""
    return [str(getattr(one, "uri", one)).rpartition("/")[2] for one in found]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def at_event(name: str, call: Callable[[], None]) -> Options:
    return Options(on_event=lambda event: call() if event.name == name else None)


# --- saving


@pytest.mark.parametrize("async_", [True, False])
def test_saved_and_restored(memory: Memory, *, async_: bool) -> None:
    """If this fails, nothing works."""
    with CheckpointManager(memory.root, async_=async_) as manager:
        made = manager.save(7, state_of(7.0))
    assert isinstance(made, AsyncSave) == async_
    state = state_of(-1.0)
    restored = CheckpointManager(memory.root).restore(state)
    assert restored is not None
    assert_holds(state, 7.0)
    assert (restored.step, restored.uri, restored.skipped) == (7, memory.uri("step-7"), ())
    assert restored.report is not None
    assert restored.report.num_bytes_wanted > 0
    assert cloudckpt.latest(memory.root) == cloudckpt.list_checkpoints(memory.root)[0]


def test_step_that_is_not_due_costs_nothing(memory: Memory) -> None:
    """If this fails, every step of training asks the store, or is held up by the save of an earlier one."""
    manager = CheckpointManager(memory.root, save_every=10)
    loss: Any = object()  # a tensor on a GPU, of which the number would wait for the GPU
    assert [manager.save(step, state_of(), metrics={"loss": loss}) for step in (1, 9, 11)] == [None] * 3
    assert memory.stores == {}
    assert [step for step in range(31) if manager.is_due(step)] == [0, 10, 20, 30]
    save_all(manager, 20)
    manager.save(21, state_of(21.0), force=True)
    manager.wait(WAIT_S)
    assert numbers(manager) == [20, 21]


def test_each_step_keeps_the_metrics_of_the_steps_before(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, plots lack removed steps, have steps that failed or were abandoned, or manifests grow for ever."""
    monkeypatch.setattr(save_history, "MAX_EARLIER_VALUES", 4)

    def earlier(step: int) -> Any:
        return cloudckpt.describe(memory.uri(f"step-{step}")).metadata.get("earlier_metrics")

    manager = CheckpointManager(memory.root, keep_last=9)
    for step in range(4):
        manager.save(step, state_of(), metrics={"loss": math.inf if step == 1 else step, "acc": 0.5})
    manager.wait(WAIT_S)
    assert earlier(0) is None
    assert earlier(2) == {"1": {"loss": None, "acc": 0.5}, "0": {"loss": 0.0, "acc": 0.5}}
    assert sorted(earlier(3)) == ["1", "2"]
    manager.restore(state_of(), step=1)
    manager.save(2, state_of(), overwrite=True)
    manager.wait(WAIT_S)
    assert sorted(earlier(2)) == ["0", "1"]
    manager.save(8, state_of())
    manager.wait(WAIT_S)
    assert sorted(earlier(8)) == ["0", "1"]
    resumed = CheckpointManager(memory.root, keep_last=9)
    assert resumed.restore(state_of(), step=3)
    resumed.save(4, state_of())
    resumed.wait(WAIT_S)
    assert sorted(earlier(4)) == ["2", "3"]
    keeps_all = CheckpointManager(memory.root)
    keeps_all.restore(state_of())
    keeps_all.save(5, state_of())
    keeps_all.wait(WAIT_S)
    assert earlier(5) is None


def test_a_run_that_does_not_save_its_last_step_says_so(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, the last steps of a run, or a run shorter than `save_every`, are lost without a word."""

    def run(*steps: int, force: bool = False, asks: bool = False) -> str:
        caplog.clear()
        with CheckpointManager(memory.root, save_every=4) as manager:
            manager.restore(state_of())
            for step in steps:
                if not asks or manager.is_due(step):
                    manager.save(step, state_of(), force=force)
        return "".join(warnings_in(caplog))

    assert "because no step up to 3 was due. A new start begins from scratch" in run(1, 2, 3)
    assert "manager.save(3, …, force=True)" in caplog.text
    assert run() == run(3, force=True) == ""
    assert "because no step up to 7 was due. A new start begins after step 3" in run(5, 6, 7)
    end = f"step 10, the last one, is not saved under {memory.root}: no step after 8 was due. A new start begins after"
    assert f"{end} step 8" in run(8, 9, 10)
    assert run(11, 12) == run(13, 14, 16) == run(17, 20, asks=True) == ""
    assert "step 25, the last one, is not saved" in run(24, 25, asks=True)

    def fail() -> None:
        with CheckpointManager(memory.uri("other"), save_every=4) as manager:
            manager.save(0, state_of())
            manager.save(1, state_of())
            raise KeyError

    caplog.clear()
    with pytest.raises(KeyError):
        fail()
    assert "the last one" not in caplog.text


def test_saves_by_time_follow_each_other_without_a_wait(memory: Memory) -> None:
    """If this fails, `save_every` as a time saves each step, or none, or training waits for a save in flight."""
    hour = CheckpointManager(memory.root, save_every=timedelta(hours=1))
    assert [hour.save(step, state_of()) for step in range(5)] == [None] * 5
    assert memory.stores == {}
    gate = Gate()
    options = Options(on_event=gate.at_event("save.committing"))
    manager = CheckpointManager(memory.root, save_every=timedelta(microseconds=1), options=options)
    manager.save(0, state_of(0.0))
    assert gate.reached.wait(WAIT_S)
    assert [manager.save(step, state_of()) for step in range(1, 5)] == [None] * 4
    gate.opened.set()
    manager.wait(WAIT_S)
    assert numbers(manager) == [0]


def test_the_first_save_after_prepare_makes_no_memory(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the first background save blocks training for longer than the second."""
    manager = CheckpointManager(memory.root)
    model = torch.nn.Linear(64, 64)
    cloudckpt.close()
    manager.prepare(model=model)
    assert manager.steps() == []
    for name in ("cloudckpt.background.stager.plan_snapshot", "cloudckpt.tensors.host_memory.MemoryBlock"):
        monkeypatch.setattr(name, None)
    monkeypatch.setattr("cloudckpt.manager.steps.Steps.list_folders", None)
    handle = manager.save(0, model=model)
    assert isinstance(handle, AsyncSave)
    handle.result(WAIT_S)
    monkeypatch.undo()
    restored = torch.nn.Linear(64, 64)
    assert manager.restore(model=restored) is not None
    assert torch.equal(restored.weight, model.weight)


@pytest.mark.parametrize("async_", [True, False])
def test_a_save_of_an_existing_step_is_refused(memory: Memory, *, async_: bool) -> None:
    """If this fails, a job that was started twice overwrites what the first one saved; or one that has forgotten its
    `restore` is told to choose another URI.
    """
    save_all(CheckpointManager(memory.root), 4, 5)
    others = "Choose another URI (another root if another job saves here)"
    own = "This manager restored step 5: continue with restored.step + 1"
    for restored, step, first in (
        (None, 5, f"If this run has saved it, call manager.restore(…) before the first save. {others}"),
        (4, 5, others),
        (5, 5, own),
        (5, 4, own),
    ):
        again = CheckpointManager(memory.root, async_=async_)
        if restored is not None:
            again.restore(state_of(), restored)
        with pytest.raises(cloudckpt.CheckpointExistsError) as refused:
            committed(again, step)
        advice = str(refused.value).partition("nothing was written. ")[2]
        assert advice == f"{first}, or pass overwrite=True to replace the checkpoint"
    again = CheckpointManager(memory.root, async_=False)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        again.save(5, state_of(6.0), force=True)  # it is not this manager's
    again.save(5, state_of(6.0), overwrite=True)
    state = state_of(-1.0)
    again.restore(state)
    assert_holds(state, 6.0)


@pytest.mark.parametrize("async_", [True, False])
def test_the_last_step_is_not_saved_twice(memory: Memory, caplog: pytest.LogCaptureFixture, *, async_: bool) -> None:
    """If this fails, a program that saves once more at its end fails where the last step was due anyhow."""
    manager = CheckpointManager(memory.root, async_=async_)
    first = manager.save(10, state_of(10.0), metrics={"loss": 1.0, "nan": math.nan})
    assert manager.save(10, state_of(10.0), force=True) is first
    assert manager.save(10, state_of(10.0), force=True, metrics={"loss": 1.0, "nan": math.nan}) is first
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):  # those of another rank may be the same
        assert manager.save(10, state_of(10.0), force=True, metrics={"loss": 2.0}) is first
    assert "already and keeps its metrics" in caplog.text
    committed(manager, 11)
    manager.close(WAIT_S)
    assert manager.steps()[0].metrics["loss"] == 1.0
    with pytest.raises(cloudckpt.CheckpointExistsError):
        committed(manager, 10, force=True)  # it is not what the job has now


def test_restored_step_is_not_saved_again(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a job that is told to stop right after it was started again ends with an error."""
    first = CheckpointManager(memory.root)
    save_all(first, 10, 20, metrics={"loss": 1.0})
    manager = CheckpointManager(memory.root)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        committed(manager, 20, force=True)  # whose it is, is not known
    manager.restore(state_of())
    assert manager.save(20, state_of(20.0), force=True) is None
    assert manager.save(20, state_of(20.0), force=True, metrics={"loss": 3.0}) is None
    assert "already and keeps its metrics" in caplog.text
    with pytest.raises(cloudckpt.CheckpointExistsError):
        committed(manager, 20)  # it does not say that it may be there already
    manager.restore(state_of(), step=10)
    assert manager.save(10, state_of(10.0), force=True) is None
    committed(manager, 20, force=True, overwrite=True)
    state = state_of(-1.0)
    manager.restore(state)
    assert_holds(state, 20.0)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None, 10**18])
def test_invalid_step_is_refused(memory: Memory, step: Any) -> None:
    """If this fails, a checkpoint gets a name under which nothing finds it again."""
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match="a step must be a whole number"):
        CheckpointManager(memory.root).save(step, state_of())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"save_every": 0}, "save_every must be"),
        ({"save_every": True}, "save_every must be"),
        ({"save_every": timedelta(0)}, "save_every must be"),
        (
            {"save_every": "10 min"},
            "of steps, a positive datetime.timedelta or None, not",
        ),
        ({"keep_last": 0}, "keep_last must be"),
        ({"on_damaged": "mend"}, "on_damaged must be one of 'raise', 'skip', 'replace', not 'mend'"),
        ({"options": Options(metadata={"step": 1})}, "must not contain 'step'"),
        ({"options": Options(metadata={"metrics": {}})}, "must not contain 'metrics'"),
    ],
)
def test_settings_that_cannot_work_are_refused(memory: Memory, settings: dict[str, Any], words: str) -> None:
    """If this fails, a slip is found at the first save, or never."""
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match=words):
        CheckpointManager(memory.root, **settings)


# --- failures of saves


def failing(memory: Memory, step: int) -> None:
    memory.at(f"step-{step}").fail("put", key_part="data/", error=lambda: permanent("put"), times=100)


def test_a_failure_comes_with_the_next_save_and_only_once(memory: Memory) -> None:
    """If this fails, days pass without a checkpoint and nobody hears of it; or a job stops for what it has handled."""
    manager = CheckpointManager(memory.root)
    failing(memory, 1)
    manager.save(1, state_of())
    with pytest.raises(cloudckpt.errors.StoreError, match="step-1"):
        manager.save(2, state_of())
    manager.save(3, state_of(3.0))
    manager.close(WAIT_S)
    assert numbers(manager) == [3]


@pytest.mark.parametrize("end", ["close", "wait", "with"])
def test_a_failure_comes_at_the_end(memory: Memory, end: str) -> None:
    """If this fails, a program ends with success although its last checkpoint is not there."""
    failing(memory, 1)
    manager = CheckpointManager(memory.root)

    def run() -> None:
        with manager if end == "with" else contextlib.nullcontext():
            manager.save(1, state_of())
        if end != "with":
            getattr(manager, end)(WAIT_S)

    with pytest.raises(cloudckpt.errors.StoreError, match="step-1"):
        run()
    manager.close(WAIT_S)  # it is known now


def test_an_error_in_the_loop_is_not_masked(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, the traceback of a crash is that of a checkpoint, or the save in flight is abandoned."""
    failing(memory, 2)
    manager = CheckpointManager(memory.root)
    save_all(manager, 1)

    def run() -> None:
        with manager:
            manager.save(2, state_of(2.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert any("the last save failed" in record.message and "step-2" in record.message for record in caplog.records)
    assert manager.in_flight is None
    assert numbers(manager) == [1]


def test_a_restore_waits_for_the_save_in_flight(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a job that goes back to its last save gets an older one, or begins anew; or it changes tensors
    that an overlapped save still copies.
    """
    gate = Gate()
    manager = CheckpointManager(memory.root, options=Options(on_event=gate.at_event("save.set_up")))
    handle = manager.save(1, state_of(1.0))
    assert isinstance(handle, AsyncSave)
    wait, state = handle.committed.wait, state_of(0.0)

    def let_through_and_wait(timeout: float | None = None) -> bool:
        gate.opened.set()
        return wait(timeout)

    monkeypatch.setattr(handle.committed, "wait", let_through_and_wait)
    try:
        found = manager.restore(state)
    finally:
        gate.opened.set()
    assert found is not None
    assert found.step == 1
    assert_holds(state, 1.0)
    manager.close(WAIT_S)


# --- Ctrl-C


@pytest.mark.parametrize(
    ("first", "last", "named"),
    [
        ("nothing", "nothing", None),
        ("restored", "nothing", None),
        ("restored", "saved", 2),
        ("restored", "failed", None),
        ("nothing", "failed", None),
        ("nothing", "saved, and Ctrl-C again", None),
        ("restored", "saved, and Ctrl-C again", None),
    ],
)
def test_ctrl_c_names_the_last_committed_step(
    memory: Memory, caplog: pytest.LogCaptureFixture, first: str, last: str, named: int | None
) -> None:
    """If this fails, a user who stops training has to search for what is saved, or is told of a step that is not."""
    caplog.set_level(logging.INFO, "cloudckpt")
    if first == "restored":
        save_all(CheckpointManager(memory.root), 1)
    gate = Gate()
    manager = CheckpointManager(memory.root, options=Options(on_event=gate.at_event("save.committing"), retries=0))

    def train() -> None:
        with manager:
            manager.restore(state_of())
            if last == "failed":
                memory.at("step-2").fail("put", key_part="manifest", error=lambda: permanent("put"), times=99)
            if last != "nothing":
                manager.save(2, state_of(2.0))
                assert gate.reached.wait(WAIT_S)
            raise KeyboardInterrupt

    class AtWarning(logging.Handler):
        """Lets the save go on, or presses again, once the manager waits for it."""

        def emit(self, record: logging.LogRecord) -> None:
            if last.endswith("again"):
                raise KeyboardInterrupt
            gate.opened.set()

    handler = AtWarning(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            train()
    finally:
        logging.getLogger().removeHandler(handler)
        gate.opened.set()
    words = [record.getMessage() for record in caplog.records if "was committed under" in record.getMessage()]
    words += [record.getMessage() for record in caplog.records if "last committed step" in record.getMessage()]
    if named is None:
        expected = f"no step was committed under {memory.root} in this run"
        restored = f", which was restored from step 1 ({memory.uri('step-1')})"
        expected += restored if first == "restored" else ""
    else:
        uri = memory.uri(f"step-{named}")
        expected = f"the last committed step is {named} ({uri}). Start the program again to resume"
    if last.endswith("again"):
        expected += f". The save to {memory.uri('step-2')} is still running"
    assert words == [expected]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [f"cloudckpt: {expected}"], "the last line of the traceback"
    waited = f"stopping: waiting for the save in flight to {memory.uri('step-2')}"
    assert (waited in caplog.text) == (last != "nothing")


PROGRAM_WITHOUT_A_CONTEXT = """
import sys, threading
import cloudckpt

end = sys.argv[2]

def on_event(event):
    if event.name == "save.committing" and event.uri.endswith("step-2") and end == "interrupt":
        threading.main_thread().join(60)  # until the program ends

manager = cloudckpt.CheckpointManager(sys.argv[1], options=cloudckpt.Options(on_event=on_event))
manager.save(1, {"a": 1})

def run():
    manager.save(2, {"a": 2})
    if end.startswith("interrupt"):
        raise KeyboardInterrupt

if end == "interrupt in finally":
    try:
        run()
    finally:
        manager.close()
else:
    run()
if end == "closed":
    manager.close()
    raise KeyboardInterrupt
if end == "interactive":  # as the shell of Python does
    sys.ps1, sys.last_value = ">>> ", KeyboardInterrupt()
"""


def test_a_step_that_lacks_an_object_of_an_earlier_one_warns(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a save without the optimizer lets retention remove the last step that a run can resume from."""
    model = torch.nn.Linear(2, 2)
    objects: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "extra": {"epoch": 1}}
    with CheckpointManager(memory.root, keep_last=1) as manager:
        manager.save(1, **objects)
        manager.save(2, **objects)
        assert warnings_in(caplog) == []
        manager.save(3, model=model)
        manager.save(4, model=model)
    (warning,) = warnings_in(caplog)
    assert warning.startswith("step 3 is saved without 'optimizer', 'extra', which step 2 has.")
    assert "Retention may remove the last step that has it" in warning
    caplog.clear()
    with CheckpointManager(memory.uri("all")) as manager:
        manager.save(1, {"model": {}, "optim": {"lr": 1}})
        manager.save(2, {"model": {}})
    (warning,) = warnings_in(caplog)
    assert warning.startswith("step 2 is saved without 'optim', which step 1 has.")
    assert "Retention" not in warning


def test_an_error_in_training_names_the_last_committed_step(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a user whose loss fails has to search for what is saved; or an early error has a useless note."""
    caplog.set_level(logging.INFO, "cloudckpt")  # a note is logged, too

    def fail_after(*steps: int) -> None:
        with CheckpointManager(memory.root) as manager:
            save_all(manager, *steps)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after()
    assert "committed step" not in caplog.text
    assert "no step was committed" not in caplog.text
    with pytest.raises(ZeroDivisionError):
        fail_after(1, 2)
    assert f"the last committed step is 2 ({memory.uri('step-2')})" in caplog.text


@pytest.mark.parametrize(
    ("end", "is_told"),
    [
        ("interrupt", True),
        ("interrupt in finally", True),
        ("closed", False),
        ("interactive", False),
    ],
)
def test_ctrl_c_outside_a_context_names_the_last_committed_step(end: str, is_told: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """If this fails, a script without `with` ends with a bare traceback, or one that ended well says so."""
    command = [sys.executable, "-c", PROGRAM_WITHOUT_A_CONTEXT, str(tmp_path / "run"), end]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=WAIT_S)
    told = f"cloudckpt: the last committed step is 2 ({tmp_path}/run/step-2). Start the program again to resume"
    assert (told in found.stderr.splitlines()[-1:]) == is_told, found.stderr
    assert ("last committed step" in found.stderr) == is_told, found.stderr


# --- metrics


def test_metrics_are_in_the_manifest(memory: Memory) -> None:
    """If this fails, which checkpoint is the best is known only to the process that saved it."""
    options = Options(metadata={"run": "a"})
    manager = CheckpointManager(memory.root, options=options)
    save_all(manager, 1, metrics={"loss": torch.tensor(0.5, requires_grad=True), "accuracy": np.float32(0.25), "n": 3})
    save_all(manager, 2, metrics={"loss": math.nan, "accuracy": 0.75})
    save_all(manager, 3)
    document = json.loads(memory.at("step-1").inner.read("manifest.json", max_bytes=2**30))
    assert document["metadata"] == {"run": "a", "step": 1, "metrics": {"loss": 0.5, "accuracy": 0.25, "n": 3.0}}
    other = CheckpointManager(memory.root)
    first, second, third = other.steps()
    assert first.metrics == {"loss": 0.5, "accuracy": 0.25, "n": 3.0}
    assert math.isnan(second.metrics["loss"])
    assert third.metrics == {}
    best = [other.best("loss"), other.best("accuracy"), other.best("accuracy", "min")]
    assert [info.step if info else None for info in best] == [1, 2, 1]


def test_the_latest_step_has_its_metrics_after_one_manifest(memory: Memory) -> None:
    """If this fails, the newest step says that it has no metrics, or asking for it reads every manifest of the run."""
    writer = CheckpointManager(memory.root)
    save_all(writer, 1, 3, metrics={"loss": 0.5})
    save_all(writer, 2, metrics={"loss": math.inf, "accuracy": 0.25})
    manager = CheckpointManager(memory.root)
    stores = [memory.at(f"step-{step}") for step in (1, 3, 2)]
    for store in stores:
        store.calls.clear()
    newest = manager.latest()
    assert newest is not None
    assert (newest.step, newest.metrics["accuracy"]) == (2, 0.25)
    assert math.isnan(newest.metrics["loss"])
    assert [store.count("read") for store in stores] == [0, 0, 1]
    assert manager.latest() is not None
    assert stores[2].count("read") == 1, "it is remembered"
    stores[2].once_before("read", "manifest", lambda: cloudckpt.delete(memory.uri("step-2")))
    newest = CheckpointManager(memory.root).latest()
    assert newest is not None
    assert (newest.step, newest.metrics) == (2, {}), "it was removed meanwhile, and the look came before"


def test_a_look_at_the_run_of_another_job_writes_nothing(memory: Memory) -> None:
    """If this fails, a notebook that looks for the best step disturbs the job that trains, or needs its permissions."""
    writer = CheckpointManager(memory.root)
    committed(writer, 1, metrics={"loss": 0.5})
    memory.stores.clear()
    reader = CheckpointManager(memory.root, keep_last=1)
    assert memory.stores == {}
    assert (reader.best("loss"), reader.latest()) == (reader.steps()[0], writer.latest())
    reader.close()
    writes = ("put", "create_multipart", "delete", "abort_multipart")
    assert sum(store.count(operation) for store in memory.stores.values() for operation in writes) == 0


def test_best_metric_has_the_direction_of_its_name(memory: Memory) -> None:
    """If this fails, `best("acc")` returns the worst step, or guesses where the name tells nothing."""
    manager = CheckpointManager(memory.root)
    names = {"val/Top1.ACC": 2, "train_loss": 1, "reward-mean": 2, "kl": None, "neg_mse": None, "map_size": None}
    names |= {"acc_loss": None, "lossless": None, "terror": None}
    for step in (1, 2):
        save_all(manager, step, metrics=dict.fromkeys(names, step))
    for name, step in names.items():
        if step is None:
            with pytest.raises(cloudckpt.errors.InvalidOptionError, match="pass mode='min' or mode='max'"):
                manager.best(name)
        else:
            found = manager.best(name)
            assert (name, found and found.step) == (name, step)
    highest = manager.best("kl", mode="max")
    assert highest is not None
    assert highest.step == 2


def test_metrics_that_no_step_has_are_named(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, metrics vanish without a word, since they are measured between the steps that are saved."""
    manager = CheckpointManager(memory.root, save_every=2, keep_last=1, keep_best=("val_loss", "min", 3))
    for step in range(1, 7):
        save_all(manager, step, metrics={"loss": 1.0} if step < 3 else {"val_loss": 1.0} if step == 3 else None)
        if step == 2:
            assert "without the metric" not in caplog.text, "each step has what was measured beside it"
    manager.save(7, state_of(7.0), metrics={"val_loss": 1.0})
    save_all(manager, 8)
    found = [record.getMessage() for record in caplog.records if "metric" in record.getMessage()]
    (message,) = [one for one in found if "without the metric" in one]
    assert message.startswith("step 4 is saved without the metric 'val_loss': they were passed for step 3")
    assert "force=True" in message
    assert "is_due" in message
    caplog.clear()
    with CheckpointManager(memory.uri("other"), save_every=2) as other:
        other.save(3, state_of(3.0), metrics={"val_loss": 1.0})
        other.save(3, state_of(3.0), force=True)
    (message,) = [record.getMessage() for record in caplog.records if "without the metric" in record.getMessage()]
    assert message.endswith("Pass metrics= to this one, too")


def test_unknown_metric_is_named(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a mistyped metric is not told, or a run that asks for one before its first evaluation ends."""
    manager = CheckpointManager(memory.root, keep_last=1, keep_best=("val_los", "min", 3))
    assert manager.best("val_los", "min") is None, "there is no step"
    save_all(manager, 1)
    assert manager.best("val_los", "min") is None, "no step has metrics"
    assert "val_los" not in caplog.text
    save_all(manager, 2, metrics={"val_loss": math.nan, "loss": 0.5})
    save_all(manager, 3, metrics={"val_loss": math.nan, "loss": 0.5})
    warnings = [record.getMessage() for record in caplog.records if "keep_best" in record.getMessage()]
    message = "no step has the metric 'val_los' (did you mean 'val_loss'?); the steps have 'loss', 'val_loss'"
    assert warnings == [f"keep_best keeps no step under {memory.root}: {message}"], "once, once it matters"
    caplog.clear()
    for _ in range(2):
        assert manager.best("val_los", "min") is None
        assert manager.best("accuracy", "max") is None, "it may be measured later"
    assert [record.getMessage() for record in caplog.records] == [
        f"no step is the best under {memory.root}: {message}",
        f"no step is the best under {memory.root}: no step has the metric 'accuracy'; {message.partition('; ')[2]}",
    ], "once for each"
    caplog.clear()
    assert manager.best("val_loss") is manager.best("val_loss") is None
    told = f"no step is the best under {memory.root}: no step has a finite value of 'val_loss'"
    assert [record.getMessage() for record in caplog.records] == [told]


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": "0.5"},
        {"loss": torch.zeros(2)},
        {"loss": torch.zeros((), device="meta")},
        {"loss": 10**400},
        {"\ud800": 1.0},
        "loss",
    ],
)
def test_invalid_metric_is_refused(memory: Memory, metrics: Any) -> None:
    """If this fails, a manifest gets what no reader understands."""
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match="metrics must be"):
        CheckpointManager(memory.root).save(1, state_of(), metrics=metrics)
    assert memory.stores == {}


# --- restoring


def test_an_empty_root_is_a_fresh_start(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, the first run of a job cannot begin; or one with a wrong root begins without a word."""
    state = state_of(-1.0)
    assert CheckpointManager(memory.root).restore(state) is None
    assert_holds(state, -1.0)
    assert CheckpointManager(memory.root).latest() is None
    cloudckpt.save(state_of(), memory.uri("checkpoint-5"))
    cloudckpt.save(state_of(), memory.uri("step-007"))
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        assert CheckpointManager(memory.root).restore(state) is None
    assert any("checkpoint-5, step-007. To go" in record.message for record in caplog.records)
    for number in range(20):
        cloudckpt.save(state_of(), memory.uri(f"epoch-{number}"))
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        assert CheckpointManager(memory.root).restore(state) is None
    assert any("epoch-17 and 2 more. To go" in record.message for record in caplog.records)


@pytest.mark.parametrize("by", ["manager", "latest", "load_latest"])
def test_a_step_that_comes_while_it_looks_is_no_fresh_start(memory: Memory, by: str) -> None:
    """If this fails, a job that starts while another removes an old step trains from nothing."""
    cloudckpt.save(state_of(1.0), memory.uri("step-1"))

    def moves_on() -> None:
        cloudckpt.save(state_of(2.0), memory.uri("step-2"))
        cloudckpt.delete(memory.uri("step-1"))

    # After the folders were listed, and before this one is looked into.
    watched = memory.at("step-1" if by == "manager" else "")
    watched.once_before("list", "manifest", moves_on)
    if by == "manager":
        restored = CheckpointManager(memory.root).restore(state_of())
        assert restored is not None
        assert restored.step == 2
        return
    found = cloudckpt.latest(memory.root) if by == "latest" else cloudckpt.load_latest(state_of(), memory.root)
    assert found is not None
    assert found.uri == memory.uri("step-2")


def test_a_root_that_is_a_checkpoint_is_no_fresh_start(memory: Memory) -> None:
    """If this fails, a job that is given a step instead of the folder of steps begins anew, and says nothing."""
    save_all(CheckpointManager(memory.root), 5)
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match="is itself a checkpoint"):
        CheckpointManager(memory.uri("step-5")).restore(state_of())


def test_a_checkpoint_around_steps_is_named(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a save to the root of a run, in place of a step, succeeds without a word."""
    save_all(CheckpointManager(memory.root), 5, 6)
    cloudckpt.save(state_of(), memory.uri("best"))
    assert warnings_in(caplog) == []
    cloudckpt.save(state_of(), memory.root)
    assert f"{memory.root} becomes a checkpoint itself, and has steps in it, such as step-6" in caplog.text


def test_files_of_another_program_are_no_silent_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a job that moves from torch.save to the manager trains from nothing without a word."""
    torch.save(state_of(), tmp_path / "step-1.pt")
    assert CheckpointManager(tmp_path).restore(state_of()) is None
    assert "files of another program are: step-1.pt. To go on with one" in caplog.text
    assert f"cloudckpt import {tmp_path}/step-1.pt {tmp_path}/step-<n> --format torch" in caplog.text
    cloudckpt.import_checkpoint(tmp_path / "step-1.pt", tmp_path / "step-1", format="torch")
    assert CheckpointManager(tmp_path).restore(state_of(-1.0)) is not None


def test_a_root_of_runs_is_no_silent_fresh_start(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a job with checkpoints one folder deeper starts anew, and nothing says so."""
    cloudckpt.save(state_of(), f"{memory.root}/logs/deep/down/c")
    assert cloudckpt.latest(memory.root) is None
    assert "Name the one" not in caplog.text
    for name in ("steps/step-1", "best/epoch=1.ckpt"):
        cloudckpt.save(state_of(), f"{memory.root}/{name}")
    names = "folders best, steps"
    assert cloudckpt.latest(memory.root) is None
    assert names in caplog.text
    caplog.clear()
    assert CheckpointManager(memory.root).restore(state_of()) is None
    assert names in caplog.text
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match=names):
        cloudckpt.load_latest(state_of(), memory.root)


def test_a_root_with_a_slip_is_no_silent_fresh_start(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a mistyped root trains from nothing beside the run; or each new run of a series warns."""
    for name in ("adam/step-1", "seed-1/step-1", "empty/notes/a"):
        cloudckpt.save(state_of(), f"{memory.root}/{name}")

    def warnings_of(name: str) -> list[str]:
        caplog.clear()
        assert CheckpointManager(f"{memory.root}/{name}").restore(state_of()) is None
        return warnings_in(caplog)

    assert [f"but {memory.root}/adam has steps" in warning for warning in warnings_of("adamm")] == [True]
    assert warnings_of("seed-2") == warnings_of("emptyy") == warnings_of("other") == []


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize(("operation", "pattern"), [("list", r"\.metadata$"), ("list_directories", "step-")])
def test_one_listing_that_lacks_torchs_steps_is_no_fresh_start(
    tmp_path: Path, operation: str, pattern: str, nth: int
) -> None:
    """If this fails, one bogus listing lets a job that moves to the manager train from nothing."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "step-20", no_dist=True)
    options = make_options(connections=1, wrap_store=Lies(pattern, operation, nth=nth))
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match=r"has saved step 20\. Import what"):
        CheckpointManager(tmp_path, no_dist=True, options=options).restore({"w": torch.zeros(4)})


def test_a_step_that_may_not_be_looked_at_is_not_passed_over(memory: Memory) -> None:
    """If this fails, a job whose newest step is closed to it goes on from an older one, and nobody knows."""
    save_all(CheckpointManager(memory.root), 1, 2, 3)
    memory.at("step-3").fail("list", error=lambda: denied("list"), times=1000)
    manager = CheckpointManager(memory.root)
    state = state_of(-1.0)
    asked: list[Callable[[], Any]] = [
        lambda: manager.restore(state),
        manager.latest,
        manager.steps,
        lambda: manager.best("loss"),
    ]
    for ask in asked:
        with pytest.raises(AccessDeniedError):
            ask()
    assert_holds(state, -1.0)
    assert manager.restore(state, step=2) is not None
    assert_holds(state, 2.0)


def test_a_step_that_is_asked_for_and_missing_is_an_error(memory: Memory) -> None:
    """If this fails, a job that was told where to begin begins somewhere else."""
    manager = CheckpointManager(memory.root)
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match=r"step 3 is not committed .* no step is committed"):
        manager.restore(state_of(), step=3)
    save_all(manager, 1, 20, 4)
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match="committed there: steps 1, 4, 20"):
        manager.restore(state_of(), step=3)
    state = state_of(-1.0)
    restored = manager.restore(state, step=4)
    assert restored is not None
    assert restored.step == 4
    assert_holds(state, 4.0)


@pytest.mark.parametrize("async_", [True, False])
def test_damage_is_passed_over_and_its_step_can_be_replaced(memory: Memory, *, async_: bool) -> None:
    """If this fails, a job that goes back behind a damaged checkpoint fails when it comes to that step again, though it
    was told to replace it.
    """
    save_all(CheckpointManager(memory.root), 1, 2, 3)
    break_data(memory, "step-3")
    state = state_of(-1.0)
    manager = CheckpointManager(memory.root, on_damaged="replace", async_=async_)
    restored = manager.restore(state)
    assert restored is not None
    assert_holds(state, 2.0)
    assert restored.step == 2
    assert [one.uri for one in restored.skipped] == [memory.uri("step-3")]
    save_all(manager, 3)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        save_all(manager, 3)  # it is whole now
    cloudckpt.verify(memory.uri("step-3"))


def test_nothing_of_a_damaged_step_stays_in_what_an_older_one_lacks(memory: Memory) -> None:
    """If this fails, restore with strict=False, or with a new tensor in extra, leaves bytes of a damaged step there."""

    def make_model(*names: str) -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})

    with CheckpointManager(memory.root, async_=False) as manager:
        manager.save(1, model=make_model("old"), extra={"epoch": 1})
        manager.save(2, model=make_model("old", "new"), extra={"epoch": 2, "mean": torch.ones(2)})
    (key,) = memory.data_keys("step-2")
    data = bytearray(memory.at("step-2").inner.read(key, max_bytes=2**30))
    data[-1] ^= 1
    memory.at("step-2").inner.put(key, [memoryview(data)], crc32c=crc32c_of([memoryview(data)]))
    model, extra = make_model("old", "new"), {"mean": torch.zeros(2)}
    before = model["new"].weight.detach().clone()
    restored = CheckpointManager(memory.root).restore(model=model, strict=False)
    assert restored is not None
    assert restored.step == 1
    assert torch.equal(model["new"].weight, before)
    with pytest.raises(cloudckpt.errors.StateDictMismatchError, match=r"'mean' under 'extra'"):
        CheckpointManager(memory.root).restore(model=make_model("old", "new"), extra={"mean": torch.zeros(2)})
    CheckpointManager(memory.root).restore(model=model, extra=extra, strict=False)
    assert extra.pop("epoch") == 1
    assert torch.equal(extra.pop("mean"), torch.zeros(2))


def contents(memory: Memory, name: str) -> dict[str, bytes]:
    store = memory.at(name).inner
    return {key: store.read(key, max_bytes=2**30) for key in memory.all_keys(name)}


def test_a_damaged_step_is_saved_beside_and_never_touched(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a manager replaces or removes a step that trouble on the way has made look damaged, or a job does
    not go on from the right step afterwards.
    """
    save_all(CheckpointManager(memory.root), 100, 200, metrics={"loss": 0.1})
    break_data(memory, "step-200")
    before = contents(memory, "step-200")
    manager = CheckpointManager(memory.root, save_every=100, keep_last=1)
    restored = manager.restore(state_of(-1.0))
    assert restored is not None
    assert restored.step == 100
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        save_all(manager, 200, metrics={"loss": 0.2})
    assert "saving step 200 as memory" in caplog.text
    again = memory.uri("step-200-again-1")
    assert manager.uri_of(200) == again
    assert manager.save(200, state_of(200.0), force=True) is not None, "it is there already"
    for settings in ({"overwrite": False}, {"overwrite": True}):
        with contextlib.suppress(cloudckpt.CheckpointExistsError):
            save_all(manager, 200, metrics={"loss": 0.2}, **settings)
    latest, best = manager.latest(), manager.best("loss")
    assert latest is not None
    assert best is not None
    assert (latest.step, latest.uri, best.uri) == (200, again, again)
    assert [(info.step, info.uri) for info in manager.steps()] == [(200, again)], "100 is superseded"
    assert contents(memory, "step-200") == before
    save_all(manager, 300)
    assert contents(memory, "step-200") == before
    assert numbers(manager) == [200, 300]  # the damaged one, which stays

    state = state_of(-1.0)
    later = CheckpointManager(memory.root, keep_last=1)
    restored = later.restore(state)
    assert restored is not None
    assert (restored.step, restored.skipped) == (300, ())


def test_a_restarted_job_resumes_from_a_step_saved_beside_a_damaged_one(memory: Memory) -> None:
    """If this fails, a job that is started again after a damage loses what it has saved since, or its step drifts."""
    save_all(CheckpointManager(memory.root), 100, 200)
    break_data(memory, "step-200")
    first = CheckpointManager(memory.root)
    first.restore(state_of(-1.0))
    save_all(first, 200)
    for step in (None, 200):
        state = state_of(-1.0)
        manager = CheckpointManager(memory.root)
        restored = manager.restore(state, step)
        assert restored is not None
        assert (restored.step, restored.uri) == (200, memory.uri("step-200-again-1"))
        assert_holds(state, 200.0)
        assert manager.save(200, state, force=True) is None
    with pytest.raises(cloudckpt.CheckpointExistsError):
        CheckpointManager(memory.root, async_=False).save(200, state_of(1.0))

    # That one is damaged, too: the next one lies beside both.
    break_data(memory, "step-200-again-1")
    manager = CheckpointManager(memory.root)
    restored = manager.restore(state_of(-1.0))
    assert restored is not None
    assert restored.step == 100
    assert names(restored.skipped) == ["step-200-again-1", "step-200"]
    save_all(manager, 200, 201)
    assert names(manager.steps()) == ["step-100", "step-200-again-2", "step-201"]
    restored = CheckpointManager(memory.root).restore(state_of(-1.0), 200)
    assert restored is not None
    assert names([restored]) == ["step-200-again-2"]


def test_damage_is_raised_with_on_damaged_raise(memory: Memory) -> None:
    """If this fails, a job that is to stop at damage goes back to an older step, or removes what it has not seen."""
    save_all(CheckpointManager(memory.root), 1, 2, 3)
    break_data(memory, "step-3")
    state = state_of(-1.0)
    manager = CheckpointManager(memory.root, on_damaged="raise", keep_last=1, async_=False)
    with pytest.raises(
        cloudckpt.CorruptCheckpointError, match=r"on_damaged='raise' .*step-3.* restore\(state_dict, step"
    ):
        manager.restore(state)
    restored = manager.restore(state, 2)
    assert restored is not None
    with pytest.raises(cloudckpt.CheckpointExistsError):
        manager.save(3, state_of(3.0))
    save_all(manager, 4)
    assert numbers(manager) == [3, 4]
    restored = manager.restore(state)
    assert restored is not None
    assert restored.step == 4


def test_a_root_with_only_damaged_steps_is_no_fresh_start(memory: Memory) -> None:
    """If this fails, a job whose checkpoints are all damaged trains from nothing, and nobody knows."""
    save_all(CheckpointManager(memory.root), 1)
    break_data(memory, "step-1")
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=f"no checkpoint under {memory.root} can be loaded"):
        CheckpointManager(memory.root).restore(state_of())


# --- retention


def test_superseded_steps_are_removed(memory: Memory) -> None:
    """If this fails, the bucket fills up, or what was promised to stay is gone."""
    manager = CheckpointManager(memory.root, keep_last=2, keep_every=40, keep_best=("loss", "min", 1))
    for step in range(0, 100, 10):
        save_all(manager, step, metrics={"loss": abs(step - 30)})
    assert numbers(manager) == [0, 30, 40, 80, 90]
    assert numbers(CheckpointManager(memory.root)) == [0, 30, 40, 80, 90]
    assert manager.retention is not None
    assert manager.retention.removed == (memory.uri("step-70"),)
    assert manager.retention.kept == tuple(memory.uri(f"step-{step}") for step in (90, 80, 40, 30, 0))
    assert memory.data_keys("step-70") == []
    for step in numbers(manager):
        cloudckpt.verify(manager.uri_of(step))


def test_a_step_saved_again_after_its_removal_is_counted_by_retention(memory: Memory) -> None:
    """If this fails, a job that goes back to a step that retention has removed fills the bucket from there on."""
    manager = CheckpointManager(memory.root, keep_last=1)
    save_all(manager, 1, 2)
    assert numbers(manager) == [2]
    save_all(manager, 1)
    assert numbers(manager) == [1]
    save_all(manager, 2, 3)
    assert numbers(manager) == [3]


def test_a_failed_save_removes_no_checkpoint(memory: Memory) -> None:
    """If this fails, a checkpoint is removed for a newer one that does not exist."""
    manager = CheckpointManager(memory.root, keep_last=1)
    save_all(manager, 1)
    failing(memory, 2)
    with pytest.raises(cloudckpt.errors.StoreError):
        save_all(manager, 2)
    assert numbers(manager) == [1]


def test_retention_removes_the_manifest_first_and_after_the_commit(memory: Memory) -> None:
    """If this fails, a death in between leaves a checkpoint without its data, or none at all."""
    manager = CheckpointManager(memory.root, keep_last=1)
    save_all(manager, 1)
    seen: list[str] = []
    memory.at("step-1").once_before("put", "manifest.1", lambda: seen.extend(memory.all_keys("step-2")))
    memory.at("step-1").once_before("delete", ".safetensors", lambda: seen.append("data"))
    memory.at("step-1").once_before("delete", "manifest.json", lambda: seen.append("manifest"))
    save_all(manager, 2)
    assert "manifest.json" in seen
    assert seen[-2:] == ["manifest", "data"]


def test_retention_leaves_a_step_alone_while_it_is_overwritten(memory: Memory) -> None:
    """If this fails, retention ends the save of another job that comes to an old step once more."""
    save_all(CheckpointManager(memory.root), 1, 2)
    gate = Gate()
    failures: list[BaseException] = []

    def overwrite() -> None:
        options = at_event("save.committing", gate)
        try:
            cloudckpt.save(state_of(5.0), memory.uri("step-1"), overwrite=True, options=options)
        except BaseException as error:
            failures.append(error)
            raise

    other = threading.Thread(target=overwrite)
    other.start()
    assert gate.reached.wait(WAIT_S)
    manager = CheckpointManager(memory.root, keep_last=1, async_=False)
    manager.restore(state_of())
    save_all(manager, 3)
    assert manager.retention is not None
    assert [(one.uri, one.reason) for one in manager.retention.failed] == [
        (
            memory.uri("step-1"),
            "another save writes there, or was killed: gc removes its data after 24 h, or with --older-than 1s",
        )
    ]
    assert manager.retention.removed == (memory.uri("step-2"),)
    gate.opened.set()
    other.join(WAIT_S)
    assert failures == []
    state = state_of(-1.0)
    cloudckpt.load(state, memory.uri("step-1"))
    assert_holds(state, 5.0)


def test_a_refused_removal_does_not_end_training(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a role that may not delete ends a job that trains well; or nobody hears of it."""
    events: list[str] = []
    options = Options(on_event=lambda event: events.append(f"{event.name} {event.uri}"))
    with CheckpointManager(memory.root, keep_last=1, options=options) as manager:
        save_all(manager, 1, 2)
        assert numbers(manager) == [2]
        memory.at("step-2").fail("put", key_part="manifest.1", error=lambda: permanent("put"), times=1)
        save_all(manager, 3)
        assert numbers(manager) == [2, 3]
        assert manager.retention is not None
        (failed,) = manager.retention.failed
        assert failed.uri == memory.uri("step-2")
        assert manager.retention.kept == (memory.uri("step-3"),)
        assert f"retention.failed {memory.uri('step-2')}" in events
        assert f"retention.removed {memory.uri('step-1')}" in events
        assert any("did not remove the superseded checkpoint" in record.message for record in caplog.records)
        save_all(manager, 4)  # and is made up for
        assert manager.retention.failed == ()
        assert numbers(manager) == [4]


def test_protected_steps_do_not_stop_the_removal_of_others(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a few protected steps keep retention from removing any other, and the bucket fills up."""
    save_all(CheckpointManager(memory.root), *range(1, 10))
    for step in range(1, 9):
        for operation in ("put", "delete"):
            memory.at(f"step-{step}").fail(operation, error=lambda: denied("delete"), times=1000)
    manager = CheckpointManager(memory.root, keep_last=1)
    manager.restore(state_of())
    save_all(manager, 10)
    assert manager.retention is not None
    assert names(manager.retention.failed) == [f"step-{step}" for step in range(1, 10)]
    assert "not tried" in manager.retention.failed[-1].reason
    save_all(manager, 11)
    assert numbers(manager) == [*range(1, 9), 11]
    assert names(manager.retention.removed) == ["step-9", "step-10"]


def test_a_step_whose_metrics_may_not_be_read_may_be_the_best(memory: Memory) -> None:
    """If this fails, the best step goes because nobody may know that it is, or no other ever goes because of it."""
    for step, loss in enumerate((0.5, 0.1, 0.3)):
        save_all(CheckpointManager(memory.root), step, metrics={"loss": loss})
    manager = CheckpointManager(memory.root, keep_last=1, keep_best=("loss", "min", 1))
    manager.restore(state_of())
    memory.at("step-1").fail("read", key_part="manifest", error=lambda: denied("read"), times=1000)
    save_all(manager, 3)
    assert manager.retention is not None
    assert names(manager.retention.removed) == ["step-0"]
    assert names(manager.retention.kept) == ["step-3", "step-2"]
    assert names(manager.retention.failed) == ["step-1"]
    with pytest.raises(AccessDeniedError):
        manager.best("loss")


def test_a_listing_that_fails_removes_nothing(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a store that shows only a part of what is there has the rest removed by mistake."""
    manager = CheckpointManager(memory.root, keep_last=1)
    save_all(manager, 1, 2)
    memory.at("step-2").fail("list", error=lambda: permanent("list"), times=100)
    save_all(manager, 3)
    assert manager.retention is not None
    assert manager.retention.failed[0].uri == memory.root
    assert f"retention failed at {memory.root}: " in caplog.text
    assert "did not remove" not in caplog.text
    assert manager.retention.removed == ()


def test_nothing_is_removed_while_this_process_restores(memory: Memory) -> None:
    """If this fails, a job removes what it is reading."""
    save_all(CheckpointManager(memory.root), 1, 2)
    gate = Gate()
    manager = CheckpointManager(memory.root, keep_last=1, async_=False)
    manager.restore(state_of())
    reader = CheckpointManager(memory.root, options=at_event("load.planned", gate))
    state = state_of(-1.0)
    thread = threading.Thread(target=lambda: reader.restore(state, step=1))
    thread.start()
    assert gate.reached.wait(WAIT_S)
    manager.save(3, state_of(3.0))
    with pytest.raises(TimeoutError, match="were not removed in time"):
        manager.wait(0.05)
    assert memory.data_keys("step-1")
    gate.opened.set()
    thread.join(WAIT_S)
    assert_holds(state, 1.0)
    manager.close(WAIT_S)
    assert numbers(manager) == [3]


def go_to_other_machine(monkeypatch: pytest.MonkeyPatch, now_ns: int) -> None:
    """Begin a process on a machine with this time, which its file system has, too: no other clock corrects it."""
    set_time_in_new_process(monkeypatch, now_ns)
    monkeypatch.setattr(MemoryStore, "now", lambda *_: datetime_of(now_ns))


def test_just_committed_step_stays_with_any_clock(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a job on a machine whose clock is behind another's loses its new step as soon as it is there."""
    now_ns = 1_900_000_000 * 10**9

    def go_to_machine(*, minutes_ahead: int) -> None:
        go_to_other_machine(monkeypatch, now_ns + minutes_ahead * 60 * 10**9)

    go_to_machine(minutes_ahead=0)
    manager = CheckpointManager(memory.root, keep_last=1)
    save_all(manager, 1)
    go_to_machine(minutes_ahead=10)
    save_all(CheckpointManager(memory.root), 1, overwrite=True)
    go_to_machine(minutes_ahead=0)
    save_all(manager, 5)
    assert numbers(manager) == [1, 5], "besides the one that another machine says is newer"
    save_all(manager, 4)
    assert numbers(manager) == [4], "it has seen the other by now, and is later"


@pytest.mark.parametrize("keep_last", [None, 2])
@pytest.mark.parametrize("days_ahead", [-700, -2, 2, 700])
@pytest.mark.parametrize("restores", ["newest", "oldest", "none"])
def test_a_clock_that_is_years_off_changes_no_order(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, *, restores: str, days_ahead: int, keep_last: int | None
) -> None:
    """If this fails, a job goes back to an older step after a restart, or retention removes the newer ones."""
    begin_ns = 1_795_403_713 * 10**9
    done: list[int] = []

    def run_on_machine(days_ahead: int, *steps: int) -> None:
        go_to_other_machine(monkeypatch, begin_ns + days_ahead * 86_400 * 10**9)
        manager = CheckpointManager(memory.root, keep_last=keep_last, async_=False)
        if restores != "none":
            restored = manager.restore(state_of(), step=done[-2] if restores == "oldest" and done else None)
            assert restored is None or restored.step in done[-2:]
        save_all(manager, *steps)
        done.extend(steps)
        in_order = [info.step for info in sorted(manager.steps(), key=lambda info: info.committed_at)]
        assert in_order == done[-keep_last if keep_last and restores != "none" else 0 :]

    run_on_machine(0, 9, 8)
    run_on_machine(days_ahead, 7, 6)
    run_on_machine(0, 5)
    run_on_machine(-days_ahead, 4, 3)


def test_after_the_last_time_of_the_format_steps_are_ordered_by_number(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a clock or a manifest of the year 2300 makes manifests that no reader takes."""
    _clock.MACHINE.newest_ns = 10**19
    save_all(CheckpointManager(memory.root, async_=False), 8, 9)
    set_time_in_new_process(monkeypatch)
    manager = CheckpointManager(memory.root, async_=False, keep_last=2)
    manager.restore(state_of())
    save_all(manager, 10, 11)
    assert numbers(manager) == [10, 11]
    restored = CheckpointManager(memory.root).restore(state_of())
    assert restored is not None
    assert restored.step == 11


def test_a_clock_that_is_behind_a_commit_is_named_once(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, nobody learns that one of the machines writes wrong times."""
    for hours_behind, num_warnings in ((0.9, 0), (1.1, 1), (50, 1)):
        set_time_in_new_process(monkeypatch)
        save_all(CheckpointManager(memory.root, async_=False), int(hours_behind * 10))
        set_time(monkeypatch, ahead_s=-hours_behind * 3600)
        CheckpointManager(memory.root).restore(state_of())
        found = [one.getMessage() for one in caplog.records if "clock" in one.getMessage()]
        assert len(found) == num_warnings, hours_behind
    assert "1.1 hours behind" in found[0]
    assert memory.root in found[0]


def test_half_removed_step_is_removed_a_day_later(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, what a removal left that the store ended is there for ever, and nobody reads it any more; or the
    report counts it among the steps that can be loaded.
    """
    manager = CheckpointManager(memory.root, keep_last=1)
    save_all(manager, 1)
    memory.at("step-1").fail("delete", key_part="data/", error=lambda: denied("delete"), times=1)
    save_all(manager, 2)
    assert manager.retention is not None
    assert [one.uri for one in manager.retention.failed] == [memory.uri("step-1")]
    assert manager.retention.kept == (memory.uri("step-2"),)
    save_all(manager, 3)
    assert memory.all_keys("step-1")
    set_time(monkeypatch, ahead_s=25 * 3600)
    save_all(manager, 4, 5)
    assert memory.all_keys("step-1") == []


class _Config:
    """A class of the user's program, in two versions of it."""

    def __init__(self, *values: int) -> None:
        self.values = values

    def __reduce__(self) -> Any:
        return _Config, self.values


@pytest.mark.parametrize("step", [None, 2])
def test_unloadable_class_is_not_taken_for_damage(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    """If this fails, a class that has changed makes a job go back, and write over the step that was all right."""
    monkeypatch.setattr("torch.serialization.get_unsafe_globals_in_checkpoint", lambda _: [])
    manager = CheckpointManager(memory.root, async_=False, keep_last=1)
    with torch.serialization.safe_globals([_Config]):
        manager.save(1, state_of(1.0))
        manager.save(2, {**state_of(2.0), "config": _Config(7)})
        monkeypatch.setattr(_Config, "__init__", lambda _, a, b: None)
        later = CheckpointManager(memory.root, async_=False)
        with pytest.raises(
            cloudckpt.errors.UnsupportedValueError, match=r"'config' of .*step-2 .*its class has changed"
        ):
            later.restore({**state_of(), "config": None}, step)
        cloudckpt.verify(f"{memory.root}/step-2")
        with pytest.raises(cloudckpt.CheckpointExistsError):
            later.save(2, state_of(3.0))


# --- roots


def test_foreign_objects_under_a_root_stay(tmp_path: Path) -> None:
    """If this fails, a manager removes what is not its own, trips over it, or overlooks what was saved without it."""
    for name in ("step-100", "step-007", "step-", "step-1x", "other"):
        cloudckpt.save(state_of(1.0), tmp_path / name)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-5").write_text("a file")
    (tmp_path / "step-6").mkdir()
    manager = CheckpointManager(tmp_path, keep_last=1, async_=False)
    assert numbers(manager) == [100]
    restored = manager.restore(state_of())
    assert restored is not None
    assert restored.step == 100
    save_all(manager, 200)
    assert numbers(manager) == [200]
    left = {entry.name for entry in tmp_path.iterdir()} - {"step-100"}
    assert left == {"step-007", "step-", "step-1x", "other", "notes.txt", "step-5", "step-6", "step-200"}


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(("operation", "pattern"), [("list", "rank-0/manifest"), ("list_directories", "step-")])
def test_steps_of_ranks_apart_are_no_fresh_start(memory: Memory, operation: str, pattern: str, nth: int) -> None:
    """If this fails, a job whose ranks once saved apart trains from nothing, at least after one bogus listing."""
    for rank in (0, 1):
        cloudckpt.save(state_of(7.0), memory.uri(f"step-7/rank-{rank}"), no_dist=True)
    options = make_options(connections=1, wrap_store=Lies(pattern, operation, nth=nth))
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match="in step 7 each rank has a checkpoint"):
        CheckpointManager(memory.root, options=options).restore(state_of())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("key", ["manifest.json", "manifest.1.json"])
def test_a_damaged_fence_is_damage_of_its_own_step_alone(memory: Memory, key: str) -> None:
    """If this fails, one flipped bit in what a removed step has left ends every look at the others, and retention."""
    manager = CheckpointManager(memory.root, keep_last=1, keep_best=("loss", "min", 1), async_=False)
    save_all(manager, 1, 2, metrics={"loss": 1.0})
    damaged = bytearray(encode_fence(new_fence(keeps=None)))
    damaged[60] ^= 1
    views = [memoryview(bytes(damaged))]
    memory.at("step-0").inner.put(key, views, crc32c=crc32c_of(views))
    assert [info.step for info in manager.steps()] == [0, 2]
    best = manager.best("loss")
    assert best is not None
    assert best.step == 2
    restored = CheckpointManager(memory.root).restore(state_of())
    assert restored is not None
    assert restored.step == 2


# --- options whose effect is easily missed


@pytest.mark.parametrize("asks", [True, False])
def test_random_generators_are_restored_only_where_that_is_asked_for(memory: Memory, *, asks: bool) -> None:
    """If this fails, `random_state=False` is passed over, and an evaluation changes the training's random numbers."""

    def numbers_now() -> list[float]:
        kept = (torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002  # the global generator
        drawn = [float(torch.rand(1)), float(np.random.rand()), random.random()]  # noqa: NPY002
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
        random.setstate(kept[2])
        return drawn

    model, fresh = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    saved = numbers_now()
    with CheckpointManager(memory.root) as manager:
        manager.save(1, model=model)
    torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
    passed = numbers_now()
    assert all(one != other for one, other in zip(saved, passed, strict=True))
    with CheckpointManager(memory.root) as manager:
        assert manager.restore(model=fresh, random_state=asks) is not None
    assert numbers_now() == (saved if asks else passed)


@pytest.mark.parametrize("first", ["looks", "saves"])
def test_a_second_job_on_a_root_is_named_once(memory: Memory, caplog: pytest.LogCaptureFixture, first: str) -> None:
    """If this fails, two jobs with one root remove each other's steps for hours, and no log says so."""
    manager = CheckpointManager(memory.root, keep_last=2 if first == "looks" else None)
    assert manager.restore(state_of()) is None
    if first == "looks":  # as retention does after each commit
        save_all(manager, 10, 20)
        CheckpointManager(memory.root).save(21, state_of(), force=True).result(WAIT_S)
        save_all(manager, 30)
        assert warnings_in(caplog) == [], "a step of this process is no other job's"
    cloudckpt.save(state_of(), memory.uri("step-33"))
    save_all(manager, 40, 50)
    cloudckpt.save(state_of(), memory.uri("step-53"))
    save_all(manager, 60)
    (message,) = warnings_in(caplog)
    assert message.startswith(f"another job has saved {memory.uri('step-33')} since this one looked at the steps")
    assert message.endswith("stop one of them, or give each a root of its own")


def test_steps_above_the_first_of_a_job_are_named_once(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a job that forgot `restore`, or continues from an old step, removes what another has reached."""
    save_all(CheckpointManager(memory.root), 100, 200, 300)
    with CheckpointManager(memory.root) as fresh:
        save_all(fresh, 10, 20)
    with CheckpointManager(memory.root, keep_last=3) as resumed:
        restored = resumed.restore(state_of())
        assert restored is not None
        assert restored.step == 20
        save_all(resumed, 30)
    assert [message.partition(". If")[0] for message in warnings_in(caplog)] == [
        f"the first save of this job is step 10, and {memory.root} also has steps 100, 200, 300",
        f"this job continues from the step that was committed last, 20, and {memory.root} also has steps 100, 200, 300",
    ]
    caplog.clear()
    with CheckpointManager(memory.root, keep_last=1) as replacing:
        assert replacing.restore(state_of(), step=30) is not None
        replacing.save(1, state_of(), overwrite=True).result(WAIT_S)
    with CheckpointManager(memory.root) as alone:
        assert alone.restore(state_of()) is not None
        save_all(alone, 2)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("refusal", [None, "mismatch", "store"])
def test_steps_of_another_run_are_named_and_stay(
    memory: Memory, caplog: pytest.LogCaptureFixture, refusal: str | None
) -> None:
    """If this fails, ``keep_last`` of a run that begins in another run's root removes or counts that run's steps; also
    if its `restore` found that the steps are not its own, or could not look.
    """
    save_all(CheckpointManager(memory.root, keep_last=3), 1, 2, 300)
    with CheckpointManager(memory.root, keep_last=2, keep_best=("loss", "min", 1), async_=False) as other:
        if refusal == "mismatch":
            with pytest.raises(StateDictMismatchError):
                other.restore({"another": torch.zeros(3)}, strict=True)
        elif refusal == "store":
            memory.at("step-2").fail("list", error=lambda: denied("list"), times=1)
            with pytest.raises(AccessDeniedError):
                other.restore(state_of())
        for step in (100, 101, 102, 103):
            save_all(other, step, metrics={"loss": float(step)})
    assert numbers(other) == [1, 2, 100, 102, 103, 300]
    assert warnings_in(caplog)[-1] == (
        f"{memory.root} has steps 1, 2, 300, which this manager has neither restored nor saved: its rules neither "
        "count nor remove them. If this run has saved them, call restore before the first save. Otherwise pass another "
        "root, or delete them (cloudckpt rm)"
    )
    assert sum("neither count" in message for message in warnings_in(caplog)) == 1


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_step_that_was_committed_a_moment_ago_is_not_named_as_anothers(
    memory: Memory, caplog: pytest.LogCaptureFixture, *, has_begun: bool
) -> None:
    """If this fails, a user is told to delete a step of this run: retention has listed it just after its commit."""
    save_all(CheckpointManager(memory.root, keep_last=3), 1, 2)
    steps = Steps(parse_location(memory.root), make_options())
    steps.run_uris.add(steps.uri_of(1))  # as before the manager has noted that step 2 is committed
    steps.begun_uris |= {steps.uri_of(2)} if has_begun else set()
    retention = Retention(steps, RetentionPolicy(keep_last=1, keep_every=None, keep_best=None), get_damaged_uris=tuple)
    retention.start(steps.uri_of(1))
    assert retention.wait(WAIT_S)
    assert any("neither count" in message for message in warnings_in(caplog)) is not has_begun


@pytest.mark.parametrize("step", [None, 2])
def test_steps_that_a_restore_has_found_are_superseded(
    memory: Memory, caplog: pytest.LogCaptureFixture, step: int | None
) -> None:
    """If this fails, no step of an earlier start is ever removed, and the bucket fills up; or a step is removed that
    another run saves after the restore.
    """
    save_all(CheckpointManager(memory.root), 1, 2, 3)
    with CheckpointManager(memory.root, keep_last=1) as manager:
        assert manager.restore(state_of(), step=step) is not None
        save_all(manager, 4)
        cloudckpt.save(state_of(), memory.uri("step-1000"))
        save_all(manager, 5)
    assert numbers(manager) == [5, 1000]
    assert not any("neither count" in message for message in warnings_in(caplog))


def test_damage_of_the_newest_step_is_no_other_job(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, each job that goes on beside a damaged step is told of another job."""
    save_all(CheckpointManager(memory.root), 10, 20)
    break_data(memory, "step-20")
    with CheckpointManager(memory.root) as manager:
        restored = manager.restore(state_of())
        assert restored is not None
        assert restored.step == 10
        save_all(manager, 11)
    assert not any("also has" in message for message in warnings_in(caplog))


def test_after_a_rollback_keep_last_keeps_the_steps_committed_last(memory: Memory) -> None:
    """If this fails, a job that went back to an earlier step loses what it saves from there on."""
    save_all(CheckpointManager(memory.root, keep_last=2), 10, 20, 30)
    manager = CheckpointManager(memory.root, keep_last=2)
    state = state_of(-1.0)
    manager.restore(state, step=20)
    assert_holds(state, 20.0)
    save_all(manager, 25)
    assert sorted(numbers(manager)) == [25, 30]
    save_all(manager, 26)
    assert sorted(numbers(manager)) == [25, 26]
    assert CheckpointManager(memory.root).restore(state) is not None
    assert_holds(state, 26.0)
