"""Checks of a tensor's chunks on whole arrays. `validation` imports this late: listing checkpoints needs no numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from cloudckpt.format.model import Chunk, StoredTensor
from cloudckpt.format.validation import fills_once

Integers = npt.NDArray[np.int64]

_MAX_SORTED_DIMS = 3  # of a million blocks, sorting more corners takes more memory than counting them
_MAX_INT64 = 2**63 - 1
_OBJECT_INDEX, _BEGIN, _END = attrgetter("object_index"), attrgetter("begin"), attrgetter("end")


def is_sound(tensor: StoredTensor, itemsize_bytes: int, object_sizes_bytes: Integers) -> bool:
    """Return whether the chunks certainly have no problem. `find_problems` names the problems.

    The tensor's shape must be a shape already, of less than 2^63 bytes, so that no sum or product here overflows
    unnoticed: extents bound offsets and lengths, and a product that wraps has a zero among its factors.
    """
    chunks, shape = tensor.chunks, tensor.shape
    try:
        offsets = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)
        lengths = np.array([chunk.lengths for chunk in chunks], dtype=np.int64)
        object_index, begins, ends = (_column(chunks, of) for of in (_OBJECT_INDEX, _BEGIN, _END))
    except (ValueError, OverflowError):
        return False  # of different numbers of dimensions, or beyond any size
    if offsets.shape != (len(chunks), len(shape)) or lengths.shape != offsets.shape:
        return False
    extents = np.array(shape, dtype=np.int64)
    return (
        _all((lengths >= 0) & (lengths <= extents) & (offsets >= 0))
        and _all(offsets <= extents - lengths)
        and _all((object_index >= 0) & (object_index < len(object_sizes_bytes)))
        and _all((begins >= 0) & (begins <= ends) & (ends <= object_sizes_bytes[object_index]))
        and (bool(tensor.transforms) or _hold(lengths, begins, ends, itemsize_bytes))
        and arrays_fill_once(offsets, lengths, shape)
    )


def _hold(lengths: Integers, begins: Integers, ends: Integers, itemsize_bytes: int) -> bool:
    """Return whether each range is as long as its chunk's elements, and aligned to them."""
    num_bytes = lengths.prod(axis=1, dtype=np.int64) * itemsize_bytes
    return _all((ends - begins == num_bytes) & (begins % itemsize_bytes == 0))


def _all(flags: npt.NDArray[np.bool_]) -> bool:
    return bool(flags.all())


def _column(chunks: list[Chunk], of: Callable[[Chunk], int]) -> Integers:
    return np.fromiter(map(of, chunks), dtype=np.int64, count=len(chunks))


def arrays_fill_once(offsets: Integers, lengths: Integers, shape: Sequence[int]) -> bool:
    """`fills_once` for many blocks, one per row of ``[num_blocks, num_dims]``, all of which lie inside of `shape`.

    The same corners are counted, by sorting. Where they are too many or too far apart for that, `fills_once` decides.
    """
    extents = np.array(shape, dtype=np.int64)
    is_filled = (lengths != 0).all(axis=1)
    if not is_filled.all():
        offsets, lengths = offsets[is_filled], lengths[is_filled]
    split: list[int] = np.flatnonzero((lengths != extents).any(axis=0)).tolist()
    sides = [shape[dim] + 1 for dim in split]
    if len(lengths) == 0 or 0 in shape or len(split) > _MAX_SORTED_DIMS or math.prod(sides) > _MAX_INT64:
        return fills_once(_rows(offsets, lengths), tuple(shape))
    # A corner's position as one number, each with its sign; the last row is the whole array, to be taken away.
    begins = np.vstack([offsets[:, split], np.zeros((1, len(split)), dtype=np.int64)])
    ends = np.vstack([offsets[:, split] + lengths[:, split], extents[None, split]])
    codes = np.zeros((len(begins), 1), dtype=np.int64)
    signs = np.ones((len(begins), 1), dtype=np.int8)
    signs[-1] = -1
    for dim, side in enumerate(sides):
        codes = np.hstack([codes * side + begins[:, dim : dim + 1], codes * side + ends[:, dim : dim + 1]])
        signs = np.hstack([signs, -signs])
    order = np.argsort(codes, axis=None)
    codes, signs = codes.ravel()[order], signs.ravel()[order]
    first = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
    return not np.add.reduceat(signs, first, dtype=np.int64).any()


def _rows(offsets: Integers, lengths: Integers) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    rows: Any = zip(offsets.tolist(), lengths.tolist(), strict=True)
    return ((tuple(begin), tuple(length)) for begin, length in rows)
