"""`CheckpointManager(on_failure="warn")` on one rank: which failures training survives, and who hears of them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any

import pytest
import torch
from tests.kit.in_memory import Gate, Memory, assert_holds, state_of
from tests.kit.wrapped import permanent
from tests.manager.conftest import WAIT_S
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt import AsyncSave, CheckpointManager, Event, Options
from cloudckpt.errors import InvalidOptionError, SaveInFlightError, StoreError
from cloudckpt.manager.policies import Failures
from cloudckpt.types import SaveFailure

in_both_ways = pytest.mark.parametrize("async_", [True, False])


def warning(memory: Memory, **settings: Any) -> CheckpointManager:
    return CheckpointManager(memory.root, **{"on_failure": "warn", "keep_last": 2, **settings})


def break_saves(memory: Memory, *steps: int, operation: str = "put", key_part: str = "data/", **settings: Any) -> None:
    for step in steps:
        error = {"error": lambda: permanent(operation), "times": 100} | settings
        memory.at(f"step-{step}").fail(operation, key_part=key_part, **error)


def save(manager: CheckpointManager, step: int, **settings: Any) -> Any:
    return manager.save(step, state_of(float(step)), **settings)


def save_each(manager: CheckpointManager, *steps: int, state: Any = None) -> None:
    """A background save fails before the next begins."""
    for step in steps:
        manager.save(step, state or state_of(float(step)))


def numbers(manager: CheckpointManager) -> list[int]:
    return [info.step for info in manager.steps()]


def failed(manager: CheckpointManager) -> list[int]:
    return [failure.step for failure in manager.failures]


@in_both_ways
def test_training_goes_on(memory: Memory, caplog: pytest.LogCaptureFixture, *, async_: bool) -> None:
    """If this fails, a store that is down for some minutes ends the training, loses a save that it could have had,
    removes what was there before, or nobody hears of it.
    """
    events: list[Event] = []
    stop = cloudckpt.telemetry.subscribe(events.append)
    break_saves(memory, 3, 4)
    with warning(memory, async_=async_) as manager:
        made = [save(manager, step) for step in (1, 2, 3, 4)]
        manager.wait(WAIT_S)
        assert numbers(manager) == [1, 2]
        save(manager, 5)
        manager.wait(WAIT_S)
        assert numbers(manager) == [2, 5]
    stop()
    assert [type(one) for one in made[2:]] == [AsyncSave if async_ else SaveFailure] * 2
    assert failed(manager) == [3, 4]
    assert all(isinstance(failure.error, StoreError) for failure in manager.failures)
    assert [failure.uri for failure in manager.failures] == [memory.uri("step-3"), memory.uri("step-4")]
    events_of_failures = [event for event in events if event.name == "save.tolerated"]
    assert [(event.uri, event.error) for event in events_of_failures] == [
        (failure.uri, "StoreError") for failure in manager.failures
    ]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.partition(":")[0] for text in warned] == [
        "the save of step 3 failed, and training continues (1 in a row; 3 end it)",
        "the save of step 4 failed, and training continues (2 in a row; 3 end it)",
    ]
    state = state_of(-1.0)
    CheckpointManager(memory.root).restore(state)
    assert_holds(state, 5.0)


@in_both_ways
def test_too_many_in_a_row_are_raised(memory: Memory, *, async_: bool) -> None:
    """If this fails, days of training pass without a checkpoint, or a store that fails now and then ends a job."""
    manager = warning(memory, async_=async_, max_failures=2)
    break_saves(memory, 1, 3, 5, 6, 8)
    save_each(manager, 1, 2, 3, 4, 5)
    with pytest.raises(StoreError, match="step-6"):
        save_each(manager, 6, 7)
    assert failed(manager) == [1, 3, 5, 6]
    with pytest.raises(StoreError, match="step-8"):  # a program that goes on nevertheless: each is raised
        save_each(manager, 8, 9)
    save(manager, 10)
    manager.close(WAIT_S)
    assert numbers(manager) == [4, 10]


@in_both_ways
@pytest.mark.parametrize("is_in_context", [True, False])
def test_the_failure_of_the_last_save_is_seen(memory: Memory, *, is_in_context: bool, async_: bool) -> None:
    """If this fails, a job ends with success and without its last step; or `wait` ends a job that goes on."""
    manager = warning(memory, async_=async_)
    break_saves(memory, 2)

    def run() -> None:
        with manager if is_in_context else contextlib.nullcontext():
            save_each(manager, 1, 2)
            manager.wait(WAIT_S)
        assert not is_in_context
        manager.close(WAIT_S)

    with pytest.raises(StoreError, match="step-2"):
        run()
    manager.close(WAIT_S)  # it is known now
    cloudckpt.close(WAIT_S)
    assert failed(manager) == [2]


def test_a_failed_save_does_not_stop_another_manager(memory: Memory) -> None:
    """If this fails, another manager of the process stops for a failure that this one lets pass."""
    manager = warning(memory)
    break_saves(memory, 1)
    save(manager, 1)
    other = CheckpointManager(f"{memory.root}/other")
    save(other, 1)
    other.close(WAIT_S)
    assert numbers(other) == [1]
    save(manager, 2)
    manager.close(WAIT_S)


def test_an_unknown_commit_is_survived(memory: Memory) -> None:
    """If this fails, a lost answer to the commit ends the training; or the step, which may be there, is taken for one
    that is committed, and others are removed for it.
    """
    manager = warning(memory, keep_last=1)
    save(manager, 1)
    manager.wait(WAIT_S)
    at = memory.at("step-2")
    at.once_before("put", "manifest", lambda: at.fail("list", error=lambda: permanent("list")))
    save(manager, 2)
    manager.wait(WAIT_S)
    (failure,) = manager.failures
    assert isinstance(failure.error, cloudckpt.CommitUnknownError), failure.error
    assert "manifest.json" in memory.all_keys("step-1")
    assert "manifest.json" in memory.all_keys("step-2")
    save(manager, 3)
    manager.close(WAIT_S)
    assert numbers(manager) == [3]


@in_both_ways
def test_a_step_that_may_be_committed_is_saved_again(memory: Memory, *, async_: bool) -> None:
    """If this fails, a job that saves its last step again, before it is preempted for example, dies of the outage."""
    manager = warning(memory, async_=async_)
    at = memory.at("step-2")
    at.once_before("put", "manifest", lambda: at.fail("list", error=lambda: permanent("list"), times=2))
    for _ in range(3):
        save(manager, 2, force=True)
        manager.wait(WAIT_S)
    assert [type(failure.error).__name__ for failure in manager.failures] == ["CommitUnknownError", "StoreError"]
    assert {"manifest.json", "manifest.1.json"} & set(memory.all_keys("step-2")) == {"manifest.1.json"}
    with pytest.raises(cloudckpt.CheckpointExistsError):
        save_each(manager, 2, 2)
    assert numbers(manager) == [2]


def test_a_step_that_may_have_been_committed_before_others_is_refused(memory: Memory) -> None:
    """If this fails, a job that comes back to an earlier step replaces its checkpoint, because a later save failed."""
    manager = warning(memory, async_=False)
    at = memory.at("step-2")
    at.once_before("put", "manifest", lambda: at.fail("list", error=lambda: permanent("list")))
    break_saves(memory, 3)
    save_each(manager, 2, 3)
    assert [type(failure.error).__name__ for failure in manager.failures] == ["CommitUnknownError", "StoreError"]
    assert numbers(manager) == [2]
    with pytest.raises(cloudckpt.CheckpointExistsError):
        save(manager, 2)


def test_a_commit_of_another_job_is_not_tolerated_as_an_outage(memory: Memory) -> None:
    """If this fails, a job that another one has overtaken trains on, and overwrites what the other has saved."""
    manager = warning(memory, async_=False)
    other = {"step": 7}
    at = memory.at("step-2")

    def overtake() -> None:
        cloudckpt.save(other, memory.uri("step-2"))
        cloudckpt.save(other, memory.uri("step-2"), overwrite=True)

    at.once_before("put", "manifest", overtake)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        save(manager, 2)
    assert failed(manager) == []


@in_both_ways
@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_failures_take_little_memory(memory: Memory, on_failure: str, *, async_: bool) -> None:
    """If this fails, each failed save keeps its state dict, or a long run ends out of memory."""
    manager = warning(memory, async_=async_, on_failure=on_failure, max_failures=1000)
    break_saves(memory, *range(150))
    kept: list[weakref.ref[torch.Tensor]] = []
    for step in range(150):
        tensor = torch.full((9,), float(step))
        kept.append(weakref.ref(tensor))
        state = {"w": tensor}
        with contextlib.suppress(StoreError):
            manager.save(step, state)
            manager.wait(WAIT_S)
        del tensor, state
    assert [step for step, reference in enumerate(kept) if reference() is not None] == []
    assert failed(manager) == list(range(50, 150))


def test_ranks_decide_alike_in_whichever_order_they_see_it() -> None:
    """If this fails, a save that is refused beside a slow one is raised on the ranks that saw the slow one fail before,
    and the others train on.
    """
    outage = CheckpointException("write", {0: (permanent("put"), None)})  # type: ignore[dict-item]  # no traceback
    outcomes = {1: outage, 2: outage, 3: SaveInFlightError("refused", uri="memory://step-2")}
    decisions = []
    for order in ([1, 2, 3], [1, 3, 2]):
        failures = Failures("warn", 2)
        goes_on = {step: failures.record(step, "memory://step", outcomes[step]) is not None for step in order}
        decisions.append((sorted(goes_on.items()), failures.in_a_row))
    assert decisions == [([(1, True), (2, False), (3, True)], 2)] * 2


class _Unsavable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


@in_both_ways
def test_errors_of_the_program_are_raised(memory: Memory, *, async_: bool) -> None:
    """If this fails, a program that can never save trains for days before it hears of it."""
    manager = warning(memory, async_=async_)
    save(manager, 1)
    manager.wait(WAIT_S)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        save(warning(memory, async_=False), 1)
    with pytest.raises(TypeError):
        manager.save(2)
    with pytest.raises(BaseException, match="ZeroDivisionError"):
        save_each(manager, 3, 4, state={"value": _Unsavable()})
    with pytest.raises(cloudckpt.errors.UnsupportedValueError):
        save_each(manager, 5, 6, state={"sparse": torch.zeros(4).to_sparse()})
    assert failed(manager) == []
    save(manager, 7)
    manager.close(WAIT_S)


def test_an_interrupt_is_raised(memory: Memory) -> None:
    """If this fails, Ctrl-C while a save waits for the store does not end the training."""
    manager = warning(memory, async_=False)
    memory.at("step-1").fail("put", error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        save(manager, 1)
    assert failed(manager) == []


def test_a_save_that_is_cancelled_is_no_failure(memory: Memory) -> None:
    """If this fails, a job that cancels its saves itself is ended, or warned of."""
    gate = Gate()
    manager = warning(memory, max_failures=1, options=Options(on_event=gate.at_event("save.set_up")))
    handle = save(manager, 1)
    assert gate.reached.wait(WAIT_S)
    gate.opened.set()
    if handle.cancel():
        save(manager, 2)
    manager.close(WAIT_S)
    assert failed(manager) == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_beside_one_in_flight_can_be_skipped(memory: Memory, *, fails: bool) -> None:
    """If this fails, a store that hangs holds training up although the job asked for skipped saves; or those skipped
    count for the save that is still in flight.
    """
    gate = Gate()
    if fails:
        break_saves(memory, 1)
    options = Options(async_in_flight="raise", on_event=gate.at_event("save.set_up"))
    manager = warning(memory, max_failures=2, options=options)
    save(manager, 1)
    assert gate.reached.wait(WAIT_S)
    skipped = [save(manager, step) for step in (2, 3, 4)]
    assert all(isinstance(one, SaveFailure) for one in skipped)
    gate.opened.set()
    with pytest.raises(cloudckpt.errors.SaveInFlightError):
        manager.close(WAIT_S)  # the last step is not there
    assert failed(manager) == [2, 3, 4] + [1] * fails
    assert numbers(manager) == [1] * (not fails)
    save(manager, 5)
    manager.close(WAIT_S)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"on_failure": "ignore"}, "on_failure must be 'raise' or 'warn', not 'ignore'"),
        ({"max_failures": 0}, "max_failures must be a positive whole number, not 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(memory: Memory, settings: dict[str, Any], words: str) -> None:
    """If this fails, ranks may decide apart, and one trains on without the others."""
    with pytest.raises(InvalidOptionError, match=words):
        warning(memory, **settings)


@in_both_ways
def test_a_preempted_job_learns_of_a_failed_last_save(memory: Memory, *, async_: bool) -> None:
    """If this fails, a preempted job reports that its last step is committed, and it is not."""
    manager = warning(memory, async_=async_)
    break_saves(memory, 1)
    with cloudckpt.on_sigterm(deadline_s=WAIT_S) as preemption, pytest.raises(StoreError, match="step-1"):
        preemption.finish(lambda: save(manager, 1, force=True))
