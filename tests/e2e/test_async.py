"""Asynchronous saves: training goes on beside them, faults are recovered from, failures are told."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.e2e.harness import run_ranks
from tests.e2e.models import AppState, assert_same, build
from tests.e2e.places import Place
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt.tensors.stager import PinnedStager

NUM_STEPS = 9
FAULTY_STEPS = (1, 4, 7)
WAIT_S = 120  # another process has to import torch, on a machine that may be busy


class InjectedError(Exception):
    """The fault of the training loop."""


def train_with_faults(root: str) -> None:
    """On each rank: save after every other step, fail now and then, reload the newest checkpoint, go on."""
    expected = build("fsdp2", seed=0).losses(0, NUM_STEPS)

    pending_faults = set(FAULTY_STEPS)
    training = build("fsdp2", seed=0)
    handle: cloudckpt.AsyncSave | None = None
    losses: dict[int, torch.Tensor] = {}
    resumed_from: list[int] = []
    step = 0
    while step < NUM_STEPS:
        try:
            losses[step] = training.step(step)
            if step in pending_faults:
                pending_faults.remove(step)
                raise InjectedError  # noqa: TRY301  the handler below is what is tested
            step += 1
            if step % 2 == 0:
                if handle is not None:
                    handle.result(WAIT_S)
                state = {"app": AppState(training), "step": step}
                handle = cloudckpt.async_save(state, f"{root}/step-{step:03}")
                handle.staged.result(WAIT_S)
        except InjectedError:  # noqa: PERF203  the loop that users write
            training = build("fsdp2", seed=0)
            step = 0
            if handle is not None:
                handle.result(WAIT_S)
                newest = cloudckpt.latest(root)
                assert newest is not None
                state = {"app": AppState(training), "step": -1}
                cloudckpt.load(state, newest.uri)
                step = state["step"]
            resumed_from.append(step)
    if handle is not None:
        handle.result(WAIT_S)
    assert resumed_from == [0, 4, 6]
    assert_same(torch.stack([losses[number] for number in range(NUM_STEPS)]), expected)
    names = [found.name for found in cloudckpt.list_checkpoints(root)]
    assert names == ["step-002", "step-004", "step-006", "step-008"]


@pytest.mark.multirank
@pytest.mark.every_store
def test_a_loop_with_faults_reaches_the_losses_of_one_without(place: Place) -> None:
    """If this fails, a job that crashes now and then does not resume where its newest checkpoint says."""
    run_ranks(train_with_faults, place.root, world_size=2)


def values(fill: float) -> dict[str, torch.Tensor]:
    """One tensor that each rank holds alike, and one key of each rank's own."""
    return {"shared": torch.full((1000,), fill), f"own-{dist.get_rank()}": torch.full((7,), fill)}


def assert_checkpoint_holds(uri: str, fill: float) -> None:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in values(fill).items()}
    cloudckpt.load(loaded, uri)
    assert_same(loaded, values(fill))


def save_through_every_door(root: str, kind: AsyncCheckpointerType) -> None:
    """On each rank: cloudckpt's call, torch's with our writer and stager, torch's by URI; all change once staged."""
    group = dist.new_group(backend="gloo")  # torch shares the default group with training otherwise

    state = values(1.0)
    handle = cloudckpt.async_save(state, f"{root}/ours", async_checkpointer_type=kind)
    handle.staged.result(WAIT_S)
    for tensor in state.values():
        tensor.fill_(-1)
    handle.result(WAIT_S)
    assert handle.done()
    assert handle.exception(0) is None
    assert_checkpoint_holds(f"{root}/ours", 1.0)

    state = values(2.0)
    writer = cloudckpt.ObjectStoreWriter(f"{root}/writer")
    stager = PinnedStager(shared=kind is AsyncCheckpointerType.PROCESS)
    future = dcp.async_save(
        state, storage_writer=writer, process_group=group, async_checkpointer_type=kind, async_stager=stager
    )
    assert isinstance(future, Future)
    for tensor in state.values():
        tensor.fill_(-1)
    future.result(WAIT_S)
    stager.close()
    assert_checkpoint_holds(f"{root}/writer", 2.0)

    cloudckpt.enable()
    try:
        state = values(3.0)
        uri = f"{root}/enabled" if "://" in root else f"file://{root}/enabled"
        future = dcp.async_save(state, checkpoint_id=uri, process_group=group, async_checkpointer_type=kind)
        assert isinstance(future, Future)
        for tensor in state.values():
            tensor.fill_(-1)
        future.result(WAIT_S)
    finally:
        cloudckpt.disable()
    assert_checkpoint_holds(uri, 3.0)


@pytest.mark.multirank
@pytest.mark.parametrize("kind", list(AsyncCheckpointerType), ids=lambda kind: kind.name)
@pytest.mark.slow
def test_every_way_to_save_asynchronously_commits_what_was_staged(place: Place, kind: AsyncCheckpointerType) -> None:
    """If this fails, an asynchronous save is torn by later training steps, or does not reach the store at all."""
    run_ranks(save_through_every_door, place.root, kind, world_size=2)
