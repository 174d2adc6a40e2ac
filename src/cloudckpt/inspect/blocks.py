"""Cut tensors into blocks, and read the same block of two checkpoints."""

from __future__ import annotations

import io
import itertools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from cloudckpt.commit.log import resolve
from cloudckpt.format.model import Chunk, Manifest, StoredTensor
from cloudckpt.format.torch_metadata import ItemLocations, dtype_of, find_overlapping_chunks
from cloudckpt.io.boxes import Box, intersect
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.load import LoadJob
from cloudckpt.tensors.extensions import ReadTransforms
from cloudckpt.uri import parse_location

BATCH_BYTES = 64 * MIB


class Sized(Protocol):
    """Something that takes memory."""

    @property
    def num_bytes(self) -> int: ...


_S = TypeVar("_S", bound=Sized)


def boxes_for(first: StoredTensor, second: StoredTensor, itemsize_bytes: int) -> Iterable[Box]:
    """Cut a tensor as the checkpoint with more chunks does, and cut large blocks further."""
    if 0 in first.shape:
        return
    chunks = max(first.chunks, second.chunks, key=len)
    is_whole = bool(first.transforms or second.transforms)  # these chunks can only be read whole
    for chunk in chunks:
        if 0 in chunk.lengths:
            continue
        box = Box(chunk.offsets, chunk.lengths)
        yield from [box] if is_whole else _cut(box, max(BATCH_BYTES // itemsize_bytes, 1))


def _cut(box: Box, most_elements: int) -> Iterator[Box]:
    """Cut `box` along its leading dimensions into boxes of at most `most_elements`."""
    if math.prod(box.lengths) <= most_elements:
        yield box
        return
    dim = next(dim for dim in range(len(box.lengths)) if math.prod(box.lengths[dim + 1 :]) <= most_elements)
    step = max(most_elements // math.prod(box.lengths[dim + 1 :]), 1)
    leading = [range(offset, offset + length) for offset, length in zip(box.offsets[:dim], box.lengths, strict=False)]
    for before in itertools.product(*leading):
        for begin in range(0, box.lengths[dim], step):
            length = min(step, box.lengths[dim] - begin)
            yield Box(
                (*before, box.offsets[dim] + begin, *box.offsets[dim + 1 :]),
                (*(1 for _ in before), length, *box.lengths[dim + 1 :]),
            )


def batches(wanted: Iterable[_S]) -> Iterator[list[_S]]:
    """Group blocks into batches of at most `BATCH_BYTES`, or of one block."""
    batch: list[_S] = []
    num_bytes = 0
    for one in wanted:
        if batch and num_bytes + one.num_bytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(one)
        num_bytes += one.num_bytes
    if batch:
        yield batch


class ComparedBlock:
    """A block of a tensor, or a value, of both checkpoints."""

    def __init__(self, name: str, box: Box | None, dtype: str, num_bytes: int) -> None:
        self.name, self.box, self.num_bytes = name, box, num_bytes
        self._dtype = dtype
        self._held: list[Any] = []

    def make(self) -> None:
        """Allocate memory for both checkpoints."""
        if self.box is not None:
            for _ in range(2):
                # torch warns when it makes tensors of some dtypes.
                raw = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
                self._held.append(raw.view(dtype_of(self._dtype)).view(self.box.lengths))
        else:
            self._held = [io.BytesIO(), io.BytesIO()]

    def of(self, side: int) -> Any:
        """Return the memory for checkpoint 0 or 1."""
        return self._held[side]

    def release(self) -> None:
        """Free the memory."""
        self._held = []


class Side:
    """One of the two checkpoints."""

    def __init__(self, uri: str | os.PathLike[str], options: Options) -> None:
        self.context = Context(parse_location(uri), options, rank=0)
        self.manifest: Manifest = resolve(self.context.store, self.context.retrier).manifest
        self._locations = ItemLocations(self.manifest)

    def read(self, wanted: Sequence[tuple[ComparedBlock, Any]]) -> None:
        """Fill the blocks from this checkpoint."""
        targets: list[Any] = []
        items = [item for one, into in wanted for item in self._items_of(one, into, targets)]
        job = LoadJob(
            self.context,
            self.manifest,
            self._locations,
            transforms=ReadTransforms(None, self.context.options.extensions),
            allow_pickle=True,  # bytes are handed out as they are: nothing is unpickled
            exchange=None,
        )
        job.run(LoadPlan(items), BlockPlanner(targets))

    def _items_of(self, wanted: ComparedBlock, into: Any, targets: list[Any]) -> Iterator[ReadItem]:
        name, box = wanted.name, wanted.box
        if box is None:
            targets.append(into)
            nowhere = torch.Size((0,))
            yield ReadItem(
                type=LoadItemType.BYTE_IO,
                dest_index=MetadataIndex(name, index=len(targets) - 1),
                dest_offsets=nowhere,
                storage_index=MetadataIndex(name),
                storage_offsets=nowhere,
                lengths=nowhere,
            )
            return
        for part in chunk_parts(self.manifest.tensors[name].chunks, box, into):
            targets.append(part.target)
            yield part.read_item(name, number=len(targets) - 1)


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


class BlockPlanner(DefaultLoadPlanner):
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


def read_both(sides: Sequence[tuple[Side, Sequence[tuple[ComparedBlock, Any]]]]) -> None:
    """Read both checkpoints at once. Returns when neither reads any more; raises the first failure."""
    failures: list[BaseException] = []

    def read(side: Side, wanted: Sequence[tuple[ComparedBlock, Any]]) -> None:
        try:
            side.read(wanted)
        except BaseException as error:  # noqa: BLE001  # it is raised again below
            failures.append(error)
            for other, _ in sides:
                other.context.retrier.stop()

    thread = threading.Thread(target=read, args=sides[1], name="cloudckpt-compare", daemon=False)
    thread.start()
    try:
        read(*sides[0])
    finally:
        thread.join()
    if failures:
        raise failures[0]
