"""The bodies of objects whose bytes come from elsewhere: part by part, each held only until it is sent."""

from __future__ import annotations

import bisect
import contextlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cloudckpt._manifest.codec import unpack_tiles
from cloudckpt._manifest.model import StoredObject
from cloudckpt._pipeline.context import Context
from cloudckpt._plan.header import Contents
from cloudckpt._stage.arena import Arena
from cloudckpt._stage.tensors import bytes_view
from cloudckpt._transfer.download import fetch_verified
from cloudckpt.errors import CorruptCheckpointError, ObjectNotFoundError


class CopiedBody:
    """A data object of a checkpoint, each of its tiles checked as it comes.

    Opening it raises `CorruptCheckpointError`, with the object and what it holds, where it is not what was saved.
    """

    def __init__(
        self, source: Context, stored: StoredObject, contents: Contents, arena: Arena, *, tile_bytes: int
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
        """Of its tiles. So what is there of it elsewhere is known without reading the source."""
        return self._tiles

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Views of bytes ``[begin, end)``. Bounds lie on tiles."""
        with self._arena.lend(end - begin) as buffer:
            view = bytes_view(buffer)
            try:
                fetch_verified(
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
                raise _missing(self._source, self._stored, self._contents) from error
            yield [view]


def _missing(context: Context, stored: StoredObject, contents: Contents) -> CorruptCheckpointError:
    """The error for a data object that is not there."""
    return CorruptCheckpointError(
        f"{context.store.url(stored.key)} is missing, and with it {contents.names(0, stored.size)}", uri=context.uri
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes ``[begin, end)`` of one tensor in row-major order, and the memory, ``uint8``, that they are to fill."""

    name: str
    begin: int
    end: int
    buffer: torch.Tensor


class TensorReader(Protocol):
    """Where tensors come from."""

    def read(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all of them. Bounds never lie inside of an element. Many threads may ask at once."""


class TensorsBody:
    """A safetensors file: its header, and then whole tensors, back to back.

    `begins` are those of the tensors in the file, and `names` what the reader calls them.
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
        """Views of bytes ``[begin, end)``. Bounds lie on tiles, and so never inside of an element."""
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

    def __init__(self, path: str, arena: Arena, *, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._path = path
        self._arena = arena

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Views of bytes ``[begin, end)``."""
        with self._arena.lend(end - begin) as buffer:
            view = bytes_view(buffer)
            with open(self._path, "rb") as file:  # noqa: PTH123  # a str, as all paths of this package
                file.seek(begin)
                num_bytes = file.readinto(view)  # a buffered file fills all that there is
            if num_bytes != len(view):
                raise OSError(f"{self._path} has become shorter while it was read")
            yield [view]
