"""Plan a snapshot: its memory, and the tasks that copy tensors into it, which `snapshot.Snapshot` runs in threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch

from cloudckpt._torch_compat import copy_each, negated_view
from cloudckpt.io.boxes import compute_strides
from cloudckpt.options import KIB, MIB
from cloudckpt.tensors.addresses import LINE_BYTES, plan_address_ranges
from cloudckpt.tensors.host_memory import MemoryBlock, SnapshotPool, empty_tensor
from cloudckpt.tensors.tensor_bytes import as_carrier, extent_bytes, layout_of

CPU = torch.device("cpu")
_MAX_TASK_BYTES = 16 * MIB
_MIN_TASK_BYTES = MIB
_MAX_EARLY_BYTES = 64 * KIB
_TASKS_PER_THREAD = 4
_DEVICE_TASK_BYTES = 64 * MIB  # Bytes for each event. An upload of the first bytes waits for this many alone.
_MAX_SMALL_ELEMENTS = 32 * 1024  # torch copies more elements in threads of its own
# torch copies the bits of these dtypes unchanged.
_ORDINARY = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


class AnsweringTensor(torch.Tensor):
    """A plain tensor whose attributes are pickled with it, which torch does not do for plain tensors.

    In the other process it is a plain tensor again.
    """

    serialized_as: ClassVar[type[torch.Tensor]] = torch.Tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_attributes(self, self.serialized_as, self.__dict__).__reduce_ex__(protocol)


class AnsweringParameter(AnsweringTensor):
    """A parameter whose attributes are pickled with it. See `AnsweringTensor`."""

    serialized_as = torch.nn.Parameter


def with_attributes(tensor: torch.Tensor, kind: type[torch.Tensor], attributes: Mapping[str, Any]) -> torch.Tensor:
    """Return `tensor` as a `kind` with `attributes`. It shares the memory."""
    converted = tensor.detach().as_subclass(kind).requires_grad_(tensor.requires_grad)
    converted.__dict__.update(attributes)
    return converted


class CopyTask(msgspec.Struct):
    """Copies that one thread makes without a pause.

    Tasks of the CPU refer to tensors by their position in the state dict, so that they can be done again.
    """

    copies: list[Callable[[Sequence[torch.Tensor]], object]]
    """Each is called with the tensors of the state dict."""
    small_targets: list[torch.Tensor]
    small_tensors: list[int]
    """Positions of many small tensors, which one call copies while other threads run."""
    num_bytes: int

    @torch.no_grad()
    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        for copy in self.copies:
            copy(tensors)
        if self.small_targets:
            copy_each(self.small_targets, [tensors[number] for number in self.small_tensors])


class SnapshotSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a block that gets the bytes of an address range, or the elements of one tensor."""

    block: MemoryBlock
    offset: int
    source: int
    """The address of the bytes; 0 if elements are copied."""
    num_bytes: int
    number: int
    """The position of the first tensor in this memory."""
    tensor: torch.Tensor
    copied: torch.Tensor
    """The copy of `tensor`."""
    is_urgent: bool
    is_small: bool
    """True if `tensor` is alone in this memory, and torch copies it fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """The copies of tensors, and the tasks that fill them. Each copy has its values once all `tasks` are done."""

    copies: list[torch.Tensor]
    num_bytes: int
    """The number of bytes that the tasks copy."""
    batched: frozenset[int]
    """The positions of the small tensors that a task copies in one call with others (`CopyTask.small_tensors`)."""
    tasks: list[CopyTask]
    tasks_of_device: dict[torch.device, range]
    begins: list[int]
    ends: list[int]
    tasks_of_segment: list[range]
    """The address range of each segment of the snapshot, by address, and the tasks that fill it."""


def plan_snapshot(
    tensors: Sequence[torch.Tensor],
    pool: SnapshotPool,
    *,
    num_threads: int,
    reuse_lent: bool,
    urgent: Collection[int],
    whole: Sequence[bool],
) -> SnapshotPlan:
    """Take memory of `pool` for copies of `tensors`, which have memory addresses, and plan the copies.

    Tensors at the positions `urgent` are copied first, and then small ones. Tensors that share memory share it in their
    copies, with the same strides. If `whole` is True for a tensor and the memory is shared, torch can share the
    storage of the copy with other processes.
    """
    copies, segments = lay_out_copies(tensors, pool, reuse_lent=reuse_lent, urgent=urgent, whole=whole)
    # Small ones are often an optimizer's numbers, which the plan of the save waits for.
    segments.sort(key=lambda segment: (not segment.is_urgent, segment.num_bytes > _MAX_EARLY_BYTES))
    tasks: list[CopyTask] = []
    tasks_of_device: dict[torch.device, range] = {}
    filled: list[tuple[int, int, range]] = []
    for device in dict.fromkeys(segment.tensor.device for segment in segments):
        segments_of_device = [segment for segment in segments if segment.tensor.device == device]
        first = len(tasks)
        task_bytes = _DEVICE_TASK_BYTES
        if device == CPU:
            share_bytes = sum(segment.num_bytes for segment in segments_of_device) // (num_threads * _TASKS_PER_THREAD)
            task_bytes = min(max(share_bytes, _MIN_TASK_BYTES), _MAX_TASK_BYTES)
        ranges = add_tasks(tasks, segments_of_device, device=device, task_bytes=task_bytes)
        tasks_of_device[device] = range(first, len(tasks))
        for segment, task_range in zip(segments_of_device, ranges, strict=True):
            begin = segment.block.address + segment.offset
            filled.append((begin, begin + segment.num_bytes, task_range))
    filled.sort(key=lambda segment: segment[0])
    return SnapshotPlan(
        copies=copies,
        num_bytes=sum(segment.num_bytes for segment in segments),
        batched=frozenset(segment.number for segment in segments if segment.is_small),
        tasks=tasks,
        tasks_of_device=tasks_of_device,
        begins=[begin for begin, _, _ in filled],
        ends=[end for _, end, _ in filled],
        tasks_of_segment=[task_range for _, _, task_range in filled],
    )


def lay_out_copies(
    tensors: Sequence[torch.Tensor],
    pool: SnapshotPool,
    *,
    reuse_lent: bool,
    urgent: Collection[int],
    whole: Sequence[bool],
) -> tuple[list[torch.Tensor], list[SnapshotSegment]]:
    """Return the copies of `tensors`, still without values, and the segments that hold them. See `plan_snapshot`."""
    begins = [tensor.data_ptr() for tensor in tensors]
    own_bytes = [tensor.nbytes for tensor in tensors]
    ends = [
        begin + (num_bytes if tensor.is_contiguous() else extent_bytes(tensor))
        for tensor, begin, num_bytes in zip(tensors, begins, own_bytes, strict=True)
    ]
    ranges = plan_address_ranges(begins, ends, own_bytes)
    to_place: list[tuple[int, int]] = []  # the source and the size of each segment
    firsts: list[int] = []
    num_tensors: list[int] = []
    segment_of: list[int] = []
    segment_by_key: dict[Hashable, int] = {}
    for number, (tensor, begin, range_number) in enumerate(zip(tensors, begins, ranges.segment_of, strict=True)):
        # torch reads a tensor at an odd address where it is, but cannot have one at such an address of our memory.
        is_alone = range_number < 0 or begin % tensor.itemsize
        index = segment_by_key.setdefault((begin, layout_of(tensor)) if is_alone else range_number, len(to_place))
        if index == len(to_place):
            firsts.append(number)
            num_tensors.append(0)
            if is_alone:
                to_place.append((0, own_bytes[number]))
            else:
                to_place.append((ranges.begins[range_number], ranges.ends[range_number] - ranges.begins[range_number]))
        num_tensors[index] += 1
        segment_of.append(index)
    placement = pool.place(to_place, reuse_lent=reuse_lent)
    blocks = pool.blocks
    storages: dict[tuple[int, bool], tuple[torch.UntypedStorage, int]] = {}
    copies: list[torch.Tensor] = []
    for tensor, begin, num_bytes, index, is_whole in zip(tensors, begins, own_bytes, segment_of, whole, strict=True):
        block, offset = blocks[placement.blocks[index]], placement.offsets[index]
        source, segment_bytes = to_place[index]
        if not is_whole and num_bytes == segment_bytes and tensor.is_contiguous() and not offset % LINE_BYTES:
            copied = block.tensor(offset, tensor)
        else:
            if (index, is_whole) not in storages:
                storages[index, is_whole] = block.storage(offset, segment_bytes, whole=is_whole)
            storage, offset_bytes = storages[index, is_whole]
            offset_bytes += begin - source if source else 0
            stride: Sequence[int] = tensor.stride() if source else compute_strides(tensor.size())
            copied = empty_tensor(tensor.dtype).set_(storage, offset_bytes // tensor.itemsize, tensor.size(), stride)
        copied = _with_lazy_bits(copied, tensor) if source else copied
        copies.append(copied.requires_grad_() if tensor.requires_grad else copied)
    urgent_segments = {segment_of[number] for number in urgent}
    segments = [
        SnapshotSegment(
            block=blocks[block],
            offset=offset,
            source=source,
            num_bytes=num_bytes,
            number=first,
            tensor=tensors[first],
            copied=copies[first],
            is_urgent=index in urgent_segments,
            is_small=source > 0 and count == 1 and _is_small(tensors[first]),
        )
        for index, (first, block, offset, (source, num_bytes), count) in enumerate(
            zip(firsts, placement.blocks, placement.offsets, to_place, num_tensors, strict=True)
        )
    ]
    return copies, segments


def add_tasks(
    tasks: list[CopyTask], segments: Sequence[SnapshotSegment], *, device: torch.device, task_bytes: int
) -> list[range]:
    """Add the tasks that fill `segments` from one device. Return for each segment the tasks that fill it."""
    first, ranges = len(tasks), []
    for segment in segments:
        begin = num_used = 0
        num_units, copy_units = _find_copy(segment, device)
        unit_bytes = segment.num_bytes // num_units
        while begin < num_units:
            if len(tasks) == first or tasks[-1].num_bytes >= task_bytes:
                tasks.append(CopyTask(copies=[], small_targets=[], small_tensors=[], num_bytes=0))
            task = tasks[-1]
            end = min(begin + max((task_bytes - task.num_bytes) // unit_bytes, 1), num_units)
            if segment.is_small:
                task.small_targets.append(segment.copied)
                task.small_tensors.append(segment.number)
            else:
                task.copies.append(functools.partial(copy_units, begin, end))
            task.num_bytes += (end - begin) * unit_bytes
            num_used += 1
            begin = end
        ranges.append(range(len(tasks) - num_used, len(tasks)))
    return ranges


def _find_copy(segment: SnapshotSegment, device: torch.device) -> tuple[int, Callable[..., object]]:
    """Return the number of units of a segment, and a function that copies units ``[begin, end)`` of it."""
    if device == CPU:
        if segment.is_small or not segment.source:
            return 1, functools.partial(_copy_elements, segment.copied, segment.number)
        address = segment.block.address + segment.offset
        return segment.num_bytes, functools.partial(_copy_memory, address, segment.source)
    tensor = segment.tensor.detach()
    if not segment.source:
        # It is split too: the GPU makes a copy of the elements, which must not be large.
        return len(tensor), functools.partial(_copy_rows, segment.copied, tensor.resolve_conj().resolve_neg())
    storage, storage_offset = tensor.untyped_storage(), segment.source - tensor.untyped_storage().data_ptr()
    if storage_offset < 0 or storage_offset + segment.num_bytes > storage.nbytes():
        raise RuntimeError("tensors of different storages share memory of a GPU. Copy one of them first")
    flat: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    source = flat.set_(storage, storage_offset, (segment.num_bytes,), (1,))
    target = segment.block.bytes_tensor(segment.offset, segment.num_bytes)
    return segment.num_bytes, functools.partial(_copy_rows, target, source)


def _copy_memory(target: int, source: int, begin: int, end: int, _: Sequence[torch.Tensor]) -> None:
    ctypes.memmove(target + begin, source + begin, end - begin)  # other threads run meanwhile


def _copy_elements(target: torch.Tensor, number: int, _: int, __: int, tensors: Sequence[torch.Tensor]) -> None:
    """Copy by numpy, which uses this thread alone: torch would use threads of its own for each tensor."""
    source = tensors[number].detach().resolve_conj().resolve_neg()
    as_carrier(target).numpy()[...] = as_carrier(source).numpy()


def _copy_rows(target: torch.Tensor, source: torch.Tensor, begin: int, end: int, _: Sequence[torch.Tensor]) -> None:
    target[begin:end].copy_(source[begin:end], non_blocking=True)


def _is_small(tensor: torch.Tensor) -> bool:
    return bool(
        tensor.is_cpu
        and tensor.dtype in _ORDINARY
        and tensor.numel() < _MAX_SMALL_ELEMENTS
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _with_lazy_bits(copied: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Mark a copy of the memory of `tensor` as conjugated or negated, if `tensor` is."""
    if not tensor.is_conj() and not tensor.is_neg():
        return copied
    copied = copied.conj() if tensor.is_conj() else copied
    copied = negated_view(copied) if tensor.is_neg() else copied
    return with_attributes(copied, AnsweringTensor, {})  # torch sends a plain tensor without the marks
