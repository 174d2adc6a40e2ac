"""`PinnedStager` in torch's own asynchronous saves: with its threads and its processes, its writers and ours."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.e2e.harness import run_ranks
from tests.e2e.models import assert_same
from tests.e2e.places import Place
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import cloudckpt
from cloudckpt.tensors.stager import PinnedStager

WAIT_S = 120  # another process has to import torch, on a machine that may be busy
NUM_SAVES = 3


def state_of(fill: float) -> dict[str, Any]:
    """One tensor that each rank holds alike, some that share memory, one of each rank's own, and a value."""
    shared = torch.full((700, 90), fill)
    return {
        "shared": shared,
        "tied": shared,
        "part": shared.t()[:50],
        "thin": torch.full((900, 20), fill)[:, 3],
        f"own-{dist.get_rank()}": torch.full((7,), fill),
        "nested": {"list": [torch.full((3,), fill), fill], "scalar": torch.tensor(fill)},
    }


def end_of(response: Future[Any] | AsyncSaveResponse) -> None:
    """Wait for both of its ends."""
    if isinstance(response, AsyncSaveResponse):
        response.staging_completion.result(WAIT_S)
        response = response.upload_completion
    response.result(WAIT_S)


def save_some_times(root: str, kind: AsyncCheckpointerType, options: dict[str, bool]) -> None:
    """On each rank: save, change what was saved, save again with the same stager."""
    group = dist.new_group(backend="gloo")  # torch shares the default group with training otherwise
    stager = PinnedStager(**options)
    for number in range(NUM_SAVES):
        uri = f"{root}/{number}"
        writer = cloudckpt.ObjectStoreWriter(uri)
        state = state_of(float(number))
        response = dcp.async_save(
            state, storage_writer=writer, process_group=group, async_checkpointer_type=kind, async_stager=stager
        )
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result(WAIT_S)
        for tensor in (state["shared"], state["thin"], state["nested"]["list"][0], state["nested"]["scalar"]):
            tensor.fill_(-1)
        end_of(response)
    sizes = stager.num_bytes
    stager.close()
    for number in range(NUM_SAVES):
        uri = f"{root}/{number}"
        reader = cloudckpt.ObjectStoreReader(uri)
        loaded = state_of(-2.0)
        del loaded["tied"], loaded["part"]  # they would be loaded into the same memory
        loaded |= {"tied": torch.zeros(700, 90), "part": torch.zeros(50, 700)}
        dcp.load(loaded, storage_reader=reader)
        assert_same(loaded, state_of(float(number)) | {"part": torch.full((50, 700), float(number))})
    # Saves that were waited for reuse the memory; where torch held one a moment longer, there are two of it.
    assert sizes <= 2 * 4 * 1024 * 1024


@pytest.mark.multirank
def test_torchs_threads_save_what_was_staged(place: Place) -> None:
    """If this fails, torch's async_save with our stager and writer saves later values, or another structure."""
    run_ranks(save_some_times, place.root, AsyncCheckpointerType.THREAD, {"overlapped": True}, world_size=2)


@pytest.mark.multirank
@pytest.mark.slow
def test_torchs_processes_save_what_was_staged(place: Place) -> None:
    """If this fails, a snapshot reaches torch's background process damaged, late or not at all."""
    run_ranks(save_some_times, place.root, AsyncCheckpointerType.PROCESS, {"shared": True}, world_size=1)
