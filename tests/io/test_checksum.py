"""CRC32C of tiles, against a bit-by-bit version and the vectors of RFC 3720."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import slow_crc32c

from cloudckpt.io.checksum import combine_tile_crc32cs, compute_tile_crc32cs
from cloudckpt.stores.base import crc32c_of, num_bytes

RFC_3720_VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
]


@st.composite
def views_of(draw: st.DrawFn) -> list[memoryview]:
    return [memoryview(draw(st.binary(max_size=40))) for _ in range(draw(st.integers(0, 6)))]


@pytest.mark.parametrize(("data", "expected"), RFC_3720_VECTORS)
def test_vectors_of_the_rfc(data: bytes, expected: int) -> None:
    """If this fails, what we call CRC32C is something else, and stores refuse every upload."""
    assert slow_crc32c(data) == expected
    assert crc32c_of([memoryview(data)]) == expected
    assert compute_tile_crc32cs([memoryview(data)], len(data)) == [expected]


@given(views_of(), st.integers(1, 50))
def test_tiles_are_cut_across_views(views: list[memoryview], tile_bytes: int) -> None:
    """If this fails, checksums depend on how tensors lie in memory, and good data is refused when loaded."""
    data = b"".join(views)
    expected = [slow_crc32c(data[begin : begin + tile_bytes]) for begin in range(0, len(data), tile_bytes)]
    assert compute_tile_crc32cs(views, tile_bytes) == expected
    assert combine_tile_crc32cs(expected, tile_bytes=tile_bytes, size_bytes=len(data)) == slow_crc32c(data)
    assert crc32c_of(views) == slow_crc32c(data)
    assert num_bytes(views) == len(data)
