"""Tensors on a GPU, through the pinned buffers. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from tests.in_memory import Memory

import cloudckpt
from cloudckpt.options import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _state() -> dict[str, torch.Tensor]:
    whole = torch.arange(3_000_000, dtype=torch.float32, device="cuda").reshape(1000, 3000)
    return {
        "contiguous": whole,
        "strided": whole.t(),
        "sliced": whole[:, 1::7],
        "half": whole.to(torch.bfloat16),
        "scalar": torch.tensor(3.5, device="cuda"),
        "empty": torch.empty(0, 4, device="cuda"),
    }


@pytest.mark.parametrize("kind", ["cuda", "cpu", "converted"])
def test_what_is_saved_from_a_gpu_loads_onto_either(memory: Memory, kind: str) -> None:
    """Bytes that are sent before their copy has ended, or read in another order, would be wrong weights."""
    state = _state()
    options = cloudckpt.Options(tile_bytes=4096, part_bytes=MIB, staging_bytes=2 * MIB)
    cloudckpt.save(state, memory.uri(), options=options)
    target = {
        name: torch.zeros(
            tensor.shape,
            dtype=torch.float64 if kind == "converted" else tensor.dtype,
            device="cpu" if kind == "cpu" else "cuda",
        )
        for name, tensor in state.items()
    }
    cloudckpt.load(target, memory.uri())
    for name, tensor in state.items():
        assert torch.equal(target[name].cpu(), tensor.cpu().to(target[name].dtype)), name


def test_a_background_save_keeps_the_values_of_its_call(memory: Memory) -> None:
    """Training goes on after the call; what it writes then belongs to the next checkpoint."""
    state = {"w": torch.ones(4_000_000, device="cuda")}
    handle = cloudckpt.async_save(state, memory.uri())
    state["w"].zero_()
    handle.result(120)
    target = {"w": torch.zeros(4_000_000, device="cuda")}
    cloudckpt.load(target, memory.uri())
    assert bool((target["w"] == 1).all())


def test_work_on_a_side_stream_is_waited_for(memory: Memory) -> None:
    """The copies run in other threads, on other streams: without waiting they would read unfinished tensors."""
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(2000, 2000, device="cuda")
        for _ in range(50):
            tensor = tensor @ tensor + 1
        expected = tensor.clone()
        cloudckpt.save({"w": tensor}, memory.uri())
    target = {"w": torch.zeros(2000, 2000)}
    cloudckpt.load(target, memory.uri())
    assert torch.equal(target["w"], expected.cpu())
