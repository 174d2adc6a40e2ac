"""Bodies of uploads whose bytes come from a checkpoint, from tensors or from a local file."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch.distributed.checkpoint.planner import ReadItem

from cloudckpt.errors import CorruptCheckpointError, ObjectNotFoundError
from cloudckpt.format.codec import unpack_tiles
from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, Manifest, StoredObject
from cloudckpt.format.safetensors import ObjectContents
from cloudckpt.format.torch_metadata import dtype_of
from cloudckpt.inspect.blocks import BlockReader, ChunkPart, chunk_parts
from cloudckpt.io.boxes import Box, split_into_boxes
from cloudckpt.io.download import fetch_and_verify
from cloudckpt.pipeline.context import Context
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.tensor_bytes import bytes_view


class CopiedBody:
    """A data object of a checkpoint. Each tile is checked when it is read.

    `open` raises `CorruptCheckpointError`, with the object and its tensors, if it is not what was saved.
    """

    def __init__(
        self, source: Context, stored: StoredObject, contents: ObjectContents, arena: Arena, *, tile_bytes: int
    ) -> None:
        self.size_bytes = stored.size
        self._source = source
        self._stored = stored
        self._contents = contents
        self._arena = arena
        self._tile_bytes = tile_bytes
        self._tiles: array[int] = unpack_tiles(stored.crc32c)

    @property
    def known_crc32cs(self) -> Sequence[int]:
        """Checksums of its tiles, by which parts of an earlier copy are known without reading the source."""
        return self._tiles

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Lend views of bytes ``[begin, end)``. Bounds lie on tiles."""
        with self._arena.lend(end - begin) as buffer:
            view = bytes_view(buffer)
            try:
                fetch_and_verify(
                    self._source.store,
                    self._source.retrier,
                    key=self._stored.key,
                    begin=begin,
                    views=[view],
                    tile_bytes=self._tile_bytes,
                    expected_crc32cs=self._tiles[begin // self._tile_bytes : -(-end // self._tile_bytes)],
                    holding=self._contents.names,
                )
            except ObjectNotFoundError as error:
                raise CorruptCheckpointError(
                    f"{self._source.store.url(self._stored.key)} is missing, and with it "
                    f"{self._contents.names(0, self.size_bytes)}",
                    uri=self._source.uri,
                ) from error
            yield [view]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes ``[begin, end)`` of one tensor in row-major order, and the ``uint8`` memory to read them into."""

    name: str
    begin: int
    end: int
    buffer: torch.Tensor


class TensorReader(Protocol):
    """A source of tensors."""

    def read(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all buffers. Bounds never lie inside an element. Several threads call it."""


class TensorsBody:
    """A safetensors file: its header, then whole tensors back to back.

    `begins` are the positions of the tensors in the file, `names` their names in the reader.
    """

    def __init__(
        self,
        header: bytes,
        names: Sequence[str],
        begins: Sequence[int],
        *,
        size_bytes: int,
        reader: TensorReader,
        arena: Arena,
    ) -> None:
        self.size_bytes = size_bytes
        self._header = header
        self._names = names
        self._begins = [*begins, size_bytes]
        self._reader = reader
        self._arena = arena

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Lend views of bytes ``[begin, end)``. Bounds lie on tiles, and so never inside an element."""
        with self._arena.lend(end - begin) as buffer:
            view = bytes_view(buffer)
            head = self._header[begin:end]
            view[: len(head)] = head
            self._reader.read(list(self._inside(begin, end, buffer)))
            yield [view]

    def _inside(self, begin: int, end: int, buffer: torch.Tensor) -> Iterator[TensorBytes]:
        first = max(bisect.bisect_right(self._begins, begin) - 1, 0)
        for index in range(first, len(self._names)):
            own, after = self._begins[index], self._begins[index + 1]
            if own >= end:
                return
            low, high = max(own, begin), min(after, end)
            if low < high:
                yield TensorBytes(
                    name=self._names[index], begin=low - own, end=high - own, buffer=buffer[low - begin : high - begin]
                )


class FileBody:
    """A local file."""

    def __init__(self, path: Path, arena: Arena, *, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._path = path
        self._arena = arena

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Lend views of bytes ``[begin, end)``."""
        with self._arena.lend(end - begin) as buffer:
            view = bytes_view(buffer)
            with self._path.open("rb") as file:
                file.seek(begin)
                num_bytes = file.readinto(view)  # a buffered file fills all that there is
            if num_bytes != len(view):
                raise OSError(f"{self._path} has become shorter while it was read")
            yield [view]


_CONNECTIONS_OF_EACH = 2
ChunkName: TypeAlias = tuple[str, tuple[int, ...]]
"""The name of a tensor, and the offsets of one of its chunks."""


class CheckpointReader:
    """Reads tensors of one manifest, and checks each byte. Each call holds at most `budget_bytes` beside the buffers.

    A chunk that was saved through an extension can only be unpacked whole. If parts of it are wanted, one chunk is
    unpacked at a time, and kept for the reads of the next parts.
    """

    def __init__(self, context: Context, manifest: Manifest, *, budget_bytes: int) -> None:
        advanced = context.options.advanced
        request_bytes = max(min(advanced.request_bytes, budget_bytes), advanced.tile_bytes)
        options = dataclasses.replace(
            context.options,
            connections=_CONNECTIONS_OF_EACH,
            read_bytes=max(budget_bytes, advanced.tile_bytes),
            advanced=dataclasses.replace(advanced, request_bytes=request_bytes),
        )
        self._context = Context(context.location, options, rank=context.rank, recorder=context.recorder)
        self._manifest = manifest
        self._reader = BlockReader(self._context, manifest)
        self._unpacking = threading.Lock()
        self._unpacked: tuple[ChunkName, torch.Tensor] | None = None

    def stop(self) -> None:
        """Stop retries."""
        self._context.retrier.stop()

    def read(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all buffers. Raises what a load raises."""
        blocks: list[torch.Tensor] = []
        items = [item for want in wanted for item in self._items_of(want, blocks)]
        self._reader.read(items, blocks)

    def _items_of(self, want: TensorBytes, blocks: list[torch.Tensor]) -> Iterator[ReadItem]:
        """Yield the reads that fill one buffer, and add the memory of each to `blocks`."""
        tensor = self._manifest.tensors[want.name]
        itemsize_bytes = ITEMSIZE_BYTES[tensor.dtype]
        elements = want.buffer.view(dtype_of(tensor.dtype))
        position = 0
        for box in split_into_boxes(want.begin // itemsize_bytes, want.end // itemsize_bytes, tensor.shape):
            size = math.prod(box.lengths)
            block = elements[position : position + size].view(box.lengths)
            position += size
            for part in chunk_parts(tensor.chunks, box, block):
                if tensor.transforms and part.within_chunk.lengths != part.chunk.lengths:
                    part.target.copy_(self._read_part(want.name, part))
                    continue
                blocks.append(part.target)
                yield part.read_item(want.name, number=len(blocks) - 1)

    def _read_part(self, name: str, part: ChunkPart) -> torch.Tensor:
        """Return a part of a chunk that can only be unpacked whole."""
        key = (name, part.chunk.offsets)
        with self._unpacking:  # a second thread that wants the chunk waits instead of unpacking it again
            if self._unpacked is None or self._unpacked[0] != key:
                self._unpacked = None  # frees the last one first
                self._unpacked = key, self._unpack(name, part.chunk)
            found = self._unpacked[1]
        for dim, (offset, length) in enumerate(zip(part.within_chunk.offsets, part.within_chunk.lengths, strict=True)):
            found = found.narrow(dim, offset, length)
        return found

    def _unpack(self, name: str, chunk: Chunk) -> torch.Tensor:
        dtype = self._manifest.tensors[name].dtype
        raw = torch.empty(math.prod(chunk.lengths) * ITEMSIZE_BYTES[dtype], dtype=torch.uint8, device="cpu")
        whole = raw.view(dtype_of(dtype)).view(chunk.lengths)
        parts = chunk_parts([chunk], Box(chunk.offsets, chunk.lengths), whole)
        self._reader.read([part.read_item(name, number=0) for part in parts], [whole])
        return whole
