"""What happens to the nearest rival's checkpoints (s3torchconnector's DCP writer and reader), tried on ours.

A test for each scenario in which that one loses or mixes data, or reports success: named after the scenario, with what
must happen. All through the public calls.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.aftermath import assert_nothing_needless
from tests.e2e.harness import run_ranks
from tests.e2e.killing import check, die, job_at, version_there
from tests.e2e.kills import Kill
from tests.e2e.models import assert_same
from tests.e2e.places import LocalPlace, Place, S3Place
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

import cloudckpt
from cloudckpt.options import KIB, MIB
from cloudckpt.testing.servers import S3Server
from cloudckpt.testing.wire import S3_ACCESS_DENIED, Rule, Wire

pytestmark = pytest.mark.faults

RIVALS = (1.0, 2.0)


def own_values(fill: float) -> dict[str, torch.Tensor]:
    """Many tensors of this rank's own, which go into several objects."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {f"own-{rank}-{number}": torch.full((5000,), fill + number) for number in range(6)}


def outcome_of_save(uri: str, fill: float) -> str:
    """On each rank; all jobs begin at about the same time, and whoever comes last to the commit is too late."""
    try:
        cloudckpt.save(own_values(fill), uri)
    except cloudckpt.CheckpointExistsError:
        return "refused"
    return "committed"


def load_own_values(uri: str) -> float:
    state = own_values(0.0)
    cloudckpt.load(state, uri)
    fill = min(float(tensor.min()) for tensor in state.values())
    assert_same(state, own_values(fill))
    return fill


@pytest.mark.multirank
def test_two_concurrent_writers(place: Place) -> None:
    """Two jobs save to one URI at once with overwrite=False → exactly one is told that it succeeded, and its values,
    and no others, are there.
    """
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_ranks, outcome_of_save, place.uri(), fill, world_size=2) for fill in RIVALS]
        outcomes = [job.result() for job in jobs]
    assert sorted(outcomes) == [["committed"] * 2, ["refused"] * 2]
    winner = RIVALS[outcomes.index(["committed"] * 2)]
    assert run_ranks(load_own_values, place.uri(), world_size=2) == [winner] * 2


@pytest.mark.multirank
@pytest.mark.parametrize("step", ["middle part", "after complete", "before the manifest", "committed"])
def test_killed_while_overwriting(s3: S3Place, tmp_path: Path, step: str) -> None:
    """A process is killed while it overwrites v1 → v1 whole until the commit, v2 whole from then on; never a mix."""
    check(s3, Kill(step=step, overwrite=True), tmp_path / "scratch")


@pytest.mark.multirank
@pytest.mark.parametrize(
    "step",
    ["manifest put carried out", "before old manifests go", "between manifests and data", "in the middle of old data"],
)
def test_killed_between_the_old_metadata_and_the_new(s3: S3Place, tmp_path: Path, step: str) -> None:
    """Killed between removing the old metadata and the new one's being there → there is no such moment: the old goes
    only once the new counts, so that one of them is always whole.
    """
    check(s3, Kill(step=step, who="all ranks", overwrite=True), tmp_path / "scratch")


def save_with_one_object_denied(uri: str, endpoint_url: str) -> None:
    """On each rank; eight threads, and an object for each tensor."""
    options = cloudckpt.Options(
        storage_options={"endpoint_url": endpoint_url}, object_bytes=KIB, part_bytes=MIB, connections=8
    )
    with pytest.raises(CheckpointException, match=r"data/[^/]+/1-3\.safetensors") as caught:
        cloudckpt.save(own_values(1.0), uri, options=options)
    assert isinstance(caught.value, cloudckpt.errors.AccessDeniedError)
    assert sorted(caught.value.failures) == [1]
    assert "s3:PutObject" in str(caught.value)


@pytest.mark.multirank
def test_one_denied_object_among_several_writer_threads(s3: S3Place, s3_server: S3Server) -> None:
    """The PUT of one object is denied to one of several threads → the save fails on all ranks with the key and the
    missing permission, and nothing is left.
    """
    denied = Rule(action=S3_ACCESS_DENIED, method="PUT", path=r"/1-3\.safetensors", times=None)
    with Wire(s3_server.endpoint_url, denied) as wire:
        run_ranks(save_with_one_object_denied, s3.uri(), wire.url, world_size=2)
        assert wire.num_acted >= 1
    assert s3.keys() == []


