"""Into which blocks two checkpoints are cut to be compared. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from cloudckpt._manifest.model import StoredTensor
from cloudckpt._plan.boxes import Box
from cloudckpt.options import MIB

BATCH_BYTES = 64 * MIB


class Sized(Protocol):
    """What takes memory."""

    @property
    def num_bytes(self) -> int: ...


_S = TypeVar("_S", bound=Sized)


def boxes_for(first: StoredTensor, second: StoredTensor, itemsize_bytes: int) -> Iterable[Box]:
    """The finer of the two ways in which the tensor is cut, cut further where its blocks are large."""
    if 0 in first.shape:
        return
    chunks = max(first.chunks, second.chunks, key=len)
    is_whole = bool(first.transforms or second.transforms)  # such chunks are read whole, however little is wanted
    for chunk in chunks:
        if 0 in chunk.lengths:
            continue
        box = Box(chunk.offsets, chunk.lengths)
        yield from [box] if is_whole else _cut(box, max(BATCH_BYTES // itemsize_bytes, 1))


def _cut(box: Box, most_elements: int) -> Iterator[Box]:
    """Into boxes of at most so many elements, along the leading dimensions."""
    if math.prod(box.lengths) <= most_elements:
        yield box
        return
    dim = next(dim for dim in range(len(box.lengths)) if math.prod(box.lengths[dim + 1 :]) <= most_elements)
    step = max(most_elements // math.prod(box.lengths[dim + 1 :]), 1)
    leading = [range(offset, offset + length) for offset, length in zip(box.offsets[:dim], box.lengths, strict=False)]
    for before in itertools.product(*leading):
        for begin in range(0, box.lengths[dim], step):
            length = min(step, box.lengths[dim] - begin)
            yield Box(
                (*before, box.offsets[dim] + begin, *box.offsets[dim + 1 :]),
                (*(1 for _ in before), length, *box.lengths[dim + 1 :]),
            )


def batches(wanted: Iterable[_S]) -> Iterator[list[_S]]:
    batch: list[_S] = []
    num_bytes = 0
    for one in wanted:
        if batch and num_bytes + one.num_bytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(one)
        num_bytes += one.num_bytes
    if batch:
        yield batch
