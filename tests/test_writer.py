"""The writer on one rank, over a store that can be watched and disturbed."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from tests.in_memory import Memory, assert_holds, loaded, state_of, written
from tests.options import make_options
from tests.wrapped import permanent
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

import cloudckpt
from cloudckpt import Event, ObjectStoreReader, ObjectStoreWriter, Options
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    IncompleteSaveError,
    NoConditionalCommitError,
)
from cloudckpt.stores.base import Capabilities
from cloudckpt.tensors.host_memory import Arena

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

SMALL_PARTS = {"tile_bytes": 4096, "part_bytes": 4096}


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


def test_a_refused_commit_removes_the_data(memory: Memory) -> None:
    """If this fails, a missing permission on the manifest leaves all data objects to be paid for."""
    denied = AccessDeniedError("s3:PutObject", key="k", operation="put")
    memory.at().fail("put", key_part="manifest", error=lambda: denied)
    with pytest.raises(AccessDeniedError):
        cloudckpt.save(state_of(), memory.uri())
    assert memory.all_keys() == []


def test_a_lost_race_removes_only_its_own_data(memory: Memory) -> None:
    """If this fails, the loser of two saves leaves its objects, or removes the winner's (G2)."""
    memory.at().once_before("put", "manifest", lambda: cloudckpt.save(state_of(1.0), memory.uri()) and None)
    with pytest.raises(CheckpointExistsError, match="Checkpoint already exists"):
        cloudckpt.save(state_of(2.0), memory.uri())
    assert_holds(loaded(memory.uri()), 1.0)
    assert len(memory.data_keys()) == 1


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


def test_a_failed_upload_names_its_cause_and_leaves_nothing(memory: Memory) -> None:
    """If this fails, a save reports success without its data, or leaves half of it."""
    memory.at().fail("upload_part", skip=1, error=lambda: permanent("upload_part"))
    with pytest.raises(CheckpointException, match=r"\[rank 0\] StoreError: no"):
        cloudckpt.save(state_of(), memory.uri(), options=make_options(**SMALL_PARTS))
    assert memory.all_keys() == []
    assert list(memory.at().inner.list_uploads()) == []


def test_discard_removes_what_was_written_and_no_more(memory: Memory) -> None:
    """If this fails, ranks of a failed save leave their objects, or remove those of a committed one."""
    writer = ObjectStoreWriter(memory.uri())
    writer.discard()
    metadata, results = written(writer, state_of())
    assert len(memory.data_keys()) == 1
    writer.discard()
    assert memory.all_keys() == []
    writer.reset()
    metadata, results = written(writer, state_of(4.0))
    writer.finish(metadata=metadata, results=[results])
    writer.discard()
    assert_holds(loaded(memory.uri()), 4.0)


def test_without_collectives_each_rank_has_its_own_place(memory: Memory) -> None:
    """If this fails, ranks that save alone write one key."""
    for rank in (0, 3):
        writer = ObjectStoreWriter(memory.uri())
        metadata, results = written(writer, state_of(float(rank)), rank=rank, use_collectives=False)
        writer.finish(metadata=metadata, results=[results])
    assert [key.split("/")[0] for key in memory.all_keys() if key.endswith("manifest.json")] == ["rank-0", "rank-3"]
    with pytest.raises(CheckpointNotFoundError):
        ObjectStoreReader(memory.uri()).read_metadata()
    assert_holds(loaded(memory.uri("checkpoint/rank-3")), 3.0)
    assert "w" in ObjectStoreReader(memory.uri()).read_metadata(rank=3).state_dict_metadata


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


def test_cpu_tensors_are_saved_without_a_copy(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a save of CPU tensors needs their memory again (G7)."""

    def refuse(self: Arena, num_bytes: int) -> None:
        raise AssertionError(f"{num_bytes} bytes were copied")

    monkeypatch.setattr(Arena, "lend", refuse)
    state = {f"w{number}": torch.full((999,), float(number)) for number in range(20)}
    cloudckpt.save(state, memory.uri(), options=make_options(**SMALL_PARTS))


def test_strided_tensors_are_staged_within_the_budget(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, transposed weights take as much staging memory as they are large (G7)."""
    most_bytes = 0
    original = Arena._take

    def take(self: Arena, num_bytes: int) -> torch.Tensor:
        nonlocal most_bytes
        buffer = original(self, num_bytes)
        most_bytes = max(most_bytes, self._held_bytes)
        return buffer

    monkeypatch.setattr(Arena, "_take", take)
    options = make_options(staging_bytes=8192, connections=8, **SMALL_PARTS)
    state = {"w": torch.arange(200_000, dtype=torch.float32).view(400, 500).t()}
    cloudckpt.save(state, memory.uri(), options=options)
    assert 0 < most_bytes <= 8192
    target = {"w": torch.zeros(500, 400)}
    cloudckpt.load(target, memory.uri())
    assert torch.equal(target["w"], state["w"])
