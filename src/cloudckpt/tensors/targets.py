"""The memory that a load fills, and the ranged reads into it: in place if possible, else by way of a buffer."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, ItemLocation, StoredTensor
from cloudckpt.format.torch_metadata import dtype_of
from cloudckpt.io.boxes import Box, compute_strides, find_runs, intersect, split_into_boxes
from cloudckpt.io.reads import RangeRead, WantedRange
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.tensor_bytes import (
    address_range,
    as_carrier,
    bytes_view,
    holds_its_values,
    is_viewable,
    memory_address,
)

_ALIGNMENT_BYTES = 16  # the size of the largest element


class Target(Protocol):
    """Receives the bytes of one read item. Ranges are those of the object's bytes."""

    num_bytes: int

    def wants(self, consumer: int, *, max_gap_bytes: int) -> list[WantedRange]:
        """Return the ranges to fetch."""

    @property
    def is_copied(self) -> bool:
        """True if the bytes come by way of a buffer. Known once `wants` was called."""

    def direct_view(self, begin: int, end: int) -> memoryview | None:
        """Return the memory that these wanted bytes belong in; None if they have to be copied there."""

    def copy_from(self, source: torch.Tensor, begin: int) -> None:
        """Take what is wanted of the bytes from `begin` on, which the ``uint8`` tensor `source` holds."""


class BytesTarget:
    """Takes all stored bytes of one item as they are."""

    def __init__(self, location: ItemLocation) -> None:
        self._location = location
        self.num_bytes = location.end - location.begin
        self._lock = threading.Lock()
        self._content: bytearray | None = None

    @property
    def content(self) -> bytearray:
        """The bytes. Their memory is taken when the first arrive."""
        with self._lock:
            if self._content is None:
                self._content = bytearray(self.num_bytes)
            return self._content

    def release(self) -> None:
        """Let go of the bytes."""
        self._content = None

    def wants(self, consumer: int, *, max_gap_bytes: int) -> list[WantedRange]:  # noqa: ARG002  # one range has no gaps
        at = self._location
        return [WantedRange(consumer, at.object_index, at.begin, at.end, is_held=True)]

    @property
    def is_copied(self) -> bool:
        return False

    def direct_view(self, begin: int, end: int) -> memoryview:
        return memoryview(self.content)[begin - self._location.begin : end - self._location.begin]

    def copy_from(self, source: torch.Tensor, begin: int) -> None:
        self.direct_view(begin, begin + len(source))[:] = bytes_view(source)


class TensorTarget:
    """Fills a tensor with a block of a stored chunk.

    Contiguous CPU memory of the stored dtype is read into directly. Any other tensor is copied to, which converts
    dtypes, moves to devices and honours strides.
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
        assert location.dtype is not None  # noqa: S101  # only tensors have a TensorTarget
        self._location = location
        self._box = box
        self._itemsize_bytes = ITEMSIZE_BYTES[location.dtype]
        self._dtype = dtype_of(location.dtype)
        self._target = target
        self.num_bytes = math.prod(box.lengths) * self._itemsize_bytes
        self._is_direct = self._is_dropped = False
        self._run_begins: list[int] = []
        self._run_bytes = 0

    def wants(self, consumer: int, *, max_gap_bytes: int) -> list[WantedRange]:
        at, size = self._location, self._itemsize_bytes
        if self._box.lengths == at.lengths:
            runs = [(at.begin, at.begin + self.num_bytes)] if self.num_bytes else []
        else:
            runs = [
                (at.begin + begin * size, at.begin + end * size)
                for begin, end in find_runs(at.lengths, self._box, max_gap=max_gap_bytes // size)
            ]
        holds_only_wanted = sum(end - begin for begin, end in runs) == self.num_bytes
        if holds_only_wanted and self._target.dtype == self._dtype and is_viewable(self._target):
            self._is_direct = True
            self._run_begins = [begin for begin, _ in runs]
            self._run_bytes = runs[0][1] - runs[0][0] if runs else 0
        return [WantedRange(consumer, at.object_index, begin, end) for begin, end in runs]

    @property
    def is_copied(self) -> bool:
        return not self._is_direct

    @property
    def address_range(self) -> tuple[int, int] | None:
        """The addresses that are written to."""
        return address_range(self._target)

    def copy_instead(self) -> None:
        """Do not fill the tensor's memory directly."""
        self._is_direct = False

    def drop(self) -> None:
        """Ignore the bytes, because another target fills the same memory. To be called after `copy_instead`."""
        self._is_dropped = True

    @property
    def is_dense(self) -> bool:
        """True if all bytes of the address range are the tensor's."""
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
        strides = compute_strides(self._location.lengths)
        for box in split_into_boxes(first, first + elements.numel(), self._location.lengths):
            common = intersect(box, self._box)
            if common is None:
                continue
            start = sum(o * s for o, s in zip(common.offsets, strides, strict=True)) - first
            block = target
            pairs = zip(common.offsets, self._box.offsets, common.lengths, strict=True)
            for dim, (offset, origin, length) in enumerate(pairs):
                block = block.narrow(dim, offset - origin, length)
            block.copy_(elements.as_strided(common.lengths, strides, elements.storage_offset() + start))


