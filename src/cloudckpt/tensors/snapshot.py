"""Fill a snapshot in threads, which hold the interpreter's lock for a small part of the time."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from cloudckpt._workers import num_cores_of_rank
from cloudckpt.tensors.snapshot_plan import CPU, SnapshotPlan
from cloudckpt.tensors.tensor_bytes import extent_bytes

_MAX_THREADS = 32  # more threads do not make memory faster
_MAX_QUEUED_TASKS = 64  # so the GPU has work while this thread waits for the interpreter's lock


class CudaStream:
    """A side stream of `device`, on which copies run beside training, one after the other.

    Its copies begin after the work that is queued on the current stream of the calling thread at its construction.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device)
        self._before = torch.cuda.current_stream(device).record_event()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Queue the copies of this thread here while the context lasts."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._before)
            yield

    def record_event(self) -> torch.cuda.Event:
        """Return the point after all copies so far. A wait for it raises the errors of the copies."""
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps, and leaves the core to training
        event.record(self._stream)
        return event

    def drain(self) -> None:
        """Wait until all copies have ended, with or without an error."""
        with contextlib.suppress(Exception):  # an event or a copy has raised it already
            self._stream.synchronize()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of `device`. torch has few streams, and returns the same ones again."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


@contextlib.contextmanager
def copies_queued_on(stream: CudaStream) -> Iterator[None]:
    """Queue the copies of the body on `stream`. After an error, wait for the queued copies, which use memory."""
    try:
        with torch.no_grad(), stream.use():
            yield
    except BaseException:
        stream.drain()
        raise


