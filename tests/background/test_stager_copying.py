"""How a snapshot is filled: in order, waited for piece by piece, and with an end in any case."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch

from cloudckpt.background.stager import PinnedStager
from cloudckpt.tensors.copying import Staging
from cloudckpt.tensors.host_memory import SnapshotPool
from cloudckpt.tensors.snapshot_plan import CopyTask, SnapshotPlan, add_tasks, lay_out_copies

MIB = 1024 * 1024
WAIT_S = 60


class Gate:
    """Lets copies pass one by one, as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, error: BaseException | None = None) -> None:
        self.permits = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.entered = threading.Event()
        self._error = error
        self._run = CopyTask.run
        monkeypatch.setattr(CopyTask, "run", lambda task, views: self._pass(task, views))  # noqa: PLW0108  # a function, which binds the task

    def _pass(self, task: CopyTask, views: Sequence[torch.Tensor]) -> None:
        self.entered.set()
        assert self.permits.acquire(timeout=WAIT_S)
        self.threads.add(threading.current_thread().name)
        if self._error is not None:
            raise self._error
        self._run(task, views)


def waiting_for(staging: Staging, tensor: torch.Tensor) -> tuple[threading.Thread, threading.Event]:
    """A thread that waits for a tensor's bytes, and whether they were there."""
    is_there = threading.Event()

    def wait() -> None:
        with contextlib.suppress(ValueError):
            staging.wait(tensor.data_ptr(), tensor.nbytes)
            is_there.set()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, is_there


def test_copied_part_is_readable_while_the_rest_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, an upload begins only when all has been copied, or reads bytes that are not there yet."""
    gate = Gate(monkeypatch)
    stager = PinnedStager(num_threads=1)
    first, second = torch.full((5 * MIB,), 1, dtype=torch.uint8), torch.full((5 * MIB,), 2, dtype=torch.uint8)
    staging = stager.begin({"first": first, "second": second})
    elsewhere = torch.ones(3)
    staging.wait(elsewhere.data_ptr(), 12)  # which is none of its memory
    staging.wait(0, 0)
    early, early_there = waiting_for(staging, staging.state_dict["first"])
    late, late_there = waiting_for(staging, staging.state_dict["second"])
    tasks = -(-10 * MIB // (10 * MIB // 4))
    for _ in range(2):
        gate.permits.release()
    early.join(WAIT_S)
    assert early_there.is_set()
    assert bool((staging.state_dict["first"] == 1).all())
    assert not late_there.is_set()
    assert not staging.completed.done()
    assert staging.copied_bytes == 5 * MIB
    for _ in range(tasks):
        gate.permits.release()
    late.join(WAIT_S)
    assert late_there.is_set()
    staging.completed.result(WAIT_S)
    assert bool((staging.state_dict["second"] == 2).all())
    assert gate.threads == {"cloudckpt-stage-0"}
    stager.close()


def test_a_copy_that_fails_ends_all_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a save whose copying failed hangs, or commits what was never copied."""
    with monkeypatch.context() as patched:
        gate = Gate(patched, error=ValueError("the memory is broken"))
        stager = PinnedStager(num_threads=2)
        staging = stager.begin({"w": torch.arange(4 * MIB)})
        thread, is_there = waiting_for(staging, staging.state_dict["w"])
        gate.permits.release(100)
        thread.join(WAIT_S)
        assert not is_there.is_set()
        with pytest.raises(ValueError, match="the memory is broken"):
            staging.completed.result(WAIT_S)
        with pytest.raises(ValueError, match="the memory is broken"):
            staging.wait(staging.state_dict["w"].data_ptr(), 8)
    again = stager.begin({"w": torch.arange(4 * MIB)})
    again.completed.result(WAIT_S)
    assert torch.equal(again.state_dict["w"], torch.arange(4 * MIB))
    stager.close()


class FakeEvent:
    """A point in a fake stream's work, which is done only when it is waited for."""

    def __init__(self, stream: FakeStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        if self._number == self._stream.failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._stream.log.append(f"waited {self._number}")


class FakeStream:
    """Stands for a CUDA stream, and notes the order of the calls."""

    def __init__(self, *, failing: int | None = None) -> None:
        self.failing = failing
        self.log: list[str] = []
        self._num_events = 0

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        self.log.append("begin")
        yield
        self.log.append("end")

    def record_event(self) -> FakeEvent:
        self.log.append(f"event {self._num_events}")
        self._num_events += 1
        return FakeEvent(self, self._num_events - 1)

    def drain(self) -> None:
        self.log.append("drain")


GPU = torch.device("cuda", 0)


def device_plan(tensors: list[torch.Tensor], *, task_bytes: int) -> SnapshotPlan:
    """The plan of a snapshot of a GPU's tensors, which lie on the CPU here."""
    copies, segments = lay_out_copies(tensors, SnapshotPool(shared=False), reuse_lent=True)
    segments = [msgspec.structs.replace(segment, is_small=False) for segment in segments]  # as a GPU's never are
    tasks: list[CopyTask] = []
    ranges = add_tasks(tasks, segments, device=GPU, task_bytes=task_bytes)
    begins = [segment.block.address + segment.offset for segment in segments]
    return SnapshotPlan(
        copies=copies,
        num_bytes=sum(segment.num_bytes for segment in segments),
        batched=frozenset(),
        tasks=tasks,
        tasks_of_device={GPU: range(len(tasks))},
        begins=begins,
        ends=[begin + segment.num_bytes for begin, segment in zip(begins, segments, strict=True)],
        tasks_of_segment=ranges,
    )


def copied_by(stream: FakeStream, tensors: list[torch.Tensor]) -> tuple[Staging, list[torch.Tensor]]:
    """A snapshot that is copied on `stream`, when it has ended, and the copies."""
    plan = device_plan(tensors, task_bytes=1000)
    staging = Staging(plan, tensors, {}, num_threads=1, new_stream=lambda _: stream)
    staging.start()
    staging.completed.exception(WAIT_S)
    return staging, plan.copies


def test_a_gpus_copies_are_there_once_their_events_are() -> None:
    """If this fails, bytes are uploaded that the GPU has not sent yet."""
    whole, stream = torch.randn(30, 50), FakeStream()
    tensors = [torch.arange(10_000), torch.ones(3), whole.t(), whole[:, ::9], torch.randn(70, 90)[:, 3::9]]
    staging, copies = copied_by(stream, tensors)
    assert staging.copied_bytes == staging.num_bytes
    for copied, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copied, tensor)
        staging.wait(copied.data_ptr(), tensor.nbytes)
    events = [line for line in stream.log if line.startswith("event")]
    waits = [line for line in stream.log if line.startswith("waited")]
    assert len(events) == len(waits) > 50
    assert waits == [f"waited {number}" for number in range(len(waits))]
    ahead = max(
        sum(line.startswith("event") for line in stream.log[:at]) - sum("waited" in line for line in stream.log[:at])
        for at in range(len(stream.log))
    )
    assert ahead == 65
    assert "drain" not in stream.log


def test_an_error_of_the_gpu_ends_the_snapshot_after_its_last_copy() -> None:
    """If this fails, a GPU error is lost, or memory is freed that copies in flight still write to."""
    stream = FakeStream(failing=7)
    staging, _ = copied_by(stream, [torch.arange(10_000)])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        staging.completed.result(WAIT_S)
    assert stream.log[-1] == "drain"
    assert staging.copied_bytes < staging.num_bytes
