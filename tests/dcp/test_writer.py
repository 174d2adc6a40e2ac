"""The writer and the reader on one rank, used again and again, over a store that can be watched and disturbed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.kit.in_memory import Memory, assert_holds, loaded, state_of
from tests.kit.ranks import on_ranks
from tests.kit.wrapped import Lies, permanent
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

import cloudckpt
from cloudckpt import Event, ObjectStoreReader, ObjectStoreWriter, Options
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    IncompleteSaveError,
    NoConditionalCommitError,
)
from cloudckpt.options import MIB
from cloudckpt.stores.base import Capabilities
from cloudckpt.stores.local import files


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

    num_tries = 0

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        self.num_tries += 1
        super().finish(metadata, [[*of_rank[:-1], _without_last_item(of_rank[-1])] for of_rank in results])


def _without_last_item(result: WriteResult) -> WriteResult:
    columns = ("fqns", "offsets", "begins", "ends", "dtypes", "lengths", "transforms")
    shorter = {name: getattr(result.storage_data, name)[:-1] for name in (*columns, "hashes")}
    return dataclasses.replace(result, storage_data=msgspec.structs.replace(result.storage_data, **shorter))


def test_an_incomplete_write_is_removed_and_not_committed(memory: Memory) -> None:
    """If this fails, a save that lost a part succeeds (G3), leaves its objects behind, or writes all of it again."""
    writer = Forgetful(memory.uri(), options=Options(unchanged="reference"))
    with pytest.raises(IncompleteSaveError, match="Nothing was committed"):
        cloudckpt.save(state_of(), storage_writer=writer)
    assert memory.all_keys() == []
    assert writer.num_tries == 1


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


def test_nothing_is_sent_to_a_place_with_a_checkpoint(memory: Memory) -> None:
    """If this fails, a save that will be refused uploads everything first."""
    cloudckpt.save(state_of(), memory.uri())
    memory.at().calls.clear()
    with pytest.raises(CheckpointExistsError, match="nothing was written"):
        cloudckpt.save(state_of(), memory.uri())
    assert {call.operation for call in memory.at().calls} <= {"list", "list_directories"}


def test_a_store_without_the_condition_needs_consent(memory: Memory) -> None:
    """If this fails, overwrite protection is lost without anybody knowing (G2)."""
    memory.at().capabilities = Capabilities(conditional_create=False, multipart=True, verifies_crc32c=True)
    with pytest.raises(NoConditionalCommitError, match="commit='unconditional'"):
        cloudckpt.save(state_of(), memory.uri())
    cloudckpt.save(state_of(5.0), memory.uri(), options=Options(commit="unconditional"))
    assert_holds(loaded(memory.uri()), 5.0)


# --- loading


def test_ranks_that_found_different_saves_load_neither(memory: Memory) -> None:
    """If this fails, a model is made of two checkpoints (G1)."""
    readers = []
    for fill in (1.0, 2.0):
        cloudckpt.save(state_of(fill), memory.uri(), overwrite=True)
        reader = ObjectStoreReader(memory.uri())
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
        readers.append(reader)
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in readers]
    with pytest.raises(CheckpointChangedError, match="2 different saves"):
        readers[0].prepare_global_plan(plans)
    assert readers[0].prepare_global_plan([plans[0], plans[0]])


def overwriting(memory: Memory, *fills: float, known: Sequence[str] = ()) -> None:
    """Overwrite the checkpoint when its data is first read, and again for each further value."""
    if fills:
        before = memory.data_keys()

        def overwrite() -> None:
            cloudckpt.save(state_of(fills[0]), memory.uri(), overwrite=True)
            overwriting(memory, *fills[1:], known=before)

        # Not one that has vanished by now, which is looked for again.
        (key,) = set(before) - set(known)
        memory.at().once_before("read_into", key, overwrite)


@pytest.mark.parametrize("options", [Options(), Options(verify=False)], ids=["verified", "not verified"])
def test_an_overwrite_in_the_middle_of_a_load_is_followed(memory: Memory, options: Options) -> None:
    """If this fails, a load beside an overwrite fails, or mixes two saves (G1)."""
    cloudckpt.save(state_of(1.0), memory.uri())
    overwriting(memory, 2.0)
    assert_holds(loaded(memory.uri(), options=options), 2.0)


def test_overwrites_without_end_are_an_error(memory: Memory) -> None:
    """If this fails, a load never ends, or ends with a mixture."""
    cloudckpt.save(state_of(1.0), memory.uri())
    overwriting(memory, 2.0, 3.0)
    with pytest.raises(CheckpointChangedError, match="load again"):
        loaded(memory.uri())


def test_a_deletion_during_a_load_is_no_damage(memory: Memory) -> None:
    """If this fails, a checkpoint that retention removed is reported as damaged."""
    cloudckpt.save(state_of(1.0), memory.uri())
    memory.at().once_before(
        "read_into", "data/", lambda: memory.at().inner.delete(["manifest.json", *memory.data_keys()])
    )
    with pytest.raises(CheckpointNotFoundError):
        loaded(memory.uri())


# --- a writer that is used again, interrupts, and checkpoints of other kinds


def test_a_later_failure_of_the_same_writer_leaves_what_it_committed(memory: Memory) -> None:
    """If this fails, a broken state dict at step 2 removes the data of the checkpoint of step 1."""
    writer = cloudckpt.ObjectStoreWriter(memory.uri(), overwrite=True)
    cloudckpt.save(state_of(1.0), storage_writer=writer)
    with pytest.raises(cloudckpt.errors.CloudckptError):
        cloudckpt.save({"a": {"b": 1}, "a.b": 2}, storage_writer=writer)
    assert_holds(loaded(memory.uri()), 1.0)


@on_ranks(2)
def test_discard_keeps_what_a_commit_refers_to(tmp_path: Path) -> None:
    """torch also reports a failure where something broke only after the commit; the data is the checkpoint's then."""

    class Careless(cloudckpt.ObjectStoreWriter):
        def finish(self, metadata, results):  # type: ignore[no-untyped-def]
            super().finish(metadata, results)
            raise OSError("after the commit")

    rank, other = dist.get_rank(), 1 - dist.get_rank()
    with pytest.raises(BaseException, match="after the commit"):
        cloudckpt.save({f"w{rank}": torch.full((10,), float(rank))}, storage_writer=Careless(tmp_path / "c"))
    dist.barrier()  # both have discarded
    target = {f"w{other}": torch.zeros(10)}
    cloudckpt.load(target, tmp_path / "c")
    assert bool((target[f"w{other}"] == other).all())


