"""Tensors that are filled by their addresses."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from cloudckpt.format.model import Chunk, StoredTensor
from cloudckpt.io.reads import WantedRange
from cloudckpt.tensors.targets import WholeTensors

BEGIN = 64


def stored_as(tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> StoredTensor:
    """One chunk that would hold the tensor."""
    shape = tuple(tensor.size())
    end = BEGIN + tensor.numel() * tensor.itemsize
    name = str(dtype or tensor.dtype).removeprefix("torch.")
    return StoredTensor(dtype=name, shape=shape, chunks=[Chunk((0,) * len(shape), shape, 3, BEGIN, end)])


def wholes_of(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[WholeTensors, list[int]]:
    wholes = WholeTensors()
    fqns = [f"t{number}" for number in range(len(tensors))]
    stored = {fqn: stored_as(tensor, dtype=dtype) for fqn, tensor in zip(fqns, tensors, strict=True)}
    return wholes, wholes.add(fqns, tensors, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint8])
def test_the_memory_of_the_tensor_is_filled(dtype: torch.dtype) -> None:
    """If this fails, a load of small tensors writes elsewhere in memory than it should."""
    tensor = torch.zeros(5, 3).to(dtype)
    wholes, left = wholes_of(torch.zeros(2).to(dtype), tensor)
    assert left == []
    num_bytes = 15 * dtype.itemsize
    expected = torch.tensor([number % 2 for number in range(num_bytes)], dtype=torch.uint8)
    for low, high in ((0, 7), (7, num_bytes)):
        view = wholes.direct_view(1, BEGIN + low, BEGIN + high)
        assert view is not None
        assert (view.format, view.ndim, view.nbytes, view.readonly) == ("B", 1, high - low, False)
        view[:] = bytes(expected[low:high].tolist())
    assert torch.equal(tensor.view(torch.uint8).flatten(), expected)
    assert list(wholes.wants())[1] == WantedRange(1, 3, BEGIN, BEGIN + num_bytes)
    assert wholes.num_bytes == num_bytes + 2 * dtype.itemsize


def test_a_view_never_reaches_beyond_the_tensor() -> None:
    """If this fails, a wrong range overwrites whatever lies behind a tensor in memory."""
    wholes, _ = wholes_of(torch.zeros(6))
    for low, high in ((20, 25), (-8, 4), (30, 40), (8, 4)):
        with pytest.raises(ValueError, match="do not lie in the chunk"):
            wholes.direct_view(0, BEGIN + low, BEGIN + high)
    view = wholes.direct_view(0, BEGIN + 20, BEGIN + 24)
    assert view is not None
    assert view.nbytes == 4


def test_a_view_keeps_the_memory_alive() -> None:
    """If this fails, a read that ends after a failed load writes into memory that is somebody else's by then."""
    tensor = torch.zeros(1000)
    wholes, _ = wholes_of(tensor)
    view = wholes.direct_view(0, BEGIN, BEGIN + 4000)
    assert view is not None
    kept = weakref.ref(tensor)
    del tensor, wholes
    gc.collect()
    assert kept() is not None
    view.release()
    gc.collect()
    assert kept() is None


def test_a_parameter_that_requires_grad_is_filled_like_any_tensor() -> None:
    """If this fails, a model's parameters take the slow way, or their gradients notice the load."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    wholes, left = wholes_of(parameter)
    assert left == []
    wholes.copy_from(0, torch.ones(4).view(torch.uint8), BEGIN)
    assert torch.equal(parameter.detach(), torch.ones(4))
    assert parameter.grad_fn is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 3).t(),
        torch.zeros(8)[::2],
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        torch._neg_view(torch.zeros(3)),  # alone in being contiguous
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
    ],
    ids=["transposed", "strided", "conjugated", "negated", "negated in place", "meta", "sparse"],
)
def test_tensors_whose_memory_is_not_their_bytes_are_left(tensor: torch.Tensor) -> None:
    """If this fails, bytes are written over memory that holds them in another order or form, or over none."""
    wholes, left = wholes_of(torch.zeros(2), tensor)
    assert left == [1]
    assert wholes.fqns == ["t0"]


@pytest.mark.parametrize("begin", [0, 5], ids=["whole", "part"])
def test_a_tensor_without_its_memory_is_left(begin: int) -> None:
    """If this fails, a load into parameters whose memory FSDP has freed writes to address 0, or to one near it."""
    tensor = torch.zeros(8)[begin:]
    tensor.untyped_storage().resize_(0)
    assert wholes_of(tensor)[1] == [0]


def test_what_is_stored_otherwise_is_left() -> None:
    """If this fails, stored bytes of one type or shape are taken for those of another."""
    tensor = torch.zeros(4)
    assert wholes_of(tensor, dtype=torch.int32)[1] == [0]
    for entry in (
        StoredTensor(dtype="float32", shape=(4,), chunks=[]),
        StoredTensor(dtype="float32", shape=(2, 2), chunks=[Chunk((0, 0), (2, 2), 0, 0, 16)]),
        StoredTensor(dtype="float32", shape=(4,), chunks=[Chunk((0,), (4,), 0, 0, 16)], transforms=["zlib"]),
        StoredTensor(dtype="float32", shape=(4,), chunks=[Chunk((i,), (1,), 0, 4 * i, 4 * i + 4) for i in range(4)]),
    ):
        assert WholeTensors().add(["t"], [tensor], {"t": entry}) == [0]
    assert WholeTensors().add(["t"], [tensor], {}) == [0]


def test_those_that_are_to_be_copied_are() -> None:
    """If this fails, tied weights are filled by two reads at once, which find each other's bytes in their check."""
    tensor = torch.zeros(4)
    wholes, _ = wholes_of(tensor, tensor)
    begins, ends = wholes.address_ranges()
    assert begins == [tensor.data_ptr()] * 2
    assert ends == [tensor.data_ptr() + 16] * 2
    wholes.copy_instead([1])
    assert wholes.are_copied() == [False, True]
    assert wholes.direct_view(0, BEGIN, BEGIN + 16) is not None
    assert wholes.direct_view(1, BEGIN, BEGIN + 16) is None
    wholes.copy_from(1, torch.full((2,), 7.0).view(torch.uint8), BEGIN + 8)
    assert tensor.tolist() == [0, 0, 7, 7]
