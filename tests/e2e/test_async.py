"""Asynchronous saves by each call and each kind of torch's: what was staged is committed."""

from __future__ import annotations

import logging
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.models import assert_same
from tests.kit.ranks import on_ranks
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt.background.stager import PinnedStager

WAIT_S = 120  # another process has to import torch, on a machine that may be busy


def values(fill: float) -> dict[str, torch.Tensor]:
    """One tensor that each rank holds alike, and one key of each rank's own."""
    return {"shared": torch.full((1000,), fill), f"own-{dist.get_rank()}": torch.full((7,), fill)}


def assert_checkpoint_holds(uri: str, fill: float) -> None:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in values(fill).items()}
    cloudckpt.load(loaded, uri)
    assert_same(loaded, values(fill))


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType), ids=lambda kind: kind.name)
@pytest.mark.slow
@on_ranks(2)
def test_every_way_to_save_asynchronously_commits_what_was_staged(root: str, kind: AsyncCheckpointerType) -> None:
    """If this fails, an asynchronous save is torn by later training steps, or does not reach the store at all."""
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


@on_ranks(2)
def test_save_on_the_group_of_training_is_warned_of_once_on_one_rank(root: str) -> None:
    """If this fails, a job whose training meets torch's save on one gloo group hangs without a word of the reason."""
    calls: list[str] = []
    handler = logging.Handler()
    handler.addFilter(lambda record: "process group" in record.msg)
    handler.emit = lambda record: calls.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cloudckpt").addHandler(handler)
    saves = dist.new_group(backend="gloo")
    cloudckpt.enable()
    try:
        for number, settings in enumerate([{"process_group": saves}, {"no_dist": True}, {}, {"process_group": None}]):
            uri = f"file://{root}/{number}" + (f"/{dist.get_rank()}" if settings.get("no_dist") else "")
            future = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=uri, **settings)  # type: ignore[arg-type]
            assert isinstance(future, Future)
            future.result(WAIT_S)
            assert len(calls) == (number > 1 and dist.get_rank() == 0)
    finally:
        cloudckpt.disable()
        logging.getLogger("cloudckpt").removeHandler(handler)
    assert all("process_group=dist.new_group()" in each and f"{root}/2" in each for each in calls)