@pytest.mark.parametrize("where", ["callback", "finish"])
def test_failures_after_the_commit_keep_the_data_where_listings_lag(memory: Memory, where: str) -> None:
    """If this fails, Ctrl-C in a callback deletes the data of a committed checkpoint that no listing shows yet."""
    lies = Lies("manifest", "list", times=0)

    def interrupt(event: Event) -> None:
        if event.name == "save.done" and where == "callback":
            lies.begin()
            raise KeyboardInterrupt

    class Careless(cloudckpt.ObjectStoreWriter):
        def finish(self, metadata, results):  # type: ignore[no-untyped-def]
            super().finish(metadata, results)
            lies.begin()
            raise KeyboardInterrupt

    options = Options(on_event=interrupt, advanced=cloudckpt.AdvancedOptions(wrap_store=lies))
    with pytest.raises((KeyboardInterrupt, CommitUnknownError)):
        cloudckpt.save(state_of(1.0), storage_writer=Careless(memory.uri(), options=options))
    assert_holds(loaded(memory.uri()), 1.0)


def test_memory_that_changes_during_the_planning_is_saved_as_it_is_when_it_is_sent(memory: Memory) -> None:
    """If this fails, a save reads the old or freed memory of a parameter that a callback gives new memory."""
    state = {"w": torch.zeros(1000), "freed": torch.zeros(1000)}

    def replace(event: Event) -> None:
        if event.name == "save.set_up":
            state["w"].data = torch.ones(1000)

    cloudckpt.save(state, memory.uri(), options=Options(on_event=replace))
    target = {"w": torch.zeros(1000)}
    cloudckpt.load(target, memory.uri())
    assert bool((target["w"] == 1).all())

    def free(event: Event) -> None:
        if event.name == "save.set_up":
            state["freed"].untyped_storage().resize_(0)

    with pytest.raises(BaseException, match=r"'freed'.* memory was freed"):
        cloudckpt.save(state, memory.uri("freed"), options=Options(on_event=free))


def test_a_planner_with_attributes_of_its_own_saves(memory: Memory) -> None:
    """If this fails, an attribute of a user's planner is taken for something of ours."""
    planner = DefaultSavePlanner()
    planner.sources = {"a": "somewhere"}  # type: ignore[attr-defined]
    cloudckpt.save(state_of(1.0), memory.uri(), planner=planner)
    assert_holds(loaded(memory.uri()), 1.0)


def test_background_saves_of_one_writer_keep_to_their_uris(tmp_path: Path) -> None:
    """A writer that is pointed to its next URI while it still saves puts one state where another belongs."""
    writer = cloudckpt.ObjectStoreWriter(tmp_path / "unused")
    handles = [
        cloudckpt.async_save(state_of(step), f"{tmp_path}/{step}", storage_writer=writer) for step in (1.0, 2.0, 3.0)
    ]
    for handle in handles:
        handle.result(60)
    for step in (1.0, 2.0, 3.0):
        assert_holds(loaded(f"{tmp_path}/{step}"), step)


