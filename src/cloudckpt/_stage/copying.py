"""The copies of a snapshot, made in threads that hold the interpreter's lock for little of it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence

import msgspec
import torch

from cloudckpt._stage.laying import Segment
from cloudckpt._stage.staging import Staging
from cloudckpt._stage.tensors import as_carrier
from cloudckpt.options import MIB

_MOST_THREADS = 32  # more do not make memory faster
_MOST_TASK_BYTES = 16 * MIB
_LEAST_TASK_BYTES = MIB
_TASKS_PER_THREAD = 4


class Move(msgspec.Struct, frozen=True, gc=False):
    """`num_bytes` from one address to another."""

    target: int
    source: int
    num_bytes: int


class Gather(msgspec.Struct, frozen=True):
    """The elements of `source`, however they lie, into `target`, which has the same shape."""

    target: torch.Tensor
    source: torch.Tensor
    num_bytes: int

    def run(self) -> None:
        """By numpy, which does it in this thread alone: torch would start threads of its own for each of ours."""
        source = self.source.detach().resolve_conj().resolve_neg()
        as_carrier(self.target).numpy()[...] = as_carrier(source).numpy()


class Task(msgspec.Struct):
    """Copies that one thread makes in one go."""

    copies: list[Move | Gather]
    num_bytes: int

    def run(self) -> None:
        for copy in self.copies:
            if type(copy) is Move:
                ctypes.memmove(copy.target, copy.source, copy.num_bytes)  # other threads run meanwhile
            elif type(copy) is Gather:
                copy.run()


def num_threads_of_rank() -> int:
    """As many as this process has cores to itself, beside the other ranks of its machine."""
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        num_cores = os.cpu_count() or 1
    try:
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError:
        num_ranks = 1
    return max(1, min(num_cores // max(num_ranks, 1), _MOST_THREADS))


def tasks_of(segments: Sequence[Segment], *, task_bytes: int) -> tuple[list[Task], list[range]]:
    """The tasks that fill the segments, in their order, and of each segment the tasks that it takes."""
    tasks: list[Task] = []
    ranges: list[range] = []
    task = Task(copies=[], num_bytes=task_bytes)  # full: the first copy begins one
    for segment in segments:
        first, done_bytes = len(tasks) - (task.num_bytes < task_bytes), 0
        while done_bytes < segment.num_bytes:
            if task.num_bytes >= task_bytes:
                task = Task(copies=[], num_bytes=0)
                tasks.append(task)
            if segment.copy is not None:
                step_bytes = segment.num_bytes
                task.copies.append(Gather(segment.copy, segment.tensor, step_bytes))
            else:
                step_bytes = min(segment.num_bytes - done_bytes, task_bytes - task.num_bytes)
                task.copies.append(Move(segment.target + done_bytes, segment.source + done_bytes, step_bytes))
            task.num_bytes += step_bytes
            done_bytes += step_bytes
        ranges.append(range(first, len(tasks)))
    return tasks, ranges


def copy_to(staging: Staging, segments: Sequence[Segment], *, num_threads: int) -> None:
    """Start to fill `segments`. `staging` is told what is there, and how it ended."""
    share_bytes = staging.num_bytes // (num_threads * _TASKS_PER_THREAD)
    task_bytes = min(max(share_bytes, _LEAST_TASK_BYTES), _MOST_TASK_BYTES)
    tasks, ranges = tasks_of(segments, task_bytes=task_bytes)
    addresses = [(segment.target, segment.target + segment.num_bytes) for segment in segments]
    staging.expect(addresses, ranges, num_tasks=len(tasks), sources=[segment.tensor for segment in segments])
    crew = _Crew(staging, tasks)
    if len(tasks) > 1:
        crew.start(min(num_threads, len(tasks)))
    else:
        crew.work()  # so little is copied before a thread has started


class _Crew:
    """Threads that do the tasks in their order, and none once one has failed. The last to end says so."""

    def __init__(self, staging: Staging, tasks: Sequence[Task]) -> None:
        self._staging = staging
        self._tasks = tasks
        self._lock = threading.Lock()
        self._num_begun = 0
        self._num_at_work = 1
        self._error: BaseException | None = None

    def start(self, num_threads: int) -> None:
        """With as many of them as the system lets start; in this one, where it lets none."""
        self._num_at_work = num_threads
        for number in range(num_threads):
            # Not a daemon: the interpreter waits for it.
            thread = threading.Thread(target=self.work, name=f"cloudckpt-stage-{number}", daemon=False)
            try:
                thread.start()
            except RuntimeError:
                for _ in range(number + 1, num_threads):
                    self._leave()
                if number:
                    self._leave()
                else:
                    self.work()
                return

    def work(self) -> None:
        try:
            while (number := self._next()) is not None:
                self._tasks[number].run()
                self._staging.task_done(number, self._tasks[number].num_bytes)
        except BaseException as error:  # noqa: BLE001  # it is raised where it is waited for
            with self._lock:
                self._error = self._error or error
        self._leave()

    def _next(self) -> int | None:
        with self._lock:
            if self._error is not None or self._num_begun == len(self._tasks):
                return None
            self._num_begun += 1
            return self._num_begun - 1

    def _leave(self) -> None:
        with self._lock:
            self._num_at_work -= 1
            is_last = not self._num_at_work
        if is_last:
            self._staging.end(self._error)
