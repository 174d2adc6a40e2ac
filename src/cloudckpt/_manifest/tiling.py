"""Whether blocks fill an array, each element once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

_MAX_SPLIT_DIMS = 8  # every block costs 2 ** that many steps; no device mesh has as many dimensions


def fills_once(blocks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    """Whether every element of an array of `shape` lies in exactly one of `blocks` (offsets, lengths).

    Takes time proportional to the number of blocks: two functions on a grid are equal if their mixed differences are,
    and a block's indicator differs from zero only at the block's corners. Blocks that split the array along more than
    eight dimensions are not recognised.
    """
    filled = [(offsets, lengths) for offsets, lengths in blocks if 0 not in lengths]
    if len(filled) == 1:  # nearly always, and large jobs have a million tensors
        return filled[0] == ((0,) * len(shape), shape)
    whole = [] if 0 in shape else [((0,) * len(shape), shape)]
    split = [dim for dim, extent in enumerate(shape) if any(lengths[dim] != extent for _, lengths in filled)]
    if len(split) > _MAX_SPLIT_DIMS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, group in ((1, filled), (-1, whole)):
        for offsets, lengths in group:
            ends = [((offsets[dim], sign), (offsets[dim] + lengths[dim], -sign)) for dim in split]
            for corner in itertools.product(*ends):
                odd = sum(1 for _, direction in corner if direction != sign) % 2
                corners[tuple(position for position, _ in corner)] += -sign if odd else sign
    return not any(corners.values())
