"""The reader on one rank, and what it shares with the writer, over a store that can be watched and disturbed."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch
from tests.in_memory import Memory, assert_holds, loaded, state_of
from tests.options import make_options
from torch.distributed.checkpoint.planner import LoadPlan

import cloudckpt
from cloudckpt import Event, ObjectStoreReader, ObjectStoreWriter, Options
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

SMALL_PARTS = {"tile_bytes": 4096, "part_bytes": 4096}


# --- pickling and order of calls


def test_writers_and_readers_travel(memory: Memory) -> None:
    """If this fails, an async save by process, or a data loader that holds a reader, cannot start."""
    options = Options(retries=9, metadata={"a": 1})
    writer = ObjectStoreWriter(memory.uri(), options=options, overwrite=True)
    cloudckpt.save(state_of(1.0), storage_writer=writer)
    reader = ObjectStoreReader(memory.uri(), options=options)
    cloudckpt.load(state_of(), storage_reader=reader)
    for used in (True, False):
        if not used:
            writer = ObjectStoreWriter(memory.uri(), options=options, overwrite=True)
            reader = ObjectStoreReader(memory.uri(), options=options)
        writer_copy, reader_copy = pickle.loads(pickle.dumps(writer)), pickle.loads(pickle.dumps(reader))
        assert writer_copy.checkpoint_id == reader_copy.checkpoint_id == memory.uri()
        cloudckpt.save(state_of(2.0), storage_writer=writer_copy)  # it may overwrite, as the original may
        state = state_of(-1.0)
        cloudckpt.load(state, storage_reader=reader_copy)
        assert_holds(state, 2.0)


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


def test_a_deletion_in_the_middle_of_a_load_is_told_from_damage(memory: Memory) -> None:
    """If this fails, a checkpoint that retention removed is reported as damaged."""
    cloudckpt.save(state_of(1.0), memory.uri())
    memory.at().once_before(
        "read_into", "data/", lambda: memory.at().inner.delete(["manifest.json", *memory.data_keys()])
    )
    with pytest.raises(CheckpointNotFoundError):
        loaded(memory.uri())


def test_a_missing_object_is_named_with_its_tensors(memory: Memory) -> None:
    """If this fails, a user whose object was deleted does not learn which, or is told to try again for ever."""
    cloudckpt.save(state_of(1.0), memory.uri())
    (key,) = memory.data_keys()
    memory.at().inner.delete([key])
    with pytest.raises(CorruptCheckpointError, match=rf"{key} is missing, and with it .*'w'"):
        loaded(memory.uri())


def test_a_part_costs_about_its_size(memory: Memory) -> None:
    """If this fails, a rank that needs a few rows reads the whole tensor (G8)."""
    options = make_options(tile_bytes=4096, part_bytes=4096)
    cloudckpt.save({"w": torch.ones(1000, 1000), "b": torch.ones(5)}, memory.uri(), options=options)
    memory.at().calls.clear()
    report = cloudckpt.load({"b": torch.zeros(5)}, memory.uri(), options=options)
    assert report is not None
    assert report.num_bytes_wanted == 20
    assert memory.at().num_bytes("read_into") == report.num_bytes_read <= 2 * 4096


# --- events and reports


def test_events_tell_the_story_in_order(memory: Memory) -> None:
    """If this fails, progress bars and logs show steps that did not happen, or not when they did."""
    events: list[Event] = []
    options = make_options(on_event=events.append, connections=1, **SMALL_PARTS)
    cloudckpt.save({"w": torch.ones(2500)}, memory.uri(), options=options)
    parts = [event for event in events if event.name == "save.part_uploaded"]
    names = [event.name for event in events]
    assert names == [
        "save.begun",
        "save.set_up",
        *["save.part_uploaded"] * len(parts),
        "save.completing",
        "save.object_uploaded",
        "save.written",
        "save.committing",
        "save.committed",
        "save.done",
    ]
    (key,) = memory.data_keys()
    assert {event.key for event in parts} == {key}
    size_bytes = memory.at().inner.head(key).size_bytes
    assert sum(event.num_bytes for event in parts) == size_bytes
    assert [event.num_bytes for event in events if event.name in ("save.object_uploaded", "save.written")] == [
        size_bytes
    ] * 2
    assert {event.uri for event in events} == {memory.uri()}
    assert events[-2].key == "manifest.json"
    assert len({event.operation for event in events}) == 1
    assert events[-1].report is not None
    assert events[-1].num_bytes == events[-1].report.num_bytes == size_bytes

    events.clear()
    cloudckpt.save({"w": torch.ones(10)}, memory.uri(), options=options, overwrite=True)
    assert [(event.name, event.key) for event in events][-6:] == [
        ("save.committing", "manifest.1.json"),
        ("save.committed", "manifest.1.json"),
        ("save.removing", "manifest.json"),
        ("save.removing", key),
        ("save.cleaned_up", ""),
        ("save.done", ""),
    ]

    events.clear()
    memory.at().fail("read_into")
    cloudckpt.load({"w": torch.ones(10)}, memory.uri(), options=options)
    assert [event.name for event in events] == ["load.begun", "load.planned", "retry", "load.range_read", "load.done"]
    assert events[2].error == "TransientStoreError"


def test_the_save_report_is_what_the_store_saw(memory: Memory) -> None:
    """If this fails, the figures that users tune by are made up (G9)."""
    memory.at().fail("upload_part", times=2)
    options = make_options(object_bytes=8000, **SMALL_PARTS)
    metadata = cloudckpt.save({f"w{n}": torch.ones(1500) for n in range(4)}, memory.uri(), options=options)
    report, store = metadata.report, memory.at()
    assert report is not None
    assert (report.uri, report.rank, report.num_retries) == (memory.uri(), 0, 2)
    assert report.num_objects == len(memory.data_keys()) == 4
    assert report.num_bytes == sum(store.inner.head(key).size_bytes for key in memory.data_keys())
    assert report.num_requests == len(store.calls)
    assert report.attempt in memory.data_keys()[0]
    assert min(report.plan_s, report.write_s, report.commit_s) > 0
    assert report.bytes_per_s == pytest.approx(report.num_bytes / report.write_s)


def test_the_load_report_is_what_the_store_saw(memory: Memory) -> None:
    """If this fails, the figures that users tune by are made up (G9)."""
    cloudckpt.save(state_of(1.0), memory.uri(), options=make_options(**SMALL_PARTS))
    store = memory.at()
    store.calls.clear()
    state = state_of(-1.0)
    tensors = {name: state[name] for name in ("w", "t", "b", "one")}
    report = cloudckpt.load(tensors, memory.uri())
    assert report is not None
    assert report.num_bytes_wanted == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert report.num_bytes_read == store.num_bytes("read_into") >= report.num_bytes_wanted
    assert report.num_requests == len(store.calls)
    assert report.num_retries == 0
    assert report.attempt in memory.data_keys()[0]
    assert report.bytes_per_s == pytest.approx(report.num_bytes_wanted / report.read_s)
