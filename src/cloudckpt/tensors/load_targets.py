"""The memory that a load fills, and the ranged reads into it: in place if possible, else by way of a buffer."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from cloudckpt.format.model import Chunk, ItemLocation, StoredTensor
from cloudckpt.io.boxes import Box, compute_strides, find_runs, intersect, split_into_boxes
from cloudckpt.io.reads import RangeRead, WantedRange
from cloudckpt.stores.base import copy_into, crc32c_of
from cloudckpt.tensors.casts import CastCheck
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.tensor_bytes import (
    ALIGNMENT_BYTES,
    address_range,
    as_carrier,
    bytes_view,
    dtype_of,
    holds_its_values,
    is_viewable,
    view_memory,
    viewable_address,
    writable,
)


class BytesTarget:
    """Takes all stored bytes of one item as they are."""

    is_copied = False

    def __init__(self, location: ItemLocation) -> None:
        self._location = location
        self.num_bytes = location.end - location.begin
        self._lock = threading.Lock()
        self._content: bytearray | None = None

    @property
    def content(self) -> bytearray:
        """The bytes. Their memory is taken on first use."""
        with self._lock:
            if self._content is None:
                self._content = bytearray(self.num_bytes)
            return self._content

    def release(self) -> None:
        """Drop the reference to the bytes."""
        self._content = None

    def ranges(self, number: int, *, max_gap_bytes: int) -> list[WantedRange]:  # noqa: ARG002  # one range has no gaps
        location = self._location
        return [WantedRange(number, location.object_index, location.begin, location.end, is_held=True)]

    def direct_views(self, begin: int, end: int) -> list[memoryview]:
        return [memoryview(self.content)[begin - self._location.begin : end - self._location.begin]]


class RunTarget:
    """Fills whole tensors that are stored one after the other, each in its own memory.

    A model can have 100,000 small tensors: planning and reads handle one run, not an object for each.
    """

    is_copied = False

    def __init__(
        self, tensors: Sequence[torch.Tensor], object_index: int, bounds: Sequence[int], shifts: Sequence[int]
    ) -> None:
        """`bounds` has the begin of each tensor and the end of the last; a begin plus its shift is an address."""
        self.num_bytes = bounds[-1] - bounds[0]
        self._tensors, self._object_index, self._bounds, self._shifts = tensors, object_index, bounds, shifts

    def ranges(self, number: int, *, max_gap_bytes: int) -> list[WantedRange]:  # noqa: ARG002  # one range has no gaps
        return [WantedRange(number, self._object_index, self._bounds[0], self._bounds[-1])]

    def direct_views(self, begin: int, end: int) -> list[memoryview]:
        if not self._bounds[0] <= begin < end <= self._bounds[-1]:
            raise ValueError(f"bytes [{begin}, {end}) are not within [{self._bounds[0]}, {self._bounds[-1]})")
        first, last = bisect.bisect_right(self._bounds, begin) - 1, bisect.bisect_left(self._bounds, end)
        bounds, shifts = [begin, *self._bounds[first + 1 : last], end], self._shifts[first:last]
        begins, ends = list(map(operator.add, bounds, shifts)), list(map(operator.add, bounds[1:], shifts))
        low = min(begins)
        memory = view_memory(low, max(ends) - low, self._tensors[first:last])
        return [memory[begin - low : end - low] for begin, end in zip(begins, ends, strict=True)]


class TensorTarget(msgspec.Struct, gc=False):
    """Fills a tensor with a box of a stored chunk.

    Bytes for contiguous CPU memory of the stored dtype are read in place. All others pass through a buffer and are
    copied, which converts dtypes, moves to devices and honours strides.
    """

    chunk: ItemLocation
    dtype: torch.dtype
    """The dtype of the stored elements."""
    tensor: torch.Tensor
    num_bytes: int
    """The number of bytes that are wanted."""
    box: Box
    is_shared: bool = False
    """True if another target fills some of the same memory. Then the bytes are verified in a buffer, and copied."""
    is_dropped: bool = False
    """True if another target fills all of the same memory, so that these bytes are ignored. Only if `is_shared`."""
    dropped_crcs: dict[Box, int] | None = None
    """The CRC32C of each ignored box, in the tensor's dtype; None if ignored boxes are not compared."""
    address: int = 0
    """The address of the tensor's memory if it holds the wanted bytes one after the other; otherwise 0."""
    run_begins: Sequence[int] = ()
    """The begin of each wanted range of a box that has an address."""
    is_copied: bool = False
    """True if the bytes pass through a buffer. Set by `ranges`."""
    cast: CastCheck | None = None
    """The check of the elements for a tensor of another dtype."""

    def ranges(self, number: int, *, max_gap_bytes: int) -> list[WantedRange]:
        """Return the ranges to fetch."""
        location, size = self.chunk, self.dtype.itemsize
        runs = [
            (location.begin + begin * size, location.begin + end * size)
            for begin, end in find_runs(location.lengths, self.box, max_gap=max_gap_bytes // size)
        ]
        self.is_copied = True
        holds_only_wanted = sum(end - begin for begin, end in runs) == self.num_bytes == self.tensor.nbytes
        addresses = None if self.is_shared else address_range(self.tensor)
        if holds_only_wanted and addresses and self.tensor.dtype == self.dtype and is_viewable(self.tensor):
            self.address, self.run_begins, self.is_copied = addresses[0], [begin for begin, _ in runs], False
        return [WantedRange(number, location.object_index, begin, end) for begin, end in runs]

    def direct_views(self, begin: int, end: int) -> list[memoryview]:
        """Return the memory of these wanted bytes; no views if they are copied."""
        return [] if self.is_copied else [self._memory(begin, end)]

    def copy_from(self, source: torch.Tensor, begin: int) -> None:
        """Copy the wanted part of `source`, a ``uint8`` tensor with the object's bytes from `begin` on."""
        if self.is_dropped and self.dropped_crcs is None:
            return
        first = (begin - self.chunk.begin) // self.dtype.itemsize
        elements = source.view(self.dtype)
        target = self.tensor
        if target.dtype == self.dtype and holds_its_values(target):
            elements, target = as_carrier(elements), as_carrier(target)
        strides = compute_strides(self.chunk.lengths)
        for box in split_into_boxes(first, first + elements.numel(), self.chunk.lengths):
            common = intersect(box, self.box)
            if common is None:
                continue
            start = sum(o * s for o, s in zip(common.offsets, strides, strict=True)) - first
            part = target[common.relative_to(self.box.offsets).slices]
            source = elements.as_strided(common.lengths, strides, elements.storage_offset() + start)
            if self.dropped_crcs is not None:
                self.dropped_crcs[common] = _checksum(source.to(part.dtype))
                continue
            with writable([part]):
                part.copy_(source if self.cast is None else self.cast.check(source))

    def has_dropped_others(self) -> bool:
        """Return True if the tensor now differs from an ignored box. Call it after the read."""
        target = as_carrier(self.tensor) if holds_its_values(self.tensor) else self.tensor
        return any(
            _checksum(target[box.relative_to(self.box.offsets).slices]) != crc
            for box, crc in (self.dropped_crcs or {}).items()
        )

    def _memory(self, begin: int, end: int) -> memoryview:
        """Return the memory at `address` for bytes ``[begin, end)`` of the object."""
        num_bytes, run = self.num_bytes, bisect.bisect_right(self.run_begins, begin) - 1
        offset = run * (num_bytes // len(self.run_begins)) + begin - self.run_begins[run]
        last = offset + end - begin
        if not 0 <= offset <= last <= num_bytes:
            raise ValueError(f"bytes [{begin}, {end}) are not within the chunk that begins at {self.chunk.begin}")
        return view_memory(self.address + offset, last - offset, self.tensor)


def _checksum(values: torch.Tensor) -> int:
    return crc32c_of([bytes_view(values.detach().cpu().contiguous())])


Target: TypeAlias = BytesTarget | RunTarget | TensorTarget
"""Receives the bytes of one read item, or of a run of them. Ranges are those of the object's bytes."""


def new_box_target(
    location: ItemLocation, box: Box, tensor: torch.Tensor, *, cast: CastCheck | None = None
) -> TensorTarget:
    """Return the target of a tensor that gets the elements of a stored chunk in `box`."""
    assert location.dtype is not None  # noqa: S101  # a tensor's
    dtype = dtype_of(location.dtype)
    return TensorTarget(location, dtype, tensor, math.prod(box.lengths) * dtype.itemsize, box, cast=cast)


def find_whole_address(tensor: torch.Tensor, stored: StoredTensor) -> int:
    """Return the address of contiguous CPU memory that gets all bytes of a stored tensor; 0 for any other tensor."""
    if len(stored.chunks) != 1 or stored.transforms or tensor.dtype is not dtype_of(stored.dtype):
        return 0
    if tensor.size() != stored.shape:  # the caller may have replaced its memory since the plan was made
        return 0
    return viewable_address(tensor)


def find_tensor_runs(
    tensors: Sequence[torch.Tensor], chunks: Sequence[Chunk], addresses: Sequence[int]
) -> list[RunTarget]:
    """Return the runs that fill whole `tensors`, which are stored as `chunks`, at their addresses.

    Bytes that are stored once for several tensors, such as tied ones, are a run of their own for each.
    """
    columns = ("object_index", "begin", "end")
    objects, begins, ends = (np.array([*map(operator.attrgetter(name), chunks)], dtype=np.int64) for name in columns)
    order = np.lexsort((begins, objects))
    objects, begins, ends = objects[order], begins[order], ends[order]
    is_same = objects[1:] == objects[:-1]
    is_alone = np.zeros(len(order) + 1, dtype=bool)
    is_alone[1:-1] = is_same & (begins[1:] < ends[:-1])
    is_alone = is_alone[1:] | is_alone[:-1]
    follows = is_same & (begins[1:] == ends[:-1]) & ~is_alone[1:] & ~is_alone[:-1]
    shifts = (np.array(addresses, dtype=np.int64)[order] - begins).tolist()
    firsts = [0, *(np.flatnonzero(~follows) + 1).tolist()] if tensors else []
    positions, bounds = order.tolist(), begins.tolist()
    return [
        RunTarget(
            [tensors[position] for position in positions[first:last]],
            int(objects[first]),
            [*bounds[first:last], int(ends[last - 1])],
            shifts[first:last],
        )
        for first, last in itertools.pairwise([*firsts, len(positions)])
    ]


class _Gap(NamedTuple):
    """Bytes ``[begin, end)`` of a request that go through a buffer, at `position` there.

    They are aligned in the buffer as in the object, so that elements are aligned too.
    """

    begin: int
    end: int
    position: int


class _BufferedRange(NamedTuple):
    """Bytes ``[begin, end)`` of the object, in memory."""

    begin: int
    end: int
    content: torch.Tensor


@contextlib.contextmanager
def open_request(request: RangeRead, targets: Sequence[Target], arena: Arena) -> Iterator[list[memoryview]]:
    """Yield views to fill with the request's bytes, in order. The targets have the bytes when the context ends well.

    Most views are the targets' own memory. Bytes that no target wants, or that have to be converted, go through a
    buffer of `arena`. Bytes that several targets want, such as names of tied tensors, are read into one and copied.
    """
    parts: list[memoryview | _Gap] = []
    copied: list[WantedRange] = []
    shared: list[tuple[int, int, memoryview]] = []
    reached = request.begin
    position = 0
    for begin, end, wants in _group_wants(request):
        filled, views = _find_direct_views(wants, begin, end, targets)
        if len(wants) > 1 or not views:
            copied += [want for want in wants if want is not filled]
        if not views:
            continue
        if reached < begin:
            parts.append(gap := _new_gap(reached, begin, position))
            position = gap.position + begin - reached
            reached = begin
        parts += views
        for view in views if len(wants) > 1 else ():
            shared.append((reached, reached + len(view), view))
            reached += len(view)
        reached = end
    if reached < request.end:
        parts.append(gap := _new_gap(reached, request.end, position))
        position = gap.position + request.end - reached
    with arena.lend(position) if position else contextlib.nullcontext(torch.empty(0, device="cpu")) as buffer:
        gaps = {
            part: buffer[part.position : part.position + part.end - part.begin]
            for part in parts
            if isinstance(part, _Gap)
        }
        yield [bytes_view(gaps[part]) if isinstance(part, _Gap) else part for part in parts]
        if copied:
            sources = [_BufferedRange(gap.begin, gap.end, content) for gap, content in gaps.items()]
            sources += [
                _BufferedRange(begin, end, torch.frombuffer(view, dtype=torch.uint8)) for begin, end, view in shared
            ]
            sources.sort(key=_end_of)  # they do not overlap
            for want in copied:
                _copy(want, sources, targets)


def _group_wants(request: RangeRead) -> Iterator[tuple[int, int, Sequence[WantedRange]]]:
    """Yield the wants with the ranges of the request that they want. Overlapping wants are yielded together."""
    low, high = request.begin, request.end
    if not request.overlapping:
        for want in request.wanted:
            yield max(want.begin, low), min(want.end, high), (want,)
        return
    begin = end = low
    together: list[WantedRange] = []
    for want in request.wanted:
        if together and want.begin < end:
            together.append(want)
            end = max(end, min(want.end, high))
            continue
        if together:
            yield begin, end, together
        begin, end, together = max(want.begin, low), min(want.end, high), [want]
    if together:
        yield begin, end, together


def _find_direct_views(
    wants: Sequence[WantedRange], begin: int, end: int, targets: Sequence[Target]
) -> tuple[WantedRange | None, list[memoryview]]:
    """Return the want whose own memory takes bytes ``[begin, end)``, and that memory. All `wants` want all of it."""
    if len(wants) == 1 or all(want.begin <= begin and end <= want.end for want in wants):
        for want in wants:
            if views := targets[want.target_number].direct_views(begin, end):
                return want, views
    return None, []


def _new_gap(begin: int, end: int, position: int) -> _Gap:
    return _Gap(begin=begin, end=end, position=position + (begin - position) % ALIGNMENT_BYTES)


def _copy(want: WantedRange, sources: Sequence[_BufferedRange], targets: Sequence[Target]) -> None:
    for number in range(bisect.bisect_right(sources, want.begin, key=_end_of), len(sources)):
        source = sources[number]
        if source.begin >= want.end:
            break
        begin, end = max(want.begin, source.begin), min(want.end, source.end)
        if begin < end:
            target, content = targets[want.target_number], source.content[begin - source.begin : end - source.begin]
            if views := target.direct_views(begin, end):
                copy_into(views, bytes_view(content))
            elif isinstance(target, TensorTarget):
                target.copy_from(content, begin)


def _end_of(source: _BufferedRange) -> int:
    return source.end
