"""An order, back as a plan: its items, and a planner that finds what they hold in mapped files."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from cloudckpt._process.messages import FileId, Form, Order


@dataclass(frozen=True)
class OrderedItem(WriteItem):
    """A row of an order."""

    row: int = -1


class Maps:
    """Files that were mapped, for as long as they come again: to map a gigabyte anew takes a sixth of a second."""

    def __init__(self) -> None:
        self._kept: dict[FileId, torch.Tensor] = {}

    def of(self, file: int, *, is_kept: bool) -> torch.Tensor:
        """All bytes of it, which are only read. It can be closed; whoever refers to them keeps them mapped."""
        file_id = file_id_of(file)
        if file_id in self._kept:
            return self._kept[file_id]
        mapped = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        if is_kept:
            self._kept[file_id] = mapped
        return mapped

    def keep_only(self, files: Collection[FileId]) -> None:
        """The memory of the others is free once its owner, too, has freed it."""
        self._kept = {file_id: mapped for file_id, mapped in self._kept.items() if file_id in files}


def file_id_of(file: int) -> FileId:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


class MappedPlanner(DefaultSavePlanner):
    """Resolves the items of one order. `files` can be closed once it is made."""

    def __init__(self, order: Order, files: Sequence[int], maps: Maps) -> None:
        super().__init__()
        self._order = order
        # Each once, so that tensors that share memory still do so here.
        self._files = [maps.of(file, is_kept=number != order.own_file) for number, file in enumerate(files)]

    def items(self) -> list[WriteItem]:
        """Of the order, in its order."""
        order = self._order
        rows = zip(order.fqns, order.form_numbers, order.hints, strict=True)
        return [_item(order.forms[form], fqn, hint, row) for row, (fqn, form, hint) in enumerate(rows)]

    def place_of(self, item: WriteItem) -> Hashable | None:
        """See `cloudckpt._stage.ties.KnowsPlaces`."""
        assert isinstance(item, OrderedItem)  # noqa: S101  # it made them
        order, row = self._order, item.row
        form, begin, end = order.forms[order.form_numbers[row]], order.begins[row], order.ends[row]
        if form.dtype is None or begin == end:
            return None
        return order.file_numbers[row], begin, end, form.offset, form.dtype, form.shape, form.strides

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert isinstance(write_item, OrderedItem)  # noqa: S101  # it made them
        order, row = self._order, write_item.row
        form = order.forms[order.form_numbers[row]]
        begin, end = order.begins[row], order.ends[row]
        if form.dtype is None:
            if begin == end:
                return io.BytesIO()
            value: Any = self._files[order.file_numbers[row]][begin:end].numpy()
            return io.BytesIO(value)
        if begin == end:
            return torch.empty(form.shape, dtype=form.dtype, device="cpu")
        content = self._files[order.file_numbers[row]][begin:end]
        if begin % form.dtype.itemsize:
            content = content.clone()
        flat = content.view(form.dtype)
        return flat.view(form.shape) if form.strides is None else flat.as_strided(form.shape, form.strides)


def _item(form: Form, fqn: str, hint: int, row: int) -> OrderedItem:
    index = MetadataIndex(fqn, form.offset, None if hint < 0 else hint)
    return OrderedItem(index=index, type=form.type, tensor_data=form.tensor_data, row=row)
