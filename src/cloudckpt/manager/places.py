"""The root of a run, and the fast place in front of it: the steps of both, and the work that a commit starts.

Retention is in `retention.py`, the fast place in `fast_place.py`, its copies in `drain.py`. `SaveHistory.finish`
calls `Places.start_after_commit`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence

from cloudckpt.manager.fast_place import FastPlace, StepsOfHost
from cloudckpt.manager.retention import Retention, lock_root
from cloudckpt.manager.steps import StepInfo, Steps, format_folder


class Places:
    """The root of a run, and the fast place in front of it, if the run has one.

    Args:
        root: Steps of the root.
        root_retention: Removes superseded steps of the root.
        fast: The fast place.

    """

    def __init__(self, root: Steps, root_retention: Retention, fast: FastPlace | None) -> None:
        self.root, self.root_retention, self.fast = root, root_retention, fast

    @property
    def each(self) -> list[Steps]:
        """The root's steps, and those of the fast place."""
        return [self.root] if self.fast is None else [self.root, self.fast.steps]

    def __str__(self) -> str:
        return " or ".join(steps.location.uri for steps in self.each)

    def uris_of(self, folder: str) -> list[str]:
        """Return the URIs of a folder in all places."""
        return [steps.location.child(folder).uri for steps in self.each]

    def choose_folder(self, step: int, damaged_uris: Collection[str]) -> str:
        """Return the name of the first folder for a step that is damaged in no place."""
        again = 0
        while not set(damaged_uris).isdisjoint(self.uris_of(format_folder(step, again))):
            again += 1
        return format_folder(step, again)

    def read_times(self) -> None:
        """Read the times of all commits, so that the next one is later in every place."""
        for steps in self.each:
            steps.read_times()

    def adopt_found(self, *, is_coordinator: bool) -> None:
        """Take the steps that this rank has found for those of this run, after a restore. Never raises."""
        if is_coordinator or (self.fast is not None and self.fast.hosts is not None):  # each rank copies its part
            self.root.read_times()  # a look for one step alone does not find the others
        for steps in self.each:
            self.root.run_uris |= steps.known_uris

    def find_committed(self, step: int | None = None, *, with_metadata: bool) -> list[StepInfo]:
        """Return the committed steps of all places, or the checkpoints of one step, newest first."""
        return [info for info, _ in self.find_placed(step, with_metadata=with_metadata)]

    def find_latest(self) -> StepInfo | None:
        """Return the step that was committed last, with its metrics."""
        if self.fast is None:
            return self.root.find_latest()
        return next(iter(self.find_committed(with_metadata=True)), None)

    def find_placed(
        self, step: int | None, *, with_metadata: bool, gathered: Sequence[StepsOfHost] | None = None
    ) -> list[tuple[StepInfo, bool]]:
        """Return the committed steps of all places, newest first, each with True if the root has it or is owed it."""
        if self.fast is not None:
            return self.fast.find_committed(step, with_metadata=with_metadata, gathered=gathered)
        return [(info, True) for info in self.root.find_committed(step, with_metadata=with_metadata)]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep the managers of this process from removing steps meanwhile."""
        with contextlib.ExitStack() as stack:
            for steps in self.each:
                stack.enter_context(lock_root(steps.location.uri))
            yield

    def start_after_commit(self, uri: str, rank: int, *, is_fast: bool, is_owed: bool) -> None:
        """Start retention, and the copies that the root is owed, after `rank`, this one, has seen a commit."""
        if self.fast is not None and is_fast:
            self.fast.note_commit(uri, rank, is_owed=is_owed)
            return
        if rank == 0:
            self.root.known_uris.add(uri)
            self.root_retention.start(uri)
        if self.fast is not None and self.fast.drain.owed_infos:  # the fast place takes no saves now
            self.fast.start(rank)

    def wait(self, ends_at_s: float | None) -> None:
        """Wait for copies and removals. Raises `TimeoutError` at `ends_at_s`, a time of ``time.monotonic``."""
        root = self.root.location.uri
        if self.fast is not None and not self.fast.wait(remaining_s(ends_at_s)):
            raise TimeoutError(f"steps were not copied from {self.fast.uri} to {root} in time; the copy continues")
        retentions = [self.root_retention] if self.fast is None else [self.fast.retention, self.root_retention]
        if not all(retention.wait(remaining_s(ends_at_s)) for retention in retentions):
            raise TimeoutError(f"superseded checkpoints under {root} were not removed in time; the removal continues")


def remaining_s(ends_at_s: float | None) -> float | None:
    """Return the seconds until `ends_at_s`, a time of ``time.monotonic``; None if there is no end."""
    return None if ends_at_s is None else max(0.0, ends_at_s - time.monotonic())
