"""Where the segments of a snapshot lie in the blocks of memory that there are. Everything is in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LINE_BYTES = 64
"""Of a cache line: what torch aligns its memory to."""
_PAGE_BYTES = 4096
_LARGE_BYTES = 64 * 1024  # from here on, a segment begins on a page
_BLOCK_BYTES = 2 * 1024 * 1024  # blocks are whole numbers of huge pages
_GROWTH = 8  # a later block has at least this share of the bytes that there were


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Of each segment, its block and where it begins there; the last block may be one that has yet to be made."""

    blocks: list[int]
    offsets: list[int]
    new_block_bytes: int
    """0 where all segments fit into the blocks that there are."""


def place(segments: Iterable[tuple[int, int]], capacities: Sequence[int]) -> Placing:
    """Places for segments of ``(address, num_bytes)`` in blocks of these capacities.

    No two overlap. Within a block they lie in their order, and each as far from a multiple of 64 as its address does,
    so that what lies in it keeps its alignment.
    """
    blocks: list[int] = []
    offsets: list[int] = []
    filled = [0] * (len(capacities) + 1)
    current, new = 0, len(capacities)
    room = capacities[0] if capacities else 0
    for address, num_bytes in segments:
        beyond = address % LINE_BYTES
        step = _PAGE_BYTES if num_bytes >= _LARGE_BYTES else LINE_BYTES
        offset = -(-filled[current] // step) * step + beyond
        if current < new and offset + num_bytes > room:
            for current, capacity in enumerate(capacities):  # the one where it fits is the next current
                offset = -(-filled[current] // step) * step + beyond
                if offset + num_bytes <= capacity:
                    break
            else:
                current = new
                offset = -(-filled[new] // step) * step + beyond
            room = capacities[current] if current < new else 0
        blocks.append(current)
        offsets.append(offset)
        filled[current] = offset + num_bytes
        if current == new:
            current, room = 0, capacities[0] if capacities else 0
    missing_bytes = max(filled[new], sum(capacities) // _GROWTH) if filled[new] else 0
    return Placing(blocks=blocks, offsets=offsets, new_block_bytes=-(-missing_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