def test_checkpoints_of_torchs_writer_are_not_hidden_unasked(tmp_path: Path) -> None:
    """A save beside one would make later loads return something else than before."""
    dcp.save(state_of(1.0), checkpoint_id=str(tmp_path / "c"))
    with pytest.raises(cloudckpt.CheckpointExistsError, match="Checkpoint already exists"):
        cloudckpt.save(state_of(2.0), tmp_path / "c")


def test_a_reader_of_torchs_finds_the_checkpoint_while_enabled(memory: Memory) -> None:
    """If this fails, frameworks that save by URI and load with an `FsspecReader`, as Lightning does for FSDP1, cannot
    resume; or what torch's own writer has saved cannot be read any more.
    """
    theirs = "memory://of-torch/checkpoint"
    # Nothing is synchronized in memory, and torch 2.14 warns of that.
    dcp.save(state_of(2.0), storage_writer=FsspecWriter(theirs, sync_files=False), no_dist=True)
    cloudckpt.enable()
    try:
        dcp.save(state_of(1.0), checkpoint_id=memory.uri(), no_dist=True)
        for uri, kind, value in ((memory.uri(), cloudckpt.ObjectStoreReader, 1.0), (theirs, FsspecReader, 2.0)):
            reader = FsspecReader(uri)
            assert type(reader) is kind
            assert "w" in reader.read_metadata().state_dict_metadata
            state = state_of(0.0)
            dcp.load(state, storage_reader=reader, no_dist=True)
            assert_holds(state, value)
        assert type(FsspecReader(memory.uri(), skip_instance_cache=True)) is FsspecReader  # settings for fsspec
        memory.at().fail("list", error=lambda: permanent("list"))
        with pytest.raises(cloudckpt.errors.StoreError):
            FsspecReader(memory.uri())
    finally:
        cloudckpt.disable()
    assert type(FsspecReader(memory.uri())) is FsspecReader


def test_torch_does_not_save_beside_a_checkpoint_while_enabled(tmp_path: Path) -> None:
    """If this fails, torch saves beside a manifest, and no load finds that save, because it finds the manifest."""
    path = str(tmp_path / "c")
    cloudckpt.save(state_of(1.0), path)
    try:
        cloudckpt.enable()
        with pytest.raises(BaseException, match="Checkpoint already exists"):
            dcp.save(state_of(2.0), checkpoint_id=path)
        cloudckpt.enable(overwrite=True)
        dcp.save(state_of(2.0), checkpoint_id=path)
    finally:
        cloudckpt.disable()
    assert_holds(loaded(path), 2.0)


@pytest.mark.parametrize("is_within", [True, False], ids=["within", "outside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "compressed", "torch"])
def test_tensors_of_inference_mode_are_filled_in_and_outside_it(
    tmp_path: Path,
    kind: str,
    dtype: torch.dtype,
    is_within: bool,  # noqa: FBT001  # of the table
) -> None:
    """If this fails, a model that was built for inference cannot be loaded: torch writes to it in that mode alone."""
    if kind == "torch":
        dcp.save(state_of(3.0), checkpoint_id=tmp_path)
    else:
        extensions = [cloudckpt.Zstandard()] if kind == "compressed" else []
        cloudckpt.save(state_of(3.0), tmp_path, options=Options(extensions=extensions))
    with torch.inference_mode():
        target = {"w": torch.zeros(300, 10, dtype=dtype)}
    with torch.inference_mode(is_within):
        cloudckpt.load(target, tmp_path, allow_pickle=kind == "torch")
    assert bool((target["w"] == 3).all())


def test_an_error_after_the_manifest_appeared_keeps_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for a refusal, it would remove the data of a checkpoint that everybody can see."""
    real = files.fsync_directory

    def broken(directory: str) -> None:
        if (tmp_path / "c" / "manifest.json").exists():
            raise OSError(errno.EIO, "input/output error")
        real(directory)

    monkeypatch.setattr(files, "fsync_directory", broken)
    with contextlib.suppress(cloudckpt.errors.CloudckptError):
        cloudckpt.save(state_of(1.0), tmp_path / "c")
    assert_holds(loaded(str(tmp_path / "c")), 1.0)


def test_a_save_to_a_path_gives_each_thread_a_file(tmp_path: Path, memory: Memory) -> None:
    """If this fails, a save to a path is as slow as one thread: those that write to one file wait for each other."""
    state = {f"w{number}": torch.zeros(40 * MIB, dtype=torch.uint8) for number in range(5)}
    cloudckpt.save(state, memory.uri())
    assert len(memory.data_keys()) == 1
    cloudckpt.save(state, tmp_path)
    assert len(list(tmp_path.glob("data/**/*.safetensors"))) == 5
