"""Copies from one GPU into host memory, on a stream of their own beside what training does there."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import torch

from cloudckpt._stage.crew import Crew
from cloudckpt._stage.laying import Segment
from cloudckpt.options import MIB

_TASK_BYTES = 64 * MIB  # for each event: what is uploaded first waits for so much, and no longer
_MOST_UNDER_WAY = 4  # tasks that the GPU has been given beyond the one that is waited for


class Waitable(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Until the work before it has been done. Raises what went wrong with it."""


class Stream(Protocol):
    """What copies are queued on, one after the other."""

    def use(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, this thread's copies go there."""

    def mark(self) -> Waitable:
        """A point after all copies so far."""

    def drain(self) -> None:
        """Wait until nothing is left to do, however it went."""


class CudaStream:
    """A side stream of `device`, which begins after what the calling thread's current stream has to do now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device)
        self._before = torch.cuda.current_stream(device).record_event()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """See `Stream`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._before)
            yield

    def mark(self) -> Waitable:
        """See `Stream`. Whoever waits for it sleeps, and does not spin on a core that training needs."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
        event.record(self._stream)
        return event

    def drain(self) -> None:
        """See `Stream`."""
        with contextlib.suppress(Exception):  # it has been raised already, by a mark or a copy
            self._stream.synchronize()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Made once: torch has few, and gives the same ones out again."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
    return _streams[device]


class DeviceTask(msgspec.Struct):
    """Copies that are waited for together."""

    number: int
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    num_bytes: int


class CopyQueue:
    """The tasks of one device, in their order. They are numbered from `first_task` on."""

    def __init__(self, *, first_task: int, task_bytes: int = _TASK_BYTES) -> None:
        self._next = first_task
        self._task_bytes = task_bytes
        self._tasks: list[DeviceTask] = []

    @property
    def end_task(self) -> int:
        """The number after the last one's."""
        return self._next

    def add(self, segment: Segment) -> range:
        """The tasks that fill `segment`."""
        source, target = _source_of(segment), _target_of(segment)
        first, done_rows = self._current().number, 0
        # A tensor that is gathered is cut, too: the GPU makes a copy of what it gathers, which is not to be large.
        rows = len(source)
        row_bytes = segment.num_bytes // rows
        while done_rows < rows:
            task = self._current()
            step = min(rows - done_rows, max((self._task_bytes - task.num_bytes) // row_bytes, 1))
            task.sources.append(source[done_rows : done_rows + step])
            task.targets.append(target[done_rows : done_rows + step])
            task.num_bytes += step * row_bytes
            done_rows += step
        return range(first, self._next)

    def _current(self) -> DeviceTask:
        if not self._tasks or self._tasks[-1].num_bytes >= self._task_bytes:
            self._tasks.append(DeviceTask(number=self._next, targets=[], sources=[], num_bytes=0))
            self._next += 1
        return self._tasks[-1]

    def run(self, crew: Crew, stream: Stream) -> None:
        """Make the copies, and tell `crew` of each task when its copies have ended, not when they were begun."""
        under_way: deque[tuple[DeviceTask, Waitable]] = deque()
        has_ended = False
        try:
            with torch.no_grad(), stream.use():
                for task in self._tasks:
                    if crew.has_failed:
                        return
                    for target, source in zip(task.targets, task.sources, strict=True):
                        target.copy_(source, non_blocking=True)
                    under_way.append((task, stream.mark()))
                    if len(under_way) > _MOST_UNDER_WAY:
                        _wait_for(under_way.popleft(), crew)
                while under_way:
                    _wait_for(under_way.popleft(), crew)
            has_ended = True
        finally:
            if not has_ended:  # neither side's memory may be let go of while it is still read or written
                stream.drain()


def _wait_for(begun: tuple[DeviceTask, Waitable], crew: Crew) -> None:
    task, mark = begun
    mark.synchronize()
    crew.done(task.number, task.num_bytes)


def _source_of(segment: Segment) -> torch.Tensor:
    """What is copied: bytes as they lie, or the elements of a tensor that has at least one dimension."""
    tensor = segment.tensor.detach()
    if segment.copy is not None:
        return tensor.resolve_conj().resolve_neg()
    storage = tensor.untyped_storage()
    offset = segment.source - storage.data_ptr()
    if offset < 0 or offset + segment.num_bytes > storage.nbytes():
        raise RuntimeError("tensors of different storages share memory of a GPU; copy one of them first")
    flat: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, offset, (segment.num_bytes,), (1,))


def _target_of(segment: Segment) -> torch.Tensor:
    if segment.copy is not None:
        return segment.copy
    storage, offset = segment.block.storage(segment.offset, segment.num_bytes)
    flat: torch.Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.set_(storage, offset, (segment.num_bytes,), (1,))


def queues_of(
    segments: Sequence[Segment], *, first_task: int
) -> tuple[dict[torch.device, CopyQueue], list[range], int]:
    """For each device a queue of what is copied from there; of each segment its tasks; the number after the last."""
    devices = list(dict.fromkeys(segment.tensor.device for segment in segments))
    queues: dict[torch.device, CopyQueue] = {}
    ranges: dict[int, range] = {}
    for device in devices:
        queue = queues[device] = CopyQueue(first_task=first_task)
        for number, segment in enumerate(segments):
            if segment.tensor.device == device:
                ranges[number] = queue.add(segment)
        first_task = queue.end_task
    return queues, [ranges[number] for number in range(len(segments))], first_task
