"""Tensors of every type and in every kind of memory layout, each with what its bytes must be."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st

from cloudckpt.format.model import ITEMSIZE_BYTES

DTYPES = [getattr(torch, name) for name in ITEMSIZE_BYTES if hasattr(torch, name)]  # some are of newer versions


def bytes_for(size_bytes: int, dtype: torch.dtype, seed: int = 0) -> bytes:
    """Some bytes; for bool, only those that are bools."""
    values = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, size_bytes, dtype=np.uint8)
    return values.tobytes()


def tensor_of(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A fresh tensor with these bytes."""
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


def array_of(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The same for numpy, which has no idea of the type and cannot change a bit."""
    return np.frombuffer(content, dtype=f"V{dtype.itemsize}").reshape(shape)


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, bytes]:
    """A tensor: sliced, stepped, transposed, expanded, or as it is; and its bytes in row-major order, by numpy."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 6), max_size=4).map(tuple))
    content = bytes_for(math.prod(shape) * dtype.itemsize, dtype, draw(st.integers(0, 9)))
    tensor, array = tensor_of(content, dtype, shape), array_of(content, dtype, shape)
    for _ in range(draw(st.integers(0, 3))):
        if not tensor.dim():
            break
        dim = draw(st.integers(0, tensor.dim() - 1))
        kind = draw(st.sampled_from(["slice", "transpose", "select", "expand"]))
        if kind == "slice":
            start = draw(st.integers(0, tensor.shape[dim]))
            stop = draw(st.integers(start, tensor.shape[dim]))
            chosen = slice(start, stop, draw(st.integers(1, 3)))
            index = (slice(None),) * dim
            tensor, array = tensor[(*index, chosen)], array[(*index, chosen)]
        elif kind == "transpose":
            other = draw(st.integers(0, tensor.dim() - 1))
            tensor, array = tensor.transpose(dim, other), array.swapaxes(dim, other)
        elif kind == "select" and tensor.shape[dim]:
            at = draw(st.integers(0, tensor.shape[dim] - 1))
            tensor, array = tensor.select(dim, at), array.take(at, axis=dim)
        elif kind == "expand":
            times = draw(st.integers(1, 3))
            tensor = tensor.unsqueeze(0).expand(times, *tensor.shape)
            array = np.broadcast_to(array, (times, *array.shape))
    return tensor, array.tobytes()
