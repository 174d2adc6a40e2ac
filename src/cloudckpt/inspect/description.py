"""Describe the content of a checkpoint from its manifest."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt._display import Rows, with_short_repr
from cloudckpt.commit.log import Resolved, resolve
from cloudckpt.errors import CheckpointNotFoundError
from cloudckpt.format.model import Chunk, Manifest, StoredTensor
from cloudckpt.format.nesting import name_path, path_from_json
from cloudckpt.format.safetensors import INDEX_SUFFIX, SUFFIX
from cloudckpt.io.client import open_client
from cloudckpt.options import Options
from cloudckpt.uri import Location, parse_location


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescription:
    """One tensor of a `CheckpointDescription`."""

    name: str
    """Name of the tensor, such as ``model.layer.weight``."""
    dtype: str
    """torch's name, without the ``torch.``."""
    shape: tuple[int, ...]
    """Global shape."""
    num_bytes: int
    """Size on the store."""
    num_chunks: int
    """Number of chunks, usually one for each rank that held a part."""
    grid: tuple[int, ...] | None
    """Number of chunks along each dimension; None if they form no grid."""
    objects: tuple[int, ...]
    """Positions of its data objects in `CheckpointDescription.objects`."""
    requires_grad: bool
    """True if the tensor required a gradient at the save."""
    transforms: tuple[str, ...]
    """Transforms of each chunk, such as compression."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperDescription:
    """One tensor of a `CheckpointDescription` that consists of others, such as a quantized weight."""

    name: str
    """Name of the tensor. A part's name is this name, a dot and the name of the part."""
    kind: str
    """Module and name of the tensor's class."""
    shape: tuple[int, ...]
    """Global shape."""
    parts: tuple[str, ...]
    """Names of its parts among the tensors."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDescription:
    """One Python object of a `CheckpointDescription`."""

    name: str
    """Name of the object."""
    num_bytes: int
    """Size on the store."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectDescription:
    """One data object of a `CheckpointDescription`."""

    key: str
    """Key relative to the checkpoint."""
    num_bytes: int
    """Size on the store."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDescription:
    """Content of a committed checkpoint. `describe` returns it."""

    uri: str
    """URI of the checkpoint."""
    attempt: str
    """Identifier of the save."""
    created_at: str
    """Time at which the manifest was made, by the writer's clock (RFC 3339, UTC)."""
    world_size: int
    """Number of ranks that saved."""
    manifest_number: int
    """Number of the manifest: 0 for the first save, one more for each overwrite and each fence of a deletion or gc."""
    software: Mapping[str, str]
    """Versions of the libraries of the save, by name."""
    metadata: Mapping[str, Any]
    """``Options.metadata`` of the save."""
    tile_bytes: int
    """Number of bytes that share one CRC32C."""
    objects: tuple[ObjectDescription, ...]
    """The data objects."""
    tensors: tuple[TensorDescription, ...]
    """The tensors."""
    values: tuple[ValueDescription, ...]
    """The Python objects."""
    wrappers: tuple[WrapperDescription, ...] = ()
    """The tensors that consist of others."""
    empty_dicts: tuple[str, ...] = ()
    """Names of the dicts that were saved without any entry, such as the state of a disabled GradScaler."""

    @property
    def num_bytes(self) -> int:
        """Size of all data objects."""
        return sum(stored.num_bytes for stored in self.objects)

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDescription:
    """The entries of a checkpoint in one module, without entries that have a row of their own."""

    name: str
    """The common parts of the entries' names: ``model.layers``; ``model (rest)`` beside other modules of ``model``."""
    num_tensors: int
    """Number of tensors."""
    num_elements: int
    """Number of elements of all tensors."""
    num_values: int
    """Number of Python objects."""
    num_bytes: int
    """Size of all entries on the store."""


