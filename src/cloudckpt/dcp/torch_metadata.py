"""A manifest as torch's `Metadata`. Its parts are made on access, since a rank needs only a few of all chunks."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from cloudckpt.format.model import (
    Chunk,
    ItemLocation,
    ItemReceipts,
    Manifest,
    StoredRange,
    StoredTensor,
    StoredWrapper,
    find_chunk,
    find_overlapping_chunks,
    locate_chunk,
    locate_value,
)
from cloudckpt.format.nesting import Nesting, path_from_json
from cloudckpt.tensors.tensor_bytes import dtype_of

_T = TypeVar("_T")
DCP_VERSION = "1.0.0"
"""The version of torch's own `Metadata`, which its planners look at."""


class LazyList(Sequence[_T]):
    """A sequence in place of a list of torch's, whose elements are made on access. Equal to a list of the same."""

    __slots__ = ()

    @abc.abstractmethod
    def make(self, position: int) -> _T:
        """Return the element at `position`, which is not negative."""

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        positions = range(len(self))[index]
        return self.make(positions) if isinstance(positions, int) else [*map(self.make, positions)]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, LazyList)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(list(self))


class StoredChunks(LazyList[ChunkStorageMetadata]):
    """The chunks of one tensor. Can be pickled."""

    __slots__ = ("_chunks",)

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def make(self, position: int) -> ChunkStorageMetadata:
        return _torch_chunk(self._chunks[position])

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        return map(_torch_chunk, self._chunks)

    def find_overlapping(self, box: ChunkStorageMetadata) -> list[ChunkStorageMetadata] | None:
        """Return the chunks that hold any of `box`; None if each chunk has to be looked at."""
        positions = find_overlapping_chunks(self._chunks, tuple(box.offsets), tuple(box.sizes))
        return None if positions is None else [_torch_chunk(self._chunks[position]) for position in positions]


class StoredEntries(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """The stored entries by FQN, in place of torch's dict. Each access makes the entry anew."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.tensors = manifest.tensors
        self.wrappers = manifest.wrappers
        self._values = manifest.values
        self._names = dict.fromkeys([*manifest.tensors, *manifest.values])

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        tensor = self.tensors.get(fqn)
        if tensor is not None:
            return make_torch_entry(tensor)
        self._values[fqn]
        return BytesStorageMetadata()

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._names

    def holds_value(self, fqn: str) -> bool:
        """Return True if the entry is a Python value."""
        return fqn in self._values

    def keys(self) -> KeysView[str]:
        return self._names.keys()  # of which sets are made and compared without Python code

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ItemLocations(Mapping[MetadataIndex, ItemLocation]):
    """The location of each item of a valid manifest. Can be pickled."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._positions: dict[str, dict[tuple[int, ...], int]] = {}

    def __getitem__(self, index: MetadataIndex) -> ItemLocation:
        tensor = self._manifest.tensors.get(index.fqn)
        if tensor is not None:
            if index.offset is None:
                raise KeyError(index)
            return locate_chunk(tensor, tensor.chunks[self._position(tensor, index)])
        value = self._manifest.values.get(index.fqn)
        if value is None or index.offset is not None:
            raise KeyError(index)
        return locate_value(value)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn, tensor in self._manifest.tensors.items():
            offsets_of_chunks = dict.fromkeys(chunk.offsets for chunk in tensor.chunks)
            yield from (MetadataIndex(fqn, offsets) for offsets in offsets_of_chunks)
        yield from map(MetadataIndex, self._manifest.values)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _position(self, tensor: StoredTensor, index: MetadataIndex) -> int:
        offsets = tuple(index.offset or ())
        hint = index.index
        if hint is not None and 0 <= hint < len(tensor.chunks):
            hinted = tensor.chunks[hint]
            if hinted.offsets == offsets and 0 not in hinted.lengths:
                return hint
        position = find_chunk(tensor.chunks, offsets)
        if position is not None:
            return position
        if index.fqn not in self._positions:
            positions = self._positions[index.fqn] = {}
            for position, chunk in enumerate(tensor.chunks):
                # An empty chunk may be where another one begins. It is never the wanted one.
                if chunk.offsets not in positions or 0 not in chunk.lengths:
                    positions[chunk.offsets] = position
        try:
            return self._positions[index.fqn][offsets]
        except KeyError:
            raise KeyError(index) from None


def make_torch_entry(tensor: StoredTensor) -> TensorStorageMetadata:
    """Return torch's description of one tensor. Its chunks are stored in row-major order."""
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(tensor.dtype), requires_grad=tensor.requires_grad),
        size=torch.Size(tensor.shape),
        chunks=StoredChunks(tensor.chunks),  # type: ignore[arg-type]  # torch reads it as a sequence
    )


