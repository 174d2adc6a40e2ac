"""Saves that are killed in the middle and begun again, on any store: what they send, and what is there in the end."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import RankError, run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import LocalPlace, Place, S3Place
from tests.options import make_options

import cloudckpt
from cloudckpt.options import KIB, MIB

NAMES = ("a", "b", "c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One try to save, on each of its ranks."""

    uri: str
    part_bytes: int
    scratch: Path
    """Where each rank notes the parts and the objects that it has sent."""
    world_size: int = 2
    victims: tuple[int, ...] = ()
    after_num_parts: int = 0
    """When a victim dies."""
    resume: bool = True
    overwrite: bool = False
    changed: tuple[str, ...] = ()
    """The names of tensors that are no longer as in other tries."""

    def values(self, rank: int) -> dict[str, Any]:
        """What the rank saves: of each name an object of three parts, of which the last is half full."""
        num_elements = 5 * self.part_bytes // 8
        return {
            f"{rank}-{name}": torch.rand(
                num_elements, generator=torch.Generator().manual_seed(10 * rank + index + 1000 * (name in self.changed))
            )
            for index, name in enumerate(NAMES)
        }

    def options(self, **more: Any) -> cloudckpt.Options:
        """With one connection, the parts go up one after the other."""
        return make_options(
            part_bytes=self.part_bytes,
            tile_bytes=min(self.part_bytes, MIB) // 4,
            object_bytes=self.part_bytes * 5 // 2,
            connections=1,
            resume=self.resume,
            **more,
        )

    def noted(self, rank: int, name: str) -> list[int]:
        """The bytes of each event of this name."""
        path = self.scratch / f"{rank}.{name}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return self.world_size * len(NAMES) * (5 * self.part_bytes // 8) * 4


@dataclass(slots=True, kw_only=True)
class Noting:
    """Listens to a rank's save; kills the rank when its time has come."""

    job: Try
    num_parts: int = field(default=0)

    def __call__(self, event: cloudckpt.Event) -> None:
        with (self.job.scratch / f"{event.rank}.{event.name}").open("a") as file:
            file.write(f"{event.num_bytes}\n")
        self.num_parts += event.name == "save.part_uploaded"
        if event.rank in self.job.victims and self.num_parts == self.job.after_num_parts:
            os.kill(os.getpid(), signal.SIGKILL)


def save(job: Try) -> tuple[int, int]:
    """On each rank: what was sent, and what was not."""
    options = job.options(on_event=Noting(job=job))
    report = cloudckpt.save(job.values(dist.get_rank()), job.uri, overwrite=job.overwrite, options=options).report
    return report.num_bytes, report.num_reused_bytes


def part_bytes_on(place: Place) -> int:
    """The least that the store takes, or something small."""
    return 5 * MIB if isinstance(place, S3Place) else 64 * KIB


def tried(place: Place, scratch: Path, **what: Any) -> Try:
    """A try at `place`."""
    scratch.mkdir(parents=True)
    return Try(uri=place.uri(), part_bytes=part_bytes_on(place), scratch=scratch, **what)


def die(job: Try) -> None:
    """The victims are killed, each after as many parts as it is to send, and the others end."""
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(save, job, world_size=job.world_size, grace_s=60.0)
    for rank in job.victims:
        assert len(job.noted(rank, "save.part_uploaded")) == job.after_num_parts, rank


def succeed(job: Try) -> int:
    """The save is committed, and holds what was to be saved, bit for bit; the bytes that did not have to be sent."""
    sent_and_reused = run_ranks(save, job, world_size=job.world_size)
    for rank, (num_bytes, _) in enumerate(sent_and_reused):
        assert sum(job.noted(rank, "save.part_uploaded")) == num_bytes
    expected = {name: value for rank in range(job.world_size) for name, value in job.values(rank).items()}
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    cloudckpt.load(state, job.uri, no_dist=True)
    assert_same(state, expected)
    total = sum(num_bytes + num_reused for num_bytes, num_reused in sent_and_reused)
    assert job.num_bytes < total < 1.1 * job.num_bytes  # with the headers
    return sum(num_reused for _, num_reused in sent_and_reused)


def check_kill(place: Place, scratch: Path) -> None:
    """Killed once, and resumed: all parts that were sent are used, on a path all whole objects."""
    first = tried(place, scratch / "1", victims=(0, 1), after_num_parts=8)
    die(first)
    event = "save.object_uploaded" if isinstance(place, LocalPlace) else "save.part_uploaded"
    num_sent = sum(sum(first.noted(rank, event)) for rank in range(first.world_size))
    assert succeed(tried(place, scratch / "2")) == num_sent > 0
