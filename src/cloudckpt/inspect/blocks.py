"""Read boxes of stored tensors, and stored values, into memory that the caller gives."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from cloudckpt.format.model import Chunk, Manifest
from cloudckpt.format.torch_metadata import ItemLocations, find_overlapping_chunks
from cloudckpt.io.boxes import Box, intersect
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.load import LoadJob
from cloudckpt.tensors.extensions import ReadTransforms


class BlockReader:
    """Reads from one manifest, and checks each byte."""

    def __init__(self, context: Context, manifest: Manifest) -> None:
        self.context = context
        self.manifest = manifest
        self._locations = ItemLocations(manifest)

    def read(self, items: Sequence[ReadItem], targets: Sequence[Any]) -> None:
        """Carry out `items`, each into the target whose number it has. Raises what a load raises."""
        if not items:
            return
        job = LoadJob(
            self.context,
            self.manifest,
            self._locations,
            transforms=ReadTransforms(None, self.context.options.extensions),
            allow_pickle=True,  # bytes are handed out as they are: nothing is unpickled
            exchange=None,
        )
        job.run(LoadPlan(list(items)), _BlockPlanner(targets))


def read_value_item(name: str, *, number: int) -> ReadItem:
    """Return the read of the value `name` into the target with that number, a binary file."""
    nowhere = torch.Size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(name, index=number),
        dest_offsets=nowhere,
        storage_index=MetadataIndex(name),
        storage_offsets=nowhere,
        lengths=nowhere,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPart:
    """The common part of a stored chunk and a block that is to be filled."""

    chunk: Chunk
    within_chunk: Box
    """Relative to the chunk."""
    block_offsets: tuple[int, ...]
    target: torch.Tensor
    """The memory of this part in the block."""

    def read_item(self, name: str, *, number: int) -> ReadItem:
        """Return the read of this part of the tensor `name`, into the target with that number."""
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(name, index=number),
            dest_offsets=torch.Size(self.block_offsets),
            storage_index=MetadataIndex(name, torch.Size(self.chunk.offsets)),
            storage_offsets=torch.Size(self.within_chunk.offsets),
            lengths=torch.Size(self.within_chunk.lengths),
        )


def chunk_parts(chunks: Sequence[Chunk], box: Box, block: torch.Tensor) -> Iterator[ChunkPart]:
    """Find the parts of `chunks` that fill `block`, which holds `box` of the tensor."""
    positions = find_overlapping_chunks(chunks, box.offsets, box.lengths) if len(chunks) > 1 else None
    for chunk in chunks if positions is None else [chunks[position] for position in positions]:
        common = intersect(box, Box(chunk.offsets, chunk.lengths))
        if common is None:
            continue
        offsets = tuple(a - b for a, b in zip(common.offsets, box.offsets, strict=True))
        target = block
        if common.lengths != box.lengths:  # each `narrow` makes a tensor, of which there can be very many
            for dim, (offset, length) in enumerate(zip(offsets, common.lengths, strict=True)):
                target = target.narrow(dim, offset, length)
        within = Box(tuple(a - b for a, b in zip(common.offsets, chunk.offsets, strict=True)), common.lengths)
        yield ChunkPart(chunk=chunk, within_chunk=within, block_offsets=offsets, target=target)


class _BlockPlanner(DefaultLoadPlanner):
    """Gives each read item the target with its number."""

    def __init__(self, targets: Sequence[Any]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found: torch.Tensor = self._target_of(read_item)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor was read into its place."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._target_of(read_item).write(value.getvalue())

    def _target_of(self, read_item: ReadItem) -> Any:
        assert read_item.dest_index.index is not None  # noqa: S101  # every item has one here
        return self._targets[read_item.dest_index.index]
