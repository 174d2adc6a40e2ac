"""Any bytes of any tensor of a checkpoint, in row-major order, whatever chunks it was saved in."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
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
    """Reads tensors of one manifest, each byte checked. Each call holds at most `budget_bytes` beside what it fills.

    Chunks that were saved through an extension can only be unpacked whole. Of those that are wanted in parts, one is
    unpacked at a time, and as many are kept as `kept_bytes` hold, and the last one in any case: whoever comes for the
    next part finds it.
    """

    def __init__(self, context: Context, manifest: Manifest, *, budget_bytes: int, kept_bytes: int = 0) -> None:
        options = dataclasses.replace(
            context.options,
            connections=_CONNECTIONS_OF_EACH,
            read_bytes=max(budget_bytes, context.options.tile_bytes),
            request_bytes=max(min(context.options.request_bytes, budget_bytes), context.options.tile_bytes),
        )
        self._context = Context(context.location, options, rank=context.rank, recorder=context.recorder)
        self._manifest = manifest
        self._locations = ItemLocations(manifest)
        self._kept = _Kept(kept_bytes)

    def stop(self) -> None:
        """Give up what would have to be tried again."""
        self._context.retrier.stop()

    def read(self, wanted: Sequence[TensorBytes]) -> None:
        """See `TensorReader`. Raises what a load raises."""
        blocks: list[torch.Tensor] = []
        self._run([item for want in wanted for item in self._items_of(want, blocks)], blocks)

    def _run(self, items: list[ReadItem], blocks: Sequence[torch.Tensor]) -> None:
        if not items:
            return
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
                within = tuple(a - b for a, b in zip(common.offsets, chunk.offsets, strict=True))
                if tensor.transforms and common.lengths != chunk.lengths:
                    part.copy_(self._cut(want.name, chunk, Box(within, common.lengths)))
                    continue
                blocks.append(part)
                yield _item(want.name, chunk, Box(within, common.lengths), at=offsets, number=len(blocks) - 1)

    def _cut(self, name: str, chunk: Chunk, box: Box) -> torch.Tensor:
        """`box` of a chunk that can only be unpacked whole."""
        tensor = self._manifest.tensors[name]
        num_bytes = math.prod(chunk.lengths) * ITEMSIZE_BYTES[tensor.dtype]

        def unpacked() -> torch.Tensor:
            raw = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            whole = raw.view(dtype_of(tensor.dtype)).view(chunk.lengths)
            everything = Box((0,) * len(chunk.lengths), chunk.lengths)
            self._run([_item(name, chunk, everything, at=everything.offsets, number=0)], [whole])
            return whole

        found = self._kept.get((name, chunk.offsets), unpacked, num_bytes=num_bytes)
        for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            found = found.narrow(dim, offset, length)
        return found


class _Kept:
    """The chunks that were unpacked last: as many as `kept_bytes` hold, and the last one in any case."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._chunks: OrderedDict[tuple[str, tuple[int, ...]], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, key: tuple[str, tuple[int, ...]], unpacked: Callable[[], torch.Tensor], *, num_bytes: int
    ) -> torch.Tensor:
        """The chunk. Who wants it meanwhile waits for it, and does not unpack it once more."""
        with self._lock:
            if key not in self._chunks:
                while self._chunks and num_bytes + sum(one.nbytes for one in self._chunks.values()) > self._kept_bytes:
                    self._chunks.popitem(last=False)
                self._chunks[key] = unpacked()
            self._chunks.move_to_end(key)
            return self._chunks[key]


def _item(name: str, chunk: Chunk, box: Box, *, at: Sequence[int], number: int) -> ReadItem:
    """The read of `box` of a chunk into the block with that number."""
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, index=number),
        dest_offsets=torch.Size(at),
        storage_index=MetadataIndex(name, torch.Size(chunk.offsets)),
        storage_offsets=torch.Size(box.offsets),
        lengths=torch.Size(box.lengths),
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
