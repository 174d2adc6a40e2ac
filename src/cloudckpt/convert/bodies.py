"""Bodies of uploads whose bytes come from a checkpoint, from tensors or from a local file."""

from __future__ import annotations

import bisect
import contextlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from cloudckpt.errors import CorruptCheckpointError, ObjectNotFoundError
from cloudckpt.format.codec import unpack_tiles
from cloudckpt.format.model import StoredObject
from cloudckpt.format.safetensors import ObjectContents
from cloudckpt.inspect.blocks import TensorBytes
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
