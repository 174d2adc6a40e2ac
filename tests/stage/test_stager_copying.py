"""How a snapshot is filled: in order, waited for piece by piece, and with an end in any case."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from cloudckpt._stage import copying
from cloudckpt._stage.copying import num_threads_of_rank
from cloudckpt._stage.crew import Crew
from cloudckpt._stage.cuda_copying import CopyQueue, queues_of
from cloudckpt._stage.laying import lay_out
from cloudckpt._stage.memory import Pool
from cloudckpt._stage.stager import PinnedStager
from cloudckpt._stage.staging import Expected, Staging

MIB = 1024 * 1024
WAIT_S = 60


class Gate:
    """Lets copies pass one by one, as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, error: BaseException | None = None) -> None:
        self.permits = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.entered = threading.Event()
        self._error = error
        self._run = copying.Task.run
        monkeypatch.setattr(copying.Task, "run", lambda task, views: self._pass(task, views))  # noqa: PLW0108  # a function, which binds the task

    def _pass(self, task: copying.Task, views: Sequence[torch.Tensor]) -> None:
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


def test_what_is_there_can_be_read_while_the_rest_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_all_threads_copy_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, large models are copied by one core, or each save leaves threads behind."""
    num_threads = 3
    at_once = threading.Barrier(num_threads)
    run = copying.Task.run

    def run_together(task: copying.Task, views: Sequence[torch.Tensor]) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            at_once.wait(WAIT_S)
        at_once.abort()  # once all have been in here together
        run(task, views)

    monkeypatch.setattr(copying.Task, "run", run_together)
    before = set(threading.enumerate())
    stager = PinnedStager(num_threads=num_threads)
    staging = stager.begin({"w": torch.arange(4 * MIB)})
    staging.completed.result(WAIT_S)
    assert at_once.broken
    assert torch.equal(staging.state_dict["w"], torch.arange(4 * MIB))
    for thread in threading.enumerate():
        if thread.name.startswith("cloudckpt-stage"):
            thread.join(WAIT_S)
    assert set(threading.enumerate()) <= before
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


@pytest.mark.parametrize("num_started", [0, 1])
def test_where_no_more_threads_start_the_copy_is_made_all_the_same(
    num_started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a process at its limit of threads, or at its end, loses its save or hangs."""
    left = [num_started]
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    stager = PinnedStager(num_threads=4)
    staging = stager.begin({"w": torch.arange(8 * MIB)})
    staging.completed.result(WAIT_S)
    assert torch.equal(staging.state_dict["w"], torch.arange(8 * MIB))
    stager.close()


def test_an_interrupted_begin_still_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, Ctrl-C while a save begins makes the next save, or the end of the process, hang."""

    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    stager = PinnedStager(num_threads=4)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stager.begin({"w": torch.arange(8 * MIB)})
    assert stager._last is not None
    assert isinstance(stager._last.completed.exception(WAIT_S), KeyboardInterrupt)
    assert stager._last.copied_bytes == 0
    stager.begin({"w": torch.arange(8 * MIB)}).completed.result(WAIT_S)
    stager.close()


def test_the_next_snapshot_does_not_wait_for_one_that_was_interrupted_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If this fails, Ctrl-C at the end of a small copy hangs the next save, and the interpreter's exit."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with contextlib.closing(PinnedStager()) as stager:
        with monkeypatch.context() as patched:
            patched.setattr(Staging, "end", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stager.begin({"w": torch.ones(8)})
        staging = stager.begin({"w": torch.full((8,), 2.0)})
        staging.completed.result(WAIT_S)
        assert torch.equal(staging.state_dict["w"], torch.full((8,), 2.0))


def test_an_interrupted_begin_ends_after_the_threads_that_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, memory is used for the next snapshot while a thread still copies the last one into it."""
    gate = Gate(monkeypatch)
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        assert gate.entered.wait(WAIT_S)
        raise KeyboardInterrupt

    stager = PinnedStager(num_threads=4)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            stager.begin({"w": torch.arange(8 * MIB)})
    assert stager._last is not None
    assert not stager._last.completed.done()
    gate.permits.release(100)
    assert isinstance(stager._last.completed.exception(WAIT_S), KeyboardInterrupt)
    stager.close()


def test_sources_are_kept_until_they_are_copied_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a model that is dropped after the call is read when it is gone, or lives until the next save."""
    gate = Gate(monkeypatch)
    stager = PinnedStager(num_threads=1)
    tensor = torch.full((4 * MIB,), 5, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    count = torch._C._storage_Use_Count
    staging = stager.begin({"w": tensor})
    del tensor
    assert count(storage._cdata) > 1
    gate.permits.release(100)
    staging.completed.result(WAIT_S)
    for thread in threading.enumerate():
        if thread.name.startswith("cloudckpt-stage"):
            thread.join(WAIT_S)
    assert count(storage._cdata) == 1
    assert bool((staging.state_dict["w"] == 5).all())
    stager.close()


def test_overlapped_staging_returns_a_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, torch begins to save what has not been copied yet."""
    gate = Gate(monkeypatch)
    stager = PinnedStager(overlapped=True, num_threads=1)
    future = stager.stage({"w": torch.arange(MIB)})
    assert not isinstance(future, dict)
    assert not future.done()
    gate.permits.release(100)
    assert torch.equal(future.result(WAIT_S)["w"], torch.arange(MIB))
    stager.synchronize_staging()
    stager.close()


