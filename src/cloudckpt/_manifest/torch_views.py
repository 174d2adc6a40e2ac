"""A manifest as torch's planners and this package's reader see it: objects of theirs are made only when asked for.

A load on one rank asks for a few of a million.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping, Sequence
from typing import Any, overload

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt._manifest.lookup import meeting, position_of
from cloudckpt._manifest.model import Chunk, Manifest, StoredTensor
from cloudckpt._manifest.receipts import ItemLocation
from cloudckpt._manifest.torch_dtypes import dtype_of

# Made on import, by one thread: see `codec`.
_CHUNKS_DECODER = msgspec.json.Decoder(list[Chunk])
_MANIFEST_DECODER = msgspec.json.Decoder(Manifest)


class StoredChunks(Sequence[ChunkStorageMetadata]):
    """The chunks of one tensor, in place of torch's list of them. Equal to a list of the same; can be pickled."""

    __slots__ = ("_chunks",)

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(index, slice):
            return [_torch_chunk(chunk) for chunk in self._chunks[index]]
        return _torch_chunk(self._chunks[index])

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        return map(_torch_chunk, self._chunks)

    def meeting(self, box: ChunkStorageMetadata) -> list[ChunkStorageMetadata] | None:
        """Those that hold any of `box`; None where only looking at each can tell."""
        found = meeting(self._chunks, tuple(box.offsets), tuple(box.sizes))
        return None if found is None else [_torch_chunk(self._chunks[position]) for position in found]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, StoredChunks)):
            return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _chunks_from, (msgspec.json.encode(self._chunks),)


class StoredEntries(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """What is stored, by FQN, in place of torch's dict of it. Every look makes what it returns anew."""

    def __init__(self, manifest: Manifest) -> None:
        self.tensors = manifest.tensors
        self._values = manifest.values
        self._names = dict.fromkeys([*manifest.tensors, *manifest.values])

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        tensor = self.tensors.get(fqn)
        if tensor is not None:
            return torch_entry(tensor)
        self._values[fqn]
        return BytesStorageMetadata()

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._names

    def holds_value(self, fqn: str) -> bool:
        """Whether the entry is a Python value."""
        return fqn in self._values

    def keys(self) -> KeysView[str]:
        return self._names.keys()  # of which sets are made and compared without Python code

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ItemLocations(Mapping[MetadataIndex, ItemLocation]):
    """Where each item of a valid manifest lies. Can be pickled."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._positions: dict[str, dict[tuple[int, ...], int]] = {}

    def __getitem__(self, index: MetadataIndex) -> ItemLocation:
        tensor = self._manifest.tensors.get(index.fqn)
        if tensor is not None:
            if index.offset is None:
                raise KeyError(index)
            return location_of(tensor, tensor.chunks[self._position(tensor, index)])
        value = self._manifest.values.get(index.fqn)
        if value is None or index.offset is not None:
            raise KeyError(index)
        return ItemLocation(
            object_index=value.object_index,
            begin=value.begin,
            end=value.end,
            dtype=None,
            lengths=(),
            transforms=tuple(value.transforms),
        )

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn, tensor in self._manifest.tensors.items():
            seen = dict.fromkeys(chunk.offsets for chunk in tensor.chunks)
            yield from (MetadataIndex(fqn, offsets) for offsets in seen)
        yield from map(MetadataIndex, self._manifest.values)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _locations_from, (msgspec.json.encode(self._manifest),)

    def _position(self, tensor: StoredTensor, index: MetadataIndex) -> int:
        offsets = tuple(index.offset or ())
        hint = index.index
        if hint is not None and 0 <= hint < len(tensor.chunks):
            hinted = tensor.chunks[hint]
            if hinted.offsets == offsets and 0 not in hinted.lengths:
                return hint
        position = position_of(tensor.chunks, offsets)
        if position is not None:
            return position
        if index.fqn not in self._positions:
            positions = self._positions[index.fqn] = {}
            for position, chunk in enumerate(tensor.chunks):
                # An empty chunk may lie where another begins, and it is never the one that is meant.
                if chunk.offsets not in positions or 0 not in chunk.lengths:
                    positions[chunk.offsets] = position
        try:
            return self._positions[index.fqn][offsets]
        except KeyError:
            raise KeyError(index) from None


def torch_entry(tensor: StoredTensor) -> TensorStorageMetadata:
    """Torch's description of one tensor, without how it lay in the memory of a rank: its chunks lie row by row."""
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(tensor.dtype), requires_grad=tensor.requires_grad),
        size=torch.Size(tensor.shape),
        chunks=StoredChunks(tensor.chunks),  # type: ignore[arg-type]  # torch reads it as a sequence
    )


def _torch_chunk(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.lengths))


def location_of(tensor: StoredTensor, chunk: Chunk) -> ItemLocation:
    """Where a chunk of `tensor` lies."""
    return ItemLocation(
        object_index=chunk.object_index,
        begin=chunk.begin,
        end=chunk.end,
        dtype=tensor.dtype,
        lengths=chunk.lengths,
        transforms=tuple(tensor.transforms),
    )


def _chunks_from(document: bytes) -> StoredChunks:
    return StoredChunks(_CHUNKS_DECODER.decode(document))


def _locations_from(document: bytes) -> ItemLocations:
    return ItemLocations(_MANIFEST_DECODER.decode(document))