def _torch_chunk(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.lengths))


def make_metadata(manifest: Manifest, *, checkpoint_id: Any, load_id: str, is_lazy: bool = False) -> Metadata:
    """Return torch's `Metadata` of the checkpoint; its ``storage_data`` maps each index to an `ItemLocation`.

    Time and memory grow with the number of tensors, not of chunks: chunks and locations are made on access. If it
    `is_lazy`, so are the tensors' entries, and the nesting is left out: code of the user must not see it.
    """
    entries: Any = StoredEntries(manifest)
    return Metadata(
        state_dict_metadata=entries if is_lazy else dict(entries),
        planner_data=None if is_lazy else nesting_of(manifest),
        storage_data=ItemLocations(manifest),
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=manifest.save_id, load_id=load_id),
        version=DCP_VERSION,
    )


def stored_wrappers(metadata: Metadata | None) -> Mapping[str, StoredWrapper]:
    """Return the tensors of a checkpoint that consist of others, by name."""
    if metadata is not None and isinstance(metadata.state_dict_metadata, StoredEntries):
        return metadata.state_dict_metadata.wrappers
    nesting = None if metadata is None else metadata.planner_data
    return nesting.wrappers if isinstance(nesting, Nesting) else {}


def stored_nesting(metadata: Metadata | None) -> Nesting | None:
    """Return the nesting of a checkpoint if there are tuples in it whose entries are stored apart."""
    entries: Any = None if metadata is None else metadata.state_dict_metadata
    if isinstance(entries, StoredEntries):
        return nesting_of(entries.manifest) if entries.manifest.tuples else None
    nesting = None if metadata is None else metadata.planner_data
    return nesting if isinstance(nesting, Nesting) and nesting.tuples else None


def nesting_of(manifest: Manifest) -> Nesting | None:
    """Return the nesting that a manifest has; None if the state dict was not flattened."""
    if manifest.nesting is None and not manifest.wrappers:
        return None
    return Nesting(
        {fqn: tuple(path) for fqn, path in (manifest.nesting or {}).items()},
        typed={fqn: path_from_json(path) for fqn, path in (manifest.typed_nesting or {}).items()},
        empty=map(path_from_json, manifest.empty_mappings),
        wrappers=manifest.wrappers,
        tuples={path_from_json(stored_tuple.path): stored_tuple.kind for stored_tuple in manifest.tuples},
    )


_KeyAndRange = tuple[str, int, int]


class StoredRanges(Mapping[MetadataIndex, StoredRange]):
    """The range of each item of a save. Values are made on access. Can be pickled."""

    def __init__(self, receipts: Iterable[ItemReceipts]) -> None:
        self._columns = [
            (receipt.stored_in.path, receipt.fqns, receipt.offsets, receipt.begins, receipt.ends)
            for receipt in receipts
        ]
        self._ranges: dict[tuple[str, tuple[int, ...] | None], _KeyAndRange] | None = None

    def __getitem__(self, index: MetadataIndex) -> StoredRange:
        try:
            key, begin, end = self._get_ranges()[index.fqn, index.offset]
        except KeyError:
            raise KeyError(index) from None
        return StoredRange(key=key, begin=begin, end=end)

    def __iter__(self) -> Iterator[MetadataIndex]:
        return (MetadataIndex(fqn, offsets) for fqn, offsets in self._get_ranges())

    def __len__(self) -> int:
        return len(self._get_ranges())

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranges": None}

    def _get_ranges(self) -> dict[tuple[str, tuple[int, ...] | None], _KeyAndRange]:
        """Return the items. A later item hides an earlier one of the same index, as in the manifest."""
        if self._ranges is None:
            self._ranges = {
                (fqn, offsets): (key, begin, end)
                for key, *columns in self._columns
                for fqn, offsets, begin, end in zip(*columns, strict=True)
            }
        return self._ranges
