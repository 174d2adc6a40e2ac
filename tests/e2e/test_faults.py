"""A fault at each step of a save and a load: exactly the ranks that failed are named, and nothing is committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import LocalPlace, Place
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.futures import Future

import cloudckpt

WRITER_STEPS = ["set_up", "local_plan", "global_plan", "write", "async_write", "finish"]
READER_STEPS = ["read_metadata", "set_up", "local_plan", "global_plan", "read", "async_read"]
COORDINATOR_STEPS = {"global_plan", "finish"}


class InjectedError(ValueError):
    """The fault. Defined here, importable by all ranks."""


class _Faulty:
    """Raises in one step on some ranks."""

    fail_step: str
    fail_ranks: Sequence[int]

    def _fail_in(self, step: str) -> None:
        if step == self.fail_step and dist.get_rank() in self.fail_ranks:
            raise InjectedError(f"injected into {step} of rank {dist.get_rank()}")

    def _failed_future(self, step: str) -> Future[Any] | None:
        try:
            self._fail_in(step)
        except InjectedError as error:
            future: Future[Any] = Future()
            future.set_exception(error)
            return future
        return None


class FaultyWriter(_Faulty, cloudckpt.ObjectStoreWriter):
    """Our writer, with a fault before each step or in the future of its writes."""

    def __init__(self, uri: str, step: str, ranks: Sequence[int]) -> None:
        super().__init__(uri)
        self.fail_step, self.fail_ranks = step, ranks

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        self._fail_in("set_up")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        self._fail_in("local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self._fail_in("global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._fail_in("write")
        written = super().write_data(plan, planner)
        return self._failed_future("async_write") or written

    def finish(self, metadata: Any, results: Any) -> None:
        self._fail_in("finish")
        super().finish(metadata, results)


class FaultyReader(_Faulty, cloudckpt.ObjectStoreReader):
    """Our reader, with a fault before each step or in the future of its reads."""

    def __init__(self, uri: str, step: str, ranks: Sequence[int]) -> None:
        super().__init__(uri)
        self.fail_step, self.fail_ranks = step, ranks

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self._fail_in("read_metadata")
        return super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        self._fail_in("set_up")
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        self._fail_in("local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self._fail_in("global_plan")
        return super().prepare_global_plan(plans)

    def read_data(self, plan: Any, planner: Any) -> Any:
        self._fail_in("read")
        read = super().read_data(plan, planner)
        return self._failed_future("async_read") or read


def values() -> dict[str, torch.Tensor]:
    return {"shared": torch.arange(100.0), f"own-{dist.get_rank()}": torch.ones(5)}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in values().items()}


def failing_ranks(step: str, num_ranks: int, coordinator: int) -> list[list[int]]:
    """Which ranks to let fail in this step; steps of the coordinator fail on it alone."""
    if step in COORDINATOR_STEPS:
        return [[coordinator]]
    return [[coordinator], [num_ranks - 1], list(range(1, num_ranks))]


def fail_in_each_writer_step(root: str, coordinator: int) -> None:
    for step in WRITER_STEPS:
        for number, ranks in enumerate(failing_ranks(step, dist.get_world_size(), coordinator)):
            uri = f"{root}/{step}-{number}"
            with pytest.raises(CheckpointException, match=f"injected into {step}") as caught:
                _save_state_dict(values(), FaultyWriter(uri, step, ranks), coordinator_rank=coordinator)
            assert sorted(caught.value.failures) == ranks, step
            assert all(isinstance(cause, InjectedError) for cause, _ in caught.value.failures.values())
            with pytest.raises(cloudckpt.CheckpointNotFoundError):
                cloudckpt.load(zeros(), uri)
    # the fault over, the same ranks save and load on
    _save_state_dict(values(), FaultyWriter(f"{root}/good", "none", []), coordinator_rank=coordinator)
    state = zeros()
    cloudckpt.load(state, f"{root}/good")
    assert_same(state, values())


@pytest.mark.multirank
def test_a_fault_in_a_save_names_exactly_the_ranks_that_failed(local: LocalPlace) -> None:
    """If this fails, a failed save passes for a good one, or blames the wrong ranks."""
    run_ranks(fail_in_each_writer_step, local.root, 1, world_size=3)
    assert [key.split("/")[0] for key in local.manifest_keys()] == ["good"]


def fail_in_each_reader_step(uri: str, coordinator: int) -> None:
    cloudckpt.save(values(), uri)
    for step in READER_STEPS:
        for ranks in failing_ranks(step, dist.get_world_size(), coordinator):
            with pytest.raises(CheckpointException, match=f"injected into {step}") as caught:
                _load_state_dict(zeros(), FaultyReader(uri, step, ranks), coordinator_rank=coordinator)
            assert sorted(caught.value.failures) == ranks, step
    state = zeros()
    _load_state_dict(state, FaultyReader(uri, "none", []), coordinator_rank=coordinator)
    assert_same(state, values())


@pytest.mark.multirank
def test_a_fault_in_a_load_names_exactly_the_ranks_that_failed(local: LocalPlace) -> None:
    """If this fails, one rank trains on with old weights while another reports the failure."""
    run_ranks(fail_in_each_reader_step, local.uri(), 1, world_size=3)


def save_and_fail_through_our_call(root: str) -> None:
    for step in WRITER_STEPS:
        writer = FaultyWriter(f"{root}/{step}", step, [0] if step in COORDINATOR_STEPS else [1])
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


def fail_with_an_unpicklable_error(uri: str) -> None:
    with pytest.raises(CheckpointException, match="code 7") as caught:
        cloudckpt.save(values(), uri, planner=UnpicklablePlanner())
    assert sorted(caught.value.failures) == [1]


@pytest.mark.multirank
def test_an_error_that_cannot_be_pickled_still_reaches_all_ranks(place: Place) -> None:
    """If this fails, one rank's SDK error leaves the others hanging in a collective."""
    run_ranks(fail_with_an_unpicklable_error, place.uri(), world_size=2)
    assert place.manifest_keys() == []
