"""The manifest of a save, from its content."""

from __future__ import annotations

import datetime as dt
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import torch

from cloudckpt._messages import join_first
from cloudckpt._version import __version__
from cloudckpt.errors import IncompleteSaveError, InvalidOptionError, UnsupportedValueError
from cloudckpt.format.codec import pack_tiles
from cloudckpt.format.model import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    REFERENCES_VERSION,
    Manifest,
    ObjectRef,
    StoredObject,
    StoredTensor,
    StoredTuple,
    StoredValue,
)
from cloudckpt.format.nesting import Nesting, path_to_json
from cloudckpt.format.validation import find_problems

Paths: TypeAlias = Mapping[str, Sequence[str | int]]
"""The path of each entry in the nested state dict, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All that a checkpoint holds. Object indices count the objects of all ranks, in the ranks' order."""

    objects: Sequence[Sequence[ObjectRef]]
    """The objects that each rank wrote or found unchanged, without those that hold nothing of the checkpoint."""
    tensors: dict[str, StoredTensor]
    values: dict[str, StoredValue] = field(default_factory=dict)
    nesting: Paths | None = None
    """The nesting of the state dict, which may be a `Nesting`; None if it was not flattened."""


def build_manifest(
    content: Content, *, uri: str, attempt: str, save_id: str, tile_bytes: int, user_metadata: Mapping[str, Any]
) -> Manifest:
    """Return the manifest of a save, without a commit time.

    Raises `IncompleteSaveError` if the chunks do not fill each tensor, or are not within their objects, so that no load
    would succeed; `UnsupportedValueError` for metadata that is not JSON; and `InvalidOptionError` if ranks cut tiles of
    different lengths.
    """
    _check_tiles(content.objects, tile_bytes, uri)
    refers = any(ref.folder for refs in content.objects for ref in refs)
    manifest = Manifest(
        format=FORMAT_NAME,
        version=REFERENCES_VERSION if refers else (FORMAT_MAJOR, FORMAT_MINOR),
        attempt=attempt,
        created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds"),
        world_size=len(content.objects),
        software={
            "cloudckpt": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        tile_bytes=tile_bytes,
        objects=[
            StoredObject(key=ref.key, size=ref.size_bytes, crc32c=pack_tiles(ref.tile_crc32cs), folder=ref.folder)
            for refs in content.objects
            for ref in refs
        ],
        tensors=content.tensors,
        values=content.values,
        **_nesting_of(content.nesting, content.tensors.keys() | content.values.keys()),
        save_id=save_id,
        is_referable=any(tensor.xxh3_128s for tensor in content.tensors.values()),
        metadata=_json_values(user_metadata, uri),
    )
    problems = find_problems(manifest)
    if problems:
        raise IncompleteSaveError(
            f"the ranks hold no whole checkpoint for {uri}: {join_first(problems)}. Nothing was "
            "committed. Sharded tensors have to be saved by all of their ranks together (no_dist=False)",
            uri=uri,
        )
    return manifest


def _check_tiles(objects: Sequence[Sequence[ObjectRef]], tile_bytes: int, uri: str) -> None:
    """Check that all ranks cut tiles of one length: a load would take tiles of another length for damage."""
    for rank, refs in enumerate(objects):
        for ref in refs:
            if ref.tile_bytes != tile_bytes:
                raise InvalidOptionError(
                    f"AdvancedOptions(tile_bytes={ref.tile_bytes}) on rank {rank} differs from {tile_bytes} on the "
                    f"coordinator, and the manifest of {uri} has one for all ranks. Nothing was committed. Pass the "
                    "same Options on all ranks"
                )


def _json_values(user_metadata: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """Return the user's metadata in the form in which readers get it."""
    try:
        json.dumps(msgspec.to_builtins(user_metadata), allow_nan=False)  # msgspec would make null of NaN
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(user_metadata), type=dict[str, Any])
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UnsupportedValueError(
            f"Options(metadata=…) cannot be kept in the manifest of {uri}, because it is not JSON: {error}", uri=uri
        ) from error
    return values


def _nesting_of(paths: Paths | None, fqns: Iterable[str]) -> dict[str, Any]:
    """Return the members of the manifest that hold the nesting."""
    if paths is None:
        return {}
    saved = set(fqns)
    nesting = {fqn: list(path) for fqn, path in paths.items() if fqn in saved}
    if not isinstance(paths, Nesting):
        return {"nesting": nesting}
    typed = {fqn: path_to_json(path) for fqn, path in paths.typed.items() if fqn in saved}
    return {
        "nesting": nesting,
        "typed_nesting": typed or None,
        "empty_mappings": [path_to_json(path) for path in paths.empty],
        "tuples": [StoredTuple(path_to_json(path), kind) for path, kind in paths.tuples.items()],
        "wrappers": paths.wrappers,
    }
