"""Bodies of uploads whose bytes come from a checkpoint, a file or tensors; and the files of whole tensors."""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from cloudckpt.commit.attempts import new_save_id
from cloudckpt.convert.transfer import BodyIn, Transfer, choose_buffered_part_bytes
from cloudckpt.format.model import ITEMSIZE_BYTES, ObjectRef
from cloudckpt.format.safetensors import HeaderEntry, Layout, ObjectContents, lay_out
from cloudckpt.io.download import download_range
from cloudckpt.io.reads import RangeRead
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.draft import Draft, require_no_resume
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.wanted_items import TensorBytes
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.tensors.data_objects import pack
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.tensor_bytes import bytes_view


class CopiedBody:
    """A data object of a checkpoint. Each tile is checked when it is read.

    `open` raises `CorruptCheckpointError`, which names the object and its tensors, if bytes have changed since the
    save, and `CheckpointChangedError` if the source was replaced.
    """

    def __init__(self, reader: CheckpointReader, object_index: int, contents: ObjectContents, arena: Arena) -> None:
        self._reader, self._object_index, self._contents, self._arena = reader, object_index, contents, arena
        self.size_bytes = reader.manifest.objects[object_index].size

    @property
    def known_crc32cs(self) -> Sequence[int]:
        """Checksums of the tiles. With them, parts of an earlier copy are compared without reading the source."""
        return self._reader.tiles_of(RangeRead(object_index=self._object_index, begin=0, end=self.size_bytes))

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Lend views of bytes ``[begin, end)``. Both bounds are bounds of tiles."""
        with self._arena.lend(end - begin) as buffer:
            views = [bytes_view(buffer)]
            self._reader.read_tiles(
                RangeRead(object_index=self._object_index, begin=begin, end=end),
                open_views=lambda _: contextlib.nullcontext(views),
                names_in=lambda _, low, high: self._contents.names(low, high),
                is_verified=True,
            )
            yield views


class FileBody:
    """A file of any kind, as it is. No checksum covers it."""

    def __init__(self, context: Context, file: ObjectInfo, arena: Arena) -> None:
        self._client, self._key, self._arena = context.client, file.key, arena
        self.size_bytes = file.size_bytes

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Lend a view of bytes ``[begin, end)``."""
        with self._arena.lend(end - begin) as buffer:
            view = bytes_view(buffer)
            if begin < end:
                download_range(self._client, key=self._key, begin=begin, views=[view])
            yield [view]


class TensorReader(Protocol):
    """A source of tensors."""

    def read_bytes(self, wanted: Sequence[TensorBytes]) -> None:
        """Fill all buffers, in their dtypes. No bound is inside an element. Several threads call this method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """A safetensors file of whole tensors, in the order in which they are stored."""

    entries: Sequence[HeaderEntry]
    layout: Layout

    def body_in(self, reader: TensorReader, names: Mapping[str, str]) -> BodyIn:
        """Return a function that makes the body. `names` maps each name in the file to the reader's name."""
        return functools.partial(_TensorsBody, self, reader, [names[entry.fqn] for entry in self.entries])


def plan_files(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    file_bytes: int,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> list[TensorFile]:
    """Split tensors, given by dtype and shape, into files of at most `file_bytes`. A larger tensor has its own file.

    The tensors keep their order from file to file, as in ``huggingface_hub.split_torch_state_dict_into_shards``. In
    each file, the largest elements come first, so that all are aligned.
    """
    entries = [
        HeaderEntry(
            fqn=name,
            dtype=dtype,
            shape=shape,
            offsets=None,
            num_bytes=math.prod(shape) * ITEMSIZE_BYTES[dtype],
        )
        for name, (dtype, shape) in tensors.items()
    ]
    files = []
    for group in pack([entry.num_bytes for entry in entries], object_bytes=file_bytes):
        members = sorted((entries[index] for index in group), key=lambda entry: -entry.itemsize_bytes)
        files.append(TensorFile(entries=members, layout=lay_out(members, metadata=metadata)))
    return files


def write_files(
    transfer: Transfer,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    reader: TensorReader,
    names: Mapping[str, str],
    *,
    budget_bytes: int,
    stop_reading: Callable[[], None],
    check_unchanged: Callable[[], None],
) -> tuple[Draft, list[TensorFile], list[ObjectRef]]:
    """Write the objects of a checkpoint of whole tensors, given by dtype and shape, at the target of a transfer.

    `names` maps each name to the reader's name. Buffers take at most `budget_bytes`. `check_unchanged` raises if a
    source was replaced. After a failure, no object exists.

    Returns:
        The draft to commit, the planned files, and the receipt of each file.

    """
    target, progress, advanced = transfer.target, transfer.progress, transfer.target.options.advanced
    files = plan_files(tensors, file_bytes=advanced.object_bytes)
    require_no_resume(target.options)
    draft = Draft(target, save_id=new_save_id())
    draft.begin(overwrite=transfer.overwrite)
    progress.expect(sum(file.layout.size_bytes for file in files))
    target.on_sent = progress.add
    part_bytes = choose_buffered_part_bytes(target, budget_bytes=budget_bytes, tile_bytes=advanced.tile_bytes)
    try:
        with contextlib.closing(Arena(budget_bytes=budget_bytes)) as arena:
            bodies = ((file.body_in(reader, names)(arena), part_bytes) for file in files)
            receipts = draft.write(bodies, on_failure=stop_reading)
        check_unchanged()
    except BaseException:
        draft.remove(draft.key(number) for number in range(len(files)))
        raise
    return draft, files, receipts


class _TensorsBody:
    """The bytes of a safetensors file: its header, then whole tensors back to back."""

    def __init__(self, file: TensorFile, reader: TensorReader, names: Sequence[str], arena: Arena) -> None:
        self.size_bytes = file.layout.size_bytes
        self._header = file.layout.header
        self._names, self._dtypes = names, [entry.dtype for entry in file.entries]
        self._begins = [*file.layout.begins, self.size_bytes]
        self._reader = reader
        self._arena = arena

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[list[memoryview]]:
        """Lend views of bytes ``[begin, end)``. Both bounds are bounds of tiles, so no element is cut."""
        with self._arena.lend(end - begin) as buffer:
            view = bytes_view(buffer)
            header_bytes = self._header[begin:end]
            view[: len(header_bytes)] = header_bytes
            self._reader.read_bytes(list(self._find_tensors(begin, end, buffer)))
            yield [view]

    def _find_tensors(self, begin: int, end: int, buffer: torch.Tensor) -> Iterator[TensorBytes]:
        first = max(bisect.bisect_right(self._begins, begin) - 1, 0)
        for index in range(first, len(self._names)):
            tensor_begin, tensor_end = self._begins[index], self._begins[index + 1]
            if tensor_begin >= end:
                return
            low, high = max(tensor_begin, begin), min(tensor_end, end)
            if low < high:
                yield TensorBytes(
                    name=self._names[index],
                    begin=low - tensor_begin,
                    end=high - tensor_begin,
                    buffer=buffer[low - begin : high - begin],
                    dtype=self._dtypes[index],
                )
