"""What a rank says it wrote, and where a reader finds it. Plain values, which travel between ranks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectReceipt:
    """An object that was written, and what must be found there again."""

    key: str
    size_bytes: int
    tile_crc32cs: tuple[int, ...]


class ItemReceipts(msgspec.Struct, frozen=True, kw_only=True):
    """Where an object's write items came to lie. In columns, all of one length: the coordinator of a job gets millions.

    Items that are alike may share what describes them, and take hardly any room when they are sent.
    """

    stored_in: ObjectReceipt
    tile_bytes: int
    """Of the tiles whose checksums `stored_in` has."""
    offsets: list[tuple[int, ...] | None]
    """As the items' indices have them; None for a Python object."""
    begins: array[int]
    ends: array[int]
    """Of their bytes in the object."""
    dtypes: list[str | None]
    """What was really written; a cached plan may say otherwise."""
    lengths: list[tuple[int, ...]]
    transforms: list[tuple[str, ...]]
    fqns: list[str]
    """The last: pickle has short references to what came before 256 other things."""


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
