"""Background saves of a GPU's tensors, by way of a pinned snapshot. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.kit.in_memory import Memory
from tests.kit.options import make_options

import cloudckpt
from cloudckpt import ObjectStoreWriter
from cloudckpt.background.stager import PinnedStager
from cloudckpt.options import MIB

DEVICE = "cuda"
TIMEOUT_S = 120

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def state_of(fill: float, *, num_bytes: int = 64 * MIB) -> dict[str, torch.Tensor]:
    tensor = torch.full((num_bytes // 8, 2), fill, device=DEVICE)
    return {"w": tensor, "tied": tensor, "t": tensor[:1000].t(), "half": tensor[:77].bfloat16()}


def assert_holds(memory: Memory, fill: float, name: str = "checkpoint") -> None:
    target = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in state_of(fill).items()}
    cloudckpt.load(target, memory.uri(name))
    for key, tensor in target.items():
        assert bool((tensor == fill).all()), key


@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_on_once_all_is_staged(memory: Memory, overlap: bool) -> None:  # noqa: FBT001  # pytest's
    """If this fails, what training does after `staged` gets into the save, or what it did before is not in it."""
    state = state_of(0.0)
    for number in range(1, 5):
        for _ in range(20):  # queued, and perhaps not done when the save is asked for
            state["w"].add_(number / 20 * 16).sub_(number / 20 * 15)
        state["w"].fill_(float(number))
        state["half"].fill_(float(number))
        handle = cloudckpt.async_save(
            {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in state.items()},
            memory.uri(f"c{number}"),
            options=make_options(async_overlap=overlap, part_bytes=MIB),
        )
        handle.staged.result(TIMEOUT_S)
        state["w"].zero_()
        state["half"].zero_()
        handle.result(TIMEOUT_S)
        assert_holds(memory, float(number), f"c{number}")
    cloudckpt.close(TIMEOUT_S)


def test_a_snapshot_is_pinned_kept_and_freed() -> None:
    """If this fails, copies from the GPU run at half the link's rate, or every snapshot allocates anew."""
    stager = PinnedStager()
    sizes = []
    for number in range(4):
        staging = stager.begin(state_of(float(number)))
        staging.completed.result(TIMEOUT_S)
        assert bool((staging.state_dict["w"] == number).all())
        assert staging.state_dict["w"].data_ptr() == staging.state_dict["tied"].data_ptr()
        assert all(block.is_pinned for block in stager._pool.blocks)
        sizes.append(stager.num_bytes)
    assert len(set(sizes)) == 1
    assert sizes[0] < 1.1 * 64 * MIB
    stager.close()
    assert stager.num_bytes == 0


def test_torchs_async_save_takes_the_stager(memory: Memory) -> None:
    """If this fails, a script that calls torch's own function cannot stage to pinned memory."""
    stager = PinnedStager()
    state = state_of(3.0)
    future = dcp.async_save(
        dict(state), storage_writer=ObjectStoreWriter(memory.uri()), async_stager=stager, no_dist=True
    )
    state["w"].zero_()
    state["half"].zero_()
    future.result(TIMEOUT_S)  # type: ignore[union-attr]  # no future of both was asked for
    assert_holds(memory, 3.0)
    stager.close()
