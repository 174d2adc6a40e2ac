"""A snapshot of a state dict while it is made, and once it is there."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt import _forks
from cloudckpt._stage.memory import Block
from cloudckpt._threads import Condition, Future


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Where the segments of a snapshot lie, in the order of their addresses, and which tasks fill each of them."""

    begins: list[int]
    ends: list[int]
    tasks: list[range]
    num_tasks: int

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int]], tasks: Sequence[range], *, num_tasks: int) -> Expected:
        """Of each segment, in any order, its range of addresses, and the tasks that fill it."""
        order = sorted(range(len(segments)), key=lambda number: segments[number][0])
        return cls(
            begins=[segments[number][0] for number in order],
            ends=[segments[number][1] for number in order],
            tasks=[tasks[number] for number in order],
            num_tasks=num_tasks,
        )


_not_freed: list[Sequence[Any]] = []
"""What a child has of its parent's tensors: CUDA does not work there, not even to free memory."""
_NOTHING = Expected(begins=[], ends=[], tasks=[], num_tasks=0)


class Staging:
    """A copy of a state dict in host memory, which may still be filled.

    Valid until the stager begins the next one, or is closed.
    """

    def __init__(
        self, *, state_dict: dict[str, Any], num_bytes: int, blocks: Sequence[Block], leaves_cores: bool = True
    ) -> None:
        self.state_dict = state_dict
        """Of the same structure, on the CPU; complete only when `completed` is."""
        self.num_bytes = num_bytes
        """That are copied."""
        self.leaves_cores = leaves_cores
        """Whether this rank has cores that do not copy."""
        self.completed: Future[None] = Future()
        """Done when the last byte has been copied; holds what ended the copying, if it failed."""
        self.completed.set_running_or_notify_cancel()  # it cannot be cancelled
        self._blocks = [(block.address, block.num_bytes, block) for block in blocks]
        self._changed = Condition()
        self._copied_bytes = 0
        self._expected = _NOTHING
        self._is_done = bytearray()
        self.sources: Sequence[Any] = ()
        """What is copied, until it has been."""
        _forks.watch(self)

    def after_fork(self) -> None:
        """In a child, which has none of the threads that copy. Its memory is the parent's, too."""
        self._changed = Condition()
        _not_freed.append(self.sources)
        self.sources = ()
        _forks.leave(self.completed, lambda: RuntimeError("this process was forked while the state dict was copied"))

    @property
    def copied_bytes(self) -> int:
        """So far."""
        return self._copied_bytes

    def wait(self, address: int, num_bytes: int) -> None:
        """Until the bytes at these addresses are there; at once for memory that is none of the snapshot's.

        Raises what ended the copying.
        """
        if self.completed.done():
            self.completed.result()
            return
        first = bisect.bisect_right(self._expected.ends, address)
        last = bisect.bisect_left(self._expected.begins, address + num_bytes)
        if first >= last:
            return
        low = min(tasks.start for tasks in self._expected.tasks[first:last])
        high = max(tasks.stop for tasks in self._expected.tasks[first:last])
        with self._changed:
            self._changed.wait_for(lambda: self.completed.done() or all(self._is_done[low:high]))
        if self.completed.done():
            self.completed.result()

    def segment_of(self, address: int, num_bytes: int) -> tuple[int, int] | None:
        """Where these bytes lie in shared memory: its file descriptor, and the offset. None where they do not."""
        for begin, size_bytes, block in self._blocks:
            if begin <= address and address + num_bytes <= begin + size_bytes:
                return None if block.descriptor is None else (block.descriptor, address - begin)
        return None

    @property
    def files(self) -> list[int]:
        """The descriptors of the shared memory that it lies in."""
        return [block.descriptor for _, _, block in self._blocks if block.descriptor is not None]

    def expect(self, expected: Expected, *, sources: Sequence[Any]) -> None:
        """Say what is going to be done. `sources` are kept until it has been."""
        self._expected = expected
        self._is_done = bytearray(expected.num_tasks)
        self.sources = sources

    def task_done(self, task: int, num_bytes: int) -> None:
        """Let those go on that wait for it."""
        with self._changed:
            self._is_done[task] = 1
            self._copied_bytes += num_bytes
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Let everybody go on."""
        self.sources = ()
        if error is None:
            self.completed.set_result(None)
        else:
            self.completed.set_exception(error)
        with self._changed:
            self._changed.notify_all()


class AsAWhole:
    """A staging of which everything is there at once, when all is."""

    def __init__(self, staging: Staging) -> None:
        self.completed = staging.completed

    def wait(self, address: int, num_bytes: int) -> None:  # noqa: ARG002  # as that of `Staging`
        """Until everything is there. Raises what ended the copying."""
        self.completed.result()