def group_by_module(
    entries: Iterable[TensorDescription | ValueDescription], depth: int
) -> tuple[ModuleDescription, ...]:
    """Sum up entries by module, in the order of the entries. A module is at most `depth` parts of a name, but the last.

    A value counts for the nearest module above it that has tensors, or for the first part of its name.
    """
    entries = [*entries]
    modules = {_parent_of(entry.name, depth) for entry in entries if isinstance(entry, TensorDescription)}
    groups: dict[str, list[TensorDescription | ValueDescription]] = {}
    for entry in entries:
        name = _parent_of(entry.name, depth)
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        groups.setdefault(name, []).append(entry)
    return tuple(
        ModuleDescription(
            name=f"{name} (rest)" if any(other.startswith(f"{name}.") for other in groups) else name,
            num_tensors=sum(isinstance(entry, TensorDescription) for entry in group),
            num_elements=sum(math.prod(entry.shape) for entry in group if isinstance(entry, TensorDescription)),
            num_values=sum(isinstance(entry, ValueDescription) for entry in group),
            num_bytes=sum(entry.num_bytes for entry in group),
        )
        for name, group in groups.items()
    )


def _parent_of(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:-1][:depth]) or name


def matches(fqn: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern, as for file names, fits the name, or is the name of a container above it."""
    return any(
        fqn == pattern or fqn.startswith(f"{pattern}.") or fnmatch.fnmatchcase(fqn, pattern) for pattern in patterns
    )


def describe(uri: str | os.PathLike[str], *, options: Options | None = None) -> CheckpointDescription:
    """Describe the content of the checkpoint at `uri`, or of safetensors files there.

    Reads only the manifest, or the headers of the files, and runs no code from the store.

    Args:
        uri: The checkpoint.
        options: How to reach the store.

    Returns:
        The tensors, values and data objects, with their names and sizes.

    Raises:
        CheckpointNotFoundError: No checkpoint is committed there.
        CorruptCheckpointError: The manifest is damaged.
        UnsupportedFormatError: A newer cloudckpt wrote it.
        StoreError: A request failed.

    Example::

        for tensor in cloudckpt.describe("s3://bucket/run/step-100").tensors:
            print(tensor.name, tensor.dtype, tensor.shape)

    """
    options = options or Options()
    location = parse_location(uri)
    resolved = _resolve(location, options)
    manifest = resolved.manifest
    return CheckpointDescription(
        uri=location.uri,
        attempt=manifest.attempt,
        created_at=manifest.created_at,
        world_size=manifest.world_size,
        manifest_number=resolved.number,
        software=manifest.software,
        metadata=manifest.metadata,
        tile_bytes=manifest.tile_bytes,
        objects=Rows(ObjectDescription(key=stored.path, num_bytes=stored.size) for stored in manifest.objects),
        tensors=Rows(_describe_tensor(name, tensor) for name, tensor in manifest.tensors.items()),
        values=Rows(
            ValueDescription(name=name, num_bytes=value.end - value.begin) for name, value in manifest.values.items()
        ),
        wrappers=Rows(
            WrapperDescription(
                name=name,
                kind=wrapper.kind,
                shape=wrapper.shape,
                parts=tuple(f"{name}.{part}" for part in wrapper.tensors),
            )
            for name, wrapper in manifest.wrappers.items()
        ),
        empty_dicts=find_empty_dicts(manifest),
    )


def find_empty_dicts(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of saved dicts without any entry. On some rank, others may have entries."""
    names = [name_path(path_from_json(path)) for path in manifest.empty_mappings]
    entries = [*manifest.tensors, *manifest.values] if names else []
    return tuple(name for name in names if not any(entry == name or entry.startswith(f"{name}.") for entry in entries))


def _resolve(location: Location, options: Options) -> Resolved:
    """Return the checkpoint at `location`, or the safetensors files there."""
    if not location.name.endswith((SUFFIX, INDEX_SUFFIX)):
        with contextlib.suppress(CheckpointNotFoundError):
            return resolve(open_client(location, options))
    from cloudckpt.pipeline.context import Context
    from cloudckpt.pipeline.safetensors_files import find_source

    return find_source(Context(location, options, rank=0))[1]


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
