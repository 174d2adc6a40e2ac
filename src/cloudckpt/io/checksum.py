"""Compute the CRC32C (RFC 3720, appendix B.4) of tiles and objects; `io.download` compares those of what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from awscrt import checksums

from cloudckpt.stores.base import Views

_crc32c: Any = checksums.crc32c  # takes any buffer, though it says bytes


def compute_tile_crc32cs(views: Views, tile_bytes: int) -> list[int]:
    """CRC32C of each tile of the views' bytes, taken together; the last tile may be shorter."""
    values: list[int] = []
    value, filled_bytes = 0, 0
    for view in views:
        if len(view) < tile_bytes - filled_bytes:  # as nearly all are where tensors are small
            value = _crc32c(view, value)
            filled_bytes += len(view)
            continue
        position = 0
        while position < len(view):
            step = min(tile_bytes - filled_bytes, len(view) - position)
            value = _crc32c(view[position : position + step], value)
            position += step
            filled_bytes += step
            if filled_bytes == tile_bytes:
                values.append(value)
                value, filled_bytes = 0, 0
    if filled_bytes:
        values.append(value)
    return values


def combine_tile_crc32cs(values: Sequence[int], *, tile_bytes: int, size_bytes: int) -> int:
    """CRC32C of `size_bytes` bytes whose tiles have `values`."""
    whole = 0
    for index, value in enumerate(values):
        num_bytes = min(tile_bytes, size_bytes - index * tile_bytes)
        whole = checksums.combine_crc32c(whole, value, num_bytes) if index else value
    return whole
