"""From the items of a load plan to what they fill and where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from cloudckpt._flat import PLAIN_TENSORS
from cloudckpt._manifest.model import Manifest
from cloudckpt._manifest.receipts import ItemLocation
from cloudckpt._pipeline.items import GivesTensors, LoadItems
from cloudckpt._plan.addresses import meeting_another
from cloudckpt._plan.boxes import Box
from cloudckpt._plan.reads import Request, Want
from cloudckpt._stage.targets import BytesTarget, Target, TensorTarget, address_range_of
from cloudckpt._stage.tensors import is_freed, is_short, shortage_of
from cloudckpt._stage.wholes import Targets, Wholes
from cloudckpt.errors import CloudckptError, CorruptCheckpointError, UnsupportedValueError

_MAX_NAMES = 5


class Consumer(NamedTuple):
    """One read item and what it fills; `tensor` is None for a Python object."""

    item: ReadItem
    location: ItemLocation
    target: Target
    tensor: torch.Tensor | None


class Consumers:
    """All that a load fills, numbered: whole tensors first, and then the `others`, each with an item of its own."""

    __slots__ = ("others", "targets", "wholes")

    def __init__(self, wholes: Wholes, others: Sequence[Consumer]) -> None:
        self.wholes = wholes
        self.others = others
        self.targets = Targets(wholes, [consumer.target for consumer in others])

    def __len__(self) -> int:
        return len(self.wholes) + len(self.others)

    @property
    def num_bytes(self) -> int:
        """As many as are wanted."""
        return self.wholes.num_bytes + sum(consumer.target.num_bytes for consumer in self.others)

    def fqn_of(self, number: int) -> str:
        """The entry of the state dict that this one fills, or a part of it."""
        num_whole = len(self.wholes)
        if number < num_whole:
            return self.wholes.fqns[number]
        return self.others[number - num_whole].item.storage_index.fqn

    def wants(self, *, max_gap_bytes: int) -> list[Want]:
        """The ranges to fetch."""
        wants = list(self.wholes.wants())
        for number, consumer in enumerate(self.others, len(self.wholes)):
            wants += consumer.target.wants(number, max_gap_bytes=max_gap_bytes)
        return wants

    def keep_apart(self) -> None:
        """Where tensors share memory, as tied weights do, fill none of them directly. To be called after `wants`.

        A read into memory that something else is written to would find its bytes when it checks its own. Of those that
        fill the same memory, the last is what is there in the end, and no mixture.
        """
        begins, ends = self.wholes.address_ranges()
        filled: list[Target] = []
        for consumer in self.others:
            addresses = _addresses_of(consumer)
            if addresses is not None:
                filled.append(consumer.target)
                begins.append(addresses[0])
                ends.append(addresses[1])
        num_whole = len(self.wholes)
        found = meeting_another(begins, ends)
        self.wholes.copy_instead(position for position in found if position < num_whole)
        for position in found:
            target = filled[position - num_whole] if position >= num_whole else None
            if isinstance(target, TensorTarget):
                target.copy_instead()
        last: dict[tuple[int, int], int] = {}
        for position in sorted(found):
            target = filled[position - num_whole] if position >= num_whole else None
            if target is None or (isinstance(target, TensorTarget) and target.is_dense):
                earlier = last.get((begins[position], ends[position]))
                if earlier is not None:
                    self._drop(earlier, filled)
                last[begins[position], ends[position]] = position

    def _drop(self, position: int, filled: Sequence[Target]) -> None:
        num_whole = len(self.wholes)
        if position < num_whole:
            self.wholes.drop(position)
            return
        target = filled[position - num_whole]
        assert isinstance(target, TensorTarget)  # noqa: S101  # no other is dense
        target.drop()

    def are_copied(self) -> list[bool]:
        """Of each, whether its bytes come by way of a buffer. To be called after `keep_apart`."""
        return [*self.wholes.are_copied(), *(consumer.target.is_copied for consumer in self.others)]


def consumers_of(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    manifest: Manifest,
    storage_data: Mapping[MetadataIndex, ItemLocation],
    *,
    uri: str,
) -> Consumers:
    """Of each item; the planner gives the tensors. Whole ones are taken together, where it is used to that."""
    wholes = Wholes()
    if isinstance(items, LoadItems) and isinstance(planner, GivesTensors):
        left = wholes.add(items.fqns, planner.tensors_of(items.fqns), manifest.tensors)
        items = [*(items[position] for position in left), *items.others]
    return Consumers(wholes, [_consumer_of(item, planner, storage_data, uri=uri) for item in items])


def _addresses_of(consumer: Consumer) -> tuple[int, int] | None:
    """Of the memory that is written to, be it by a copy."""
    if isinstance(consumer.target, TensorTarget):
        return consumer.target.address_range
    return None if consumer.tensor is None else address_range_of(consumer.tensor)


def _consumer_of(
    item: ReadItem, planner: LoadPlanner, storage_data: Mapping[MetadataIndex, ItemLocation], *, uri: str
) -> Consumer:
    index = item.storage_index
    location = storage_data.get(index)
    if location is None:
        raise CorruptCheckpointError(f"{uri} has no data for {index.fqn!r} at {index.offset}", uri=uri)
    if item.type is LoadItemType.BYTE_IO:
        return Consumer(item, location, BytesTarget(location), None)
    tensor, lengths = planner.resolve_tensor(item).detach(), tuple(item.lengths)
    if tensor.shape != lengths:
        raise CloudckptError(
            f"{index.fqn!r}: the planner gave a tensor of shape {tuple(tensor.shape)} for a read of {lengths}"
        )
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and is_freed(tensor):
        raise UnsupportedValueError(
            f"cannot load {index.fqn!r} of {uri}: the tensor's memory was freed, as FSDP does between uses. Load into "
            "the state dict that FSDP gives",
            uri=uri,
        )
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and is_short(tensor):
        raise UnsupportedValueError(f"cannot load {index.fqn!r} of {uri}: it is {shortage_of(tensor)}", uri=uri)
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
    return Consumer(item, location, target, tensor)


def names_in(request: Request, consumers: Consumers, begin: int, end: int) -> str:
    """The tensors and values that bytes ``[begin, end)`` of the request's object belong to, for a message."""
    fqns = {consumers.fqn_of(want.consumer): None for want in request.wants if want.begin < end and want.end > begin}
    shown = ", ".join(repr(fqn) for fqn in list(fqns)[:_MAX_NAMES])
    return shown + (f" and {len(fqns) - _MAX_NAMES} more" if len(fqns) > _MAX_NAMES else "")
