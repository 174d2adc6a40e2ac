"""Of a checkpoint's metadata, what one rank has to look at to plan its load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from cloudckpt._manifest.torch_views import StoredChunks

_MIN_CHUNKS = 64  # torch goes through fewer in less time than it takes to leave any out


def narrowed(metadata: Metadata, state_dict: Mapping[str, Any]) -> Metadata:
    """`metadata` with only those chunks of each tensor that hold any of what this rank's `state_dict` wants of it.

    torch's planner goes through all chunks of every tensor that a rank asks for, on every rank. A plan made of the
    narrowed metadata is the same, but for the hints in its storage indices. Metadata of other readers stays as it is.
    """
    entries = metadata.state_dict_metadata
    changed = {
        fqn: dataclasses.replace(entry, chunks=chunks)
        for fqn, wanted in state_dict.items()
        if isinstance(entry := entries.get(fqn), TensorStorageMetadata)
        and isinstance(entry.chunks, StoredChunks)
        and len(entry.chunks) >= _MIN_CHUNKS
        and (chunks := _wanted_chunks(entry.chunks, entry, wanted)) is not None
    }
    return dataclasses.replace(metadata, state_dict_metadata={**entries, **changed}) if changed else metadata


def _wanted_chunks(
    chunks: StoredChunks, entry: TensorStorageMetadata, wanted: Any
) -> list[ChunkStorageMetadata] | None:
    """None where torch has to look at them all, or would not look at any."""
    size = getattr(wanted, "size", None)
    if size is None or size() != entry.size:
        return None
    if isinstance(wanted, DTensor) and wanted.device_mesh.get_coordinate() is None:
        return None
    try:
        boxes = _create_chunk_list(wanted)
    except ValueError:
        return None  # torch will say it better
    found: dict[tuple[int, ...], ChunkStorageMetadata] = {}
    for box in boxes:
        held = chunks.meeting(box)
        if held is None:
            return None
        found.update((tuple(chunk.offsets), chunk) for chunk in held)
    return list(found.values())
