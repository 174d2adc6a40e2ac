"""Translate what torch's planner planned, and what the ranks say they wrote, into the content of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt.errors import IncompleteSaveError, UnsupportedValueError
from cloudckpt.format.build import Content
from cloudckpt.format.chunks import dtype_name
from cloudckpt.format.model import Chunk, ItemReceipts, ObjectRef, StoredTensor, StoredValue

_MAX_SHOWN = 10
_STEPS = frozenset({str, int})

_Kind: TypeAlias = tuple[str | None, tuple[str, ...]]
_Item: TypeAlias = tuple[int, int, int, str | None, tuple[int, ...], tuple[str, ...]]
"""The number of the receipts that have it, and then what they say of it, in their order."""
_Items: TypeAlias = dict[tuple[str, tuple[int, ...] | None], _Item]
"""The items by FQN and offsets."""


def content_of(metadata: Metadata, results: Sequence[Sequence[WriteResult]], *, uri: str) -> Content:
    """Return the content of a save that planned `metadata` and wrote `results`, one sequence per rank.

    Raises `IncompleteSaveError`, naming every item, unless exactly what was planned was written (G3), and
    `UnsupportedValueError` for what no manifest can hold.
    """
    _check_paths(metadata.planner_data, uri)
    receipts: list[ItemReceipts] = [result.storage_data for of_rank in results for result in of_rank]
    written = _written(receipts)
    used = {receipts[item[0]].stored_in.key for item in written.values()}
    index_of: dict[str, int] = {}
    objects: list[list[ObjectRef]] = []
    for of_rank in results:
        objects.append([])
        for stored_in in (result.storage_data.stored_in for result in of_rank):
            if stored_in.key in used and stored_in.key not in index_of:
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
        number, begin, end, _, _, transforms = item
        values[fqn] = StoredValue(
            object_index=object_indices[number], begin=begin, end=end, transforms=list(transforms)
        )
    if missing:
        more = f" and {len(missing) - _MAX_SHOWN} more" if len(missing) > _MAX_SHOWN else ""
        shown = ", ".join(missing[:_MAX_SHOWN]) + more
        raise IncompleteSaveError(
            f"{len(missing)} planned items of {uri} were not written, or not in their planned shape: {shown}. "
            "Nothing was committed",
            uri=uri,
        )
    return Content(objects=objects, tensors=tensors, values=values, nesting=metadata.planner_data)


def _written(receipts: Sequence[ItemReceipts]) -> _Items:
    """Return the written items; a later one replaces an earlier one of the same FQN and offsets."""
    written: _Items = {}
    for number, of_object in enumerate(receipts):
        items = zip(
            itertools.repeat(number, len(of_object.fqns)),
            of_object.begins,
            of_object.ends,
            of_object.dtypes,
            of_object.lengths,
            of_object.transforms,
            strict=True,
        )
        written.update(zip(zip(of_object.fqns, of_object.offsets, strict=True), items, strict=True))
    return written


def _stored_tensor(
    fqn: str,
    entry: TensorStorageMetadata,
    written: _Items,
    object_indices: Sequence[int],
    *,
    missing: list[str],
    uri: str,
) -> StoredTensor:
    """Build the tensor's entry. Append planned chunks that were not written to `missing`."""
    chunks: list[Chunk] = []
    kinds: set[_Kind] = set()
    for chunk in entry.chunks:
        item = written.get((fqn, chunk.offsets))
        if item is None or item[4] != chunk.sizes:
            missing.append(f"{fqn}{list(chunk.offsets)}")
            continue
        number, begin, end, dtype, lengths, transforms = item
        chunks.append(Chunk(tuple(chunk.offsets), lengths, object_indices[number], begin, end))
        if len(entry.chunks) > 1:
            kinds.add((dtype, transforms))
    if len(entry.chunks) != 1 or not chunks:
        dtype, transforms = _kind_of(kinds, fqn, uri)
    return StoredTensor(
        dtype=dtype or dtype_name(entry.properties.dtype),
        shape=tuple(entry.size),
        chunks=chunks,
        requires_grad=entry.properties.requires_grad,
        transforms=list(transforms),
    )


def _kind_of(kinds: Iterable[_Kind], fqn: str, uri: str) -> _Kind:
    """Return the dtype and the transforms that all chunks have."""
    dtypes = {dtype for dtype, _ in kinds if dtype is not None}
    transforms = {descriptors for _, descriptors in kinds}
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
    return _STEPS.issuperset(map(type, path)) or all(isinstance(step, (str, int)) for step in path)
