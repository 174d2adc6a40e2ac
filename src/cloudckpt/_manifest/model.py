"""The manifest's values, as they stand in its JSON (``docs/format.md``). Byte ranges are half-open."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

FORMAT_NAME = "cloudckpt"
FORMAT_MAJOR = 1
FORMAT_MINOR = 1


CommitTime = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class StoredObject(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One data object: its key under the checkpoint, its size, and the CRC32C of each of its tiles."""

    key: str
    size: int
    crc32c: str
    """Base64 of the tiles' CRC32C values, each as four little-endian bytes."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored block of a tensor: where it lies in the tensor, and where its bytes lie."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    object_index: int
    begin: int
    end: int


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One tensor of the state dict: its element type, its global shape, and the chunks that cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]
    requires_grad: bool = False
    transforms: list[str] = []
    """Descriptors of the stream transforms applied to each chunk's bytes, outermost first."""


class StoredValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One Python object of the state dict: the byte range that holds its ``torch.save`` bytes."""

    object_index: int
    begin: int
    end: int
    transforms: list[str] = []


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole checkpoint."""

    format: str
    version: tuple[int, int]
    attempt: str
    created_at: str
    committed_at_ns: CommitTime | None = None
    """Nanoseconds since 1970 in UTC, by which checkpoints are ordered; absent before version 1.1."""
    world_size: int
    software: dict[str, str]
    tile_bytes: int
    objects: list[StoredObject]
    tensors: dict[str, StoredTensor]
    values: dict[str, StoredValue]
    nesting: dict[str, list[str | int]] | None = None
    """The path of each entry in the nested state dict; absent where it was not flattened."""
    typed_nesting: dict[str, list[str | int | list[Any]]] | None = None
    """The path of each entry that stands under a key which is not a string; such keys stand in lists of their own."""
    empty_mappings: list[list[str | int | list[Any]]] = []
    """The paths of mappings that hold no entry, as in `typed_nesting`."""
    save_id: str | None = None
    metadata: dict[str, Any] = {}
    """The user's own."""
