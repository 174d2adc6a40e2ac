"""The manifest of a save, from what torch's planner planned and what the ranks say they wrote."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt._version import __version__
from cloudckpt.errors import IncompleteSaveError, InvalidOptionError, UnsupportedValueError
from cloudckpt.format.codec import pack_tiles
from cloudckpt.format.model import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    Chunk,
    ItemReceipts,
    Manifest,
    StoredObject,
    StoredTensor,
    StoredTuple,
    StoredValue,
)
from cloudckpt.format.nesting import Nesting, path_to_json
from cloudckpt.format.torch_metadata import dtype_name
from cloudckpt.format.validation import find_problems

_MAX_SHOWN = 10
_STEPS = frozenset({str, int})

_Kind: TypeAlias = tuple[str | None, tuple[str, ...]]
_Item: TypeAlias = tuple[int, int, int, str | None, tuple[int, ...], tuple[str, ...]]
"""The number of the receipts that have it, and then what they say of it, in their order."""
_Items: TypeAlias = dict[tuple[str, tuple[int, ...] | None], _Item]
"""The items by FQN and offsets."""


def build_manifest(
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    *,
    uri: str,
    attempt: str,
    save_id: str,
    tile_bytes: int,
    user_metadata: Mapping[str, Any],
) -> Manifest:
    """The manifest of a save that planned `metadata` and wrote `results`, one sequence per rank. It has no time yet.

    Raises `IncompleteSaveError`, naming every item, unless exactly what was planned was written (G3) and can be loaded
    again, `UnsupportedValueError` for what the manifest cannot hold, and `InvalidOptionError` where ranks cut tiles of
    other lengths.
    """
    _check_tiles(results, tile_bytes, uri)
    receipts: list[ItemReceipts] = [result.storage_data for of_rank in results for result in of_rank]
    written = _written(receipts)
    objects = _stored_objects(receipts, written)
    index_of = {key: number for number, key in enumerate(objects)}
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
    manifest = Manifest(
        format=FORMAT_NAME,
        version=(FORMAT_MAJOR, FORMAT_MINOR),
        attempt=attempt,
        created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds"),
        world_size=len(results),
        software={
            "cloudckpt": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        tile_bytes=tile_bytes,
        objects=list(objects.values()),
        tensors=tensors,
        values=values,
        **_nesting_of(metadata.planner_data, tensors.keys() | values.keys(), uri),
        save_id=save_id,
        metadata=_json_values(user_metadata, uri),
    )
    problems = find_problems(manifest)
    if problems:
        raise IncompleteSaveError(
            f"what was planned for {uri} is no whole checkpoint: {'; '.join(problems[:_MAX_SHOWN])}. Nothing was "
            "committed. Sharded tensors have to be saved by all of their ranks together (no_dist=False)",
            uri=uri,
        )
    return manifest


def _check_tiles(results: Sequence[Sequence[WriteResult]], tile_bytes: int, uri: str) -> None:
    """Check that all ranks cut the same tiles: with as many of another length, each load would find damage."""
    for rank, of_rank in enumerate(results):
        for result in of_rank:
            if result.storage_data.tile_bytes != tile_bytes:
                raise InvalidOptionError(
                    f"AdvancedOptions(tile_bytes={result.storage_data.tile_bytes}) on rank {rank} differs from "
                    f"{tile_bytes} on the coordinator, and the manifest of {uri} has one for all ranks. Nothing was "
                    "committed. Pass "
                    "the same Options on all ranks"
                )


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


def _stored_objects(receipts: Sequence[ItemReceipts], written: _Items) -> dict[str, StoredObject]:
    """Return the objects that hold an item that counts, by key, in the ranks' order."""
    used = {item[0] for item in written.values()}
    objects: dict[str, StoredObject] = {}
    for number, of_object in enumerate(receipts):
        stored_in = of_object.stored_in
        if number in used and stored_in.key not in objects:
            objects[stored_in.key] = StoredObject(
                key=stored_in.key, size=stored_in.size_bytes, crc32c=pack_tiles(stored_in.tile_crc32cs)
            )
    return objects


def _stored_tensor(
    fqn: str,
    entry: TensorStorageMetadata,
    written: _Items,
    object_indices: Sequence[int],
    *,
    missing: list[str],
    uri: str,
) -> StoredTensor:
    """The tensor, but for what is added to `missing`."""
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
    """The dtype and the transforms that all chunks have."""
    dtypes = {dtype for dtype, _ in kinds if dtype is not None}
    transforms = {descriptors for _, descriptors in kinds}
    if len(dtypes) > 1 or len(transforms) > 1:
        raise UnsupportedValueError(
            f"the ranks wrote {fqn!r} of {uri} as different types: {sorted(dtypes)}, {sorted(transforms)}. "
            "Give it one dtype on all ranks",
            uri=uri,
        )
    return (dtypes.pop() if dtypes else None), (transforms.pop() if transforms else ())


def _json_values(user_metadata: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """Return the user's metadata as a reader will get it."""
    try:
        json.dumps(msgspec.to_builtins(user_metadata), allow_nan=False)  # msgspec would make null of NaN
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(user_metadata), type=dict[str, Any])
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UnsupportedValueError(
            f"Options(metadata=…) cannot be kept in the manifest of {uri}, because it is not JSON: {error}", uri=uri
        ) from error
    return values


def _nesting_of(planner_data: Any, fqns: Iterable[str], uri: str) -> dict[str, Any]:
    """The members of the manifest that hold the planner's paths."""
    if planner_data is None:
        return {}
    known = set(fqns)
    is_nesting = isinstance(planner_data, Mapping) and all(map(_is_path, planner_data, planner_data.values()))
    if not is_nesting:
        raise UnsupportedValueError(
            f"the planner's own data ({type(planner_data).__name__}) cannot be kept in the manifest of {uri}: only the "
            "nesting of the state dict can. Keep such data in the state dict, or in Options(metadata=…)",
            uri=uri,
        )
    nesting = {fqn: list(path) for fqn, path in planner_data.items() if fqn in known}
    if not isinstance(planner_data, Nesting):
        return {"nesting": nesting}
    typed = {fqn: path_to_json(path) for fqn, path in planner_data.typed.items() if fqn in known}
    return {
        "nesting": nesting,
        "typed_nesting": typed or None,
        "empty_mappings": [path_to_json(path) for path in planner_data.empty],
        "tuples": [StoredTuple(path_to_json(path), kind) for path, kind in planner_data.tuples.items()],
        "wrappers": planner_data.wrappers,
    }


def _is_path(fqn: object, path: object) -> bool:
    if not (isinstance(fqn, str) and isinstance(path, (tuple, list)) and path):
        return False
    return _STEPS.issuperset(map(type, path)) or all(isinstance(step, (str, int)) for step in path)
