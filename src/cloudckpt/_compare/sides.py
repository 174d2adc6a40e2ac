"""Blocks of two checkpoints, read at the same time."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from cloudckpt._commit.resolve import resolve
from cloudckpt._manifest.lookup import meeting
from cloudckpt._manifest.model import Manifest
from cloudckpt._manifest.torch_dtypes import dtype_of
from cloudckpt._manifest.torch_views import ItemLocations
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.load import LoadJob
from cloudckpt._plan.boxes import Box, intersection_of
from cloudckpt._stage.transforms import ReadTransforms
from cloudckpt._threads import Thread
from cloudckpt._uri import parse_location
from cloudckpt.options import Options


class Wanted:
    """A block of a tensor, or a value, of both checkpoints."""

    def __init__(self, name: str, box: Box | None, dtype: str, num_bytes: int) -> None:
        self.name, self.box, self.num_bytes = name, box, num_bytes
        self._dtype = dtype
        self._held: list[Any] = []

    def make(self) -> None:
        """Take memory."""
        if self.box is not None:
            for _ in range(2):
                # Of some dtypes, torch warns who makes a tensor.
                raw = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
                self._held.append(raw.view(dtype_of(self._dtype)).view(self.box.lengths))
        else:
            self._held = [io.BytesIO(), io.BytesIO()]

    def of(self, side: int) -> Any:
        """The first's or the second's."""
        return self._held[side]

    def release(self) -> None:
        """Give it back."""
        self._held = []


class Side:
    """One of the two."""

    def __init__(self, uri: str | os.PathLike[str], options: Options) -> None:
        self.context = Context(parse_location(uri), options, rank=0)
        self.manifest: Manifest = resolve(self.context.store, self.context.retrier).manifest
        self._locations = ItemLocations(self.manifest)

    def read(self, wanted: Sequence[tuple[Wanted, Any]]) -> None:
        """Fill the blocks of this side."""
        targets: list[Any] = []
        items = [item for one, into in wanted for item in self._items_of(one, into, targets)]
        job = LoadJob(
            self.context,
            self.manifest,
            self._locations,
            transforms=ReadTransforms(None, self.context.options.extensions),
            allow_pickle=True,  # nothing is unpickled here: it would only keep bytes from being handed out
            exchange=None,
        )
        job.run(LoadPlan(items), _Targets(targets))

    def _items_of(self, wanted: Wanted, into: Any, targets: list[Any]) -> Iterator[ReadItem]:
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
        chunks = self.manifest.tensors[name].chunks
        positions = meeting(chunks, box.offsets, box.lengths) if len(chunks) > 1 else None
        for chunk in chunks if positions is None else [chunks[position] for position in positions]:
            common = intersection_of(box, Box(chunk.offsets, chunk.lengths))
            if common is None:
                continue
            part: torch.Tensor = into
            at = [a - b for a, b in zip(common.offsets, box.offsets, strict=True)]
            if common.lengths != box.lengths:  # or it is the block itself, and each step a tensor of many
                for dim, (offset, length) in enumerate(zip(at, common.lengths, strict=True)):
                    part = part.narrow(dim, offset, length)
            targets.append(part)
            within = [a - b for a, b in zip(common.offsets, chunk.offsets, strict=True)]
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(name, index=len(targets) - 1),
                dest_offsets=torch.Size(at),
                storage_index=MetadataIndex(name, torch.Size(chunk.offsets)),
                storage_offsets=torch.Size(within),
                lengths=torch.Size(common.lengths),
            )


class _Targets(DefaultLoadPlanner):
    """Gives each item the memory that is meant for it."""

    def __init__(self, targets: Sequence[Any]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found: torch.Tensor = self._targets[self._number(read_item)]
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is where it is to be."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._targets[self._number(read_item)].write(value.getvalue())

    @staticmethod
    def _number(read_item: ReadItem) -> int:
        assert read_item.dest_index.index is not None  # noqa: S101  # every item has one here
        return read_item.dest_index.index


def read_both(sides: Sequence[tuple[Side, Sequence[tuple[Wanted, Any]]]]) -> None:
    """Of both checkpoints at once. Raises the first failure; ends only when nothing is running."""
    failures: list[BaseException] = []

    def read(side: Side, wanted: Sequence[tuple[Wanted, Any]]) -> None:
        try:
            side.read(wanted)
        except BaseException as error:  # noqa: BLE001  # it is raised again below
            failures.append(error)
            for other, _ in sides:
                other.context.retrier.stop()

    thread = Thread(read, *sides[1], name="cloudckpt-compare", daemon=False)
    thread.start()
    try:
        read(*sides[0])
    finally:
        thread.join()
    if failures:
        raise failures[0]
