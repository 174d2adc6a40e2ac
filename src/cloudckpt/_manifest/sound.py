"""The checks of a tensor's chunks on whole arrays: for the many that are sound, without a look at each."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cloudckpt._manifest.model import Chunk, StoredTensor
from cloudckpt._manifest.tiling import arrays_fill_once

if TYPE_CHECKING:
    from cloudckpt._manifest.tiling import Integers

_OBJECT_INDEX, _BEGIN, _END = attrgetter("object_index"), attrgetter("begin"), attrgetter("end")


def are_sound(tensor: StoredTensor, itemsize_bytes: int, object_sizes_bytes: Integers) -> bool:
    """Whether the chunks certainly have no problem; which ones they have, `problems_of` finds out one by one.

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
    """Whether each range is as long as its chunk's elements, and aligned to them."""
    num_bytes = lengths.prod(axis=1, dtype=np.int64) * itemsize_bytes
    return _all((ends - begins == num_bytes) & (begins % itemsize_bytes == 0))


def _all(flags: npt.NDArray[np.bool_]) -> bool:
    return bool(flags.all())


def _column(chunks: list[Chunk], of: Callable[[Chunk], int]) -> Integers:
    return np.fromiter(map(of, chunks), dtype=np.int64, count=len(chunks))
