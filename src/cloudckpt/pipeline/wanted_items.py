"""The parts of stored items that a read asks for, and the memory that each fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cloudckpt._messages import quote_names
from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, ItemLocation
from cloudckpt.io.boxes import Box
from cloudckpt.io.reads import RangeRead, WantedRange
from cloudckpt.tensors.casts import CastCheck
from cloudckpt.tensors.load_targets import BytesTarget, Target, find_tensor_runs, new_box_target


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes ``[begin, end)`` of one tensor in row-major order, and the ``uint8`` memory to read them into."""

    name: str
    begin: int
    end: int
    buffer: torch.Tensor
    dtype: str | None = None
    """The dtype to cast the tensor to; None for the stored one. `begin` and `end` count its bytes."""


class WantedItem(NamedTuple):
    """A part of one stored item, and the memory that it fills; `tensor` is None for a value."""

    name: str
    location: ItemLocation
    box: Box
    """The part of the chunk; empty for a value, which is read whole."""
    target: Target
    tensor: torch.Tensor | None
    cast: CastCheck | None
    receive: Callable[[Any], object] | None
    """Called with the tensor when it is filled, or with the bytes of a value."""


def new_wanted_value(name: str, location: ItemLocation, receive: Callable[[bytes | bytearray], object]) -> WantedItem:
    """Return the whole value `name` as a wanted item, whose bytes `receive` gets."""
    return WantedItem(name, location, Box((), ()), BytesTarget(location), None, None, receive)


def new_wanted_box(
    name: str,
    location: ItemLocation,
    box: Box,
    tensor: torch.Tensor,
    *,
    cast: CastCheck | None = None,
    receive: Callable[[torch.Tensor], object] | None = None,
    needs_alignment: bool = False,
) -> WantedItem:
    """Return the part `box` of a chunk as a wanted item that fills `tensor`.

    The whole chunk is read if it is transformed. So is a chunk whose bytes are not aligned to elements in the object,
    if `needs_alignment`.
    """
    is_aligned = location.dtype is None or not location.begin % ITEMSIZE_BYTES[location.dtype]
    reads_whole = location.transforms or (needs_alignment and not is_aligned)
    target: Target = BytesTarget(location) if reads_whole else new_box_target(location, box, tensor, cast=cast)
    return WantedItem(name, location, box, target, tensor, cast, receive)


class WantedItems:
    """All targets of a read, numbered: first the targets of `items`, then those of whole tensors.

    `items` are wanted one by one. `fqns`, `tensors`, `chunks` and `addresses` are columns of whole tensors, which share
    no memory. A target may hold several of them.
    """

    __slots__ = ("_chunks", "_fqns", "items", "targets")

    def __init__(
        self,
        items: Sequence[WantedItem],
        fqns: Sequence[str] = (),
        tensors: Sequence[torch.Tensor] = (),
        chunks: Sequence[Chunk] = (),
        addresses: Sequence[int] = (),
    ) -> None:
        self._fqns, self._chunks = fqns, chunks
        self.items = items
        self.targets: list[Target] = [*(item.target for item in items), *find_tensor_runs(tensors, chunks, addresses)]

    @property
    def num_bytes(self) -> int:
        """The number of wanted bytes."""
        return sum(target.num_bytes for target in self.targets)

    def ranges(self, *, max_gap_bytes: int) -> list[WantedRange]:
        """Return the byte ranges to read for all targets."""
        return [
            wanted_range
            for number, target in enumerate(self.targets)
            for wanted_range in target.ranges(number, max_gap_bytes=max_gap_bytes)
        ]

    def names_in(self, request: RangeRead, begin: int, end: int) -> str:
        """Return the names, for a message, of the items in bytes ``[begin, end)`` of the request's object."""
        fqns = [
            fqn
            for fqn, chunk in zip(self._fqns, self._chunks, strict=True)
            if chunk.object_index == request.object_index and chunk.begin < end and chunk.end > begin
        ]
        overlapping = (wanted for wanted in request.wanted if wanted.begin < end and wanted.end > begin)
        fqns += {self.items[number].name: None for number in self.numbers_of_items(overlapping)}
        return quote_names(fqns)

    def numbers_of_items(self, ranges: Iterable[WantedRange]) -> Iterator[int]:
        """Yield the index in `items` for each of `ranges` that belongs to one of them."""
        return (wanted.target_number for wanted in ranges if wanted.target_number < len(self.items))
