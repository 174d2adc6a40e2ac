"""Any bytes of any tensor of a checkpoint, in row-major order, whatever chunks it was saved in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from cloudckpt._convert.bodies import TensorBytes
from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES
from cloudckpt._manifest.lookup import meeting
from cloudckpt._manifest.model import Chunk, Manifest
from cloudckpt._manifest.torch_dtypes import dtype_of
from cloudckpt._manifest.torch_views import ItemLocations
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.load import LoadJob
from cloudckpt._plan.boxes import Box, boxes_of, intersection_of
from cloudckpt._stage.transforms import ReadTransforms

_CONNECTIONS_OF_EACH = 2


class CheckpointReader:
    """Reads tensors of one manifest, each byte checked. Each call holds at most `budget_bytes` beside what it fills;
    chunks that were saved through an extension, whole.
    """

    def __init__(self, context: Context, manifest: Manifest, *, budget_bytes: int) -> None:
        options = dataclasses.replace(
            context.options,
            connections=_CONNECTIONS_OF_EACH,
            read_bytes=max(budget_bytes, context.options.tile_bytes),
            request_bytes=max(min(context.options.request_bytes, budget_bytes), context.options.tile_bytes),
        )
        self._context = Context(context.location, options, rank=context.rank, recorder=context.recorder)
        self._manifest = manifest
        self._locations = ItemLocations(manifest)

    def stop(self) -> None:
        """Give up what would have to be tried again."""
        self._context.retrier.stop()

    def read(self, wanted: Sequence[TensorBytes]) -> None:
        """See `TensorReader`. Raises what a load raises."""
        blocks: list[torch.Tensor] = []
        items = [item for want in wanted for item in self._items_of(want, blocks)]
        if items:
            transforms = ReadTransforms(None, self._context.options.extensions)
            job = LoadJob(
                self._context,
                self._manifest,
                self._locations,
                transforms=transforms,
                allow_pickle=False,
                exchange=None,
            )
            job.run(LoadPlan(items), _Blocks(blocks))

    def _items_of(self, want: TensorBytes, blocks: list[torch.Tensor]) -> Iterator[ReadItem]:
        """The reads that fill one piece; the memory of each is added to `blocks`."""
        tensor = self._manifest.tensors[want.name]
        itemsize_bytes = ITEMSIZE_BYTES[tensor.dtype]
        elements = want.buffer.view(dtype_of(tensor.dtype))
        position = 0
        for box in boxes_of(want.begin // itemsize_bytes, want.end // itemsize_bytes, tensor.shape):
            size = _size_of(box)
            block = elements[position : position + size].view(box.lengths)
            position += size
            for chunk in _meeting(tensor.chunks, box):
                common = intersection_of(box, Box(chunk.offsets, chunk.lengths))
                if common is None:
                    continue
                offsets = [a - b for a, b in zip(common.offsets, box.offsets, strict=True)]
                part = block
                for dim, (offset, length) in enumerate(zip(offsets, common.lengths, strict=True)):
                    part = part.narrow(dim, offset, length)
                blocks.append(part)
                yield ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(want.name, index=len(blocks) - 1),
                    dest_offsets=torch.Size(offsets),
                    storage_index=MetadataIndex(want.name, torch.Size(chunk.offsets)),
                    storage_offsets=torch.Size(a - b for a, b in zip(common.offsets, chunk.offsets, strict=True)),
                    lengths=torch.Size(common.lengths),
                )


def _size_of(box: Box) -> int:
    size = 1
    for length in box.lengths:
        size *= length
    return size


def _meeting(chunks: Sequence[Chunk], box: Box) -> Sequence[Chunk]:
    """Those that may hold any of `box`."""
    found = meeting(chunks, box.offsets, box.lengths) if len(chunks) > 1 else None
    return chunks if found is None else [chunks[position] for position in found]


class _Blocks(DefaultLoadPlanner):
    """Gives the memory of each item."""

    def __init__(self, blocks: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._blocks = blocks

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.index is not None  # noqa: S101  # every item has one here
        return self._blocks[read_item.dest_index.index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError(read_item)
