"""Find chunks of a stored tensor, and name the types of its elements."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch

from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, ItemLocation, StoredTensor, StoredValue


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of a dtype, without the ``torch.``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a manifest calls `name`. Raise `UnsupportedValueError` if this torch lacks it."""
    dtype = getattr(torch, name, None) if name in ITEMSIZE_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedValueError(
            f"this torch ({torch.__version__}) has no dtype {name!r}: upgrade torch to load it", uri=""
        )
    return dtype


def find_chunk(chunks: Sequence[Chunk], offsets: tuple[int, ...]) -> int | None:
    """Return the position of the non-empty chunk at `offsets`, by binary search.

    None does not mean that there is none: the chunks may be in any order.
    """
    position = bisect_left(chunks, offsets, key=lambda chunk: chunk.offsets)
    while position < len(chunks) and chunks[position].offsets == offsets:
        if 0 not in chunks[position].lengths:
            return position
        position += 1
    return None


def find_overlapping_chunks(
    chunks: Sequence[Chunk], offsets: Sequence[int], lengths: Sequence[int]
) -> list[int] | None:
    """Return the positions of the chunks that hold any of the box at `offsets`; None if each must be looked at.

    The binary search finds all of them if they are in order, as ranks write them. In any other order it may miss some.
    The chunks of a valid manifest hold each element once, so the count of elements then is too small, and the result
    None.
    """
    if not chunks or not offsets or 0 in lengths:
        return None
    first, last = chunks[0].offsets, chunks[-1].offsets
    dim = next((dim for dim in range(len(offsets)) if first[dim] != last[dim]), 0)

    def begin(chunk: Chunk) -> int:
        return chunk.offsets[dim]

    end = bisect_left(chunks, offsets[dim] + lengths[dim], key=begin)
    at_or_before = bisect_right(chunks, offsets[dim], 0, end, key=begin)
    if not at_or_before:
        return None
    positions: list[int] = []
    num_held = 0
    for position in range(bisect_left(chunks, begin(chunks[at_or_before - 1]), 0, end, key=begin), end):
        shared = _num_shared(chunks[position], offsets, lengths)
        if shared:
            positions.append(position)
            num_held += shared
    return positions if num_held == math.prod(lengths) else None


def _num_shared(chunk: Chunk, offsets: Sequence[int], lengths: Sequence[int]) -> int:
    return math.prod(
        max(0, min(offset + length, begin + extent) - max(offset, begin))
        for offset, length, begin, extent in zip(chunk.offsets, chunk.lengths, offsets, lengths, strict=True)
    )


def locate_chunk(tensor: StoredTensor, chunk: Chunk) -> ItemLocation:
    """Return the location of a chunk of `tensor`."""
    return ItemLocation(
        object_index=chunk.object_index,
        begin=chunk.begin,
        end=chunk.end,
        dtype=tensor.dtype,
        lengths=chunk.lengths,
        transforms=tuple(tensor.transforms),
    )


def locate_value(value: StoredValue) -> ItemLocation:
    """Return the location of a value."""
    return ItemLocation(
        object_index=value.object_index,
        begin=value.begin,
        end=value.end,
        dtype=None,
        lengths=(),
        transforms=tuple(value.transforms[:-1] if value.is_json else value.transforms),
        is_json=value.is_json,
    )
