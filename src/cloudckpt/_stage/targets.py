"""What a load fills: tensors, in place where their memory allows it, and the bytes of Python objects."""

from __future__ import annotations

import bisect
import math
import threading
from typing import Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cloudckpt._flat import PLAIN_TENSORS
from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES
from cloudckpt._manifest.receipts import ItemLocation
from cloudckpt._manifest.torch_dtypes import dtype_of
from cloudckpt._plan.boxes import Box, boxes_of, intersection_of, runs_of, strides_of
from cloudckpt._plan.reads import Want
from cloudckpt._stage.tensors import as_carrier, bytes_view, holds_its_values, is_viewable


class Target(Protocol):
    """Where the bytes of one read item go. Ranges are of the object's bytes."""

    num_bytes: int

    def wants(self, consumer: int, *, max_gap_bytes: int) -> list[Want]:
        """The ranges to fetch."""

    @property
    def is_copied(self) -> bool:
        """Whether the bytes come by way of a buffer; known once `wants` was asked."""

    def direct_view(self, begin: int, end: int) -> memoryview | None:
        """The memory that these wanted bytes belong in; None where they have to be copied there."""

    def copy_from(self, source: torch.Tensor, begin: int) -> None:
        """Take what is wanted of the bytes from `begin` on, which the ``uint8`` tensor `source` holds."""


class BytesTarget:
    """All stored bytes of one item, as they are."""

    def __init__(self, location: ItemLocation) -> None:
        self._location = location
        self.num_bytes = location.end - location.begin
        self._lock = threading.Lock()
        self._content: bytearray | None = None

    @property
    def content(self) -> bytearray:
        """The bytes; memory for them is taken when the first arrive."""
        with self._lock:
            if self._content is None:
                self._content = bytearray(self.num_bytes)
            return self._content

    def release(self) -> None:
        """Let go of the bytes, which have been used."""
        self._content = None

    def wants(self, consumer: int, *, max_gap_bytes: int) -> list[Want]:  # noqa: ARG002  # one range has no gaps
        at = self._location
        return [Want(consumer, at.object_index, at.begin, at.end, is_held=True)]

    @property
    def is_copied(self) -> bool:
        return False

    def direct_view(self, begin: int, end: int) -> memoryview:
        return memoryview(self.content)[begin - self._location.begin : end - self._location.begin]

    def copy_from(self, source: torch.Tensor, begin: int) -> None:
        self.direct_view(begin, begin + len(source))[:] = bytes_view(source)


class TensorTarget:
    """A block of a stored chunk, and the tensor of the same shape that it is to fill.

    Where the tensor is contiguous CPU memory of the stored dtype, the bytes are read straight into it. Else they are
    copied, which converts dtypes, moves to devices and honours strides.
    """

    __slots__ = (
        "_box",
        "_dtype",
        "_is_direct",
        "_is_dropped",
        "_itemsize_bytes",
        "_location",
        "_run_begins",
        "_run_bytes",
        "_target",
        "num_bytes",
    )

    def __init__(self, location: ItemLocation, box: Box, target: torch.Tensor) -> None:
        assert location.dtype is not None  # noqa: S101  # the caller chose by it
        self._location = location
        self._box = box
        self._itemsize_bytes = ITEMSIZE_BYTES[location.dtype]
        self._dtype = dtype_of(location.dtype)
        self._target = target
        self.num_bytes = math.prod(box.lengths) * self._itemsize_bytes
        self._is_direct = self._is_dropped = False
        self._run_begins: list[int] = []
        self._run_bytes = 0

    def wants(self, consumer: int, *, max_gap_bytes: int) -> list[Want]:
        at, size = self._location, self._itemsize_bytes
        if self._box.lengths == at.lengths:
            runs = [(at.begin, at.begin + self.num_bytes)] if self.num_bytes else []
        else:
            runs = [
                (at.begin + begin * size, at.begin + end * size)
                for begin, end in runs_of(at.lengths, self._box, max_gap=max_gap_bytes // size)
            ]
        holds_only_wanted = sum(end - begin for begin, end in runs) == self.num_bytes
        if holds_only_wanted and self._target.dtype == self._dtype and is_viewable(self._target):
            self._is_direct = True
            self._run_begins = [begin for begin, _ in runs]
            self._run_bytes = runs[0][1] - runs[0][0] if runs else 0
        return [Want(consumer, at.object_index, begin, end) for begin, end in runs]

    @property
    def is_copied(self) -> bool:
        return not self._is_direct

    @property
    def address_range(self) -> tuple[int, int] | None:
        """See `address_range_of`."""
        return address_range_of(self._target)

    def copy_instead(self) -> None:
        """Do not fill the tensor's memory directly."""
        self._is_direct = False

    def drop(self) -> None:
        """What is copied is not to be seen: another fills the same memory. After `copy_instead`."""
        self._is_dropped = True

    @property
    def is_dense(self) -> bool:
        """Whether all bytes of its address range are the tensor's."""
        addresses = self.address_range
        return addresses is not None and addresses[1] - addresses[0] == self._target.numel() * self._target.itemsize

    def direct_view(self, begin: int, end: int) -> memoryview | None:
        if not self._is_direct:
            return None
        run = bisect.bisect_right(self._run_begins, begin) - 1
        offset = run * self._run_bytes + begin - self._run_begins[run]
        # Made only now: the views of all tensors of a large model would be some ten thousand objects.
        memory = bytes_view(self._target)
        return memory if end - begin == len(memory) else memory[offset : offset + end - begin]

    def copy_from(self, source: torch.Tensor, begin: int) -> None:
        if self._is_dropped:
            return
        first = (begin - self._location.begin) // self._itemsize_bytes
        elements = source.view(self._dtype)
        target = self._target
        if target.dtype == self._dtype and holds_its_values(target):
            elements, target = as_carrier(elements), as_carrier(target)
        strides = strides_of(self._location.lengths)
        for box in boxes_of(first, first + elements.numel(), self._location.lengths):
            common = intersection_of(box, self._box)
            if common is None:
                continue
            start = sum(o * s for o, s in zip(common.offsets, strides, strict=True)) - first
            block = target
            pairs = zip(common.offsets, self._box.offsets, common.lengths, strict=True)
            for dim, (offset, origin, length) in enumerate(pairs):
                block = block.narrow(dim, offset - origin, length)
            block.copy_(elements.as_strided(common.lengths, strides, elements.storage_offset() + start))


def address_range_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses ``[begin, end)`` between which a tensor lies; None where they are none of this process' memory."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.numel():
        return None
    is_wrapper: bool = type(tensor) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(tensor)
    if is_wrapper:
        return None
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