class WholeTensors:
    """Contiguous CPU tensors, numbered, that each get all bytes of a stored chunk of their dtype and shape.

    A model can have 100,000 small ones, so it keeps columns, and no object for each.
    """

    __slots__ = ("_addresses", "_chunks", "_copied", "_dropped", "_tensors", "fqns", "num_bytes")

    def __init__(self) -> None:
        self.fqns: list[str] = []
        self.num_bytes = 0
        self._tensors: list[torch.Tensor] = []
        self._chunks: list[Chunk] = []
        self._addresses: list[int] = []
        self._copied: frozenset[int] = frozenset()
        self._dropped: set[int] = set()

    def __len__(self) -> int:
        return len(self.fqns)

    def add(
        self, fqns: Sequence[str], tensors: Sequence[torch.Tensor], stored: Mapping[str, StoredTensor]
    ) -> list[int]:
        """Take the tensors that can be filled so. Return the positions of the others."""
        dtypes: dict[str, torch.dtype] = {}
        others: list[int] = []
        for position, (fqn, tensor) in enumerate(zip(fqns, tensors, strict=True)):
            entry = stored.get(fqn)
            if entry is not None and len(entry.chunks) == 1 and not entry.transforms and tensor.size() == entry.shape:
                if entry.dtype not in dtypes:
                    dtypes[entry.dtype] = dtype_of(entry.dtype)
                address = _find_contiguous_address(tensor) if tensor.dtype is dtypes[entry.dtype] else 0
                if address:
                    self.fqns.append(fqn)
                    self._tensors.append(tensor)
                    chunk = entry.chunks[0]
                    self.num_bytes += chunk.end - chunk.begin
                    self._chunks.append(chunk)
                    self._addresses.append(address)
                    continue
            others.append(position)
        return others

    def wants(self) -> Iterator[WantedRange]:
        """Give the range of each tensor, with its number as the consumer."""
        return (
            WantedRange(number, chunk.object_index, chunk.begin, chunk.end) for number, chunk in enumerate(self._chunks)
        )

    def address_ranges(self) -> tuple[list[int], list[int]]:
        """Return where the tensors begin and end in memory."""
        pairs = zip(self._addresses, self._chunks, strict=True)
        return self._addresses.copy(), [address + chunk.end - chunk.begin for address, chunk in pairs]

    def direct_view(self, number: int, begin: int, end: int) -> memoryview | None:
        """Return the memory that bytes ``[begin, end)`` belong in; None if they have to be copied there."""
        return None if number in self._copied else self._memory(number, begin, end)

    def copy_from(self, number: int, source: torch.Tensor, begin: int) -> None:
        """Take the bytes from `begin` on, which the ``uint8`` tensor `source` holds."""
        if number not in self._dropped:
            self._memory(number, begin, begin + len(source))[:] = bytes_view(source)

    def copy_instead(self, numbers: Iterable[int]) -> None:
        """Do not fill the memory of these directly."""
        self._copied = frozenset(numbers)

    def drop(self, number: int) -> None:
        """Ignore the bytes of this one, because another fills the same memory. To be called after `copy_instead`."""
        self._dropped.add(number)

    def are_copied(self) -> list[bool]:
        """Return for each tensor True if its bytes come by way of a buffer."""
        return [number in self._copied for number in range(len(self))]

    def _memory(self, number: int, begin: int, end: int) -> memoryview:
        chunk = self._chunks[number]
        first, last = chunk.begin, chunk.end
        if not first <= begin <= end <= last:
            raise ValueError(f"bytes [{begin}, {end}) do not lie in the chunk of bytes [{first}, {last})")
        # By its address, in a fifth of the time that two tensors and an array as steps on the way would take.
        memory = _bytes_type((last - first).bit_length()).from_address(self._addresses[number])
        memory.kept_alive = self._tensors[number]
        return memoryview(memory).cast("B")[begin - first : end - first]


@functools.cache
def _bytes_type(num_bits: int) -> Any:
    """Return a type of at least as many bytes as are used. A type for each number takes longer than filling it."""
    return ctypes.c_ubyte * (1 << num_bits)


