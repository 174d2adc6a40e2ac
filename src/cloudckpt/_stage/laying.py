"""The tensors of a snapshot in their memory: what is copied from where to where, and the tensors that will hold it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cloudckpt._plan.hulls import hulls_of
from cloudckpt._stage.memory import Block, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Memory that is filled by one copy, or by several that follow each other."""

    target: int
    """Its address in the snapshot."""
    source: int
    """The address of the bytes that it gets as they are."""
    num_bytes: int
    memory: tuple[torch.UntypedStorage, int]
    """The storage that `target` lies in, and where in it."""
    tensor: torch.Tensor
    """A tensor that lies there; where `copy` is given, the one whose elements it gets instead."""
    copy: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """`copies` hold what the tensors do as soon as all `segments` are filled."""

    copies: list[torch.Tensor]
    segments: list[Segment]
    blocks: Sequence[Block]


def lay_out(tensors: Sequence[torch.Tensor], pool: Pool, *, reuse_lent: bool) -> LaidOut:
    """Take memory of `pool` for copies of `tensors`, which are strided and have memory; nothing is copied.

    Tensors that share memory share it in their copies, which have the same strides then.
    """
    begins = [tensor.data_ptr() for tensor in tensors]
    own_bytes = [tensor.nbytes for tensor in tensors]
    ends = [begin + _reach_bytes(tensor, own) for tensor, begin, own in zip(tensors, begins, own_bytes, strict=True)]
    hulls = hulls_of(begins, ends, own_bytes)
    wanted: list[tuple[int, int]] = []
    firsts: list[int] = []
    slots: list[int] = []
    known: dict[int, int] = {}
    for view, hull in enumerate(hulls.segment_of):
        slot = known.get(hull, -1) if hull >= 0 else -1
        if slot < 0:
            slot = len(wanted)
            firsts.append(view)
            if hull < 0:
                wanted.append((0, own_bytes[view]))
            else:
                known[hull] = slot
                wanted.append((hulls.begins[hull], hulls.ends[hull] - hulls.begins[hull]))
        slots.append(slot)
    placing = pool.lay_out(wanted, reuse_lent=reuse_lent)
    places = list(zip(placing.blocks, placing.offsets, wanted, strict=True))
    storages = [pool.blocks[block].storage(offset, num_bytes) for block, offset, (_, num_bytes) in places]
    copies: list[torch.Tensor] = []
    for tensor, begin, slot in zip(tensors, begins, slots, strict=True):
        storage, offset = storages[slot]
        source = wanted[slot][0]
        if source:
            copies.append(_view(tensor, storage, offset + begin - source, tensor.stride()))
        else:
            copies.append(_tensor(tensor, storage, offset, _dense_strides(tensor.size())))
    segments = [
        Segment(
            target=pool.blocks[block].address + offset,
            source=source,
            num_bytes=num_bytes,
            memory=storage,
            tensor=tensors[first],
            copy=None if source else copies[first],
        )
        for first, storage, (block, offset, (source, num_bytes)) in zip(firsts, storages, places, strict=True)
    ]
    return LaidOut(copies=copies, segments=segments, blocks=pool.blocks)


def _view(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, stride: Sequence[int]) -> torch.Tensor:
    """What `tensor` is of its own memory, of that from byte `offset` of `storage` on."""
    view = _tensor(tensor, storage, offset, stride)
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view  # noqa: SLF001  # no other way to set the bit


def _tensor(like: torch.Tensor, storage: torch.UntypedStorage, offset: int, stride: Sequence[int]) -> torch.Tensor:
    tensor: torch.Tensor = torch.empty(0, dtype=like.dtype)
    return tensor.set_(storage, offset // like.itemsize, like.size(), stride)


def _reach_bytes(tensor: torch.Tensor, own_bytes: int) -> int:
    if tensor.is_contiguous():
        return own_bytes
    last = sum((length - 1) * stride for length, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _dense_strides(size: Sequence[int]) -> list[int]:
    strides = list(itertools.accumulate(reversed(size[1:]), lambda one, other: one * other, initial=1))
    return strides[::-1][: len(size)]
