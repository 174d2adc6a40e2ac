"""Saves in the background on one rank: cancelled in every phase, watched, failed, closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.in_memory import Gate, Memory
from tests.kit.options import make_options
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

import cloudckpt
from cloudckpt import Options
from cloudckpt.background import in_flight
from cloudckpt.background.process import _StagedStateStager
from cloudckpt.background.runner import ExternalSnapshot
from cloudckpt.dcp.live.objects import find_parameters
from cloudckpt.options import KIB, MIB
from cloudckpt.tensors import snapshot_plan
from cloudckpt.tensors.snapshot import Snapshot

WAIT_S = 60.0
SIZE_BYTES = 4 * MIB


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Each test begins without a save of an earlier one."""
    yield
    with contextlib.suppress(CheckpointException):
        cloudckpt.close(WAIT_S)


def state_of(fill: int) -> dict[str, Any]:
    return {f"w{n}": torch.full((SIZE_BYTES // 4,), fill, dtype=torch.uint8) for n in range(4)}


def parameters_of(fill: int) -> dict[str, Any]:
    """The same as parameters, which are copied beside training."""
    return {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in state_of(fill).items()}


def options_of(**settings: Any) -> Options:
    return make_options(part_bytes=MIB // 2, tile_bytes=64 * KIB, connections=2, **settings)


def fill_at(uri: str) -> int:
    state = state_of(0)
    cloudckpt.load(state, uri)
    (fill,) = {int(value) for tensor in state.values() for value in tensor.unique()}
    return fill


class ByHand(AsyncStager):
    """Stages nothing before the test says so."""

    def __init__(self) -> None:
        self.future: Future[dict[str, Any]] = Future()

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        del state_dict
        return self.future


def assert_cancelled(handle: cloudckpt.AsyncSave, memory: Memory) -> None:
    """Check the end of a cancelled save: its error names it, and nothing is left."""
    error = handle.exception(WAIT_S)
    assert isinstance(error, cloudckpt.errors.SaveCancelledError)
    assert isinstance(error, CheckpointException)
    assert error.ranks == (0,)
    assert memory.uri() in str(error)
    assert handle.cancelled()
    assert handle.progress.phase == "cancelled"
    assert memory.all_keys() == []
    assert list(memory.at().inner.list_uploads()) == []
    assert handle.cancel()


def test_a_save_is_cancelled_while_it_is_staged(memory: Memory) -> None:
    """If this fails, who cancels early gets a checkpoint all the same, or waits for a copy of no use."""
    stager = ByHand()
    handle = cloudckpt.async_save(state_of(1), memory.uri(), async_stager=stager)
    assert handle.progress.phase == "staging"
    assert handle.cancel()
    stager.future.set_result(state_of(1))
    assert_cancelled(handle, memory)


@pytest.mark.parametrize("operation", ["list", "create_multipart", "upload_part", "complete_multipart"])
def test_a_save_is_cancelled_while_a_request_hangs(memory: Memory, operation: str) -> None:
    """If this fails, a save that hangs at a store cannot be ended, or leaves parts and objects behind."""
    gate = Gate()
    memory.at().once_before(operation, "", gate)
    handle = cloudckpt.async_save(state_of(1), memory.uri(), options=options_of())
    assert gate.reached.wait(WAIT_S)
    assert handle.progress.phase == ("planning" if operation == "list" else "uploading")
    num_parts = memory.at().count("upload_part")
    assert handle.cancel()
    num_in_flight = memory.at().count("upload_part") - num_parts
    gate.opened.set()
    assert_cancelled(handle, memory)
    assert memory.at().count("upload_part") <= num_parts + num_in_flight + 2  # connections
    cloudckpt.async_save(state_of(2), memory.uri()).result(WAIT_S)  # which raises nothing of it
    assert fill_at(memory.uri()) == 2


def test_a_commit_that_has_begun_is_not_cancelled(memory: Memory) -> None:
    """If this fails, `cancel` says yes and the checkpoint is there, or a commit is torn."""
    gate = Gate()
    options = options_of(on_event=gate.at_event("save.committing"))
    handle = cloudckpt.async_save(state_of(1), memory.uri(), options=options)
    assert gate.reached.wait(WAIT_S)
    assert handle.progress.phase == "committing"
    assert not handle.cancel()
    gate.opened.set()
    handle.result(WAIT_S)
    assert not handle.cancel()
    assert not handle.cancelled()
    assert fill_at(memory.uri()) == 1


def test_progress_has_the_phase_and_the_bytes_of_a_save(memory: Memory) -> None:
    """If this fails, a job's display shows what is not so."""
    gate = Gate()
    options = options_of(on_event=gate.at_event("save.object_uploaded"))
    handle = cloudckpt.async_save(state_of(1), memory.uri(), options=options)
    assert gate.reached.wait(WAIT_S)
    now = handle.progress
    assert (now.phase, now.staged_bytes) == ("uploading", SIZE_BYTES)
    assert SIZE_BYTES <= now.uploaded_bytes <= now.total_bytes
    gate.opened.set()
    report = handle.result(WAIT_S).report
    assert report is not None
    end = handle.progress
    assert (end.phase, end.staged_bytes) == ("committed", SIZE_BYTES)
    assert repr(handle) == f"<AsyncSave to {handle.uri}: committed>"
    assert end.uploaded_bytes == end.total_bytes == report.num_bytes


def test_an_awaited_save_gives_its_result_and_outlives_a_cancelled_wait(memory: Memory) -> None:
    """If this fails, `await handle` in a notebook blocks its event loop, loses the result, or ends the save."""
    gate = Gate()
    memory.at().once_before("upload_part", "", gate)
    handle = cloudckpt.async_save(state_of(1), memory.uri(), options=options_of())

    async def wait() -> None:
        given_up = asyncio.ensure_future(handle)
        await asyncio.to_thread(gate.reached.wait, WAIT_S)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert not handle.done()
        gate.opened.set()
        saved = await asyncio.wait_for(handle, WAIT_S)
        assert saved is handle.result(0)
        assert saved is await handle

    asyncio.run(wait())
    assert fill_at(memory.uri()) == 1


def test_an_awaited_failure_is_raised_once(memory: Memory) -> None:
    """If this fails, a failure is lost with a cancelled `await`, or is raised again after it was awaited."""
    cloudckpt.save(state_of(1), memory.uri())
    gate = Gate()
    memory.at().once_before("list", "", gate)

    async def give_up(handle: cloudckpt.AsyncSave) -> None:
        waiter = asyncio.ensure_future(handle)
        await asyncio.sleep(0)
        waiter.cancel()
        gate.opened.set()
        await asyncio.to_thread(handle.committed.wait)

    async def wait(handle: cloudckpt.AsyncSave) -> None:
        await handle

    asyncio.run(give_up(cloudckpt.async_save(state_of(2), memory.uri())))
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.close(WAIT_S)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        asyncio.run(wait(cloudckpt.async_save(state_of(2), memory.uri())))
    cloudckpt.close(WAIT_S)


def fails(memory: Memory) -> cloudckpt.AsyncSave:
    """A background save that failed, without anybody knowing."""
    cloudckpt.save(state_of(1), memory.uri("taken"))
    handle = cloudckpt.async_save(state_of(2), memory.uri("taken"))
    cloudckpt.background.in_flight.wait_for_previous()
    assert handle.done()
    return handle


@pytest.mark.parametrize("call", [cloudckpt.save, cloudckpt.async_save])
def test_the_next_save_raises_an_unnoticed_failure(memory: Memory, call: Callable[..., Any]) -> None:
    """If this fails, a job goes on for days without a checkpoint, and nothing says so."""
    fails(memory)
    with pytest.raises(cloudckpt.CheckpointExistsError, match="the background save to") as caught:
        call(state_of(3), memory.uri("next"))
    assert isinstance(caught.value, CheckpointException)
    assert memory.uri("taken") in str(caught.value)
    assert memory.all_keys("next") == []
    assert fill_at(memory.uri("taken")) == 1
    saved = call(state_of(3), memory.uri("next"))  # it is known now
    if isinstance(saved, cloudckpt.AsyncSave):
        saved.result(WAIT_S)
    assert fill_at(memory.uri("next")) == 3


@pytest.mark.parametrize("ask", ["result", "exception", "committed"])
def test_a_failure_that_was_asked_for_is_not_raised_again(memory: Memory, ask: str) -> None:
    """If this fails, a job that has dealt with a failure loses its next save to it."""
    handle = fails(memory)
    with contextlib.suppress(CheckpointException):
        handle.committed.result() if ask == "committed" else getattr(handle, ask)()
    cloudckpt.save(state_of(3), memory.uri("next"))
    cloudckpt.close()


def test_close_raises_an_unnoticed_failure_once(memory: Memory) -> None:
    """If this fails, the failure of the last save of a job is lost."""
    fails(memory)
    with pytest.raises(cloudckpt.CheckpointExistsError, match="the background save to"):
        cloudckpt.close()
    cloudckpt.close()


def test_close_waits_frees_and_can_be_followed_by_another_save(memory: Memory) -> None:
    """If this fails, a save is cut off, its memory stays, or a job that saves once more cannot."""
    gate = Gate()
    memory.at().once_before("upload_part", "", gate)
    handle = cloudckpt.async_save(state_of(1), memory.uri(), options=options_of())
    stager = cloudckpt.background.in_flight.stager_of_process(is_shared=False)
    assert gate.reached.wait(WAIT_S)
    with pytest.raises(TimeoutError, match="has not ended within 0"):
        cloudckpt.close(0)
    assert not handle.done()
    gate.opened.set()
    assert stager.num_bytes >= SIZE_BYTES
    cloudckpt.close(WAIT_S)
    assert handle.done()
    assert stager.num_bytes == 0
    assert not [thread.name for thread in threading.enumerate() if thread.name == "cloudckpt-async"]
    cloudckpt.close()
    cloudckpt.async_save(state_of(2), memory.uri("again")).result(WAIT_S)
    assert fill_at(memory.uri("again")) == 2


def test_a_second_save_is_refused_with_async_in_flight_raise(memory: Memory) -> None:
    """If this fails, a loop that would rather skip a checkpoint than wait waits, or the save in flight suffers."""
    gate = Gate()
    memory.at("first").once_before("upload_part", "", gate)
    handle = cloudckpt.async_save(state_of(1), memory.uri("first"), options=options_of())
    assert gate.reached.wait(WAIT_S)
    with pytest.raises(cloudckpt.errors.SaveInFlightError) as caught:
        cloudckpt.async_save(state_of(2), memory.uri("second"), options=options_of(async_in_flight="raise"))
    assert caught.value.uri == memory.uri("first")
    gate.opened.set()
    handle.result(WAIT_S)
    assert fill_at(memory.uri("first")) == 1
    assert memory.all_keys("second") == []


def test_saves_that_two_threads_begin_at_once_follow_each_other(memory: Memory) -> None:
    """If this fails, one is copied over the other that is being sent, and a checkpoint holds the other's values."""
    gate = Gate()
    memory.at("first").once_before("upload_part", "", gate)
    is_asked = threading.Event()

    class Slow:
        """A module whose state takes as long as the other thread wants."""

        def state_dict(self) -> dict[str, Any]:
            is_asked.set()
            assert other_began.wait(WAIT_S)
            return state_of(1)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    def save_other() -> None:
        assert is_asked.wait(WAIT_S)
        other_began.set()
        handles.append(cloudckpt.async_save(state_of(2), memory.uri("second"), options=options_of()))

    other_began, handles = threading.Event(), list[cloudckpt.AsyncSave]()
    thread = threading.Thread(target=save_other)
    thread.start()
    first = cloudckpt.async_save({"m": Slow()}, memory.uri("first"), options=options_of())
    assert gate.reached.wait(WAIT_S)
    assert not handles
    gate.opened.set()
    first.result(WAIT_S)
    thread.join(WAIT_S)
    handles[0].result(WAIT_S)
    assert fill_at(memory.uri("second")) == 2
    nested = {"m": state_of(0)}
    cloudckpt.load(nested, memory.uri("first"))
    assert {int(value) for tensor in nested["m"].values() for value in tensor.unique()} == {1}


class GatedCopies:
    """Lets the copying of snapshots go on only when the test wants it, but for its first task."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = Gate()
        original, first = snapshot_plan.CopyTask.run, iter([True])

        def run(task: Any, views: Any) -> None:
            if not next(first, False):
                self.gate()
            original(task, views)

        monkeypatch.setattr(snapshot_plan.CopyTask, "run", run)


def test_parts_are_sent_while_later_ones_are_copied_and_none_before(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, an upload waits for the whole copy; or sends what lay in the memory before."""
    cloudckpt.async_save(state_of(1), memory.uri("before")).result(WAIT_S)  # fills the memory with something else
    copies = GatedCopies(monkeypatch)
    sent = threading.Event()

    def note(event: cloudckpt.Event) -> None:
        if event.name == "save.part_uploaded":
            sent.set()

    options = options_of(async_overlap=True, on_event=note)
    handle = cloudckpt.async_save(parameters_of(2), memory.uri(), options=options)
    assert sent.wait(WAIT_S)
    assert not handle.staged.done()
    assert 0 < handle.progress.staged_bytes < SIZE_BYTES
    assert memory.at().num_bytes("upload_part") <= handle.progress.staged_bytes + 64 * KIB  # the header
    copies.gate.opened.set()
    handle.staged.result(WAIT_S)
    handle.result(WAIT_S)
    assert fill_at(memory.uri()) == 2


class Trained:
    """A model and its optimizer in an object of the user's."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(1500, 1500), torch.nn.BatchNorm1d(1500))
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        self.model(torch.ones(4, 1500)).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: it is only saved."""


SAVES_OF_TRAINED: dict[str, Callable[[Trained], dict[str, Any]]] = {
    "live": lambda it: {"model": it.model, "optimizer": it.optimizer, "extra": {"ema": torch.ones(5)}},
    "stateful": lambda it: {"state_dict": {"app": it, "ema": torch.ones(5)}},
    "module": lambda it: {"state_dict": {"model": it.model, "optimizer": it.optimizer, "ema": torch.ones(5)}},
    "parameters": lambda it: {"state_dict": {**dict(it.model.named_parameters()), **dict(it.model.named_buffers())}},
}


@pytest.mark.parametrize("how", SAVES_OF_TRAINED)
def test_an_overlapped_save_returns_when_all_but_parameters_is_copied(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """If this fails, a forward pass tears the statistics of a batch norm, or nothing is copied beside training."""
    trained = Trained()
    given = {"uri": memory.uri(), **SAVES_OF_TRAINED[how](trained)}
    cloudckpt.async_save(**{**given, "uri": memory.uri("before")}).result(WAIT_S)
    cloudckpt.close(WAIT_S)
    before = {name: buffer.clone() for name, buffer in trained.model.named_buffers()}
    gate, is_waited_for = Gate(), threading.Event()
    run, wait = snapshot_plan.CopyTask.run, Snapshot.wait_for_urgent

    def run_in_turn(task: Any, tensors: Any) -> None:
        if task.small_targets:
            assert is_waited_for.wait(WAIT_S)
        else:
            gate()  # of the weight alone
        run(task, tensors)

    def wait_for_urgent(snapshot: Snapshot) -> None:
        is_waited_for.set()
        wait(snapshot)

    monkeypatch.setattr(snapshot_plan.CopyTask, "run", run_in_turn)
    monkeypatch.setattr(Snapshot, "wait_for_urgent", wait_for_urgent)
    handle = cloudckpt.async_save(**given, options=options_of(async_overlap=True))
    assert not handle.staged.done()
    trained.model(torch.randn(4, 1500))
    assert not trained.model.get_buffer("1.running_mean").equal(before["1.running_mean"])
    is_waited_for.set()
    gate.opened.set()
    handle.result(WAIT_S)
    stored = flat(cloudckpt.read(memory.uri()))
    for name, buffer in before.items():
        (value,) = [value for path, value in stored.items() if path.endswith(name)]
        assert value.equal(buffer), name


def test_buffers_of_modules_are_no_parameters() -> None:
    """If this fails, the statistics of a batch norm are copied while the next forward pass changes them."""
    trained = Trained()
    for given in (trained, {"model": trained.model, "optimizers": [trained.optimizer]}):
        found = [*map(id, find_parameters(given))]
        assert {*map(id, trained.model.parameters())} < {*found}
        assert not {*found} & {*map(id, trained.model.buffers())}


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix: state}
    return {path: one for key, value in state.items() for path, one in flat(value, f"{prefix}.{key}").items()}


def test_a_copy_that_fails_fails_the_save(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, memory that was never filled is committed, or only a log knows."""
    gate = Gate()
    gate.opened.set()

    def run(_task: Any, _views: Any) -> None:
        gate()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(snapshot_plan.CopyTask, "run", run)
    with pytest.raises(CheckpointException, match="the device is gone"):
        cloudckpt.async_save(state_of(1), memory.uri())
    gate.opened.clear()
    handle = cloudckpt.async_save(parameters_of(1), memory.uri(), options=options_of(async_overlap=True))
    gate.opened.set()
    assert "the device is gone" in str(handle.exception(WAIT_S))
    assert handle.staged.exception(WAIT_S) is not None
    assert memory.all_keys() == []
    monkeypatch.undo()
    cloudckpt.async_save(state_of(2), memory.uri()).result(WAIT_S)
    assert fill_at(memory.uri()) == 2


def test_a_copy_that_failed_is_not_handed_to_a_process() -> None:
    """If this fails, a stager that fails in the background leaves a checkpoint without entries, as a success."""
    handed = _StagedStateStager(ExternalSnapshot.from_error(ValueError("no memory"))).stage({})
    assert isinstance(handed, Future)
    assert isinstance(handed.exception(WAIT_S), ValueError)


SCRIPT = """
import sys, torch, cloudckpt
uri, how = sys.argv[1:]
state = {"w": torch.full((3 << 20,), 7, dtype=torch.uint8)}
if how == "fails":
    cloudckpt.save(state, uri)
cloudckpt.async_save(state, uri)
if how == "raises":
    raise ValueError("of the script's own")
"""


@pytest.mark.parametrize("how", ["ends", "raises", "fails"])
@pytest.mark.slow
def test_a_script_that_ends_without_close_completes_its_save(tmp_path: Path, how: str) -> None:
    """If this fails, the last checkpoint of a job is missing, and nothing says so."""
    uri = str(tmp_path / "c")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, uri, how]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=WAIT_S)
    state = {"w": torch.zeros(3 << 20, dtype=torch.uint8)}
    cloudckpt.load(state, uri)
    assert bool((state["w"] == 7).all())
    assert ("of the script's own" in found.stderr) == (how == "raises")
    if how == "fails":
        assert found.returncode == in_flight.EXIT_CODE
        assert "the background save to" in found.stderr
        assert "Checkpoint already exists" in found.stderr
        assert f"save, to {uri}, failed" in found.stderr.splitlines()[-1]
    else:
        assert found.returncode == (how == "raises")
        assert "save to" not in found.stderr, found.stderr


ENDING = """
import atexit, multiprocessing, sys
atexit.register(lambda: print("flushed", file=sys.stderr, flush=True))  # which runs after the package's own

import torch
import cloudckpt
from multiprocessing import util

def save():
    cloudckpt.async_save({"w": torch.ones(2)}, "/proc/nowhere/c")
    util.Finalize(None, print, args=("finalized",), exitpriority=-100)

if __name__ == "__main__":
    how = sys.argv[1]
    kept_open = open(sys.argv[2], "w")
    kept_open.write("buffered")
    if how == "fork":
        child = multiprocessing.get_context(how).Process(target=save)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    save()
    if how == "hook":
        sys.excepthook = lambda *seen: sys.exit("the hook fails")
    sys.exit(0)
"""


@pytest.mark.parametrize("how", ["exits", "fork", "hook"])
@pytest.mark.slow
def test_an_unnoticed_failed_save_sets_the_exit_code(tmp_path: Path, how: str) -> None:
    """If this fails, a job without its last checkpoint counts as a success, or its open files lose their last lines."""
    script = tmp_path / "script.py"
    script.write_text(ENDING)
    command = [sys.executable, "-W", "ignore", os.fspath(script), how, os.fspath(tmp_path / "open")]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=WAIT_S)
    assert found.returncode == in_flight.EXIT_CODE, found.stderr
    assert "save, to /proc/nowhere/c, failed" in found.stderr
    assert "flushed" in found.stderr
    assert "finalized" in found.stdout
    assert "the background save to" in found.stderr
    assert "Exception ignored" not in found.stderr
    assert (tmp_path / "open").read_text() == "buffered"
