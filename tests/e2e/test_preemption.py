"""A job that is told to stop: on one rank or all, once or twice, whatever its saves are doing at that moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.in_memory import Memory
from tests.kit.ranks import on_ranks

import cloudckpt
from cloudckpt.manager import preemption as module

WAIT_S = 60.0
_never = threading.Event()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread, or the interpreter, is about to do."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        _never.wait(0.001)


def tell(preemption: cloudckpt.Preemption) -> None:
    """Send SIGTERM as a scheduler does. On return, Python has seen it."""
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: preemption.requested)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def value_at(uri: str) -> float:
    loaded = state(-1.0)
    cloudckpt.load(loaded, uri, no_dist=not dist.is_initialized())
    assert bool((loaded["w"] == loaded["w"][0]).all())
    return float(loaded["w"][0])


def forget_other_handlers() -> None:
    """Remove the handlers of other packages: that of coverage ends the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _no_other_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    forget_other_handlers()
    yield
    signal.signal(signal.SIGTERM, before)


# --- the signal


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """One that was there before; what it was called with."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_the_signal_is_noted_and_passed_on(handler: list[int]) -> None:
    """A job would be killed by the signal, or the launcher's own handler never be called, or not come back."""
    installed = signal.getsignal(signal.SIGTERM)
    with cloudckpt.on_sigterm(deadline_s=1000) as preemption:
        assert not preemption.requested
        assert not preemption.agreed()
        assert preemption.remaining_s == 1000
        tell(preemption)
        until(lambda: handler == [signal.SIGTERM])
        first_s = preemption.remaining_s
        assert 900 < first_s < 1000
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: handler == [signal.SIGTERM] * 2)
        assert preemption.remaining_s <= first_s  # a second signal gives no more time
        assert preemption.agreed()
    assert signal.getsignal(signal.SIGTERM) is installed


def wait_in_pool(_: int) -> None:
    signal.pause()


