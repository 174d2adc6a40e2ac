"""A rank is killed in the middle of a save: what is there afterwards is one whole checkpoint, or none."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import RankError, run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import BucketPlace, LocalPlace, Place

import cloudckpt

pytestmark = pytest.mark.multirank

Moment = Literal["save.set_up", "save.object_uploaded", "save.written", "save.committing", "save.committed"]
MOMENTS_OF_ANY_RANK: list[Moment] = ["save.set_up", "save.object_uploaded", "save.written"]
MOMENTS_OF_THE_COORDINATOR: list[Moment] = [*MOMENTS_OF_ANY_RANK, "save.committing", "save.committed"]
CASES = [(0, moment) for moment in MOMENTS_OF_THE_COORDINATOR] + [(1, moment) for moment in MOMENTS_OF_ANY_RANK]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillsItself:
    """Listens to a save's events; dies, as by the kernel's hand, at the first of this name on this rank."""

    rank: int
    moment: Moment

    def __call__(self, event: cloudckpt.Event) -> None:
        if event.rank == self.rank and event.name == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


def values(fill: float) -> dict[str, Any]:
    return {"shared": torch.full((1000,), fill), f"own-{dist.get_rank()}": torch.full((100,), fill), "fill": fill}


def save(uri: str, fill: float, *, overwrite: bool = False, killer: KillsItself | None = None) -> None:
    cloudckpt.save(values(fill), uri, overwrite=overwrite, options=cloudckpt.Options(on_event=killer))


def save_version_1(uri: str) -> None:
    save(uri, 1.0)


def save_version_2(uri: str, killer: KillsItself | None) -> None:
    save(uri, 2.0, overwrite=True, killer=killer)


def version_there(uri: str) -> float | None:
    """Of the checkpoint, which must be whole; None where there is none."""
    state = values(0.0)
    try:
        cloudckpt.load(state, uri)
    except cloudckpt.CheckpointNotFoundError:
        return None
    fill: float = state["fill"]
    assert_same(state, values(fill))
    return fill


def kill_in_save_of_version_2(place: Place, rank: int, moment: Moment) -> None:
    with pytest.raises(RankError, match=rf"rank {rank} did not report \(exit code -9\)"):
        run_ranks(save_version_2, place.uri(), KillsItself(rank=rank, moment=moment), world_size=2)


def check_kill_in_first_save(place: Place, rank: int, moment: Moment) -> None:
    kill_in_save_of_version_2(place, rank, moment)
    expected = 2.0 if moment == "save.committed" else None
    assert run_ranks(version_there, place.uri(), world_size=2) == [expected] * 2
    assert (cloudckpt.latest(place.root) is None) == (expected is None)
    run_ranks(save_version_2, place.uri(), None, world_size=2)  # the place is not spoiled
    assert run_ranks(version_there, place.uri(), world_size=2) == [2.0] * 2


def check_kill_in_overwrite(place: Place, rank: int, moment: Moment) -> None:
    run_ranks(save_version_1, place.uri(), world_size=2)
    kill_in_save_of_version_2(place, rank, moment)
    expected = 2.0 if moment == "save.committed" else 1.0
    assert run_ranks(version_there, place.uri(), world_size=2) == [expected] * 2


@pytest.mark.parametrize(("rank", "moment"), CASES)
def test_a_first_save_that_dies_leaves_all_or_nothing(local: LocalPlace, rank: int, moment: Moment) -> None:
    """If this fails, half a checkpoint passes for a whole one, or blocks the job that starts again."""
    check_kill_in_first_save(local, rank, moment)


@pytest.mark.parametrize(("rank", "moment"), CASES)
def test_an_overwrite_that_dies_leaves_one_version_whole(local: LocalPlace, rank: int, moment: Moment) -> None:
    """If this fails, a crash in an overwrite mixes two versions, or loses both."""
    check_kill_in_overwrite(local, rank, moment)


@pytest.mark.parametrize(("rank", "moment"), [(1, "save.object_uploaded"), (0, "save.committing")])
def test_a_save_to_a_bucket_that_dies_leaves_one_version_whole(bucket: BucketPlace, rank: int, moment: Moment) -> None:
    """If this fails, what holds on files does not hold on an object store."""
    check_kill_in_overwrite(bucket, rank, moment)


def test_a_first_save_to_a_bucket_that_dies_after_its_commit_is_there(bucket: BucketPlace) -> None:
    """If this fails, a commit counts only once the process that made it has ended well."""
    check_kill_in_first_save(bucket, 0, "save.committed")
