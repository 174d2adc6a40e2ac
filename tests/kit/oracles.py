"""Slow and obvious versions of what cloudckpt does fast. They share no code with it."""

from __future__ import annotations

_CASTAGNOLI_REVERSED = 0x82F63B78


def slow_crc32c(data: bytes) -> int:
    """CRC32C one bit at a time (RFC 3720, appendix B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (_CASTAGNOLI_REVERSED if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def signed(body: bytes) -> bytes:
    """The JSON object `body` as a manifest with a right checksum, as docs/format.md describes it."""
    assert body.endswith(b"}")
    return body[:-1] + b',"crc32c":"%08x"}' % slow_crc32c(body[:-1])
