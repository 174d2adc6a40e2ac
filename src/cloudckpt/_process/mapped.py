"""An order, back as a plan: its items, and a planner that finds what they hold in mapped files."""

from __future__ import annotations

import io
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from cloudckpt._process.messages import Form, Order


@dataclass(frozen=True)
class OrderedItem(WriteItem):
    """A row of an order."""

    row: int = -1


class MappedPlanner(DefaultSavePlanner):
    """Resolves the items of one order. `files` can be closed once it is made; what it gives keeps the memory mapped."""

    def __init__(self, order: Order, files: Sequence[int]) -> None:
        super().__init__()
        self._order = order
        # Each once, so that tensors that share memory still do so here. They are only read.
        self._files = [torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8) for file in files]

    def items(self) -> list[WriteItem]:
        """Of the order, in its order."""
        order = self._order
        rows = zip(order.fqns, order.form_numbers, order.hints, strict=True)
        return [_item(order.forms[form], fqn, hint, row) for row, (fqn, form, hint) in enumerate(rows)]

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
            return torch.empty(form.shape, dtype=form.dtype)
        content = self._files[order.file_numbers[row]][begin:end]
        if begin % form.dtype.itemsize:
            content = content.clone()
        flat = content.view(form.dtype)
        return flat.view(form.shape) if form.strides is None else flat.as_strided(form.shape, form.strides)


def _item(form: Form, fqn: str, hint: int, row: int) -> OrderedItem:
    index = MetadataIndex(fqn, form.offset, None if hint < 0 else hint)
    return OrderedItem(index=index, type=form.type, tensor_data=form.tensor_data, row=row)
