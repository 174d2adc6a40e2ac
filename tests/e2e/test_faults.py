"""A fault at each step of a save and a load: exactly the ranks that failed are named, and nothing is committed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.models import assert_same
from tests.kit.places import LocalPlace, Place
from tests.kit.ranks import on_ranks, run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.futures import Future

import cloudckpt

WRITER_METHODS = {
    "set_up": "set_up_storage_writer",
    "local_plan": "prepare_local_plan",
    "global_plan": "prepare_global_plan",
    "write": "write_data",
    "async_write": "write_data",
    "finish": "finish",
}
READER_METHODS = {
    "read_metadata": "read_metadata",
    "set_up": "set_up_storage_reader",
    "local_plan": "prepare_local_plan",
    "global_plan": "prepare_global_plan",
    "read": "read_data",
    "async_read": "read_data",
}
"""The method that torch calls at each step. A step in the background fails by the method's future."""
COORDINATOR_STEPS = {"global_plan", "finish"}


class InjectedError(ValueError):
    """The fault. Defined here, importable by all ranks."""


class OwnWriter(cloudckpt.ObjectStoreWriter):
    """A user's own writer."""


class OwnReader(cloudckpt.ObjectStoreReader):
    """A user's own reader."""


def faulty_writer(uri: str, step: str, ranks: Sequence[int]) -> OwnWriter:
    writer = OwnWriter(uri)
    fail_in(writer, step, WRITER_METHODS[step], ranks)
    return writer


def faulty_reader(uri: str, step: str, ranks: Sequence[int]) -> OwnReader:
    reader = OwnReader(uri)
    fail_in(reader, step, READER_METHODS[step], ranks)
    return reader


def fail_in(made: object, step: str, name: str, ranks: Sequence[int]) -> None:
    """Let the method fail on `ranks`: before it does anything, or in the future of its transfers."""
    method = getattr(made, name)

    @functools.wraps(method)
    def failing(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() not in ranks:
            return method(*args, **kwargs)
        error = InjectedError(f"injected into {step} of rank {dist.get_rank()}")
        if not step.startswith("async_"):
            raise error
        method(*args, **kwargs)
        future: Future[Any] = Future()
        future.set_exception(error)
        return future

    setattr(made, name, failing)


def values() -> dict[str, torch.Tensor]:
    return {"shared": torch.arange(100.0), f"own-{dist.get_rank()}": torch.ones(5)}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in values().items()}


def failing_ranks(step: str, num_ranks: int, coordinator: int) -> list[list[int]]:
    """Which ranks to let fail in this step; steps of the coordinator fail on it alone."""
    if step in COORDINATOR_STEPS:
        return [[coordinator]]
    return [[coordinator], [num_ranks - 1], list(range(1, num_ranks))]


@on_ranks(3)
def test_a_fault_in_a_save_names_exactly_the_ranks_that_failed(root: str, local: LocalPlace) -> None:
    """If this fails, a failed save passes for a good one, or blames the wrong ranks."""
    coordinator = 1
    for step in WRITER_METHODS:
        for number, ranks in enumerate(failing_ranks(step, dist.get_world_size(), coordinator)):
            uri = f"{root}/{step}-{number}"
            with pytest.raises(CheckpointException, match=f"injected into {step}") as caught:
                _save_state_dict(values(), faulty_writer(uri, step, ranks), coordinator_rank=coordinator)
            assert sorted(caught.value.failures) == ranks, step
            assert all(isinstance(cause, InjectedError) for cause, _ in caught.value.failures.values())
            with pytest.raises(cloudckpt.CheckpointNotFoundError):
                cloudckpt.load(zeros(), uri)
    # the fault over, the same ranks save and load on
    _save_state_dict(values(), OwnWriter(f"{root}/good"), coordinator_rank=coordinator)
    state = zeros()
    cloudckpt.load(state, f"{root}/good")
    assert_same(state, values())
    assert [key.split("/")[0] for key in local.manifest_keys()] == ["good"]


@on_ranks(3)
def test_a_fault_in_a_load_names_exactly_the_ranks_that_failed(uri: str) -> None:
    """If this fails, one rank trains on with old weights while another reports the failure."""
    coordinator = 1
    cloudckpt.save(values(), uri)
    for step in READER_METHODS:
        for ranks in failing_ranks(step, dist.get_world_size(), coordinator):
            with pytest.raises(CheckpointException, match=f"injected into {step}") as caught:
                _load_state_dict(zeros(), faulty_reader(uri, step, ranks), coordinator_rank=coordinator)
            assert sorted(caught.value.failures) == ranks, step
    state = zeros()
    _load_state_dict(state, OwnReader(uri), coordinator_rank=coordinator)
    assert_same(state, values())


def save_and_fail_through_our_call(root: str) -> None:
    for step in WRITER_METHODS:
        writer = faulty_writer(f"{root}/{step}", step, [0] if step in COORDINATOR_STEPS else [1])
        with pytest.raises(CheckpointException, match=f"injected into {step}") as caught:
            cloudckpt.save(values(), storage_writer=writer)
        assert isinstance(caught.value, CheckpointException)
        dist.barrier()


@pytest.mark.multirank
@pytest.mark.every_store
def test_a_failed_save_removes_what_it_wrote(place: Place) -> None:
    """If this fails, every failed save leaves gigabytes that somebody pays for."""
    run_ranks(save_and_fail_through_our_call, place.root, world_size=2)
    assert place.keys() == []
    assert place.num_unfinished_uploads() == 0


class Unpicklable(Exception):  # noqa: N818
    """An error as SDKs have them: its constructor wants more than its message."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class UnpicklablePlanner(dcp.DefaultSavePlanner):
    """Raises such an error on rank 1, while the data is written."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise Unpicklable(code=7)
        return super().resolve_data(write_item)


@on_ranks(2)
def test_an_error_that_cannot_be_pickled_still_reaches_all_ranks(uri: str, place: Place) -> None:
    """If this fails, one rank's SDK error leaves the others hanging in a collective."""
    with pytest.raises(CheckpointException, match="code 7") as caught:
        cloudckpt.save(values(), uri, planner=UnpicklablePlanner())
    assert sorted(caught.value.failures) == [1]
    dist.barrier()
    assert place.manifest_keys() == []
