"""From the items of a load plan to what they fill and where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from cloudckpt._manifest.receipts import ItemLocation
from cloudckpt._plan.boxes import Box
from cloudckpt._plan.reads import Request
from cloudckpt._stage.targets import BytesTarget, Target, TensorTarget
from cloudckpt.errors import CloudckptError, CorruptCheckpointError

_MAX_NAMES = 5


class Consumer(NamedTuple):
    """One read item and what it fills; `tensor` is None for a Python object. A load has one for each tensor."""

    item: ReadItem
    location: ItemLocation
    target: Target
    tensor: torch.Tensor | None


def consumers_of(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    storage_data: Mapping[MetadataIndex, ItemLocation],
    *,
    uri: str,
) -> list[Consumer]:
    """Of each item, in order; the planner gives the tensors."""
    consumers = []
    for item in items:
        index = item.storage_index
        location = storage_data.get(index)
        if location is None:
            raise CorruptCheckpointError(f"{uri} has no data for {index.fqn!r} at {index.offset}", uri=uri)
        if item.type is LoadItemType.BYTE_IO:
            consumers.append(Consumer(item, location, BytesTarget(location), None))
            continue
        tensor, lengths = planner.resolve_tensor(item).detach(), tuple(item.lengths)
        if tensor.shape != lengths:
            raise CloudckptError(
                f"{index.fqn!r}: the planner gave a tensor of shape {tuple(tensor.shape)} for a read of {lengths}"
            )
        offsets = tuple(item.storage_offsets)
        if len(offsets) != len(location.lengths) or any(
            begin < 0 or begin + length > extent
            for begin, length, extent in zip(offsets, lengths, location.lengths, strict=False)
        ):
            raise CloudckptError(
                f"{index.fqn!r}: the planner asks for {lengths} at {offsets} of a chunk of {tuple(location.lengths)}"
            )
        target: Target = (
            BytesTarget(location) if location.transforms else TensorTarget(location, Box(offsets, lengths), tensor)
        )
        consumers.append(Consumer(item, location, target, tensor))
    return consumers


def names_in(request: Request, consumers: Sequence[Consumer], begin: int, end: int) -> str:
    """The tensors and values that bytes ``[begin, end)`` of the request's object belong to, for a message."""
    fqns = {
        consumers[want.consumer].item.storage_index.fqn: None
        for want in request.wants
        if want.begin < end and want.end > begin
    }
    shown = ", ".join(repr(fqn) for fqn in list(fqns)[:_MAX_NAMES])
    return shown + (f" and {len(fqns) - _MAX_NAMES} more" if len(fqns) > _MAX_NAMES else "")
