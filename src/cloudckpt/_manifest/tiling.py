"""Whether blocks fill an array, each element once."""

from __future__ import annotations

import itertools
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

_MAX_COUNTED_DIMS = 3  # every block costs 2 ** that many steps
_PRIME = 2**127 - 1
_MAX_SORTED_DIMS = 3  # of a million blocks, sorting more corners takes more memory than counting them
_MAX_INT64 = 2**63 - 1


def fills_once(blocks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    """Whether every element of an array of `shape` lies in exactly one of `blocks` (offsets, lengths).

    Takes time and memory proportional to the number of blocks and dimensions: two functions on a grid are equal if
    their mixed differences are, and a block's indicator differs from zero only at the block's corners.
    """
    filled = [(offsets, lengths) for offsets, lengths in blocks if 0 not in lengths]
    if len(filled) == 1:  # nearly always, and large jobs have a million tensors
        return filled[0] == ((0,) * len(shape), shape)
    whole = [] if 0 in shape else [((0,) * len(shape), shape)]
    split = [dim for dim, extent in enumerate(shape) if any(lengths[dim] != extent for _, lengths in filled)]
    if len(split) > _MAX_COUNTED_DIMS:
        return _is_same_at_random(filled, whole, split)
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, group in ((1, filled), (-1, whole)):
        for offsets, lengths in group:
            ends = [((offsets[dim], sign), (offsets[dim] + lengths[dim], -sign)) for dim in split]
            for corner in itertools.product(*ends):
                odd = sum(1 for _, direction in corner if direction != sign) % 2
                corners[tuple(position for position, _ in corner)] += -sign if odd else sign
    return not any(corners.values())


def _is_same_at_random(
    filled: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    whole: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    split: Sequence[int],
) -> bool:
    """Whether the corners cancel out, without making each: they are the terms of a product, one factor a dimension.

    Each position stands for a random number, so the sums are two polynomials at a random point. Where these differ, the
    chance that their values do not is below 2 ** -110 for every document (Schwartz, Zippel, 1979), for nobody can know
    the numbers beforehand.
    """
    drawn: list[dict[int, int]] = [{} for _ in split]

    def number(at: int, position: int) -> int:
        numbers = drawn[at]
        if position not in numbers:
            numbers[position] = secrets.randbelow(_PRIME)
        return numbers[position]

    def total(blocks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
        result = 0
        for offsets, lengths in blocks:
            term = 1
            for at, dim in enumerate(split):
                begin, end = offsets[dim], offsets[dim] + lengths[dim]
                term = term * (number(at, begin) - number(at, end)) % _PRIME
            result += term
        return result % _PRIME

    return total(filled) == total(whole)


def arrays_fill_once(offsets: Integers, lengths: Integers, shape: Sequence[int]) -> bool:
    """`fills_once` for many blocks, one per row of ``[num_blocks, num_dims]``, all of which lie inside of `shape`.

    The same corners are counted, by sorting. Where they are too many or too far apart for that, `fills_once` decides.
    """
    import numpy as np  # noqa: PLC0415  # what lists checkpoints alone starts sooner without

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