@pytest.mark.parametrize("before", ["default", "ignored", "handler"])
@on_ranks(1, process_group=False)
def test_in_a_forked_child_the_signal_does_what_it_did_before(before: str) -> None:
    """If this fails, `Process.terminate` and the end of a `Pool` no longer end helpers, which outlive the job."""
    calls: list[object] = []
    handlers = {"default": signal.SIG_DFL, "ignored": signal.SIG_IGN, "handler": lambda *seen: calls.append(seen)}
    signal.signal(signal.SIGTERM, handlers[before])
    context = multiprocessing.get_context("fork")

    def wait(ready: Any) -> None:
        ready.send(None)
        while not calls:
            signal.pause()
        os._exit(7)  # the handler that was there before has returned

    with cloudckpt.on_sigterm() as outer, cloudckpt.on_sigterm() as preemption:
        ours, theirs = context.Pipe()
        child = context.Process(target=wait, args=(theirs,))
        child.start()
        ours.recv()
        child.terminate()
        if before == "ignored":
            child.join(0.2)
            assert child.exitcode is None
            child.kill()
        child.join()
        assert child.exitcode == {"default": -15, "ignored": -9, "handler": 7}[before]
        if before == "default":
            with context.Pool(2) as pool:
                pool.map_async(wait_in_pool, range(2))
            loader: Any = torch.utils.data.DataLoader(range(8), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
            batches: Any = iter(loader)
            next(batches)
            (worker,) = batches._workers
            worker.terminate()
            worker.join()
            assert worker.exitcode in (0, -15)
            batches._shutdown_workers()
            command = subprocess.Popen(["sleep", "60"])
            command.terminate()
            assert command.wait() == -15
        assert not preemption.requested
        assert not outer.requested
        assert not calls
        if before != "default":  # the process itself still notes the signal
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption.requested
            assert outer.requested
            assert len(calls) == (before == "handler")
    assert signal.getsignal(signal.SIGTERM) == handlers[before]


def code_of(child: int) -> int:
    """Wait for the child's end."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@on_ranks(1, process_group=False)
def test_a_forked_trainer_notes_the_signal_in_its_own_context() -> None:
    """If this fails, a launcher with a context of its own forks trainers that SIGTERM ends before they save."""
    forget_other_handlers()
    with cloudckpt.on_sigterm() as outer, cloudckpt.on_sigterm():
        child = os.fork()
        if child == 0:
            with cloudckpt.on_sigterm() as preemption:
                os.kill(os.getpid(), signal.SIGTERM)
                noted = preemption.requested and not outer.requested
            os._exit(0 if noted and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else 1)
        assert code_of(child) == 0


@on_ranks(1, process_group=False)
def test_a_signal_right_after_a_fork_ends_the_child() -> None:
    """If this fails, a `Pool` that is closed soon after its start waits for workers that have lost the signal."""
    forget_other_handlers()
    with cloudckpt.on_sigterm() as preemption:
        for _ in range(20):
            ours, theirs = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(theirs)
                os._exit(len(os.read(ours, 1)))  # when its parent has sent the signal and closes the pipe
            os.kill(child, signal.SIGTERM)
            os.close(theirs)
            assert code_of(child) == -signal.SIGTERM
            os.close(ours)
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested


@pytest.mark.parametrize(
    ("before", "code"), [(signal.SIG_DFL, -signal.SIGTERM), (signal.SIG_IGN, 7)], ids=["default", "ignored"]
)
@on_ranks(1, process_group=False)
def test_a_handler_that_calls_that_of_the_context_ends_a_forked_child(before: signal.Handlers, code: int) -> None:
    """If this fails, a framework that puts its own handler on top makes forked helpers survive SIGTERM."""
    signal.signal(signal.SIGTERM, before)
    with cloudckpt.on_sigterm() as preemption:
        handler: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *seen: handler(*seen))  # noqa: PLW0108  # another handler is the point
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert code_of(child) == code
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested


# --- what is in flight


def test_a_save_in_flight_is_finished(memory: Memory) -> None:
    """A signal during an upload, or during the commit, would cost the checkpoint that was nearly there."""
    with cloudckpt.on_sigterm(deadline_s=WAIT_S) as preemption:
        memory.at("a").once_before("put", "data/", lambda: tell(preemption))
        handle = cloudckpt.async_save(state(1.0), memory.uri("a"), no_dist=True)
        until(preemption.agreed)
        report = preemption.finish(lambda: cloudckpt.save(state(2.0), memory.uri("b"), no_dist=True))
    assert handle.done()
    assert report.in_flight in ("committed", "none")  # it may have ended before it was waited for
    assert (report.last, report.error) == ("committed", None)
    assert 0 < report.remaining_s < WAIT_S
    assert [value_at(memory.uri(name)) for name in "ab"] == [1.0, 2.0]


def test_a_last_save_that_is_not_made_is_not_reported(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """A job would end in the belief that its last state is saved."""
    with cloudckpt.on_sigterm() as preemption, cloudckpt.CheckpointManager(memory.uri(), save_every=100) as manager:
        tell(preemption)
        assert preemption.finish(lambda: manager.save(7, state(1.0))).last == "none"
        assert "not due needs force=True" in caplog.text
        saved = list[object]()
        assert preemption.finish(lambda: saved.append(manager.save(7, state(1.0), force=True))).last == "committed"
        assert preemption.finish(lambda: manager.save(7, state(1.0), force=True)).last == "committed", "as before"
    assert value_at(f"{memory.uri()}/step-7") == 1.0


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a save has been cancelled."""
    event = threading.Event()
    cancel = cloudckpt.AsyncSave.cancel

    def noted(self: cloudckpt.AsyncSave) -> bool:
        result = cancel(self)
        event.set()
        return result

    monkeypatch.setattr(cloudckpt.AsyncSave, "cancel", noted)
    return event


@pytest.mark.parametrize("how", ["asked", "deadline"])
def test_a_save_in_flight_is_cancelled(
    memory: Memory, cancelled: threading.Event, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A slow upload would take the time that a newer state could be saved in, or be cut off by SIGKILL."""
    # Cancelled two seconds after the signal, it has almost all of the time to end.
    farewell_s = WAIT_S - 2.0
    if how == "deadline":
        monkeypatch.setattr(module, "CLEANUP_FRACTION", 1.0)
        monkeypatch.setattr(module, "MAX_CLEANUP_S", farewell_s)

    def stall() -> None:
        tell(preemption)
        assert cancelled.wait(WAIT_S)

    with cloudckpt.on_sigterm(deadline_s=WAIT_S) as preemption:
        memory.at("a").once_before("put", "data/", stall)
        handle = cloudckpt.async_save(state(1.0), memory.uri("a"), no_dist=True)
        until(preemption.agreed)
        if how == "asked":
            report = preemption.finish(
                lambda: cloudckpt.save(state(2.0), memory.uri("b"), no_dist=True), in_flight="cancel"
            )
            assert report.last == "committed"
            assert value_at(memory.uri("b")) == 2.0
        else:
            report = preemption.finish()
            assert 0 < report.remaining_s <= farewell_s
    assert report.in_flight == "cancelled"
    assert handle.cancelled()
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        value_at(memory.uri("a"))


def test_a_save_that_does_not_end_is_not_waited_for(memory: Memory, cancelled: threading.Event) -> None:
    """A store that hangs would keep the job until SIGKILL, which leaves it no time for anything else."""
    hang = threading.Event()

    def stall() -> None:
        tell(preemption)
        assert hang.wait(WAIT_S)

    with cloudckpt.on_sigterm(deadline_s=0.5) as preemption:
        memory.at().once_before("put", "data/", stall)
        handle = cloudckpt.async_save(state(1.0), memory.uri(), no_dist=True)
        until(preemption.agreed)
        report = preemption.finish(lambda: pytest.fail("there was no time for it"))
        assert (report.in_flight, report.last, report.remaining_s) == ("unfinished", "no time", 0.0)
    assert cancelled.wait(WAIT_S)  # by a thread of its own, that nobody waits for
    hang.set()
    assert isinstance(handle.exception(WAIT_S), cloudckpt.errors.SaveCancelledError)


def test_a_failed_last_save_is_reported_on_preemption(memory: Memory) -> None:
    """A job would end in the belief that its last state is saved."""
    uri = memory.uri("taken")
    cloudckpt.save(state(1.0), uri, no_dist=True)

    def failing() -> cloudckpt.AsyncSave:
        return cloudckpt.async_save(state(2.0), uri, no_dist=True)

    with cloudckpt.on_sigterm(deadline_s=WAIT_S) as preemption:
        failing()
        with pytest.raises(cloudckpt.CheckpointExistsError):
            preemption.finish()
        failing()
        report = preemption.finish(lambda: cloudckpt.save(state(3.0), memory.uri("b"), no_dist=True))
        assert (report.in_flight, report.last) == ("failed", "committed")
        assert isinstance(report.error, cloudckpt.CheckpointExistsError)
        with pytest.raises(cloudckpt.CheckpointExistsError):
            preemption.finish(failing)
        with pytest.raises(cloudckpt.CheckpointExistsError):
            preemption.finish(lambda: cloudckpt.save(state(2.0), uri, no_dist=True))
        with pytest.raises(cloudckpt.errors.InvalidOptionError, match="in_flight"):
            preemption.finish(in_flight="both")  # type: ignore[arg-type]
    assert value_at(memory.uri("b")) == 3.0


# --- several ranks


@pytest.mark.parametrize(("signalled_at", "first"), [({0: [4], 1: [2]}, 2), ({}, None)], ids=str)
@on_ranks(2)
def test_all_ranks_stop_at_one_step(uri: str, signalled_at: dict[int, list[int]], first: int | None) -> None:
    """Ranks that stop at different steps wait for one another for ever, or save states of different steps."""
    forget_other_handlers()
    rank = dist.get_rank()
    with cloudckpt.on_sigterm(deadline_s=WAIT_S) as preemption:
        stopped = []
        for step in range(6):
            if step in signalled_at.get(rank, []):
                tell(preemption)
            if preemption.agreed():
                stopped.append(step)
        assert stopped == ([] if first is None else list(range(first, 6)))
        if stopped:
            assert preemption.finish(lambda: cloudckpt.save(state(float(stopped[0])), uri)).last == "committed"
            assert value_at(uri) == first
        assert preemption.remaining_s <= WAIT_S


@on_ranks(3)
def test_the_deadline_is_that_of_the_rank_that_is_killed_first() -> None:
    """If this fails, ranks that are told at different times make a last save that the first one does not live to end,
    or one that was not told shortens it.
    """
    forget_other_handlers()
    remaining_s, left_s = {0: 3000.0, 2: 2000.0}, []
    for ask in ("agreed", "finish"):
        deadline_s = remaining_s.get(dist.get_rank(), 1000.0)
        with cloudckpt.on_sigterm(deadline_s=deadline_s) as preemption:
            if dist.get_rank() in remaining_s:
                tell(preemption)
            if ask == "agreed":
                assert preemption.agreed()
                assert preemption.agreed()  # without the others
            else:
                preemption.finish()
            left_s.append(preemption.remaining_s)
    assert 1900 < left_s[0] <= 2000
    assert 900 < left_s[1] <= 1000  # `finish` begins the time of a rank that was not told


@on_ranks(2)
def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    """A rank that is gone would keep all others until SIGKILL."""
    forget_other_handlers()
    with cloudckpt.on_sigterm(timeout_s=WAIT_S) as preemption:
        assert not preemption.agreed()
    if dist.get_rank() == 1:
        dist.barrier()
        return
    with (
        cloudckpt.on_sigterm(timeout_s=1.0) as preemption,
        pytest.raises(cloudckpt.RankLostError, match="not all ranks agreed within 1 s"),
    ):
        preemption.agreed()
    dist.barrier()
