"""Compare torch's plan of a save with the items that the ranks wrote."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt._messages import join_first
from cloudckpt.errors import IncompleteSaveError, UnsupportedValueError
from cloudckpt.format.build import Content
from cloudckpt.format.model import Chunk, ItemReceipts, ObjectRef, StoredTensor, StoredValue
from cloudckpt.tensors.tensor_bytes import dtype_name

_PATH_PART_TYPES = frozenset({str, int})
_ChunkType: TypeAlias = tuple[str | None, tuple[str, ...]]


class _WrittenItem(NamedTuple):
    """An item that a rank has written, as its `ItemReceipts` describe it."""

    receipts_index: int
    """The index of the receipts that have it."""
    begin: int
    end: int
    dtype: str | None
    lengths: tuple[int, ...]
    transforms: tuple[str, ...]
    xxh3_128: bytes


_NOT_WRITTEN = _WrittenItem(0, 0, 0, None, (-1,), (), b"")  # no chunk has such lengths
_WrittenItems: TypeAlias = dict[tuple[str, tuple[int, ...] | None], _WrittenItem]
"""The items by FQN and offsets."""


def content_of(metadata: Metadata, results: Sequence[Sequence[WriteResult]], *, uri: str) -> Content:
    """Return the content of a save that planned `metadata` and wrote `results`, one sequence per rank.

    Raises `IncompleteSaveError`, naming every item, unless the ranks wrote exactly the planned items, and
    `UnsupportedValueError` for an entry that no manifest can hold.
    """
    _check_paths(metadata.planner_data, uri)
    receipts: list[ItemReceipts] = [result.storage_data for of_rank in results for result in of_rank]
    written = _index_items(receipts)
    used_keys = {receipts[item.receipts_index].stored_in.key for item in written.values()}
    index_of: dict[str, int] = {}
    objects: list[list[ObjectRef]] = []
    for of_rank in results:
        objects.append([])
        for stored_in in (result.storage_data.stored_in for result in of_rank):
            if stored_in.key in used_keys and stored_in.key not in index_of:
                index_of[stored_in.key] = len(index_of)
                objects[-1].append(stored_in)
    object_indices = [index_of.get(of_object.stored_in.key, -1) for of_object in receipts]
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredValue] = {}
    missing: list[str] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[fqn] = _stored_tensor(fqn, entry, written, object_indices, missing=missing, uri=uri)
            continue
        item = written.get((fqn, None))
        if item is None:
            missing.append(fqn)
            continue
        values[fqn] = StoredValue(
            object_index=object_indices[item.receipts_index],
            begin=item.begin,
            end=item.end,
            transforms=list(item.transforms),
        )
    if missing:
        shown = join_first(missing, separator=", ")
        raise IncompleteSaveError(
            f"{len(missing)} planned items of {uri} were not written, or not in their planned shape: {shown}. "
            "Nothing was committed",
            uri=uri,
        )
    return Content(objects=objects, tensors=tensors, values=values, nesting=metadata.planner_data)


def _index_items(receipts: Sequence[ItemReceipts]) -> _WrittenItems:
    """Return the written items; a later one replaces an earlier one of the same FQN and offsets."""
    written: _WrittenItems = {}
    for index, of_object in enumerate(receipts):
        columns = zip(
            itertools.repeat(index, len(of_object.fqns)),
            of_object.begins,
            of_object.ends,
            of_object.dtypes,
            of_object.lengths,
            of_object.transforms,
            of_object.hashes or itertools.repeat(b"", len(of_object.fqns)),
            strict=True,
        )
        keys = zip(of_object.fqns, of_object.offsets, strict=True)
        written.update(zip(keys, map(_WrittenItem._make, columns), strict=True))
    return written


def _stored_tensor(
    fqn: str,
    entry: TensorStorageMetadata,
    written: _WrittenItems,
    object_indices: Sequence[int],
    *,
    missing: list[str],
    uri: str,
) -> StoredTensor:
    """Build the tensor's entry. Append planned chunks that were not written to `missing`."""
    chunks: list[Chunk] = []
    hashes: list[bytes] = []
    types: set[_ChunkType] = set()
    for chunk in entry.chunks:
        index, begin, end, dtype, lengths, transforms, xxh3_128 = written.get((fqn, chunk.offsets), _NOT_WRITTEN)
        if lengths != chunk.sizes:
            missing.append(f"{fqn}{list(chunk.offsets)}")
            continue
        chunks.append(Chunk(tuple(chunk.offsets), lengths, object_indices[index], begin, end))
        hashes.append(xxh3_128)
        if len(entry.chunks) > 1:
            types.add((dtype, transforms))
    if len(entry.chunks) != 1 or not chunks:
        dtype, transforms = _common_type(types, fqn, uri)
    return StoredTensor(
        dtype=dtype or dtype_name(entry.properties.dtype),
        shape=tuple(entry.size),
        chunks=chunks,
        requires_grad=entry.properties.requires_grad,
        transforms=list(transforms),
        xxh3_128s=[digest.hex() for digest in hashes] if all(hashes) else [],
    )


def _common_type(types: Iterable[_ChunkType], fqn: str, uri: str) -> _ChunkType:
    """Return the dtype and the transforms that all chunks have."""
    dtypes = {dtype for dtype, _ in types if dtype is not None}
    transforms = {descriptors for _, descriptors in types}
    if len(dtypes) > 1 or len(transforms) > 1:
        raise UnsupportedValueError(
            f"the ranks wrote {fqn!r} of {uri} as different types: {sorted(dtypes)}, {sorted(transforms)}. "
            "Give it one dtype on all ranks",
            uri=uri,
        )
    return (dtypes.pop() if dtypes else None), (transforms.pop() if transforms else ())


def _check_paths(planner_data: Any, uri: str) -> None:
    """Raise `UnsupportedValueError` for a planner's data that is not the nesting of the state dict."""
    if planner_data is not None and not (
        isinstance(planner_data, Mapping) and all(map(_is_path, planner_data, planner_data.values()))
    ):
        raise UnsupportedValueError(
            f"the planner's own data ({type(planner_data).__name__}) cannot be kept in the manifest of {uri}: only the "
            "nesting of the state dict can. Keep such data in the state dict, or in Options(metadata=…)",
            uri=uri,
        )


def _is_path(fqn: object, path: object) -> bool:
    if not (isinstance(fqn, str) and isinstance(path, (tuple, list)) and path):
        return False
    return _PATH_PART_TYPES.issuperset(map(type, path)) or all(isinstance(step, (str, int)) for step in path)
