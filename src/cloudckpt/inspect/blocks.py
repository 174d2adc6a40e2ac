"""Read bytes of stored tensors, and stored values, into memory that the caller gives."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from cloudckpt.format.chunks import dtype_of, find_overlapping_chunks, locate_chunk, locate_value
from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, Manifest, StoredTensor
from cloudckpt.io.boxes import Box, intersect, split_into_boxes
from cloudckpt.options import MIB
from cloudckpt.pipeline.consumers import Consumer, Consumers, tensor_consumer, value_consumer
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
        self._unpacking = threading.Lock()
        self._unpacked: dict[ChunkName, torch.Tensor] = {}
        """The chunks that are kept, the one that was used last at the end."""

    def stop(self) -> None:
        """Stop retries."""
        self.context.stop()

    def read(self, wanted: Sequence[TensorBytes], values: Mapping[str, io.BytesIO] | None = None) -> None:
        """Fill all buffers, and the files of `values` by name. Raises what a load raises."""
        consumers = [consumer for want in wanted for consumer in self._consumers_of(want)]
        for name, file in (values or {}).items():
            consumers.append(value_consumer(name, locate_value(self.manifest.values[name]), file))
        self._run(consumers)

    def _consumers_of(self, want: TensorBytes) -> Iterator[Consumer]:
        """Yield the reads that fill one buffer."""
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
                    target.copy_(self._unpack_kept(want.name, tensor, chunk)[within.slices])
                    continue
                yield tensor_consumer(want.name, locate_chunk(tensor, chunk), within, target)

    def _unpack_kept(self, name: str, tensor: StoredTensor, chunk: Chunk) -> torch.Tensor:
        """Return a chunk that can only be unpacked whole."""
        key = (name, chunk.offsets)
        with self._unpacking:  # a second thread that wants the chunk waits instead of unpacking it again
            whole = self._unpacked.pop(key, None)
            if whole is None:
                num_bytes = math.prod(chunk.lengths) * ITEMSIZE_BYTES[tensor.dtype]
                self._make_room(num_bytes)
                raw = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                whole = raw.view(dtype_of(tensor.dtype)).view(chunk.lengths)
                within = Box((0,) * len(chunk.lengths), chunk.lengths)
                self._run([tensor_consumer(name, locate_chunk(tensor, chunk), within, whole)])
            self._unpacked[key] = whole
            return whole

    def _make_room(self, num_bytes: int) -> None:
        while self._unpacked and sum(kept.nbytes for kept in self._unpacked.values()) + num_bytes > _MAX_KEPT_BYTES:
            self._unpacked.pop(next(iter(self._unpacked)))

    def _run(self, consumers: Sequence[Consumer]) -> None:
        """Fill all of them."""
        if not consumers:
            return
        job = LoadJob(
            self.context,
            self.manifest,
            transforms=ReadTransforms(None, self.context.options.extensions),
            on_value=lambda consumer, content: consumer.item.write(content),  # the bytes as they are stored
        )
        job.run(Consumers(consumers))


def _find_chunks(chunks: Sequence[Chunk], box: Box) -> Iterator[tuple[Chunk, Box]]:
    """Find the chunks that overlap `box`, with the overlap."""
    positions = find_overlapping_chunks(chunks, box.offsets, box.lengths) if len(chunks) > 1 else None
    for chunk in chunks if positions is None else [chunks[position] for position in positions]:
        common = intersect(box, Box(chunk.offsets, chunk.lengths))
        if common is not None:
            yield chunk, common
