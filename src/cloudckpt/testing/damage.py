"""Functions that damage stored objects through any `Store`: flip bits, truncate, remove.

A reader has to detect each of these. They replace or delete objects under the keys of a checkpoint, which cloudckpt
itself never does.
"""

from __future__ import annotations

from cloudckpt.stores.base import Store, crc32c_of

__all__ = ["flip_bit", "overwrite", "remove", "truncate"]

_NO_BOUND = 1 << 62


def flip_bit(store: Store, key: str, *, bit: int) -> None:
    """Flip one bit of an object.

    Args:
        store: Store of the object.
        key: Key of the object.
        bit: Position of the bit: bit ``bit % 8`` of byte ``bit // 8``.

    """
    body = bytearray(_read(store, key))
    body[bit // 8] ^= 1 << (bit % 8)
    overwrite(store, key, bytes(body))


def truncate(store: Store, key: str, *, size_bytes: int) -> None:
    """Keep only the beginning of an object.

    Args:
        store: Store of the object.
        key: Key of the object.
        size_bytes: Number of bytes to keep: ``[0, size_bytes)``.

    Raises:
        ValueError: The object has no more bytes.

    """
    body = _read(store, key)
    if size_bytes >= len(body):
        raise ValueError(f"{store.url(key)} has only {len(body)} bytes. Give a size_bytes below that, not {size_bytes}")
    overwrite(store, key, body[:size_bytes])


def remove(store: Store, key: str) -> None:
    """Delete an object.

    Args:
        store: Store of the object.
        key: Key of the object.

    Raises:
        ObjectNotFoundError: There is no such object.

    """
    store.head(key)
    store.delete([key])


def overwrite(store: Store, key: str, body: bytes) -> None:
    """Replace an object, and send the correct checksum of its new content.

    Args:
        store: Store of the object.
        key: Key of the object.
        body: The new content.

    """
    views = [memoryview(body)] if body else []
    store.put(key, views, crc32c=crc32c_of(views))


def _read(store: Store, key: str) -> bytes:
    return store.read(key, max_bytes=_NO_BOUND)
