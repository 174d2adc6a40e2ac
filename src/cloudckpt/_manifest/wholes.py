"""The checks of tensors that are stored in one piece, as most are, with little time for each."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES
from cloudckpt._manifest.model import Manifest, StoredTensor

MAX_NDIM = 64  # torch's own limit
MAX_BYTES = 2**63 - 1


def not_surely_whole(manifest: Manifest) -> Iterator[tuple[str, StoredTensor]]:
    """All tensors but those that certainly have no problem: one chunk holds them, and it lies where it can.

    Models have few shapes and many tensors, so that what follows from a shape is found out once for each. The objects
    have to be sound already.
    """
    sizes_bytes = [stored.size for stored in manifest.objects]
    of_shape: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int, int] | None] = {}
    for fqn, tensor in manifest.tensors.items():
        shape = tensor.shape
        if len(tensor.chunks) == 1 and not tensor.transforms:
            key = (tensor.dtype, shape)
            try:
                expected = of_shape[key]
            except KeyError:
                expected = of_shape[key] = _expected(tensor.dtype, shape)
            if expected is not None:
                chunk = tensor.chunks[0]
                begin, end = chunk.begin, chunk.end
                origin, num_bytes, itemsize_bytes = expected
                if (
                    chunk.lengths == shape
                    and chunk.offsets == origin
                    and end - begin == num_bytes
                    and begin % itemsize_bytes == 0
                    and begin >= 0
                    and 0 <= chunk.object_index < len(sizes_bytes)
                    and end <= sizes_bytes[chunk.object_index]
                ):
                    continue
        yield fqn, tensor


def _expected(dtype: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int] | None:
    """Offsets and bytes of the one chunk, and bytes of an element; None where there is no such tensor."""
    itemsize_bytes = ITEMSIZE_BYTES.get(dtype)
    if itemsize_bytes is None or len(shape) > MAX_NDIM or not all(0 <= length <= MAX_BYTES for length in shape):
        return None
    num_bytes = math.prod(shape) * itemsize_bytes
    return ((0,) * len(shape), num_bytes, itemsize_bytes) if num_bytes <= MAX_BYTES else None
