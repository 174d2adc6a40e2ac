"""The parts of a checkpoint that a read asks for, and the memory that each fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cloudckpt.errors import join_first
from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, ItemLocation
from cloudckpt.io.boxes import Box
from cloudckpt.io.reads import RangeRead, WantedRange
from cloudckpt.tensors.casts import Cast
from cloudckpt.tensors.load_targets import BytesTarget, Target, find_runs_of, new_box_target

_MAX_NAMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes ``[begin, end)`` of one tensor in row-major order, and the ``uint8`` memory to read them into."""

    name: str
    begin: int
    end: int
    buffer: torch.Tensor
    dtype: str | None = None
    """The dtype to cast the tensor to, whose bytes are then counted; None for the stored one."""


class Want(NamedTuple):
    """A part of one stored item, and the memory that it fills; `tensor` is None for a value."""

    name: str
    location: ItemLocation
    box: Box
    """The part of the chunk; empty for a value, which is read whole."""
    target: Target
    tensor: torch.Tensor | None
    cast: Cast | None
    receive: Callable[[Any], object] | None
    """Called with the tensor when it is filled, or with the bytes of a value."""


def want_value(name: str, location: ItemLocation, receive: Callable[[bytes | bytearray], object]) -> Want:
    """Return the want of a value."""
    return Want(name, location, Box((), ()), BytesTarget(location), None, None, receive)


def want_box(
    name: str,
    location: ItemLocation,
    box: Box,
    tensor: torch.Tensor,
    *,
    cast: Cast | None = None,
    receive: Callable[[torch.Tensor], object] | None = None,
    needs_alignment: bool = False,
) -> Want:
    """Return the want that fills `tensor` with the part `box` of a chunk.

    The whole chunk is read if it is transformed. So is a chunk whose bytes are not aligned to elements in the object,
    if `needs_alignment`.
    """
    is_aligned = location.dtype is None or not location.begin % ITEMSIZE_BYTES[location.dtype]
    reads_whole = location.transforms or (needs_alignment and not is_aligned)
    target: Target = BytesTarget(location) if reads_whole else new_box_target(location, box, tensor, cast=cast)
    return Want(name, location, box, target, tensor, cast, receive)


class Wants:
    """All targets of a read, numbered: first those of `single` wants, then runs of whole tensors."""

    __slots__ = ("_chunks", "_fqns", "single", "targets")

    def __init__(
        self,
        single: Sequence[Want],
        fqns: Sequence[str] = (),
        tensors: Sequence[torch.Tensor] = (),
        chunks: Sequence[Chunk] = (),
        addresses: Sequence[int] = (),
    ) -> None:
        """`fqns`, `tensors`, `chunks` and `addresses` are columns of whole tensors, which share no memory."""
        self._fqns, self._chunks = fqns, chunks
        self.single = single
        runs = find_runs_of(tensors, chunks, addresses)
        self.targets: list[Target] = [*(want.target for want in single), *runs]

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are wanted."""
        return sum(target.num_bytes for target in self.targets)

    def ranges(self, *, max_gap_bytes: int) -> list[WantedRange]:
        """Return the ranges to fetch."""
        return [
            wanted
            for number, target in enumerate(self.targets)
            for wanted in target.ranges(number, max_gap_bytes=max_gap_bytes)
        ]

    def names_in(self, request: RangeRead, begin: int, end: int) -> str:
        """Return the names, for a message, of the items in bytes ``[begin, end)`` of the request's object."""
        fqns = [
            fqn
            for fqn, chunk in zip(self._fqns, self._chunks, strict=True)
            if chunk.object_index == request.object_index and chunk.begin < end and chunk.end > begin
        ]
        wanted = (
            wanted_range for wanted_range in request.wanted if wanted_range.begin < end and wanted_range.end > begin
        )
        fqns += {self.single[number].name: None for number in self.numbers_of_single(wanted)}
        return join_first([repr(fqn) for fqn in fqns], _MAX_NAMES, separator=", ")

    def numbers_of_single(self, wanted: Iterable[WantedRange]) -> Iterator[int]:
        """Yield the numbers of the ranges that belong to `single` wants."""
        return (wanted_range.target_number for wanted_range in wanted if wanted_range.target_number < len(self.single))
