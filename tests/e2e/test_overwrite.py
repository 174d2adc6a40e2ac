"""A checkpoint is replaced only when asked, whole or not at all, and by one of several writers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.models import assert_same
from tests.kit.places import Place
from tests.kit.ranks import on_ranks, run_ranks
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt

RIVALS = (1.0, 2.0)


def values(fill: float) -> dict[str, Any]:
    own = dist.get_rank() if dist.is_initialized() else 0
    return {"shared": torch.full((1000,), fill), f"own-{own}": torch.full((10,), fill), "fill": fill}


def loaded_from(uri: str) -> dict[str, Any]:
    state = values(-1.0)
    cloudckpt.load(state, uri)
    return state


def save_twice(uri: str) -> None:
    cloudckpt.save(values(1.0), uri)
    with pytest.raises(CheckpointException, match="Checkpoint already exists") as caught:
        cloudckpt.save(values(2.0), uri)
    assert isinstance(caught.value, cloudckpt.CheckpointExistsError)
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        dcp.save(values(2.0), storage_writer=cloudckpt.ObjectStoreWriter(uri))
    assert_same(loaded_from(uri), values(1.0))
    dist.barrier()


@pytest.mark.multirank
@pytest.mark.every_store
def test_nothing_is_overwritten_unasked(place: Place) -> None:
    """If this fails, a job with a wrong step number destroys a good checkpoint."""
    run_ranks(save_twice, place.uri(), world_size=2)
    assert len(place.manifest_keys()) == 1
    assert len(place.data_keys()) == 2  # the refused saves left nothing


def overwrite_twice(uri: str) -> None:
    for fill in (1.0, 2.0, 3.0):
        cloudckpt.save(values(fill), uri, overwrite=True)
        assert_same(loaded_from(uri), values(fill))
        dist.barrier()
    writer = cloudckpt.ObjectStoreWriter(uri, overwrite=True)
    dcp.save(values(4.0), storage_writer=writer)
    assert_same(loaded_from(uri), values(4.0))
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        cloudckpt.save(values(5.0), uri)


@pytest.mark.multirank
@pytest.mark.every_store
def test_an_overwrite_that_was_asked_for_replaces_all(place: Place) -> None:
    """If this fails, a new checkpoint is mixed with the old one, or the old one's bytes stay for ever."""
    run_ranks(overwrite_twice, place.uri(), world_size=2)
    assert len(place.data_keys()) == 2


class FailsToFinish(cloudckpt.ObjectStoreWriter):
    """Dies after all data lies on the store and before the commit."""

    def finish(self, metadata: Any, results: Any) -> None:
        raise ValueError("no commit today")


@on_ranks(2)
def test_a_failed_overwrite_leaves_the_old_checkpoint_whole(uri: str) -> None:
    """If this fails, a crash in the middle of an overwrite costs the last good checkpoint."""
    cloudckpt.save(values(1.0), uri)
    with pytest.raises(CheckpointException, match="no commit today"):
        dcp.save(values(2.0), storage_writer=FailsToFinish(uri, overwrite=True))
    assert_same(loaded_from(uri), values(1.0))


class MeetsBeforeCommit(cloudckpt.ObjectStoreWriter):
    """Commits only once the other job is about to commit too."""

    def __init__(self, uri: str, meeting_point: str, fill: float, *, overwrite: bool) -> None:
        super().__init__(uri, overwrite=overwrite)
        self.meeting_point, self.fill = meeting_point, fill

    def finish(self, metadata: Any, results: Any) -> None:
        store = dist.FileStore(self.meeting_point, -1)
        store.set(str(self.fill), "ready to commit")
        store.wait([str(fill) for fill in RIVALS], timedelta(seconds=20))
        super().finish(metadata, results)


def outcome_of_save(uri: str, meeting_point: str, fill: float, overwrite: bool) -> str:  # noqa: FBT001
    """Return what one of two jobs that save to one URI at once is told; each of its ranks hears the same."""
    writer = MeetsBeforeCommit(uri, meeting_point, fill, overwrite=overwrite)
    try:
        cloudckpt.save(values(fill), storage_writer=writer)
    except cloudckpt.CheckpointExistsError:
        return "refused"
    return "committed"


@pytest.mark.multirank
@pytest.mark.every_store
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
def test_one_of_two_concurrent_jobs_wins(place: Place, tmp_path: Path, overwrite: bool) -> None:  # noqa: FBT001
    """If this fails, two jobs with one name both believe in a checkpoint that holds only one job's weights."""
    uri = place.uri()
    if overwrite:
        run_ranks(save_one, uri, 0.0, world_size=2)
    meeting_point = str(tmp_path / "meeting-point")
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run_ranks, outcome_of_save, uri, meeting_point, fill, overwrite, world_size=2)
            for fill in RIVALS
        ]
        outcomes = [job.result() for job in jobs]
    assert sorted(outcomes) == [["committed"] * 2, ["refused"] * 2]
    winner = RIVALS[outcomes.index(["committed"] * 2)]
    assert run_ranks(fill_of_checkpoint, uri, world_size=2) == [winner, winner]
    assert len(place.data_keys()) == 2  # the loser removed its own bytes


def save_one(uri: str, fill: float) -> None:
    cloudckpt.save(values(fill), uri)


def fill_of_checkpoint(uri: str) -> float:
    """The value of every tensor of the checkpoint, which must be one."""
    state = loaded_from(uri)
    fill: float = state["fill"]
    assert_same(state, values(fill))
    return fill