def test_cores_are_shared_with_the_other_ranks_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, eight ranks copy with all cores each, and stand in each other's way."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    for local_world_size, expected in (("8", 2), ("4", 3), ("1", 12), ("99", 1), ("nonsense", 12), ("0", 12)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
        assert num_threads_of_rank() == expected
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert num_threads_of_rank() == 12


class FakeMark:
    """A point in a fake stream's work, which is only done when it is waited for."""

    def __init__(self, stream: FakeStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        if self._number == self._stream.failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._stream.log.append(f"waited {self._number}")


class FakeStream:
    """Stands for a CUDA stream, to see the order of what is asked of it."""

    def __init__(self, *, failing: int | None = None) -> None:
        self.failing = failing
        self.log: list[str] = []
        self._num_marks = 0

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        self.log.append("begin")
        yield
        self.log.append("end")

    def mark(self) -> FakeMark:
        self.log.append(f"mark {self._num_marks}")
        self._num_marks += 1
        return FakeMark(self, self._num_marks - 1)

    def drain(self) -> None:
        self.log.append("drain")


def queued(tensors: list[torch.Tensor], *, failing: int | None = None) -> tuple[Staging, FakeStream]:
    """What a GPU's queue makes of some tensors, which lie on the CPU here."""
    pool = Pool(shared=False)
    laid_out = lay_out(tensors, pool, reuse_lent=True)
    queue = CopyQueue(first_task=0, task_bytes=1000)
    ranges = [queue.add(segment) for segment in laid_out.segments]
    staging = Staging(
        state_dict=dict(enumerate(laid_out.copies)),  # type: ignore[arg-type]  # its names do not matter
        num_bytes=sum(segment.num_bytes for segment in laid_out.segments),
        blocks=laid_out.blocks,
    )
    addresses = [(segment.target, segment.target + segment.num_bytes) for segment in laid_out.segments]
    staging.expect(Expected.of(addresses, ranges, num_tasks=queue.end_task), sources=tensors)
    stream = FakeStream(failing=failing)
    Crew(staging, [lambda crew: queue.run(crew, stream)], in_threads=False).run()
    return staging, stream


def test_a_gpus_copies_are_there_once_their_events_are() -> None:
    """If this fails, bytes are uploaded that the GPU has not sent yet."""
    whole = torch.randn(30, 50)
    tensors = [torch.arange(10_000), torch.ones(3), whole.t(), whole[:, ::9], torch.randn(70, 90)[:, 3::9]]
    staging, stream = queued(tensors)
    staging.completed.result(WAIT_S)
    assert staging.copied_bytes == staging.num_bytes
    for number, tensor in enumerate(tensors):
        assert torch.equal(staging.state_dict[number], tensor)  # type: ignore[call-overload]  # as above
    marks = [line for line in stream.log if line.startswith("mark")]
    waits = [line for line in stream.log if line.startswith("waited")]
    assert len(marks) == len(waits) > 50
    assert waits == [f"waited {number}" for number in range(len(waits))]
    ahead = max(
        sum(line.startswith("mark") for line in stream.log[:at]) - sum("waited" in line for line in stream.log[:at])
        for at in range(len(stream.log))
    )
    assert ahead == 5
    assert "drain" not in stream.log


@pytest.mark.parametrize("in_threads", [False, True], ids=["here", "thread"])
def test_what_a_gpu_copies_is_not_kept_once_it_has_been_copied(*, in_threads: bool) -> None:
    """If this fails, a model on a GPU that was dropped after a save keeps its memory until the next one."""
    tensor = torch.arange(10_000)
    storage = tensor.untyped_storage()
    laid_out = lay_out([tensor], Pool(shared=False), reuse_lent=True)
    queue = CopyQueue(first_task=0)
    tasks = [queue.add(segment) for segment in laid_out.segments]
    staging = Staging(state_dict={}, num_bytes=tensor.nbytes, blocks=laid_out.blocks)
    staging.expect(Expected.of([(0, 1)], tasks, num_tasks=queue.end_task), sources=[tensor])
    crew = Crew(staging, [functools.partial(queue.run, stream=FakeStream())], in_threads=in_threads)
    del tensor, queue, laid_out
    crew.run()
    staging.completed.result(WAIT_S)
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    crew.wait()


def test_an_error_of_the_gpu_ends_the_snapshot_after_its_last_copy() -> None:
    """If this fails, a GPU error is lost, or memory is freed that copies in flight still write to."""
    staging, stream = queued([torch.arange(10_000)], failing=7)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        staging.completed.result(WAIT_S)
    assert stream.log[-1] == "drain"
    assert staging.copied_bytes < staging.num_bytes


def test_each_device_has_a_queue_and_each_segment_its_tasks() -> None:
    """If this fails, an upload waits for the copies of another GPU, or not for its own."""
    pool = Pool(shared=False)
    laid_out = lay_out([torch.arange(100), torch.arange(200), torch.arange(300)], pool, reuse_lent=True)
    queues, ranges, end = queues_of(laid_out.segments, first_task=4)
    assert list(queues) == [torch.device("cpu")]
    assert ranges == [range(4, 5)] * 3
    assert end == 5
    pool.close()
