"""Timelines of several ranks: a file for each, on one clock, and with their waits for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.timelines import Timeline
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt

pytestmark = pytest.mark.multirank

SMALL = {"tile_bytes": 4096, "part_bytes": 8192, "request_bytes": 8192}


def traced_ranks(uri: str, trace: str) -> tuple[int, int]:
    """Saves and loads; the bytes of both."""
    rank = dist.get_rank()
    state = {f"w{rank}": torch.full((20_000,), float(rank))}
    options = cloudckpt.Options(trace=trace, **SMALL)
    saved = cloudckpt.save(state, uri, options=options).report
    loaded = cloudckpt.load({f"w{rank}": torch.zeros(20_000)}, uri, options=options)
    assert saved is not None
    assert loaded is not None
    return saved.num_bytes, loaded.num_bytes_read


def one_rank_cannot_trace(uri: str, root: str) -> None:
    """Rank 1's folder is missing."""
    rank = dist.get_rank()
    options = cloudckpt.Options(trace=f"{root}/rank-{{rank}}/trace.json", timeout_s=30.0)
    with pytest.raises(CheckpointException, match="trace must be a file that can be written"):
        cloudckpt.save({f"w{rank}": torch.ones(10)}, uri, options=options)


def test_each_rank_draws_its_own_and_its_waits_for_the_others(tmp_path: Path) -> None:
    """If this fails, a straggler among the ranks cannot be told from those that wait for it."""
    done = run_ranks(traced_ranks, str(tmp_path / "c"), str(tmp_path / "{verb}.json"), world_size=2)
    saves, loads = (
        [Timeline(tmp_path / name) for name in (f"{verb}.json", f"{verb}.1.json")] for verb in ("save", "load")
    )
    for rank, (saved_bytes, loaded_bytes) in enumerate(done):
        for timeline in (saves[rank], loads[rank]):
            assert {event["pid"] for event in timeline.events} == {timeline.about["rank"]} == {rank}
            assert len(timeline.named("meeting")) >= 3
        assert saves[rank].num_bytes("put", "upload_part") == saved_bytes
        assert loads[rank].num_bytes("read_into") == loaded_bytes
        assert bool(saves[rank].named("commit")) == (rank == 0)
    commit = saves[0].named("commit")[0]
    waits = [span for span in saves[1].named("meeting") if span["ts"] + span["dur"] >= commit["ts"] + commit["dur"]]
    assert waits, "rank 1 learns of the commit after it, by the clock of both files"


def test_a_rank_that_cannot_trace_fails_the_save_on_all(tmp_path: Path) -> None:
    """If this fails, the other ranks wait for one that has refused its options."""
    (tmp_path / "rank-0").mkdir()
    run_ranks(one_rank_cannot_trace, str(tmp_path / "c"), str(tmp_path), world_size=2)
    assert not (tmp_path / "c").exists()
