"""The writer on one rank, over a store that can be watched and disturbed."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from tests.in_memory import Memory, assert_holds, loaded, state_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

import cloudckpt
from cloudckpt import Event, ObjectStoreReader, ObjectStoreWriter, Options
from cloudckpt.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    IncompleteSaveError,
    NoConditionalCommitError,
)
from cloudckpt.stores.base import Capabilities

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture
def own_plan_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps cached plans on a class, for the life of the process."""
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached")]:
        monkeypatch.setattr(SavePlanner, name, {})


@pytest.mark.usefixtures("own_plan_cache")
def test_cached_plans_write_new_keys_and_real_types(memory: Memory) -> None:
    """If this fails, a save with a cached plan writes over the objects of the one before, or records its types."""
    previous: set[str] = set()
    for number, dtype in enumerate([torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]):
        uri = memory.uri(f"step-{number}")
        state = {"w": torch.full((100,), float(number), dtype=dtype), "step": number}
        cloudckpt.save(state, uri, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert SavePlanner._cached_final_save_plan  # or this would test nothing
        keys = set(memory.data_keys(f"step-{number}"))
        assert keys
        assert not keys & previous
        previous |= keys
        target: dict[str, Any] = {"w": torch.zeros(100, dtype=dtype), "step": None}
        cloudckpt.load(target, uri)
        assert bool((target["w"] == number).all())
        assert target["step"] == number
        entry: Any = ObjectStoreReader(uri).read_metadata().state_dict_metadata["w"]
        assert entry.properties.dtype is dtype


class Forgetful(ObjectStoreWriter):
    """Loses what ranks say of one item on its way to the coordinator."""

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, [[*of_rank[:-1], _without_last_item(of_rank[-1])] for of_rank in results])


def _without_last_item(result: WriteResult) -> WriteResult:
    columns = ("fqns", "offsets", "begins", "ends", "dtypes", "lengths", "transforms")
    shorter = {name: getattr(result.storage_data, name)[:-1] for name in columns}
    return dataclasses.replace(result, storage_data=msgspec.structs.replace(result.storage_data, **shorter))


def test_less_than_was_planned_is_not_committed_and_removed(memory: Memory) -> None:
    """If this fails, a save that lost a part succeeds (G3), or leaves its objects behind."""
    with pytest.raises(IncompleteSaveError, match="Nothing was committed"):
        cloudckpt.save(state_of(), storage_writer=Forgetful(memory.uri()))
    assert memory.all_keys() == []


def test_an_unknown_outcome_keeps_the_data(memory: Memory) -> None:
    """If this fails, a commit that arrives late has no data (G1)."""
    memory.at().fail("put", key_part="manifest", after=True)
    memory.at().fail("read", key_part="manifest")
    with pytest.raises(CommitUnknownError) as caught:
        cloudckpt.save(state_of(2.0), memory.uri(), options=Options(retries=0))
    assert isinstance(caught.value, CheckpointException)
    assert_holds(loaded(memory.uri()), 2.0)


class Interrupt:
    """Raises at the event of this name."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name = name
        self.error = error

    def __call__(self, event: Event) -> None:
        if event.name == self.name:
            raise self.error


@pytest.mark.parametrize("name", ["save.committed", "save.cleaned_up"])
@pytest.mark.parametrize("overwrite", [{}, {"overwrite": True}], ids=["first", "overwrite"])
def test_an_interrupt_after_the_commit_leaves_it(memory: Memory, name: str, overwrite: dict[str, bool]) -> None:
    """If this fails, Ctrl-C a moment after the commit removes the data of a checkpoint that exists."""
    if overwrite:
        cloudckpt.save(state_of(1.0), memory.uri())
    options = Options(on_event=Interrupt(name, KeyboardInterrupt()))
    if name == "save.cleaned_up" and not overwrite:
        cloudckpt.save(state_of(2.0), memory.uri(), options=options)  # there is nothing to clean up
    else:
        with pytest.raises(CommitUnknownError, match="KeyboardInterrupt"):
            cloudckpt.save(state_of(2.0), memory.uri(), options=options, **overwrite)
    assert_holds(loaded(memory.uri()), 2.0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the user's callback failed")])
@pytest.mark.parametrize(
    "name", ["save.set_up", "save.part_uploaded", "save.object_uploaded", "save.written", "save.committing"]
)
def test_an_interrupt_before_the_commit_leaves_nothing(memory: Memory, name: str, error: BaseException) -> None:
    """If this fails, a save that was stopped leaves objects behind, or is committed all the same."""
    with pytest.raises(BaseException) as caught:
        cloudckpt.save(state_of(), memory.uri(), options=Options(on_event=Interrupt(name, error)))
    assert isinstance(caught.value, (CheckpointException, type(error)))
    assert memory.all_keys() == []
    assert list(memory.at().inner.list_uploads()) == []


def test_nothing_moves_where_a_checkpoint_lies(memory: Memory) -> None:
    """If this fails, a save that will be refused uploads everything first."""
    cloudckpt.save(state_of(), memory.uri())
    memory.at().calls.clear()
    with pytest.raises(CheckpointExistsError, match="nothing was written"):
        cloudckpt.save(state_of(), memory.uri())
    assert {call.operation for call in memory.at().calls} == {"list"}


def test_a_store_without_the_condition_needs_consent(memory: Memory) -> None:
    """If this fails, overwrite protection is lost without anybody knowing (G2)."""
    memory.at().capabilities = Capabilities(conditional_create=False, multipart=True, verifies_crc32c=True)
    with pytest.raises(NoConditionalCommitError, match="commit='unconditional'"):
        cloudckpt.save(state_of(), memory.uri())
    cloudckpt.save(state_of(5.0), memory.uri(), options=Options(commit="unconditional"))
    assert_holds(loaded(memory.uri()), 5.0)
