"""Bits that rot, objects that shrink, vanish or change places: done to a store at rest, through any `Store`.

A reader has to find all of it out. Each of these puts or deletes objects under the very keys of a checkpoint, which
cloudckpt itself never does.
"""

from __future__ import annotations

from cloudckpt.stores._body import crc32c_of
from cloudckpt.stores.base import Store

__all__ = ["flip_bit", "overwrite", "remove", "swap", "truncate"]

_NO_BOUND = 1 << 62


def flip_bit(store: Store, key: str, *, bit: int) -> None:
    """The object at `key` with one bit the other way round: ``bit % 8`` of byte ``bit // 8``."""
    body = bytearray(_read(store, key))
    body[bit // 8] ^= 1 << (bit % 8)
    overwrite(store, key, bytes(body))


def truncate(store: Store, key: str, *, size_bytes: int) -> None:
    """The first `size_bytes` of the object at `key`; raises `ValueError` where it has no more than that."""
    body = _read(store, key)
    if size_bytes >= len(body):
        raise ValueError(f"{store.url(key)} has {len(body)} bytes, so that {size_bytes} of them are not fewer.")
    overwrite(store, key, body[:size_bytes])


def remove(store: Store, key: str) -> None:
    """Nothing at `key`; raises `ObjectNotFoundError` where nothing was."""
    store.head(key)
    store.delete([key])


def swap(store: Store, key: str, other_key: str) -> None:
    """Each of the two objects under the other's key."""
    body, other = _read(store, key), _read(store, other_key)
    overwrite(store, key, other)
    overwrite(store, other_key, body)


def overwrite(store: Store, key: str, body: bytes) -> None:
    """`body` at `key`, with the checksum that it has."""
    views = [memoryview(body)] if body else []
    store.put(key, views, crc32c=crc32c_of(views))


def _read(store: Store, key: str) -> bytes:
    return store.read(key, max_bytes=_NO_BOUND)
