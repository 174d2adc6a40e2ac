"""Describe the content of a checkpoint from its manifest."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt.commit.manifest_log import resolve
from cloudckpt.format.model import Chunk, StoredTensor
from cloudckpt.io.retry import Retrier
from cloudckpt.options import Options
from cloudckpt.stores.open import open_store
from cloudckpt.uri import parse_location


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescription:
    """One tensor."""

    name: str
    dtype: str
    """Torch's name, without the ``torch.``."""
    shape: tuple[int, ...]
    num_bytes: int
    """Size on the store."""
    num_chunks: int
    """Number of stored blocks, usually one for each rank that held a part."""
    grid: tuple[int, ...] | None
    """Number of chunks along each dimension; None if they form no grid."""
    objects: tuple[int, ...]
    """Positions of its data objects in `CheckpointDescription.objects`."""
    requires_grad: bool
    transforms: tuple[str, ...]
    """Transforms of each chunk, such as compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDescription:
    """One Python object."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectDescription:
    """One data object."""

    key: str
    """Relative to the checkpoint."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDescription:
    """A committed checkpoint."""

    uri: str
    attempt: str
    created_at: str
    """When the manifest was made, by the writer's clock (RFC 3339, UTC)."""
    world_size: int
    num_overwrites: int
    software: Mapping[str, str]
    metadata: Mapping[str, Any]
    """``Options.metadata`` of the save."""
    tile_bytes: int
    objects: tuple[ObjectDescription, ...]
    tensors: tuple[TensorDescription, ...]
    values: tuple[ValueDescription, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all data objects."""
        return sum(stored.num_bytes for stored in self.objects)

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


def describe(uri: str | os.PathLike[str], *, options: Options | None = None) -> CheckpointDescription:
    """Describe the checkpoint at `uri`. Reads only its manifest, and runs no code from the store.

    Raises `CheckpointNotFoundError`, `CorruptCheckpointError`, `UnsupportedFormatError` and `StoreError`.
    """
    options = options or Options()
    store = open_store(parse_location(uri), options)
    found = resolve(store, Retrier(retries=options.retries, timeout_s=options.timeout_s))
    manifest = found.manifest
    return CheckpointDescription(
        uri=store.uri,
        attempt=manifest.attempt,
        created_at=manifest.created_at,
        world_size=manifest.world_size,
        num_overwrites=found.number,
        software=manifest.software,
        metadata=manifest.metadata,
        tile_bytes=manifest.tile_bytes,
        objects=tuple(ObjectDescription(key=stored.key, num_bytes=stored.size) for stored in manifest.objects),
        tensors=tuple(_describe_tensor(name, tensor) for name, tensor in manifest.tensors.items()),
        values=tuple(
            ValueDescription(name=name, num_bytes=value.end - value.begin) for name, value in manifest.values.items()
        ),
    )


def _describe_tensor(name: str, tensor: StoredTensor) -> TensorDescription:
    chunks = tensor.chunks
    return TensorDescription(
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        num_bytes=sum(chunk.end - chunk.begin for chunk in chunks),
        num_chunks=len(chunks),
        grid=_find_grid(chunks, len(tensor.shape)),
        objects=tuple(sorted({chunk.object_index for chunk in chunks})),
        requires_grad=tensor.requires_grad,
        transforms=tuple(tensor.transforms),
    )


def _find_grid(chunks: Sequence[Chunk], num_dims: int) -> tuple[int, ...] | None:
    if len(chunks) == 1:
        return (1,) * num_dims
    # The chunks cover the tensor exactly once, so this many chunks form a grid.
    grid = tuple(len({chunk.offsets[dim] for chunk in chunks}) for dim in range(num_dims))
    return grid if math.prod(grid) == len(chunks) else None
