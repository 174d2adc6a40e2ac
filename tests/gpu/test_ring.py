"""Saves of a GPU's tensors through the ring of pinned buffers. Skipped where there is no GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.kit.in_memory import Memory
from tests.kit.options import make_options
from tests.kit.wrapped import permanent

import cloudckpt
from cloudckpt import Options
from cloudckpt.options import MIB
from cloudckpt.tensors.host_memory import PINNED, PinnedBuffers

DEVICE = "cuda"
TIMEOUT_S = 120
STAGING_BYTES = 16 * MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    PINNED.close()
    yield
    PINNED.close()


def state_of(num_bytes: int, *, num_tensors: int = 8) -> dict[str, torch.Tensor]:
    numel = num_bytes // 4 // num_tensors
    return {
        f"t{n}": torch.arange(numel, dtype=torch.int32, device=DEVICE).mul_(n + 1).view(-1, 64)
        for n in range(num_tensors)
    }


def options(*, staging_bytes: int = STAGING_BYTES) -> Options:
    return make_options(staging_bytes=staging_bytes, part_bytes=MIB, tile_bytes=64 * 1024, connections=8)


def assert_loads(memory: Memory, state: dict[str, torch.Tensor], name: str = "checkpoint") -> None:
    target = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    cloudckpt.load(target, memory.uri(name))
    for key, tensor in state.items():
        assert torch.equal(target[key], tensor.cpu()), key


def test_values_are_right_beside_other_work(memory: Memory) -> None:
    """If this fails, kernels that run beside a save get into what it saves, or it sends what is not copied yet."""
    state = state_of(64 * MIB)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    stop = threading.Event()

    def work() -> None:
        other = torch.rand(512, 512, device=DEVICE)
        while not stop.is_set():
            other = (other @ other).tanh_()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            cloudckpt.save(dict(state), memory.uri(f"c{number}"), options=options())
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    for number in range(3):
        assert_loads(memory, expected, f"c{number}")


@pytest.mark.parametrize("is_side", [False, True], ids=["default stream", "side stream"])
def test_copies_wait_for_queued_kernels(memory: Memory, is_side: bool) -> None:  # noqa: FBT001  # pytest's
    """If this fails, the copies do not wait for the caller's stream: an optimizer's last step is half in the save."""
    with torch.cuda.stream(torch.cuda.Stream() if is_side else None):
        tensor = torch.zeros(2000, 2000, device=DEVICE)
        other = torch.eye(2000, device=DEVICE)
        for _ in range(60):
            tensor = tensor @ other + 1
        cloudckpt.save({"w": tensor}, memory.uri(), options=options())
    assert_loads(memory, {"w": torch.full((2000, 2000), 60.0)})


def test_repeated_saves_pin_nothing_more(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, pinned memory grows with each save, or each save pins its own again."""
    num_new = 0
    new = PinnedBuffers.new

    def counted(self: PinnedBuffers, num_bytes: int) -> torch.Tensor:
        nonlocal num_new
        num_new += 1
        return new(self, num_bytes)

    monkeypatch.setattr(PinnedBuffers, "new", counted)
    for number in range(8):
        cloudckpt.save(state_of(32 * MIB), memory.uri(f"c{number}"), options=options())
        assert 0 < PINNED.num_bytes <= STAGING_BYTES
    assert num_new < 3 * STAGING_BYTES // MIB  # of 256 parts
    cloudckpt.close(TIMEOUT_S)
    assert PINNED.num_bytes == 0


def test_a_save_that_fails_keeps_nothing_in_use(memory: Memory) -> None:
    """If this fails, failed saves leave pinned buffers that nobody can use, or that copies still write to."""
    memory.at().fail("upload_part", error=lambda: permanent("upload_part"), skip=3)
    with pytest.raises(BaseException, match="failed: no"):
        cloudckpt.save(state_of(32 * MIB), memory.uri(), options=options())
    assert PINNED.num_bytes > 0
    state = state_of(8 * MIB)
    cloudckpt.save(dict(state), memory.uri("again"), options=options())
    assert_loads(memory, state, "again")


def test_every_view_of_a_gpus_tensor_is_saved_by_value(memory: Memory) -> None:
    """If this fails, some view of a GPU's tensor is saved as other bytes than its values."""
    whole = torch.randn(300, 400, device=DEVICE)
    state = {
        "whole": whole,
        "transposed": whole.t(),
        "columns": whole[:, 3:100:7],
        "expanded": whole[:1].expand(50, 400),
        "row": whole[17],
        "scalar": whole[3, 4],
        "empty": whole[:0],
        "half": whole.bfloat16(),
        "eight": whole.to(torch.float8_e4m3fn),
        "complex": torch.complex(whole, whole).conj(),
        "flags": whole > 0,
    }
    cloudckpt.save(dict(state), memory.uri(), options=options())
    target = {name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=DEVICE) for name, tensor in state.items()}
    cloudckpt.load(target, memory.uri())
    for name, tensor in state.items():
        loaded, expected = target[name], tensor.resolve_conj()
        if tensor.dtype is torch.float8_e4m3fn:
            loaded, expected = loaded.view(torch.uint8), expected.view(torch.uint8)
        assert torch.equal(loaded, expected), name


@pytest.mark.parametrize("is_side", [False, True], ids=["default stream", "side stream"])
def test_a_change_on_the_callers_stream_is_not_called_unchanged(tmp_path: Path, *, is_side: bool) -> None:
    """If this fails, a save hashes a tensor before the last step has written it, and refers to its old value."""
    options = make_options(unchanged="reference")
    tensor = torch.zeros(64 * MIB // 4, device="cuda")
    cloudckpt.save({"tensor": tensor}, tmp_path / "step-0", options=options)
    with torch.cuda.stream(torch.cuda.Stream() if is_side else None):
        torch.cuda._sleep(100_000_000)  # the stream is busy for a while
        tensor.fill_(1.0)
        report = cloudckpt.save({"tensor": tensor}, tmp_path / "step-1", base=tmp_path / "step-0").report
    assert report is not None
    assert report.num_bytes_unchanged == 0
    loaded = torch.zeros_like(tensor)
    cloudckpt.load({"tensor": loaded}, tmp_path / "step-1")
    assert bool(loaded.eq(1.0).all())
