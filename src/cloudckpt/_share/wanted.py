"""Which bytes a rank will read, to whole tiles, from what its plan asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES
from cloudckpt._manifest.receipts import ItemLocation
from cloudckpt._plan.boxes import Box, runs_of
from cloudckpt._share.plan import Range, merged


def wanted_ranges(
    items: Iterable[tuple[ItemLocation, Sequence[int], Sequence[int]]],
    *,
    object_sizes_bytes: Mapping[int, int],
    tile_bytes: int,
    max_gap_bytes: int,
) -> list[Range]:
    """Merged ranges of whole tiles that hold all `items`: each the offsets and lengths of a block of a stored chunk."""
    found: list[Range] = []
    for location, offsets, lengths in items:
        begin = location.begin
        if location.dtype is None or location.transforms or tuple(lengths) == location.lengths:
            found.append((location.object_index, begin, location.end))
            continue
        size = ITEMSIZE_BYTES[location.dtype]
        box = Box(tuple(offsets), tuple(lengths))
        found += [
            (location.object_index, begin + low * size, begin + high * size)
            for low, high in runs_of(location.lengths, box, max_gap=max_gap_bytes // size)
        ]
    return merged(
        (
            object_index,
            begin // tile_bytes * tile_bytes,
            min(-(-end // tile_bytes) * tile_bytes, object_sizes_bytes[object_index]),
        )
        for object_index, begin, end in found
        if begin < end
    )
