"""What a plan's items hold, as places in files that another process can map."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from cloudckpt._manifest.torch_dtypes import dtype_of
from cloudckpt._process.channel import close_files
from cloudckpt._process.messages import Form, Order
from cloudckpt._stage.items import StagedItem, known_tensors_of, staged
from cloudckpt._stage.tensors import as_carrier, bytes_view, is_viewable
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt._stage.values import check_values

_ALIGNMENT_BYTES = 64


class SharedMemory(Protocol):
    """Where a snapshot lies."""

    def segment_of(self, address: int, num_bytes: int) -> tuple[int, int] | None:
        """The file that is mapped there, and the offset in it; None for memory of another kind."""

    @property
    def files(self) -> Sequence[int]:
        """All that it lies in."""


@dataclass(slots=True, kw_only=True)
class Contents:
    """An order, with the files that it is about. Those that were made for it are closed with it."""

    order: Order
    files: list[int]
    own_files: list[int] = field(default_factory=list)

    def close(self) -> None:
        """The other process has them, or has no use for them any more."""
        close_files(self.own_files)
        self.own_files = []


def contents_of(items: Sequence[WriteItem], planner: SavePlanner, memory: SharedMemory | None, *, uri: str) -> Contents:
    """Resolve `items`, all of which have to be there already.

    What lies in `memory` is referred to. Anything else (Python objects, tensors on a GPU or made by the planner) is
    copied to a file in memory, one item after the other. Raises `UnsupportedValueError`, naming the FQN.
    """
    check_values(items, known_tensors_of(planner), uri=uri)
    columns = _Columns(memory)
    try:
        # Transforms are applied where the bytes are sent.
        for item, found in zip(items, staged(items, planner, WriteTransforms(None), uri=uri), strict=True):
            columns.add(item, found)
    except BaseException:
        columns.scratch.close()
        raise
    scratch = columns.scratch.file
    order = Order(
        fqns=[item.index.fqn for item in items],
        forms=columns.forms,
        form_numbers=columns.form_numbers,
        hints=array("q", [-1 if item.index.index is None else item.index.index for item in items]),
        file_numbers=columns.file_numbers,
        begins=columns.begins,
        ends=columns.ends,
        own_file=-1 if scratch is None else columns.files.index(scratch),
    )
    return Contents(order=order, files=columns.files, own_files=[] if scratch is None else [scratch])


class _Scratch:
    """A file in memory that grows."""

    def __init__(self) -> None:
        self.file: int | None = None
        self._end = 0

    def put(self, content: memoryview) -> tuple[int, int]:
        if self.file is None:
            self.file = os.memfd_create("cloudckpt-contents", os.MFD_CLOEXEC)
        begin = self._end
        while content:
            num_written = os.pwrite(self.file, content, self._end)
            self._end += num_written
            content = content[num_written:]
        self._end = -(-self._end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self.file, begin

    def close(self) -> None:
        if self.file is not None:
            close_files([self.file])
            self.file = None


class _Columns:
    """Those of an order that is being made."""

    def __init__(self, memory: SharedMemory | None) -> None:
        self.scratch = _Scratch()
        self.files: list[int] = []
        self.forms: list[Form] = []
        self.form_numbers = array("l")
        self.file_numbers = array("l")
        self.begins = array("q")
        self.ends = array("q")
        self._memory = memory
        self._number_of_file: dict[int, int] = {}
        self._number_of_form: dict[Any, int] = {}
        self._kept: list[Any] = []
        """Of each form, what its key is the identity of."""

    def add(self, item: WriteItem, found: StagedItem) -> None:
        content = found.content
        strides: tuple[int, ...] | None = None
        place = self._place_of(content)
        if place is None:
            view = content if isinstance(content, memoryview) else bytes_view(_viewable(content))
            file, begin = self.scratch.put(view) if view else (None, 0)
            num_bytes = len(view)
        else:
            file, begin, num_bytes = place
            if isinstance(content, torch.Tensor) and not content.is_contiguous():
                strides = content.stride()
        self.form_numbers.append(self._form_of(item, found, strides))
        self.file_numbers.append(0 if file is None else self._file_number_of(file))
        self.begins.append(begin)
        self.ends.append(begin + num_bytes)

    def _place_of(self, content: torch.Tensor | memoryview) -> tuple[int, int, int] | None:
        """File, offset and length of what lies in shared memory."""
        if self._memory is None:
            return None
        if isinstance(content, memoryview):
            num_bytes = len(content)
            if not num_bytes or content.readonly:
                return None
            address = ctypes.addressof(ctypes.c_char.from_buffer(content))
        else:
            if content.device.type != "cpu" or not content.numel():
                return None
            last = sum((length - 1) * stride for length, stride in zip(content.shape, content.stride(), strict=True))
            num_bytes = (last + 1) * content.element_size()
            address = content.data_ptr()
        place = self._memory.segment_of(address, num_bytes)
        return None if place is None else (*place, num_bytes)

    def _file_number_of(self, file: int) -> int:
        number = self._number_of_file.get(file)
        if number is None:
            number = self._number_of_file[file] = len(self.files)
            self.files.append(file)
        return number

    def _form_of(self, item: WriteItem, found: StagedItem, strides: tuple[int, ...] | None) -> int:
        dtype = None if found.dtype is None else dtype_of(found.dtype)
        key = (item.type, item.index.offset, id(item.tensor_data), dtype, found.lengths, strides)
        number = self._number_of_form.get(key)
        if number is None:
            number = self._number_of_form[key] = len(self.forms)
            self._kept.append(item.tensor_data)
            self.forms.append(
                Form(
                    type=item.type,
                    offset=item.index.offset,
                    tensor_data=item.tensor_data,
                    dtype=dtype,
                    shape=found.lengths,
                    strides=strides,
                )
            )
        return number


def _viewable(tensor: torch.Tensor) -> torch.Tensor:
    """Its values where they can be seen as bytes, bit for bit, also of dtypes that torch can hardly copy."""
    return tensor if is_viewable(tensor) else as_carrier(tensor).cpu().contiguous()
