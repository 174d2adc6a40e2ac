"""A model that was loaded trains on exactly as the one that was saved, under every kind of parallelism."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
from tests.kit.models import (
    PARALLELISMS,
    Parallelism,
    assert_same,
    build,
    set_state,
    state_dict_of,
)
from tests.kit.places import BucketPlace, LocalPlace
from tests.kit.ranks import run_ranks
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


def save_and_train_on_in_each_mode(root: str, parallelisms: list[Parallelism]) -> None:
    """On each rank: every parallelism in every mode, and compiled."""
    for parallelism in parallelisms:
        for mode in get_args(Mode):
            # torch's own stager, which the cached mode uses, cannot copy a ShardedTensor
            if (parallelism, mode) != ("fsdp1", "async-cached"):
                save_and_train_on(f"{root}/{parallelism}-{mode}", parallelism, mode)
        save_and_train_on(f"{root}/{parallelism}-compiled", parallelism, "async", "compiled")


ON_FOUR: list[Parallelism] = ["hsdp", "fsdp_tp"]


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("num_ranks", "parallelisms"),
    [(2, [one for one in PARALLELISMS if one not in ON_FOUR]), (4, [*ON_FOUR, "fsdp2"])],  # with uneven shards
    ids=str,
)
def test_resumed_training_equals_uninterrupted_training(
    local: LocalPlace, num_ranks: int, parallelisms: list[Parallelism]
) -> None:
    """If this fails, a resumed run differs from one that never stopped: some value was lost, mixed up or rounded."""
    run_ranks(save_and_train_on_in_each_mode, local.root, parallelisms, world_size=num_ranks)


@pytest.mark.multirank
@pytest.mark.every_store
def test_resumed_training_equals_uninterrupted_training_on_a_bucket(bucket: BucketPlace) -> None:
    """If this fails, the path to a bucket loses or changes something that the local path keeps."""
    run_ranks(save_and_train_on, bucket.root, "fsdp2", "async", world_size=2)
