"""Names of one tensor: stored once, and read back under each name."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.docs.independent_reader import Checkpoint, entries_of
from tests.kit.in_memory import Memory
from tests.kit.options import make_options
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

import cloudckpt

TILE_BYTES = 4096

bases = st.builds(
    lambda shape, dtype, seed: torch.randint(
        1, 100, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.sampled_from([(), (1,), (4, 6), (6, 4), (2, 3, 4), (0, 3), (300, 5)]),
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.complex64]),
    st.integers(0, 99),
)
RELATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same": lambda tensor: tensor,
    "detached": torch.Tensor.detach,
    "parameter": lambda tensor: nn.Parameter(tensor.detach(), requires_grad=False),
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "row": lambda tensor: tensor[:1] if tensor.dim() else tensor,
    "reshaped": lambda tensor: tensor.reshape(tensor.numel()),
    "bits": lambda tensor: tensor.view({2: torch.int16, 4: torch.int32, 8: torch.float64}[tensor.element_size()]),
    "conjugated": torch.Tensor.conj,
    "clone": torch.Tensor.clone,
}


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two names must have in common to be one tensor: the address of each element, and what it means."""
    steps = itertools.product(*map(range, tensor.shape))
    offsets = tuple(sum(at * stride for at, stride in zip(step, tensor.stride(), strict=True)) for step in steps)
    is_bare = tensor.is_conj() or not offsets
    return (tensor.data_ptr(), offsets, tuple(tensor.shape), tensor.dtype, id(tensor) if is_bare else None)


@given(
    samples=st.lists(st.tuples(bases, st.lists(st.sampled_from(list(RELATIONS)), max_size=4)), min_size=1, max_size=4),
    object_bytes=st.sampled_from([4096, 1 << 20]),
    order=st.randoms(use_true_random=False),
)
def test_tied_tensor_is_stored_once(
    samples: list[tuple[torch.Tensor, list[str]]], object_bytes: int, order: Any
) -> None:
    """If this fails, tied weights take twice their room, or a name comes back with another tensor's values."""
    tensors = [kin for base, kinds in samples for kin in [base, *(RELATIONS[kind](base) for kind in kinds)]]
    order.shuffle(tensors)
    state = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    once = {place_of(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    with tempfile.TemporaryDirectory() as directory:
        uri = f"{directory}/c"
        options = make_options(object_bytes=object_bytes, tile_bytes=TILE_BYTES)
        cloudckpt.save(dict(state), uri, options=options)
        checkpoint = Checkpoint(Path(uri))
        num_objects = len(checkpoint.manifest["objects"])
        headers = [entries_of(checkpoint.object_bytes(index)) for index in range(num_objects)]
        stored_bytes = sum(high - low for entries in headers for low, high in (e["range"] for e in entries.values()))
        assert stored_bytes == sum(once.values())
        for name, tensor in state.items():
            values = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
            assert checkpoint.tensor(name) == values.numpy().tobytes(), name
        cloudckpt.verify(uri)
        target = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
        cloudckpt.load(target, uri)
        for name, tensor in state.items():
            assert torch.equal(target[name], tensor), name


class Model(nn.Module):
    """Its head is its embedding."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.head = nn.Linear(64, 500, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def data_bytes(memory: Memory) -> int:
    return sum(info.size_bytes for info in memory.at().inner.list("data/"))


def test_tied_tensor_is_read_once(memory: Memory) -> None:
    """If this fails, loading a model whose weights were tied reads the largest matrix twice."""
    cloudckpt.save({"model": Model(is_tied=True).state_dict()}, memory.uri())
    memory.at().calls.clear()
    cloudckpt.load({"model": Model(is_tied=False).state_dict()}, memory.uri())
    assert memory.at().num_bytes("read_into") <= data_bytes(memory) + 100_000  # and the manifest


def test_weights_that_were_not_tied_are_named_where_they_are(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, one of two trained matrices is lost in a model that ties them, and nobody is told."""
    names = {}
    for is_tied in (False, True):
        cloudckpt.save({"model": Model(is_tied=is_tied).state_dict()}, memory.uri(f"{is_tied}"))
        caplog.clear()
        cloudckpt.load({"model": (state := Model(is_tied=True).state_dict())}, memory.uri(f"{is_tied}"))
        names[is_tied] = [name for name in state if f"'model.{name}'" in caplog.text]
    assert len(names[False]) == 1
    assert names[True] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_under_two_names_are_no_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    """If this fails, a user of a tied model is told to untie it, or not told that its export has two matrices."""
    for is_tied in (True, False):
        model = Model(is_tied=is_tied)
        cloudckpt.save({"model": model.state_dict()}, tmp_path / "c", overwrite=True)
        cloudckpt.export_checkpoint(
            tmp_path / "c", tmp_path / "e", include="model", strip_prefix="model", overwrite=True
        )
        caplog.clear()
        options = make_options(allow_lossy_casts="rounding")
        cloudckpt.load(tmp_path / "e", model=(loaded := Model(is_tied=True).to(dtype)), options=options)
        assert torch.equal(loaded.head.weight, model.head.weight.to(dtype))
        assert ("Untie the model" in caplog.text) == (not is_tied)


def test_memory_that_is_used_again_is_not_taken_for_tied(memory: Memory) -> None:
    """If this fails, two tensors that a planner makes one after the other at one address come back as one."""

    class Making(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            return data * 2 if isinstance(data, torch.Tensor) else data

    state = {f"t{number}": torch.full((5000,), float(number)) for number in range(40)}
    cloudckpt.save(
        dict(state), memory.uri(), planner=Making(), options=make_options(object_bytes=4096, tile_bytes=4096)
    )
    loaded = {name: torch.zeros(5000) for name in state}
    cloudckpt.load(loaded, memory.uri())
    assert all(torch.equal(loaded[name], tensor * 2) for name, tensor in state.items())
