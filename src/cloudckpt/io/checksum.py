"""Compute the CRC32C (RFC 3720, appendix B.4) of tiles and objects; `io.download` compares those of what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from awscrt import checksums

from cloudckpt.options import MIB
from cloudckpt.stores.base import Views, batches, join_views

# A copy is faster than the checksum of memory that is in no cache, and each call gives up the interpreter's lock.
_JOINED_BYTES = MIB // 2
_crc32c: Any = checksums.crc32c  # takes any buffer, though it says bytes


def compute_crc32c(view: memoryview, value: int = 0) -> int:
    """CRC32C of bytes that follow those with the CRC32C `value`."""
    return _crc32c(view, value)  # type: ignore[no-any-return]  # it returns an int


def compute_tile_crc32cs(views: Views, tile_bytes: int) -> list[int]:
    """CRC32C of each tile of the views' bytes, taken together; the last tile may be shorter."""
    values: list[int] = []
    for tile in batches(views, max_bytes=tile_bytes, max_views=len(views)):
        value, step_bytes = 0, tile_bytes if len(tile) == 1 else _JOINED_BYTES
        for pieces in batches(tile, max_bytes=step_bytes, max_views=len(tile)):
            value = _crc32c(join_views(pieces), value)
        values.append(value)
    return values


def combine_tile_crc32cs(values: Sequence[int], *, tile_bytes: int, size_bytes: int) -> int:
    """CRC32C of `size_bytes` bytes whose tiles have `values`."""
    whole = 0
    for index, value in enumerate(values):
        num_bytes = min(tile_bytes, size_bytes - index * tile_bytes)
        whole = checksums.combine_crc32c(whole, value, num_bytes) if index else value
    return whole
