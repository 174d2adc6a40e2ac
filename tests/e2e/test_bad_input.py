"""Bad input: one clear error that names the thing and the next step, in bounded time, and nothing is lost."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.options import make_options
from tests.kit.places import BucketPlace
from tests.kit.ranks import on_ranks, run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import cloudckpt

CALLS: dict[str, Callable[[str], object]] = {
    "save": lambda uri: cloudckpt.save(values(), uri),
    "async_save": lambda uri: cloudckpt.async_save(values(), uri).result(60.0),
    "load": lambda uri: cloudckpt.load(values(), uri),
    "latest": cloudckpt.latest,
}


def values() -> dict[str, Any]:
    return {"model": {"weight": torch.ones(3, 4)}, "n": 1}


WRONG: Any = {"timeout_s": 3}
OPTIONS: list[Callable[[], object]] = [
    lambda: cloudckpt.save(values(), "memory://o", options=WRONG),
    lambda: cloudckpt.async_save(values(), "memory://o", options=WRONG),
    lambda: cloudckpt.load(values(), "memory://o", options=WRONG),
    lambda: cloudckpt.latest("memory://o", options=WRONG),
    lambda: cloudckpt.CheckpointManager("memory://o", options=WRONG),
]


@pytest.mark.parametrize("call", OPTIONS)
def test_options_of_another_class_are_refused(call: Callable[[], object]) -> None:
    """If this fails, a dict in the place of Options ends in an attribute that it lacks."""
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match=r"must be a cloudckpt\.Options, not dict"):
        call()


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_bucket_is_named(bucket: BucketPlace, name: str) -> None:
    """If this fails, a mistyped bucket looks like a missing checkpoint, or like success."""
    with pytest.raises(cloudckpt.errors.BucketNotFoundError, match="no-such-bucket"):
        CALLS[name](f"{bucket.scheme}://no-such-bucket/run")


def test_a_save_to_a_bucket_itself_is_named(bucket: BucketPlace, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a save in which a folder was forgotten makes a whole bucket one checkpoint, without a word."""
    root = f"{bucket.scheme}://{bucket.bucket}"
    cloudckpt.save(values(), root)
    cloudckpt.delete(root)
    assert f"{root} becomes a checkpoint as a whole. To keep several in it, save each to a folder" in caplog.text


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def fail_on_ranks(uri: str, storage_options: dict[str, Any], scheme: str) -> None:
    options = cloudckpt.Options(timeout_s=5.0, storage_options=storage_options)
    with pytest.raises(CheckpointException) as caught:
        cloudckpt.save(values(), uri, options=options)
    assert isinstance(caught.value, cloudckpt.errors.StoreTimeoutError)
    with pytest.raises(cloudckpt.errors.BucketNotFoundError):
        cloudckpt.load(values(), f"{scheme}://no-such-bucket/run")
    with pytest.raises(cloudckpt.errors.InvalidURIError):
        cloudckpt.save(values(), "abc://bucket/run")


@pytest.mark.multirank
def test_ranks_fail_together(bucket: BucketPlace, silent_endpoint: str) -> None:
    """If this fails, one rank hears of a bad store and the others hang in a collective."""
    run_ranks(fail_on_ranks, bucket.uri(), bucket.options_at(silent_endpoint), bucket.scheme, world_size=2)
    assert bucket.keys() == []


@on_ranks(2)
def test_ranks_that_disagree_save_nothing(root: str) -> None:
    """If this fails, what one rank has is lost, or a checkpoint is committed whose every load finds damage."""
    rank = dist.get_rank()
    shard = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    for mine, message in [
        ((torch.ones(4), "text"), r"'x' is .*\[4\] on rank 0, a value on rank 1"),
        ((torch.ones(4), torch.ones(5)), r"'x' is .*\[4\] .* \[5\] on rank 1"),
        ((torch.ones(4), shard), r"'x' is a tensor of .* on rank 0, a DTensor .* on rank 1"),
    ]:
        with pytest.raises(cloudckpt.errors.StateDictMismatchError, match=message):
            cloudckpt.save({"x": mine[rank], "same": torch.ones(3)}, f"{root}/differs")
    # Tiles of two lengths in as many tiles each: of this the number of checksums says nothing.
    options = make_options(tile_bytes=4096 if rank else 4160)
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match=r"tile_bytes=4096\) on rank 1 differs from 4160"):
        cloudckpt.save({f"of {rank}": torch.ones(1250)}, f"{root}/tiles", options=options)
    dist.barrier()
    assert cloudckpt.list_checkpoints(root) == []
