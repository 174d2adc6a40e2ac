"""The root of a run, and the fast place in front of it: the steps of both, and the work that a commit starts.

Retention is in `retention.py`, the fast place in `fast_place.py`, its copies in `drain.py`. `SaveHistory.finish`
calls `Places.start_after_commit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from cloudckpt.manager.drain import is_recorded_as_owed
from cloudckpt.manager.fast_place import FastPlace, StepsOfHost
from cloudckpt.manager.retention import Retention, lock_root
from cloudckpt.manager.steps import StepFolder, StepInfo, Steps, format_folder, name_of, sort_newest_first

_log = logging.getLogger("cloudckpt")


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
        """Return the committed steps of all places, newest first, each with True if the root has it or is owed it.

        `step` and `with_metadata` are those of `Steps.find_committed`; `FastPlace.gather_and_mend` returns `gathered`.

        A failure of the fast place, or of one host's directory, is only logged if the root has steps: without any, the
        run would start from scratch.
        """
        if self.fast is None:
            return [(info, True) for info in self.root.find_committed(step, with_metadata=with_metadata)]
        near, failure = self.fast.list_committed(gathered)
        far = self.root.find_committed(step, with_metadata=with_metadata)
        if failure is not None:
            fast, root = self.fast.uri, self.root.location.uri
            if not far:
                words = f"the fast place {fast} cannot be read, and {root} has no step: {failure.message}"
                failure.args = (words,)
                raise failure
            _log.warning("ignoring the fast place %s, and taking the steps of %s: %s", fast, root, failure)
        if not far:
            self.fast.refuse_unseen()
        merged = _merge_places(near, far, self.fast.drain.is_owed)
        return [(info, is_at_root) for info, is_at_root in merged if step in (None, info.step)]

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


def _merge_places(
    near: Sequence[StepFolder], far: Sequence[StepInfo], is_owed: Callable[[StepFolder], bool]
) -> list[tuple[StepInfo, bool]]:
    """Merge the committed steps of a fast place and those of its root, as `Places.find_placed`.

    If both places have the same save, which has one name and commit time, the result has the step in the fast place.
    Two saves with one name stay two steps.
    """
    copies = {(name_of(info), info.committed_at): info for info in far}
    names = {name_of(info) for info in far}
    merged: list[StepInfo] = []
    fast_only: set[str] = set()
    for folder in near:
        info = folder.info
        # A manifest here that cannot be read has no commit time by which to find its copy.
        if info is None or (folder.problem and name_of(info) in names):
            continue
        copy_info = copies.pop((name_of(info), info.committed_at), None)
        if copy_info is not None:
            merged.append(dataclasses.replace(info, place="both", copy_uri=copy_info.uri))
        else:
            merged.append(dataclasses.replace(info, place="owed" if is_owed(folder) else "fast"))
        if not folder.problem and not is_recorded_as_owed(folder.metadata):
            fast_only.add(info.uri)
    return [(info, info.uri not in fast_only) for info in sort_newest_first([*merged, *copies.values()])]


def remaining_s(ends_at_s: float | None) -> float | None:
    """Return the seconds until `ends_at_s`, a time of ``time.monotonic``; None if there is no end."""
    return None if ends_at_s is None else max(0.0, ends_at_s - time.monotonic())
