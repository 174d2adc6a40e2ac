"""The parts of a manifest, with the members of its JSON (``docs/format.md``), and how chunks are found.

Byte ranges are half-open.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from cloudckpt.errors import UnsupportedValueError

FORMAT_NAME = "cloudckpt"
FORMAT_MAJOR = 1
FORMAT_MINOR = 4
REFERENCES_VERSION = (2, 0)
"""The version of a manifest that refers to objects of other checkpoints: an older reader must refuse it."""
JSON_VALUE = "value.json/1"
"""The last transform of a value that is stored as tagged JSON. All other values are pickles."""
PUBLICATION_KEY = "publication"
"""The key in `Manifest.metadata` that describes a published version (``docs/format.md``)."""


def find_published_numbers(metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the number of a published version and that of its anchor, from `Manifest.metadata`; None for others."""
    match metadata.get(PUBLICATION_KEY):
        case {"version": int(version), "anchor": int(anchor)}:
            return version, anchor
    return None


def refuse_differences(manifest: Manifest, *, uri: str) -> None:
    """Raise `UnsupportedValueError` if the checkpoint at `uri` is a published version without the whole tensors."""
    version, anchor = find_published_numbers(manifest.metadata) or (0, 0)
    if version != anchor:
        root = uri.rpartition("/")[0]
        raise UnsupportedValueError(
            f"{uri} is version {version} of a publication, and has differences alone. cloudckpt.pull({root!r}, "
            f"model=model, version={version}) fills a model, and with a folder in place of the model it writes one. Or "
            f"take the anchor, {root}/version-{anchor}, which has whole tensors",
            uri=uri,
        )


CommitTime = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
ITEMSIZE_BYTES: dict[str, int] = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("complex64", "float64", "int64", "uint64"), 8),
    **dict.fromkeys(("bcomplex32", "complex32", "float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(
        (
            "bool", "int8", "uint8", "bits8", "bits1x8", "bits2x4", "bits4x2",
            "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
            "float4_e2m1fn_x2",
            "int1", "int2", "int3", "int4", "int5", "int6", "int7",
            "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
        ),
        1,
    ),
}  # fmt: skip
"""Bytes of one element of each dtype that a checkpoint can hold."""
# https://github.com/huggingface/safetensors#format. Only tags that every published reader knows. The newer ones
# (complex, float8_e8m0, float4, …) would make an object unreadable for older libraries, so those dtypes are bytes.
SAFETENSORS_TAG: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Tag of each dtype in a safetensors header; a dtype that is missing here is stored as ``U8``."""


class StoredObject(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One data object: its key under the checkpoint, its size, and the CRC32C of each of its tiles."""

    key: str
    size: int
    crc32c: str
    """Base64 of the tiles' CRC32C values, each as four little-endian bytes."""
    folder: str = ""
    """The folder beside the checkpoint's own that holds the object; empty for the checkpoint's own."""

    @property
    def path(self) -> str:
        """The path of the object relative to the checkpoint's folder."""
        return path_of(self.key, self.folder)


def path_of(key: str, folder: str) -> str:
    """Return the path of an object relative to the checkpoint's folder."""
    return f"../{folder}/{key}" if folder else key


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a tensor that one rank saved, and the range of its bytes in an object."""

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
    xxh3_128s: list[str] = []
    """The XXH3-128 of each chunk's bytes, in hexadecimal; empty if the save kept none."""


class StoredValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One Python object of the state dict: the byte range that holds its tagged JSON, or its ``torch.save`` bytes."""

    object_index: int
    begin: int
    end: int
    transforms: list[str] = []
    """Descriptors of stream transforms, outermost first. The last is `JSON_VALUE` for tagged JSON."""

    @property
    def is_json(self) -> bool:
        """True for tagged JSON, False for a pickle."""
        return self.transforms[-1:] == [JSON_VALUE]


class StoredWrapper(msgspec.Struct, frozen=True, kw_only=True, rename={"kind": "class"}):
    """A tensor that consists of others, which are stored as tensors under ``<wrapper's name>.<part's name>``."""

    kind: str
    """The full name of the wrapper's class."""
    tensors: list[str]
    """The names of the parts."""
    context: Any
    """The rest of the wrapper, as JSON."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class StoredTuple(msgspec.Struct, frozen=True, array_like=True):
    """A tuple whose entries are stored apart."""

    path: list[str | int | list[Any]]
    """The path, in the form of `Manifest.typed_nesting`."""
    kind: str | None
    """The full name of its class; None for a plain tuple."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole checkpoint."""

    # `commit/entries.py` parses the first five from the first bytes of a manifest, so their order is fixed.
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
    """The path of each entry in the nested state dict; absent if it was not flattened."""
    typed_nesting: dict[str, list[str | int | list[Any]]] | None = None
    """The path of each entry under a key that is no string; each such key is in a list of its own."""
    empty_mappings: list[list[str | int | list[Any]]] = []
    """The paths of mappings that hold no entry, as in `typed_nesting`."""
    tuples: list[StoredTuple] = []
    wrappers: dict[str, StoredWrapper] = {}
    save_id: str | None = None
    is_referable: bool = False
    """True if checkpoints beside this one may refer to its objects, so that an overwrite looks for their claims."""
    metadata: dict[str, Any] = {}
    """``Options.metadata`` of the save."""

    @property
    def has_checksums(self) -> bool:
        """True if a reader can compare bytes with the checksums of the save."""
        return True

    @property
    def own_keys(self) -> frozenset[str]:
        """The keys of the objects in the checkpoint's own folder."""
        return frozenset(stored.key for stored in self.objects if not stored.folder)

    @property
    def own_sizes_bytes(self) -> list[int]:
        """The sizes of the objects in the checkpoint's own folder."""
        return [stored.size for stored in self.objects if not stored.folder]

    def is_copy_of(self, other: Manifest) -> bool:
        """Return True if both are of one save: their objects have the same content, under different keys."""
        if len(self.objects) != len(other.objects):
            return False
        objects = [
            msgspec.structs.replace(stored, key=copied.key, folder=copied.folder)
            for stored, copied in zip(self.objects, other.objects, strict=True)
        ]
        return other == msgspec.structs.replace(
            self, version=other.version, attempt=other.attempt, created_at=other.created_at, objects=objects
        )


