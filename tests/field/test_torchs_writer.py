"""What torch's own FileSystemWriter and FsspecWriter do wrong, tried on ours."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.e2e.harness import run_ranks
from tests.e2e.killing import check
from tests.e2e.kills import Kill
from tests.e2e.models import assert_same
from tests.e2e.places import LocalPlace
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import cloudckpt
from cloudckpt.options import KIB, MIB

pytestmark = pytest.mark.faults

MOST_FILE_BYTES = 1 * MIB


def save_beyond_the_limit(uri: str) -> None:
    """On each rank. Only rank 1's third object is larger than a file may be."""
    rank = dist.get_rank()
    sizes = {number: 2 * MOST_FILE_BYTES if (rank, number) == (1, 2) else 40 * KIB for number in range(5)}
    state = {f"t-{rank}-{number}": torch.zeros(size // 4) for number, size in sizes.items()}
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, hard))
    try:
        with pytest.raises(CheckpointException, match="File too large") as caught:
            cloudckpt.save(state, uri, options=cloudckpt.Options(object_bytes=KIB, connections=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert sorted(caught.value.failures) == [1]


@pytest.mark.multirank
def test_lost_error_of_a_writer_thread(local: LocalPlace) -> None:
    """One of several writer threads gets an OSError from the disk → the save fails on every rank with it, and nothing
    is left.
    """
    run_ranks(save_beyond_the_limit, local.uri(), world_size=2)
    assert local.keys() == []


@pytest.mark.parametrize("byte", [0, 1999, 3999])
def test_flipped_bit_in_a_file(local: LocalPlace, byte: int) -> None:
    """A bit of a file is flipped → the load fails and names the tensor and the file: never a wrong weight."""
    saved = torch.rand(1000)
    cloudckpt.save({"layer": {"weight": saved}}, local.uri())
    (key,) = local.data_keys()
    data = bytearray(local.read(key))
    data[data.index(saved.numpy().tobytes()) + byte] ^= 1
    local.write(key, bytes(data))
    with pytest.raises(cloudckpt.CorruptCheckpointError, match=r"layer\.weight") as caught:
        cloudckpt.load({"layer": {"weight": torch.zeros(1000)}}, local.uri())
    assert key.rpartition("/")[2] in str(caught.value)


@pytest.mark.multirank
@pytest.mark.parametrize("step", ["after complete", "before the manifest", "in the middle of old data"])
def test_overwrite_then_crash(local: LocalPlace, tmp_path: Path, step: str) -> None:
    """All ranks crash in an overwrite → no new bytes under old metadata, nor the other way round: one save, whole."""
    check(local, Kill(step=step, who="all ranks", overwrite=True), tmp_path / "scratch")


class Rows(DefaultLoadPlanner):
    """Wants some rows of one tensor, as a rank does that holds them."""

    def __init__(self, target: torch.Tensor, *, first_row: int) -> None:
        super().__init__()
        self._target = target
        self._first_row = first_row

    def create_local_plan(self) -> LoadPlan:
        item = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex("shard"),
            dest_offsets=torch.Size([0, 0]),
            storage_index=MetadataIndex("shard", torch.Size([0, 0])),
            storage_offsets=torch.Size([self._first_row, 0]),
            lengths=self._target.shape,
        )
        return LoadPlan([item])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._target


def test_reading_a_whole_shard_for_a_part_of_it(local: LocalPlace) -> None:
    """4 MiB of a shard of 32 MiB are wanted → those are read, to within a tile at each end, in one request."""
    shard = torch.arange(8 * MIB, dtype=torch.int32).view(torch.float32).reshape(1024, 8192)
    cloudckpt.save({"shard": shard}, local.uri())
    wanted = torch.zeros(128, 8192)
    read: list[cloudckpt.Event] = []
    report = cloudckpt.load(
        {"shard": wanted},
        local.uri(),
        planner=Rows(wanted, first_row=301),
        options=cloudckpt.Options(
            on_event=lambda event: read.append(event) if event.name == "load.range_read" else None
        ),
    )
    assert report is not None
    assert_same(wanted.view(torch.int32), shard[301:429].view(torch.int32))
    assert report.num_bytes_wanted == 4 * MIB
    assert report.num_bytes_read <= 4 * MIB + 2 * cloudckpt.Options().tile_bytes
    assert sum(event.num_bytes for event in read) == report.num_bytes_read
    assert len(read) <= 4  # a small load is split, so that its pieces come side by side
