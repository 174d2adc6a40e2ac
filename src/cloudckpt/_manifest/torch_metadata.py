"""Between the manifest and torch's `Metadata`."""

from __future__ import annotations

import datetime as dt
import json
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt._manifest.codec import pack_tiles
from cloudckpt._manifest.model import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    Chunk,
    Manifest,
    StoredObject,
    StoredTensor,
    StoredValue,
)
from cloudckpt._manifest.receipts import ItemReceipt, ObjectReceipt
from cloudckpt._manifest.torch_dtypes import dtype_name
from cloudckpt._manifest.torch_views import ItemLocations, StoredEntries
from cloudckpt._manifest.validate import problems_of
from cloudckpt._version import __version__
from cloudckpt.errors import IncompleteSaveError, UnsupportedValueError

_MAX_SHOWN = 10

DCP_VERSION = "1.0.0"
"""The version of torch's own `Metadata`, which its planners look at."""


def manifest_of(
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    *,
    uri: str,
    attempt: str,
    save_id: str,
    tile_bytes: int,
    user_metadata: Mapping[str, Any],
) -> Manifest:
    """The manifest of a save that planned `metadata` and wrote `results`, one sequence per rank.

    Raises `IncompleteSaveError`, naming every item, unless exactly what was planned was written (G3) and can be loaded
    again, and `UnsupportedValueError` for what the manifest cannot hold.
    """
    written: defaultdict[str, dict[tuple[int, ...] | None, ItemReceipt]] = defaultdict(dict)
    for of_rank in results:
        for result in of_rank:
            written[result.index.fqn][result.index.offset] = result.storage_data
    stored_objects = _stored_objects(results, written.values())
    objects = {stored.key: number for number, stored in enumerate(stored_objects)}
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredValue] = {}
    missing: list[str] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            at = written[fqn]
            found = [at.get(chunk.offsets) for chunk in entry.chunks]
            missing += [
                f"{fqn}{list(chunk.offsets)}"
                for chunk, receipt in zip(entry.chunks, found, strict=True)
                if receipt is None or receipt.lengths != tuple(chunk.sizes)
            ]
            if not missing:
                tensors[fqn] = _stored_tensor(fqn, entry, [r for r in found if r is not None], objects, uri)
        else:
            stored = written[fqn].get(None)
            if stored is None:
                missing.append(fqn)
            else:
                values[fqn] = StoredValue(
                    object_index=objects[stored.stored_in.key],
                    begin=stored.begin,
                    end=stored.end,
                    transforms=list(stored.transforms),
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
        objects=stored_objects,
        tensors=tensors,
        values=values,
        nesting=_nesting_of(metadata.planner_data, tensors.keys() | values.keys(), uri),
        save_id=save_id,
        metadata=_json_values(user_metadata, uri),
    )
    problems = problems_of(manifest)
    if problems:
        raise IncompleteSaveError(
            f"what was planned for {uri} is no whole checkpoint: {'; '.join(problems[:_MAX_SHOWN])}. Nothing was "
            "committed. Sharded tensors have to be saved by all of their ranks together (no_dist=False, "
            "use_collectives=True)",
            uri=uri,
        )
    return manifest


def metadata_of(manifest: Manifest, *, checkpoint_id: Any, load_id: str, is_lazy: bool = False) -> Metadata:
    """Torch's `Metadata` of the checkpoint; its ``storage_data`` maps each index to an `ItemLocation`.

    Takes time and memory by the number of tensors, not of chunks: both they and the locations are made when asked for.
    Where it `is_lazy`, so are the tensors' entries, and the nesting is left out: it is not for code that is not ours.
    """
    entries: Any = StoredEntries(manifest)
    nesting = manifest.nesting
    return Metadata(
        state_dict_metadata=entries if is_lazy else dict(entries),
        planner_data=None if nesting is None or is_lazy else {fqn: tuple(path) for fqn, path in nesting.items()},
        storage_data=ItemLocations(manifest),
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=manifest.save_id, load_id=load_id),
        version=DCP_VERSION,
    )


def _stored_objects(
    results: Sequence[Sequence[WriteResult]], written: Iterable[Mapping[Any, ItemReceipt]]
) -> list[StoredObject]:
    """The objects that hold anything that counts, in the ranks' order: a later result hides an earlier one."""
    used = {receipt.stored_in.key for at in written for receipt in at.values()}
    found: dict[str, ObjectReceipt] = {}
    for of_rank in results:
        for result in of_rank:
            stored_in = result.storage_data.stored_in
            if stored_in.key not in found and stored_in.key in used:
                found[stored_in.key] = stored_in
    return [
        StoredObject(key=key, size=stored_in.size_bytes, crc32c=pack_tiles(stored_in.tile_crc32cs))
        for key, stored_in in found.items()
    ]


def _stored_tensor(
    fqn: str,
    entry: TensorStorageMetadata,
    receipts: Sequence[ItemReceipt],
    objects: Mapping[str, int],
    uri: str,
) -> StoredTensor:
    dtypes = {receipt.dtype for receipt in receipts if receipt.dtype is not None}
    transforms = {receipt.transforms for receipt in receipts}
    if len(dtypes) > 1 or len(transforms) > 1:
        raise UnsupportedValueError(
            f"the ranks wrote {fqn!r} of {uri} as different types: {sorted(dtypes)}, {sorted(transforms)}. "
            "Give it one dtype on all ranks",
            uri=uri,
        )
    return StoredTensor(
        dtype=dtypes.pop() if dtypes else dtype_name(entry.properties.dtype),
        shape=tuple(entry.size),
        chunks=[
            Chunk(
                tuple(chunk.offsets),
                receipt.lengths,  # equal to the planned ones, and one object less for each chunk
                objects[receipt.stored_in.key],
                receipt.begin,
                receipt.end,
            )
            for chunk, receipt in zip(entry.chunks, receipts, strict=True)
        ],
        requires_grad=entry.properties.requires_grad,
        transforms=list(transforms.pop()) if transforms else [],
    )


def _json_values(user_metadata: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """What a reader will get of the user's metadata."""
    try:
        json.dumps(msgspec.to_builtins(user_metadata), allow_nan=False)  # msgspec would make null of NaN
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(user_metadata), type=dict[str, Any])
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UnsupportedValueError(
            f"Options(metadata=…) cannot be kept in the manifest of {uri}, because it is not JSON: {error}", uri=uri
        ) from error
    return values


def _nesting_of(planner_data: Any, fqns: Iterable[str], uri: str) -> dict[str, list[str | int]] | None:
    if planner_data is None:
        return None
    known = set(fqns)
    is_nesting = isinstance(planner_data, Mapping) and all(
        isinstance(fqn, str)
        and isinstance(path, (tuple, list))
        and path
        and all(isinstance(step, (str, int)) for step in path)
        for fqn, path in planner_data.items()
    )
    if not is_nesting:
        raise UnsupportedValueError(
            f"the planner's own data ({type(planner_data).__name__}) cannot be kept in the manifest of {uri}: only the "
            "nesting of the state dict can. Keep such data in the state dict, or in Options(metadata=…)",
            uri=uri,
        )
    return {fqn: list(path) for fqn, path in planner_data.items() if fqn in known}
