"""A model that was loaded trains on exactly as the one that was saved, under every kind of parallelism."""

from __future__ import annotations

from typing import Literal

import pytest
from tests.e2e.harness import run_ranks
from tests.e2e.models import (
    PARALLELISMS,
    Parallelism,
    assert_same,
    build,
    set_state,
    state_dict_of,
)
from tests.e2e.places import BucketPlace, LocalPlace
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import cloudckpt

Mode = Literal["sync", "async", "async-cached"]
Engine = Literal["eager", "compiled"]
NUM_STEPS = 2
CPU_STAGING = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)


def save_and_train_on(root: str, parallelism: Parallelism, mode: Mode, engine: Engine = "eager") -> None:
    """On each rank: train, save, train on; load into another model, train it on; compare."""
    original = build(parallelism, seed=0, compiled=engine == "compiled")
    original.losses(0, NUM_STEPS)
    uri = f"{root}/last"
    if mode == "sync":
        cloudckpt.save(state_dict_of(original), uri)
    elif mode == "async":
        handle = cloudckpt.async_save(state_dict_of(original), uri)
        handle.staged.result(30)
    else:  # one stager for several saves keeps and reuses its buffers
        stager = DefaultStager(CPU_STAGING)
        earlier = f"{root}/earlier"
        cloudckpt.async_save(state_dict_of(original), earlier, async_stager=stager).result(30)
        original.losses(0, NUM_STEPS)
        handle = cloudckpt.async_save(state_dict_of(original), uri, async_stager=stager)
        handle.staged.result(30)
    losses = original.losses(NUM_STEPS, 2 * NUM_STEPS)  # while the upload runs, where it is asynchronous
    if mode != "sync":
        handle.result(30)
    if mode == "async-cached":
        stager.close()

    resumed = build(parallelism, seed=1, compiled=engine == "compiled")
    state_dict = state_dict_of(resumed)
    cloudckpt.load(state_dict, uri)
    set_state(resumed, state_dict)
    assert_same(resumed.losses(NUM_STEPS, 2 * NUM_STEPS), losses)
    assert_same(resumed.parameters(), original.parameters())


def num_ranks_for(parallelism: Parallelism) -> int:
    return 4 if parallelism in {"hsdp", "fsdp_tp"} else 2


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("parallelism", "mode"),
    [
        pytest.param(parallelism, mode)
        for parallelism in PARALLELISMS
        for mode in ("sync", "async", "async-cached")
        # torch's own stager, which the cached mode uses, cannot copy a ShardedTensor
        if (parallelism, mode) != ("fsdp1", "async-cached")
    ],
)
def test_resumed_training_equals_uninterrupted_training(
    local: LocalPlace, parallelism: Parallelism, mode: Mode
) -> None:
    """If this fails, a resumed run differs from one that never stopped: some value was lost, mixed up or rounded."""
    num_ranks = num_ranks_for(parallelism)
    run_ranks(save_and_train_on, local.root, parallelism, mode, world_size=num_ranks)


@pytest.mark.multirank
@pytest.mark.parametrize(
    "parallelism",
    PARALLELISMS,
)
@pytest.mark.slow
def test_resumed_training_equals_uninterrupted_training_under_compile(
    local: LocalPlace, parallelism: Parallelism
) -> None:
    """If this fails, the names or values of a compiled model do not survive a checkpoint."""
    num_ranks = num_ranks_for(parallelism)
    run_ranks(save_and_train_on, local.root, parallelism, "async", "compiled", world_size=num_ranks)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("parallelism", "mode"),
    [
        ("none", "async"),
        ("ddp", "sync"),
        pytest.param("fsdp1", "async"),
        ("fsdp2", "async"),
        ("fsdp2", "sync"),
        ("hsdp", "sync"),
        ("fsdp_tp", "async"),
    ],
)
def test_resumed_training_equals_uninterrupted_training_on_a_bucket(
    bucket: BucketPlace, parallelism: Parallelism, mode: Mode
) -> None:
    """If this fails, the path to a bucket loses or changes something that the local path keeps."""
    num_ranks = num_ranks_for(parallelism)
    run_ranks(save_and_train_on, bucket.root, parallelism, mode, world_size=num_ranks)


@pytest.mark.multirank
@pytest.mark.parametrize("parallelism", ["fsdp2", "ddp"])
@pytest.mark.slow
def test_four_ranks_resume(local: LocalPlace, parallelism: Parallelism) -> None:
    """If this fails, uneven shards (10 rows on 4 ranks) do not come back to the ranks that held them."""
    run_ranks(save_and_train_on, local.root, parallelism, "async", world_size=4)
