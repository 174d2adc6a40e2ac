"""The order in which systems take turns, and one turn."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from benchkit.systems import SYSTEMS
from benchkit.table import OPERATIONS, Operation, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchkit.fleet import Fleet
    from benchkit.measure import Usage
    from benchkit.server import Server

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where checkpoints go."""

    server: Server
    local_directory: Path

    def new_uri(self, system: str) -> str:
        """An address that was never used: no cache of a client knows it."""
        name = f"{system}-{uuid.uuid4().hex[:12]}"
        if SYSTEMS[system].store == "path":
            return str(self.local_directory / name)
        return f"s3://{self.server.bucket}/{self.server.prefix}{name}"

    def clear(self) -> None:
        self.server.reset()
        for child in self.local_directory.iterdir():
            shutil.rmtree(child)


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """`items` beginning with another one at each `turn`, so that none always runs first."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


def take_turns(
    fleets: Mapping[str, Fleet],
    *,
    num_ranks: int,
    num_bytes: int,
    repetitions: int,
    places: Places,
    progress: Callable[[str], None],
) -> list[Sample]:
    """Save and load with each system in turn, `repetitions` times after a warm-up (repetition 0) that is verified.

    Only one system holds tensors at a time, and only one runs. What the first load gave is compared to the bit,
    outside the timed region. Raises `WorkerFailedError` at the first failure: a table must not hide one.
    """
    samples = []
    for turn in range(repetitions + 1):
        for system in rotated(list(fleets), turn):
            usages = _turn(fleets[system], places.new_uri(system), verify=turn == 0)
            places.clear()
            of_turn = [
                _sample(usages[operation], system, operation, turn, num_ranks=num_ranks, num_bytes=num_bytes)
                for operation in OPERATIONS
            ]
            counter = f"{turn}/{repetitions}" if turn else "warm-up"
            speeds = ", ".join(f"{sample.operation} {sample.gb_per_s:.2f} GB/s" for sample in of_turn)
            progress(f"{counter}: {system}, {num_ranks} rank(s): {speeds}")
            samples += of_turn
    return samples


def _turn(fleet: Fleet, uri: str, *, verify: bool) -> dict[Operation, list[Usage]]:
    fleet.do("prepare")
    saved = fleet.usages("save", uri)
    fleet.do("zero")
    loaded = fleet.usages("load", uri)
    if verify:
        fleet.do("verify")
    fleet.do("release")
    return {"save": saved, "load": loaded}


def _sample(
    usages: Sequence[Usage],
    system: str,
    operation: Operation,
    turn: int,
    *,
    num_ranks: int,
    num_bytes: int,
) -> Sample:
    peaks = [usage.extra_peak_bytes for usage in usages if usage.extra_peak_bytes is not None]
    return Sample(
        system=system,
        num_ranks=num_ranks,
        operation=operation,
        repetition=turn,
        num_bytes=num_bytes,
        wall_s=max(usage.wall_s for usage in usages),
        cpu_s=sum(usage.cpu_s for usage in usages),
        extra_peak_bytes=max(peaks) if peaks else None,
    )
