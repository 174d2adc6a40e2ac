"""What a rank says it wrote, and where a reader finds it. Plain values, which travel between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectReceipt:
    """An object that was written, and what must be found there again."""

    key: str
    size_bytes: int
    tile_crc32cs: tuple[int, ...]


class ItemReceipt(msgspec.Struct, frozen=True, gc=False):  # in torch's gathering, a quarter of a dataclass's time
    """Where one write item came to lie. All items of one object share one `ObjectReceipt`."""

    stored_in: ObjectReceipt
    begin: int
    end: int
    dtype: str | None
    """What was really written; a cached plan may say otherwise."""
    lengths: tuple[int, ...]
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRange:
    """Bytes ``[begin, end)`` of an object, for the ``storage_data`` of a saved checkpoint's metadata."""

    key: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLocation:
    """Where a reader finds one item."""

    object_index: int
    begin: int
    end: int
    dtype: str | None
    lengths: tuple[int, ...]
    transforms: tuple[str, ...]