class PlannerThatFails(DefaultSavePlanner):
    """Cannot resolve the last of its tensors."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "z":
            raise OSError("the tensor could not be read")
        return super().resolve_data(write_item)


LARGE = {"a": torch.rand(11 * MIB // 4), "z": torch.rand(1000)}
IN_PARTS = {"part_bytes": 5 * MIB, "connections": 1}


def test_an_exception_between_the_objects_of_a_save(s3: S3Place) -> None:
    """The caller's code raises when the first object is already going up → its upload is aborted, what was written is
    removed, and nothing is visible.
    """
    options = cloudckpt.Options(object_bytes=KIB, **IN_PARTS)
    with pytest.raises(CheckpointException, match="the tensor could not be read"):
        cloudckpt.save(LARGE, s3.uri(), planner=PlannerThatFails(), options=options)
    assert s3.keys() == []
    assert s3.num_unfinished_uploads() == 0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_exception_in_the_middle_of_an_object(s3: S3Place, s3_server: S3Server, number: int) -> None:
    """A part of an upload fails → it is not completed without that part, but aborted: no object that is cut short."""
    broken = Rule(action=S3_ACCESS_DENIED, method="PUT", path=f"partNumber={number}", times=None)
    with Wire(s3_server.endpoint_url, broken) as wire:
        options = cloudckpt.Options(storage_options=s3.options_at(wire.url), **IN_PARTS)
        with pytest.raises(cloudckpt.errors.AccessDeniedError):
            cloudckpt.save(LARGE, s3.uri(), options=options)
        assert not [seen for seen in wire.requests if seen.method == "POST" and "uploadId=" in seen.target]
    assert s3.keys() == []
    assert s3.num_unfinished_uploads() == 0


@pytest.mark.parametrize("load", [cloudckpt.load, cloudckpt.load_latest], ids=["load", "load_latest"])
def test_one_bit_flipped(place: Place, load: Callable[..., Any]) -> None:
    """One bit of a stored payload is flipped → the load fails and names the object and the tensor; `load_latest` says
    so and takes the one before.
    """
    cloudckpt.save({"weight": torch.zeros(1000)}, place.uri("step-1"))
    cloudckpt.save({"weight": torch.ones(1000), "bias": torch.ones(10)}, place.uri("step-2"))
    (key,) = (key for key in place.data_keys() if key.startswith("step-2/"))
    data = bytearray(place.read(key))
    data[data.index(torch.ones(1000).numpy().tobytes()) + 2000] ^= 4
    place.write(key, bytes(data))
    state = {"weight": torch.full((1000,), 5.0)}
    if load is cloudckpt.load_latest:
        report = cloudckpt.load_latest(state, place.root)
        assert "step-2" in str(report.skipped)
        assert_same(state, {"weight": torch.zeros(1000)})
        return
    with pytest.raises(cloudckpt.CorruptCheckpointError, match="weight") as caught:
        cloudckpt.load(state, place.uri("step-2"))
    assert key.rpartition("/")[2] in str(caught.value)
    with pytest.raises(cloudckpt.CorruptCheckpointError, match="weight"):
        cloudckpt.verify(place.uri("step-2"))


def save_and_load_without_collectives(uri: str) -> None:
    """On each rank: the same name everywhere, with a value of the rank's own."""
    mine = {"x": torch.full((100,), float(dist.get_rank()))}
    cloudckpt.save(mine, uri, use_collectives=False)
    dist.barrier()
    state = {"x": torch.full((100,), -1.0)}
    cloudckpt.load(state, uri)
    assert_same(state, mine)


@pytest.mark.multirank
def test_no_collectives_on_two_ranks(place: Place) -> None:
    """Two ranks save with use_collectives=False → no two objects have one key, and each rank loads its own bytes."""
    run_ranks(save_and_load_without_collectives, place.uri(), world_size=2)
    assert len(place.data_keys()) == 2


def save_one_chunk_and_load_two(uri: str) -> None:
    full = torch.arange(48.0).reshape(12, 4)
    cloudckpt.save({"x": full}, uri)
    shards = [Shard.from_tensor_and_offsets(torch.zeros(rows, 4), [begin, 0], 0) for begin, rows in ((0, 5), (5, 7))]
    target = init_from_local_shards(shards, 12, 4)
    cloudckpt.load({"x": target}, uri)
    assert_same(torch.cat([shard.tensor for shard in target.local_shards()]), full)


@pytest.mark.multirank
def test_one_saved_chunk_wanted_as_two(place: Place) -> None:
    """One saved chunk is wanted as two local chunks of one rank → each gets its rows."""
    run_ranks(save_one_chunk_and_load_two, place.uri(), world_size=1)


@pytest.mark.multirank
def test_killed_on_a_fresh_path(s3: S3Place, tmp_path: Path) -> None:
    """A save to a fresh path is killed → gc lists its unfinished uploads, and removes them."""
    kill = Kill(step="middle part", who="all ranks")
    (tmp_path / "scratch").mkdir()
    with job_at(s3, kill, tmp_path / "scratch") as job:
        die(job)
        assert version_there(job) is None
    num_uploads = s3.num_unfinished_uploads()
    assert num_uploads >= 1
    listed = cloudckpt.gc(s3.root, older_than=0)
    assert listed.num_uploads == num_uploads
    assert s3.num_unfinished_uploads() == num_uploads
    assert f"{num_uploads} unfinished upload" in str(listed)
    young = cloudckpt.gc(s3.root, dry_run=False)  # a day old by default, and this save might still be running
    assert young.num_uploads == 0
    cloudckpt.gc(s3.root, older_than=0, dry_run=False)
    assert_nothing_needless(s3, num_manifests=0)


def test_denied_existence_check(s3: S3Place, s3_server: S3Server) -> None:
    """The look for an existing checkpoint is answered with 403 → a typed error that says which permission is missing,
    and no byte is written.
    """
    denied = Rule(action=S3_ACCESS_DENIED, method="GET", times=None)
    with Wire(s3_server.endpoint_url, denied) as wire:
        options = cloudckpt.Options(storage_options=s3.options_at(wire.url))
        with pytest.raises(cloudckpt.errors.AccessDeniedError, match="s3:ListBucket"):
            cloudckpt.save({"x": torch.ones(3)}, s3.uri(), options=options)
    assert s3.keys() == []


def test_denied_existence_check_on_a_path(local: LocalPlace) -> None:
    """What lies at the URI's place is a file → a typed error, not a checkpoint beside or over it."""
    local.write("checkpoint", b"a file of somebody's")
    with pytest.raises(cloudckpt.errors.StoreError, match="checkpoint"):
        cloudckpt.save({"x": torch.ones(3)}, local.uri())
    assert local.read("checkpoint") == b"a file of somebody's"
