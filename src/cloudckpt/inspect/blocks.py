"""Read bytes of stored tensors, and stored values, into memory that the caller gives."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, Manifest
from cloudckpt.format.torch_metadata import ItemLocations, dtype_of, find_overlapping_chunks
from cloudckpt.io.boxes import Box, intersect, split_into_boxes
from cloudckpt.options import MIB
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.load import LoadJob
from cloudckpt.tensors.extensions import ReadTransforms

ChunkName: TypeAlias = tuple[str, tuple[int, ...]]
"""The name of a tensor, and the offsets of one of its chunks."""
_MAX_KEPT_BYTES = 512 * MIB
"""More than that is kept only of a single chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes ``[begin, end)`` of one tensor in row-major order, and the ``uint8`` memory to read them into."""

    name: str
    begin: int
    end: int
    buffer: torch.Tensor


class CheckpointReader:
    """Reads from one manifest, however its tensors are cut into chunks, and checks each byte.

    A chunk that was saved through an extension can only be unpacked whole. If parts of it are wanted, one chunk is
    unpacked at a time. The last ones are kept for the reads of the next parts, up to `_MAX_KEPT_BYTES` in all.
    """

    def __init__(self, context: Context, manifest: Manifest) -> None:
        self.context = context
        self.manifest = manifest
        self._locations = ItemLocations(manifest)
        self._unpacking = threading.Lock()
        self._unpacked: dict[ChunkName, torch.Tensor] = {}
        """The chunks that are kept, the one that was used last at the end."""

    def stop(self) -> None:
        """Stop retries."""
        self.context.retrier.stop()

    def read(self, wanted: Sequence[TensorBytes], values: Mapping[str, io.BytesIO] | None = None) -> None:
        """Fill all buffers, and the files of `values` by name. Raises what a load raises."""
        targets: list[Any] = []
        items = [item for want in wanted for item in self._items_of(want, targets)]
        for name, file in (values or {}).items():
            items.append(_read_item(name, LoadItemType.BYTE_IO, len(targets)))
            targets.append(file)
        self._run(items, targets)

    def _items_of(self, want: TensorBytes, targets: list[Any]) -> Iterator[ReadItem]:
        """Yield the reads that fill one buffer, and add the memory of each to `targets`."""
        tensor = self.manifest.tensors[want.name]
        itemsize_bytes = ITEMSIZE_BYTES[tensor.dtype]
        elements = want.buffer.view(dtype_of(tensor.dtype))
        position = 0
        for box in split_into_boxes(want.begin // itemsize_bytes, want.end // itemsize_bytes, tensor.shape):
            size = math.prod(box.lengths)
            block = elements[position : position + size].view(box.lengths)
            position += size
            for chunk, common in _find_chunks(tensor.chunks, box):
                within = common.relative_to(chunk.offsets)
                target = block  # a view takes memory, and there can be very many
                if common.lengths != box.lengths:
                    target = block[common.relative_to(box.offsets).slices]
                if tensor.transforms and common.lengths != chunk.lengths:
                    target.copy_(self._unpack_kept(want.name, chunk)[within.slices])
                    continue
                yield _read_item(want.name, LoadItemType.TENSOR, len(targets), chunk=chunk, within=within)
                targets.append(target)

    def _unpack_kept(self, name: str, chunk: Chunk) -> torch.Tensor:
        """Return a chunk that can only be unpacked whole."""
        key = (name, chunk.offsets)
        with self._unpacking:  # a second thread that wants the chunk waits instead of unpacking it again
            whole = self._unpacked.pop(key, None)
            if whole is None:
                dtype = self.manifest.tensors[name].dtype
                num_bytes = math.prod(chunk.lengths) * ITEMSIZE_BYTES[dtype]
                self._make_room(num_bytes)
                raw = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                whole = raw.view(dtype_of(dtype)).view(chunk.lengths)
                within = Box((0,) * len(chunk.lengths), chunk.lengths)
                self._run([_read_item(name, LoadItemType.TENSOR, 0, chunk=chunk, within=within)], [whole])
            self._unpacked[key] = whole
            return whole

    def _make_room(self, num_bytes: int) -> None:
        while self._unpacked and sum(kept.nbytes for kept in self._unpacked.values()) + num_bytes > _MAX_KEPT_BYTES:
            self._unpacked.pop(next(iter(self._unpacked)))

    def _run(self, items: Sequence[ReadItem], targets: Sequence[Any]) -> None:
        """Carry out `items`, each into the target whose number it has."""
        if not items:
            return
        job = LoadJob(
            self.context,
            self.manifest,
            self._locations,
            transforms=ReadTransforms(None, self.context.options.extensions),
            allow_pickle=True,  # bytes are handed out as they are: nothing is unpickled
        )
        job.run(LoadPlan(list(items)), _TargetPlanner(targets))


def _find_chunks(chunks: Sequence[Chunk], box: Box) -> Iterator[tuple[Chunk, Box]]:
    """Find the chunks that overlap `box`, with the overlap."""
    positions = find_overlapping_chunks(chunks, box.offsets, box.lengths) if len(chunks) > 1 else None
    for chunk in chunks if positions is None else [chunks[position] for position in positions]:
        common = intersect(box, Box(chunk.offsets, chunk.lengths))
        if common is not None:
            yield chunk, common


def _read_item(
    name: str, kind: LoadItemType, number: int, *, chunk: Chunk | None = None, within: Box | None = None
) -> ReadItem:
    """Return the read of a value, or of the part `within` a chunk, into the target with that number."""
    offsets = torch.Size((0,) if within is None else within.offsets)
    return ReadItem(
        type=kind,
        dest_index=MetadataIndex(name, index=number),
        dest_offsets=torch.Size((0,) * len(offsets)),
        storage_index=MetadataIndex(name, None if chunk is None else torch.Size(chunk.offsets)),
        storage_offsets=offsets,
        lengths=torch.Size((0,) if within is None else within.lengths),
    )


class _TargetPlanner(DefaultLoadPlanner):
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
