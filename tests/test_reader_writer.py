"""The reader on one rank, and what it shares with the writer, over a store that can be watched and disturbed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.in_memory import Memory, assert_holds, loaded, state_of
from torch.distributed.checkpoint.planner import LoadPlan

import cloudckpt
from cloudckpt import ObjectStoreReader, Options
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


# --- pickling and order of calls


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


# --- events and reports
