"""The copies of a snapshot, made in threads that hold the interpreter's lock for little of it."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from cloudckpt._stage.crew import Crew
from cloudckpt._stage.cuda_copying import CopyQueue, CudaStream, queues_of
from cloudckpt._stage.laying import Segment
from cloudckpt._stage.staging import Expected, Staging
from cloudckpt._stage.tensors import as_carrier
from cloudckpt._workers import num_cores_of_rank
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
    """The elements of a view, however they lie, into `target`, which has the same shape."""

    target: torch.Tensor
    view: int

    def run(self, views: Sequence[torch.Tensor]) -> None:
        """By numpy, which does it in this thread alone: torch would start threads of its own for each of ours."""
        source = views[self.view].detach().resolve_conj().resolve_neg()
        as_carrier(self.target).numpy()[...] = as_carrier(source).numpy()


class Batch(msgspec.Struct, frozen=True):
    """Small views into `targets` of the same shapes, in one call, during which other threads run."""

    targets: list[torch.Tensor]
    views: list[int]

    def run(self, views: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self.targets, [views[number] for number in self.views])


class Task(msgspec.Struct):
    """Copies that one thread makes in one go. It holds none of the views that it copies."""

    copies: list[Move | Gather | Batch]
    num_bytes: int

    @torch.no_grad()
    def run(self, views: Sequence[torch.Tensor]) -> None:
        for copy in self.copies:
            if type(copy) is Move:
                ctypes.memmove(copy.target, copy.source, copy.num_bytes)  # other threads run meanwhile
            elif isinstance(copy, Gather | Batch):
                copy.run(views)


def num_threads_of_rank() -> int:
    """To copy with: one for each core, but for a quarter of four or more, since an upload goes on beside."""
    num_cores = num_cores_of_rank()
    return min(num_cores - num_cores // 4, _MOST_THREADS)


class _CpuJob:
    """Tasks that several threads do, in their order. Each call is a thread's whole work."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._numbers = iter(range(len(tasks)))
        self._lock = threading.Lock()

    def __call__(self, crew: Crew) -> None:
        views = crew.sources
        while not crew.has_failed:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            task = self._tasks[number]
            task.run(views)
            crew.done(number, task.num_bytes)


def tasks_of(segments: Sequence[Segment], *, task_bytes: int) -> tuple[list[Task], list[range]]:
    """The tasks that fill the segments, in their order, and of each segment the tasks that it takes."""
    tasks: list[Task] = []
    ranges: list[range] = []
    task = Task(copies=[], num_bytes=task_bytes)  # full: the first copy begins one
    for segment in segments:
        first, done_bytes, target = len(tasks) - (task.num_bytes < task_bytes), 0, segment.target
        while done_bytes < segment.num_bytes:
            if task.num_bytes >= task_bytes:
                task = Task(copies=[], num_bytes=0)
                tasks.append(task)
            if segment.copy is not None:
                step_bytes = segment.num_bytes
                task.copies.append(Gather(segment.copy, segment.view))
            elif segment.small is not None:
                step_bytes = segment.num_bytes
                batch = task.copies[-1] if task.copies else None
                if type(batch) is not Batch:
                    batch = Batch([], [])
                    task.copies.append(batch)
                batch.targets.append(segment.small)
                batch.views.append(segment.view)
            else:
                step_bytes = min(segment.num_bytes - done_bytes, task_bytes - task.num_bytes)
                task.copies.append(Move(target + done_bytes, segment.source + done_bytes, step_bytes))
            task.num_bytes += step_bytes
            done_bytes += step_bytes
        ranges.append(range(first, len(tasks)))
    return tasks, ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What fills the segments of a snapshot."""

    tasks: list[Task]
    """On the CPU. They hold nothing of the state dict, and can be done again for one that lies where it lay."""
    queues: dict[torch.device, CopyQueue]
    """Of each GPU."""
    expected: Expected


def work_for(segments: Sequence[Segment], *, num_threads: int) -> Work:
    """What `num_threads` threads do on the CPU, and one thread for each GPU."""
    is_on_cpu = [segment.tensor.is_cpu for segment in segments]
    on_cpu = list(itertools.compress(segments, is_on_cpu))
    share_bytes = sum(segment.num_bytes for segment in on_cpu) // (num_threads * _TASKS_PER_THREAD)
    tasks, ranges_on_cpu = tasks_of(on_cpu, task_bytes=min(max(share_bytes, _LEAST_TASK_BYTES), _MOST_TASK_BYTES))
    on_gpus = [segment for segment in segments if not segment.tensor.is_cpu]
    queues, ranges_on_gpus, num_tasks = queues_of(on_gpus, first_task=len(tasks))
    cpu_ranges, gpu_ranges = iter(ranges_on_cpu), iter(ranges_on_gpus)
    ranges = [next(cpu_ranges if is_here else gpu_ranges) for is_here in is_on_cpu]
    targets = [segment.target for segment in segments]
    addresses = [(target, target + segment.num_bytes) for target, segment in zip(targets, segments, strict=True)]
    return Work(tasks=tasks, queues=queues, expected=Expected.of(addresses, ranges, num_tasks=num_tasks))


def crew_for(staging: Staging, work: Work, tensors: Sequence[torch.Tensor], *, num_threads: int) -> Crew:
    """Whoever does `work` on `tensors`, and tells `staging` what is there, and how it ended.

    What the caller's current streams still have to do on GPUs comes before what is copied from there.
    """
    staging.expect(work.expected, sources=tensors)
    streams = [CudaStream(device) for device in work.queues]
    jobs: list[Callable[[Crew], None]] = [
        functools.partial(queue.run, stream=stream) for queue, stream in zip(work.queues.values(), streams, strict=True)
    ]
    is_little = not jobs and len(work.tasks) <= 1  # it is copied before a thread has started
    jobs += [_CpuJob(work.tasks)] * max(min(num_threads, len(work.tasks)), not jobs)
    return Crew(staging, jobs, in_threads=not is_little)