def _find_contiguous_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor whose bytes lie in memory one after the other; 0 for any other."""
    is_contiguous = (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )
    return memory_address(tensor) if is_contiguous else 0


class Targets:
    """All that a load fills, by the consumers' numbers: whole tensors first, and then the `others`."""

    __slots__ = ("_num_whole", "_others", "_wholes")

    def __init__(self, wholes: WholeTensors, others: Sequence[Target]) -> None:
        self._wholes, self._others, self._num_whole = wholes, others, len(wholes)

    def direct_view(self, consumer: int, begin: int, end: int) -> memoryview | None:
        """See `Target.direct_view`."""
        if consumer < self._num_whole:
            return self._wholes.direct_view(consumer, begin, end)
        return self._others[consumer - self._num_whole].direct_view(begin, end)

    def copy_from(self, consumer: int, source: torch.Tensor, begin: int) -> None:
        """See `Target.copy_from`."""
        if consumer < self._num_whole:
            self._wholes.copy_from(consumer, source, begin)
        else:
            self._others[consumer - self._num_whole].copy_from(source, begin)


class _Gap(NamedTuple):
    """Bytes ``[begin, end)`` of a request that go through a buffer, at `position` there.

    They are aligned in the buffer as in the object, so that elements are aligned too.
    """

    begin: int
    end: int
    position: int


class _Source(NamedTuple):
    """Bytes ``[begin, end)`` of the object, in memory."""

    begin: int
    end: int
    content: torch.Tensor


@contextlib.contextmanager
def open_request(request: RangeRead, targets: Targets, arena: Arena) -> Iterator[list[memoryview]]:
    """Give views to fill with the request's bytes, in order. The targets have them when the context ends well.

    Most views are the targets' own memory. Bytes that nobody wants, or that have to be converted, go through a buffer
    of `arena`. Bytes that several targets want, such as names of tied tensors, are read into one and copied.
    """
    parts: list[memoryview | _Gap] = []
    copied: list[WantedRange] = []
    shared: list[tuple[int, int, memoryview]] = []
    reached = request.begin
    position = 0
    for begin, end, wants in _group_wants(request):
        filled, view = _find_direct_view(wants, begin, end, targets)
        if len(wants) > 1 or view is None:
            copied += [want for want in wants if want is not filled]
        if view is None:
            continue
        if reached < begin:
            parts.append(gap := _new_gap(reached, begin, position))
            position = gap.position + begin - reached
        parts.append(view)
        if len(wants) > 1:
            shared.append((begin, end, view))
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
            sources = [_Source(gap.begin, gap.end, content) for gap, content in gaps.items()]
            sources += [_Source(begin, end, torch.frombuffer(view, dtype=torch.uint8)) for begin, end, view in shared]
            sources.sort(key=_end_of)  # they do not overlap
            for want in copied:
                _copy(want, sources, targets)


def _group_wants(request: RangeRead) -> Iterator[tuple[int, int, Sequence[WantedRange]]]:
    """Give the wants with the ranges of the request that they want. Wants that overlap are given together."""
    low, high = request.begin, request.end
    if not request.overlapping:
        for want in request.wants:
            yield max(want.begin, low), min(want.end, high), (want,)
        return
    begin = end = low
    together: list[WantedRange] = []
    for want in request.wants:
        if together and want.begin < end:
            together.append(want)
            end = max(end, min(want.end, high))
            continue
        if together:
            yield begin, end, together
        begin, end, together = max(want.begin, low), min(want.end, high), [want]
    if together:
        yield begin, end, together


def _find_direct_view(
    wants: Sequence[WantedRange], begin: int, end: int, targets: Targets
) -> tuple[WantedRange, memoryview] | tuple[None, None]:
    """Return the want whose own memory takes bytes ``[begin, end)``, and that memory. Each has to want all of it."""
    if len(wants) > 1 and any(want.begin > begin or want.end < end for want in wants):
        return None, None
    for want in wants:
        view = targets.direct_view(want.consumer, begin, end)
        if view is not None:
            return want, view
    return None, None


def _new_gap(begin: int, end: int, position: int) -> _Gap:
    return _Gap(begin=begin, end=end, position=position + (begin - position) % _ALIGNMENT_BYTES)


def _copy(want: WantedRange, sources: Sequence[_Source], targets: Targets) -> None:
    for number in range(bisect.bisect_right(sources, want.begin, key=_end_of), len(sources)):
        source = sources[number]
        if source.begin >= want.end:
            break
        begin, end = max(want.begin, source.begin), min(want.end, source.end)
        if begin < end:
            targets.copy_from(want.consumer, source.content[begin - source.begin : end - source.begin], begin)


def _end_of(source: _Source) -> int:
    return source.end
