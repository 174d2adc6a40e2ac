"""The tensors of a snapshot in their memory: what is copied from where to where, and the tensors that will hold it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from cloudckpt._plan.boxes import strides_of
from cloudckpt._plan.hulls import hulls_of
from cloudckpt._plan.placing import LINE_BYTES
from cloudckpt._stage.memory import Block, Pool, nothing_of
from cloudckpt._stage.tensors import reach_bytes


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that is filled by one copy, or by several that follow each other."""

    block: Block
    offset: int
    """Where it lies in the block."""
    source: int
    """The address of the bytes that it gets as they are."""
    num_bytes: int
    view: int
    """The first of the tensors that lie there."""
    tensor: torch.Tensor
    """That tensor; where `copy` is given, its elements are what is copied."""
    copy: torch.Tensor | None
    small: torch.Tensor | None
    """The one tensor that lies there, if it is one that torch copies in no more time than it takes."""

    @property
    def target(self) -> int:
        """Its address."""
        return self.block.address + self.offset


_SMALL_ELEMENTS = 32 * 1024  # torch copies what has as many, or more, in threads of its own
# Of these it copies any bits.
_ORDINARY = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """`copies` hold what the tensors do as soon as all `segments` are filled."""

    copies: list[torch.Tensor]
    segments: list[Segment]
    blocks: Sequence[Block]


def lay_out(
    tensors: Sequence[torch.Tensor], pool: Pool, *, reuse_lent: bool, as_whole: Sequence[bool] | None = None
) -> LaidOut:
    """Take memory of `pool` for copies of `tensors`, which are strided and have memory; nothing is copied.

    Tensors that share memory share it in their copies, which have the same strides then. Those `as_whole` have storages
    that torch shares with other processes, where the memory is shared; the others' storages have little but their own.
    """
    begins = [tensor.data_ptr() for tensor in tensors]
    own_bytes = [tensor.nbytes for tensor in tensors]
    ends = [begin + _reach_bytes(tensor, own) for tensor, begin, own in zip(tensors, begins, own_bytes, strict=True)]
    hulls = hulls_of(begins, ends, own_bytes)
    wanted: list[tuple[int, int]] = []
    firsts: list[int] = []
    num_views: list[int] = []
    slots: list[int] = []
    known: dict[Hashable, int] = {}
    for view, hull in enumerate(hulls.segment_of):
        # torch reads a tensor at an odd address where it is, but has none that lies so in memory of ours.
        is_alone = hull < 0 or begins[view] % tensors[view].itemsize
        key = _form_of(tensors[view], begins[view]) if is_alone else hull
        slot = known.setdefault(key, len(wanted))
        if slot == len(wanted):
            firsts.append(view)
            num_views.append(0)
            wanted.append(
                (0, own_bytes[view]) if is_alone else (hulls.begins[hull], hulls.ends[hull] - hulls.begins[hull])
            )
        num_views[slot] += 1
        slots.append(slot)
    placing = pool.lay_out(wanted, reuse_lent=reuse_lent)
    used = pool.blocks
    storages: dict[tuple[int, bool], tuple[torch.UntypedStorage, int]] = {}
    copies: list[torch.Tensor] = []
    wholes = as_whole or [False] * len(tensors)
    for tensor, begin, num_bytes, slot, whole in zip(tensors, begins, own_bytes, slots, wholes, strict=True):
        block, offset = used[placing.blocks[slot]], placing.offsets[slot]
        source, held_bytes = wanted[slot]
        if num_bytes == held_bytes and tensor.is_contiguous() and not offset % LINE_BYTES:
            # Alone, or tied to others that are the same.
            copied = block.tensor(offset, tensor, as_whole=whole)
        else:
            if (slot, whole) not in storages:
                storages[slot, whole] = block.storage(offset, held_bytes, as_whole=whole)
            copied = nothing_of(tensor.dtype)
            storage, at = storages[slot, whole]
            stride: Sequence[int] = tensor.stride()
            if source:
                at += begin - source
            else:
                stride = strides_of(tensor.size())
            copied.set_(storage, at // tensor.itemsize, tensor.size(), stride)
        copies.append(_with_bits(copied, tensor) if source else copied)
    segments = [
        Segment(
            block=used[block],
            offset=offset,
            source=source,
            num_bytes=num_bytes,
            view=first,
            tensor=tensors[first],
            copy=None if source else copies[first],
            small=copies[first] if source and count == 1 and _is_small(tensors[first]) else None,
        )
        for first, block, offset, (source, num_bytes), count in zip(
            firsts, placing.blocks, placing.offsets, wanted, num_views, strict=True
        )
    ]
    return LaidOut(copies=copies, segments=segments, blocks=pool.blocks)


def _form_of(tensor: torch.Tensor, address: int) -> Hashable:
    """Equal for views of the same values in the same memory."""
    return address, tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.device


def _is_small(tensor: torch.Tensor) -> bool:
    return bool(
        tensor.is_cpu
        and tensor.dtype in _ORDINARY
        and tensor.numel() < _SMALL_ELEMENTS
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _with_bits(copied: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Where the memory of `tensor` holds its values' conjugates or negatives, that of its copy does, too."""
    if tensor.is_conj():
        copied = copied.conj()
    return torch._neg_view(copied) if tensor.is_neg() else copied  # noqa: SLF001  # no other way to set the bit


def _reach_bytes(tensor: torch.Tensor, own_bytes: int) -> int:
    return own_bytes if tensor.is_contiguous() else reach_bytes(tensor)