class FilesManifest(Manifest, frozen=True, kw_only=True):
    """Safetensors files of any program, described as a checkpoint. No store holds this manifest."""

    write_ids: tuple[str, ...]
    """`ObjectInfo.write_id` of each object when its header was read."""
    unknown: dict[str, str] = {}
    """The tags of dtypes that torch does not have, by the tensors, which are described as their bytes."""

    @property
    def has_checksums(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """An object that holds a part of the checkpoint: its key, its size and its checksums."""

    key: str
    size_bytes: int
    tile_bytes: int
    """The length of a tile."""
    tile_crc32cs: tuple[int, ...]
    folder: str = ""
    """The folder beside the checkpoint's own that holds the object; empty for the checkpoint's own."""

    @property
    def path(self) -> str:
        """The path of the object relative to the checkpoint's folder."""
        return path_of(self.key, self.folder)


class ItemReceipts(msgspec.Struct, frozen=True, kw_only=True):
    """The byte ranges of an object's write items, in columns of one length: the coordinator of a job gets millions.

    Items that are alike share their values, and then take hardly any room when they are pickled.
    """

    stored_in: ObjectRef
    offsets: list[tuple[int, ...] | None]
    """The offsets in the items' indices; None for a Python object."""
    begins: array[int]
    ends: array[int]
    """The ends of the items' bytes in the object."""
    dtypes: list[str | None]
    """The dtypes that were written; a cached plan may have others."""
    lengths: list[tuple[int, ...]]
    transforms: list[tuple[str, ...]]
    hashes: list[bytes] = []
    """The XXH3-128 of each item's bytes, empty for an item without one; an empty list if the save keeps none."""
    fqns: list[str]
    """The last field: pickle needs one byte to refer to one of the first 256 objects, so shared ones come before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRange:
    """Bytes ``[begin, end)`` of an object, for the ``storage_data`` of a saved checkpoint's metadata."""

    key: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLocation:
    """The byte range and the form in which an item is stored. `is_json` is True for a value in tagged JSON."""

    object_index: int
    begin: int
    end: int
    dtype: str | None
    lengths: tuple[int, ...]
    transforms: tuple[str, ...]
    is_json: bool = False


def find_chunk(chunks: Sequence[Chunk], offsets: tuple[int, ...]) -> int | None:
    """Return the position of the non-empty chunk at `offsets`, by binary search.

    None does not mean that there is none: the chunks may be in any order.
    """
    position = bisect_left(chunks, offsets, key=lambda chunk: chunk.offsets)
    while position < len(chunks) and chunks[position].offsets == offsets:
        if 0 not in chunks[position].lengths:
            return position
        position += 1
    return None


def find_overlapping_chunks(
    chunks: Sequence[Chunk], offsets: Sequence[int], lengths: Sequence[int]
) -> list[int] | None:
    """Return the positions of the chunks that hold any of the box at `offsets`; None if each must be looked at.

    The binary search finds all of them if they are in order, as ranks write them. In any other order it may miss some.
    The chunks of a valid manifest hold each element once, so the count of elements then is too small, and the result
    None.
    """
    if not chunks or not offsets or 0 in lengths:
        return None
    first, last = chunks[0].offsets, chunks[-1].offsets
    dim = next((dim for dim in range(len(offsets)) if first[dim] != last[dim]), 0)

    def begin(chunk: Chunk) -> int:
        return chunk.offsets[dim]

    end = bisect_left(chunks, offsets[dim] + lengths[dim], key=begin)
    at_or_before = bisect_right(chunks, offsets[dim], 0, end, key=begin)
    if not at_or_before:
        return None
    positions: list[int] = []
    num_held = 0
    for position in range(bisect_left(chunks, begin(chunks[at_or_before - 1]), 0, end, key=begin), end):
        shared = _num_shared(chunks[position], offsets, lengths)
        if shared:
            positions.append(position)
            num_held += shared
    return positions if num_held == math.prod(lengths) else None


def _num_shared(chunk: Chunk, offsets: Sequence[int], lengths: Sequence[int]) -> int:
    return math.prod(
        max(0, min(offset + length, begin + extent) - max(offset, begin))
        for offset, length, begin, extent in zip(chunk.offsets, chunk.lengths, offsets, lengths, strict=True)
    )


def locate_chunk(tensor: StoredTensor, chunk: Chunk) -> ItemLocation:
    """Return the location of a chunk of `tensor`."""
    return ItemLocation(
        object_index=chunk.object_index,
        begin=chunk.begin,
        end=chunk.end,
        dtype=tensor.dtype,
        lengths=chunk.lengths,
        transforms=tuple(tensor.transforms),
    )


def locate_value(value: StoredValue) -> ItemLocation:
    """Return the location of a value."""
    return ItemLocation(
        object_index=value.object_index,
        begin=value.begin,
        end=value.end,
        dtype=None,
        lengths=(),
        transforms=tuple(value.transforms[:-1] if value.is_json else value.transforms),
        is_json=value.is_json,
    )