class Snapshot:
    """A copy of a state dict in host memory. Threads fill it after `start`: several for the CPU, one for each GPU.

    If one thread fails, the others stop. Copies from a GPU begin after the work that the caller's current stream has
    queued there. The copy is valid until the stager begins the next one, or is closed.

    Args:
        plan: The tasks, and the copies that they fill.
        tensors: The tensors that are copied, in the order of the plan.
        state_dict: The state dict of the copies.
        num_threads: Number of threads for CPU memory.
        urgent: The copies of tensors that the caller may change once `wait_for_urgent` has returned.
        new_stream: Makes the side stream of a GPU.

    """

    def __init__(
        self,
        plan: SnapshotPlan,
        tensors: Sequence[torch.Tensor],
        state_dict: dict[str, Any],
        *,
        num_threads: int,
        urgent: Sequence[torch.Tensor],
        new_stream: Callable[[torch.device], CudaStream] = CudaStream,
    ) -> None:
        self.state_dict = state_dict
        """The copy, with the structure of the original. It has all values once `completed` is done."""
        self.num_bytes = plan.num_bytes
        self.leaves_cores = num_threads < num_cores_of_rank() or CPU not in plan.tasks_of_device
        """True if this rank has cores that do not copy."""
        self.completed: Future[None] = Future()
        """Done when the last byte is copied, or with the error that ended the copying."""
        self.completed.set_running_or_notify_cancel()  # it cannot be cancelled
        self.copied_bytes = 0
        self.is_awaited_whole = False
        """True if `wait` waits for all bytes."""
        self._urgent = urgent
        self._begins, self._ends = plan.begins, plan.ends
        self._tasks_of_segment = plan.tasks_of_segment
        self._is_done = bytearray(len(plan.tasks))
        self._waiting: list[tuple[set[int], threading.Event]] = []
        """The tasks that each waiting thread still waits for. The last of them wakes the thread."""
        self._plan: SnapshotPlan | None = plan
        self._tensors = tensors
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._cpu_tasks = deque(plan.tasks_of_device.get(CPU, ()))
        gpus = {device: numbers for device, numbers in plan.tasks_of_device.items() if device != CPU}
        self._jobs: deque[Callable[[SnapshotPlan], None]] = deque(
            functools.partial(self._copy_from_device, numbers, new_stream(device)) for device, numbers in gpus.items()
        )
        self._jobs.extend([self._copy_from_cpu] * min(num_threads, len(self._cpu_tasks)))
        self._in_threads = bool(gpus) or len(plan.tasks) > 1  # a single task ends before a thread would begin
        self._num_left = len(self._jobs)

    def wait(self, address: int, num_bytes: int) -> None:
        """Wait until the copy's bytes at these addresses are filled. Returns at once for memory outside the copy.

        Raises the error that ended the copying.
        """
        if self.is_awaited_whole:
            self.completed.result()
        self._wait_for_tasks(self._tasks_at(address, num_bytes))
        if self.completed.done():
            self.completed.result()

    def wait_for_urgent(self) -> None:
        """Wait until the tensors that may change soon are copied, or the copying has failed."""
        self._wait_for_tasks(
            task for copied in self._urgent for task in self._tasks_at(copied.data_ptr(), extent_bytes(copied))
        )

    def _tasks_at(self, address: int, num_bytes: int) -> Iterable[int]:
        """Return the tasks that fill these addresses."""
        first = bisect.bisect_right(self._ends, address)
        last = bisect.bisect_left(self._begins, address + num_bytes)
        return itertools.chain.from_iterable(self._tasks_of_segment[first:last])

    def _wait_for_tasks(self, tasks: Iterable[int]) -> None:
        are_done = threading.Event()
        with self._lock:
            numbers = {task for task in tasks if not self._is_done[task]}
            if not numbers or self.completed.done():
                return
            self._waiting.append((numbers, are_done))
        are_done.wait()

    def start(self) -> None:
        """Start the threads. If no thread can be started, or there is a single task, copy in this thread."""
        if not self._jobs:
            self._finish()
            return
        num_started = 0
        try:
            for number in range(len(self._jobs) if self._in_threads else 0):
                # Not a daemon: the interpreter waits for it.
                threading.Thread(target=self._run_jobs, name=f"cloudckpt-stage-{number}", daemon=False).start()
                num_started += 1
        except RuntimeError:  # the system's limit is reached, or the interpreter ends
            pass
        except BaseException as error:
            self._error = error  # nothing more is copied
            raise
        finally:
            if not num_started:
                self._run_jobs()
        if not num_started and self._error is not None and not isinstance(self._error, Exception):
            raise self._error  # an interrupt of this thread

    def _run_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.popleft()
            except IndexError:
                return
            try:
                plan = self._plan
                if self._error is None and plan is not None:
                    job(plan)
            except BaseException as error:  # noqa: BLE001  # it is raised where the snapshot is waited for
                self._error = self._error or error
            plan = None
            with self._lock:
                self._num_left -= 1
                is_last = not self._num_left
            if is_last:
                self._finish()

    def _copy_from_cpu(self, plan: SnapshotPlan) -> None:
        while self._error is None:
            try:
                number = self._cpu_tasks.popleft()
            except IndexError:
                return
            task = plan.tasks[number]
            task.run(self._tensors)
            self._finish_task(number, task.num_bytes)

    def _copy_from_device(self, numbers: range, stream: CudaStream, plan: SnapshotPlan) -> None:
        """Queue the copies of tasks. A task is done once the event behind its copies has occurred."""
        queued: deque[tuple[int, torch.cuda.Event]] = deque()
        with copies_queued_on(stream):
            for number in numbers:
                if self._error is not None:
                    break
                plan.tasks[number].run(())
                queued.append((number, stream.record_event()))
                if len(queued) > _MAX_QUEUED_TASKS:
                    self._await_event(plan, *queued.popleft())
            while queued:
                self._await_event(plan, *queued.popleft())

    def _await_event(self, plan: SnapshotPlan, number: int, event: torch.cuda.Event) -> None:
        event.synchronize()
        self._finish_task(number, plan.tasks[number].num_bytes)

    def _finish_task(self, task: int, num_bytes: int) -> None:
        with self._lock:
            self._is_done[task] = 1
            self.copied_bytes += num_bytes
            for numbers, are_done in self._waiting:
                numbers.discard(task)
                if not numbers:
                    are_done.set()
            self._waiting = [waiting for waiting in self._waiting if waiting[0]]

    def _finish(self) -> None:
        """Set `completed`, and wake all waiting threads. No task runs any more."""
        # Drop the state dict before a waiting thread wakes, because it may expect the memory to be free.
        self._plan, self._tensors, self._urgent = None, (), ()
        try:
            if self._error is None:
                self.completed.set_result(None)
            else:
                self.completed.set_exception(self._error)
        finally:  # a callback of the future may raise an exit
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for _, are_done in waiting:
                are_done.set()


def num_copy_threads() -> int:
    """Return how many threads copy: one for each core of this rank, but three quarters if it has four or more."""
    num_cores = num_cores_of_rank()
    return min(num_cores - num_cores // 4, _MAX_THREADS)
