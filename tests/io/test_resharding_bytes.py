"""How much a rank reads of the shards of another layout: rows, columns, both, and stripes of either."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.io.boxes import Box, find_runs
from cloudckpt.io.reads import WantedRange, plan_reads

ELEMENT_BYTES = 4
MAX_OVER_READ = 0.1
Slices = tuple[slice, ...]


def wants_of(shape: Sequence[int], blocks: Sequence[Slices], *, max_gap_bytes: int) -> list[WantedRange]:
    wants = []
    for consumer, block in enumerate(blocks):
        box = Box(tuple(part.start for part in block), tuple(part.stop - part.start for part in block))
        wants += [
            WantedRange(consumer, 0, begin * ELEMENT_BYTES, end * ELEMENT_BYTES)
            for begin, end in find_runs(shape, box, max_gap=max_gap_bytes // ELEMENT_BYTES)
        ]
    return wants


def bytes_wanted(shape: Sequence[int], blocks: Sequence[Slices]) -> np.ndarray:
    """One flag for each byte of the stored shard, by indexing an array of its shape."""
    flags = np.zeros(tuple(shape), dtype=bool)
    for block in blocks:
        flags[block] = True
    return np.repeat(flags.reshape(-1), ELEMENT_BYTES)


def parts(extent: int, num_ranks: int) -> list[slice]:
    """Even parts as torch cuts them: the last ones may be smaller, or empty."""
    step = -(-extent // num_ranks)
    return [slice(min(rank * step, extent), min((rank + 1) * step, extent)) for rank in range(num_ranks)]


def stripes(extent: int, num_ranks: int, num_turns: int) -> list[list[slice]]:
    """What each rank gets where a dimension was cut `num_turns` times first and over the ranks then."""
    return [
        [
            slice(outer.start + inner.start, outer.start + inner.stop)
            for outer in parts(extent, num_turns)
            for inner in [parts(outer.stop - outer.start, num_ranks)[rank]]
        ]
        for rank in range(num_ranks)
    ]


@given(
    shape=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    mesh=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    num_turns=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    tile_bytes=st.sampled_from([4, 64, 256]),
    max_gap_bytes=st.sampled_from([0, 16, 200]),
)
def test_every_layout_gets_its_bytes_and_little_else(
    shape: tuple[int, int], mesh: tuple[int, int], num_turns: tuple[int, int], tile_bytes: int, max_gap_bytes: int
) -> None:
    """If this fails, a rank of some mesh misses bytes of its shard, or reads more than it may (G8)."""
    size_bytes = shape[0] * shape[1] * ELEMENT_BYTES
    of_rows, of_columns = (stripes(shape[dim], mesh[dim], num_turns[dim]) for dim in (0, 1))
    for rows, columns in itertools.product(of_rows, of_columns):
        blocks = list(itertools.product(rows, columns))
        wanted = bytes_wanted(shape, blocks)
        requests = plan_reads(
            wants_of(shape, blocks, max_gap_bytes=max_gap_bytes),
            object_sizes_bytes={0: size_bytes},
            tile_bytes=tile_bytes,
            request_bytes=512,
            max_gap_bytes=max_gap_bytes,
            max_over_read=MAX_OVER_READ,
        )
        read = np.zeros(size_bytes, dtype=int)
        for request in requests:
            read[request.begin : request.end] += 1
        assert read.max(initial=0) <= 1
        assert read[wanted].all()
        assert read.sum() <= _most_bytes(wanted, tile_bytes, max_gap_bytes)


def _most_bytes(wanted: np.ndarray, tile_bytes: int, max_gap_bytes: int) -> float:
    """What is wanted and a share more, the tiles at the ends of each run, and the gaps too small to matter."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], wanted.astype(np.int8), [0]])))
    begins, ends = edges[::2], edges[1::2]
    gaps = begins[1:] - ends[:-1]
    small = gaps <= max_gap_bytes + 2 * (tile_bytes - 1)  # which whole tiles make smaller at both ends
    num_wanted = int(wanted.sum()) + int(gaps[small].sum())
    return (1 + MAX_OVER_READ) * num_wanted + 2 * (tile_bytes - 1) * len(begins)
