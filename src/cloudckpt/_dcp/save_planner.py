"""The planner that `cloudckpt.save` uses: torch's default, with what several ranks hold spread evenly over them."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from cloudckpt._dcp.plain_plan import local_items, merged
from cloudckpt._flat import PLAIN_TENSORS, flattened
from cloudckpt._plan.balance import Held, Share, spread
from cloudckpt._stage.ties import planned_ties
from cloudckpt.options import MIB

_MIN_PIECE_BYTES = 1 * MIB
_VALUE_BYTES = 4096  # of a Python object, whose size is known only once it is serialised


def entries_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict` with what its ``Stateful`` objects say in their place, for `BalancedSavePlanner`."""
    return {key: _state_of(value) for key, value in state_dict.items()}


def _state_of(value: Any) -> Any:
    # The check of the protocol takes longer than all that is done with a small tensor.
    if type(value) in PLAIN_TENSORS:
        return value
    return value.state_dict() if isinstance(value, Stateful) else value


@dataclasses.dataclass(frozen=True)
class PieceItem(WriteItem):
    """Some rows of what a rank's own plan has as one item."""

    whole: MetadataIndex | None = None
    """Of that item."""


@dataclasses.dataclass(frozen=True)
class TiedItem(WriteItem):
    """What is of the same memory, on this rank, as the item of another name: stored once, if one rank saves both."""

    first: MetadataIndex | None = None
    """Of that item."""


class BalancedSavePlanner(DefaultSavePlanner):
    """Spreads replicated tensors by bytes, the largest first, and cuts what would make a rank the straggler.

    torch's planner takes them as they come, and whole. Each rank's own shards count too, wherever they stand.

    Only what says itself that it is replicated is cut: a ``DTensor``. Plain tensors of one name are merely taken for
    replicas; where they are none (buffers that nobody synchronises), one rank's is saved, never a mixture of several.

    Names of one tensor, as of tied weights, are saved by one rank, and so once.

    `entries`, if given, is what is saved, whatever torch's `save` hands over: it makes a log record for each entry.
    """

    def __init__(self, *, entries: dict[str, Any] | None = None, min_piece_bytes: int = _MIN_PIECE_BYTES) -> None:
        super().__init__()
        self._entries = entries
        self._min_piece_bytes = min_piece_bytes

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        entries = state_dict if self._entries is None else self._entries
        # torch flattens otherwise in a process that has loaded a checkpoint of torch before 2.4.
        flat = flattened(entries) if _version._derived_version is None else None  # noqa: SLF001  # it has no other name
        if flat is None:
            super().set_up_planner(entries, storage_meta, is_coordinator)
            return
        self.state_dict, self.mappings = flat.entries, flat.paths
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = local_items(self.state_dict, is_coordinator=self.is_coordinator)
        for position, first in planned_ties(items, self.state_dict).items():
            item = items[position]
            items[position] = TiedItem(
                index=item.index, type=item.type, tensor_data=item.tensor_data, first=items[first].index
            )
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = merged(balanced(all_plans, min_piece_bytes=self._min_piece_bytes))
        metadata.planner_data = dict(ChainMap(*(plan.planner_data for plan in plans)))
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata

    def plain_tensors(self) -> Mapping[str, Any]:
        """See `cloudckpt._stage.items.KnowsPlainTensors`."""
        return self.state_dict

    def resolve_data(self, write_item: WriteItem) -> Any:
        if not isinstance(write_item, PieceItem):
            return super().resolve_data(write_item)
        whole, data = write_item.whole, write_item.tensor_data
        assert whole is not None and whole.offset is not None and write_item.index.offset is not None  # noqa: S101, PT018  # so it is made
        assert data is not None  # noqa: S101  # likewise
        tensor: torch.Tensor = self.lookup_object(whole)
        for dim, length in enumerate(data.chunk.sizes):
            tensor = tensor.narrow(dim, write_item.index.offset[dim] - whole.offset[dim], length)
        return tensor


def balanced(plans: Sequence[SavePlan], *, min_piece_bytes: int) -> list[SavePlan]:
    """The ranks' plans with every item in one of them alone, whole or in pieces."""
    if len(plans) == 1:
        return list(plans)
    found: dict[MetadataIndex, list[tuple[int, WriteItem]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            found.setdefault(item.index, []).append((rank, item))
    own_bytes = [0] * len(plans)
    held: dict[MetadataIndex, Held] = {}
    tied: dict[MetadataIndex, MetadataIndex] = {}
    for index, copies in found.items():
        rank, item = copies[0]
        first = _first_of(copies, found)
        if first is not None:
            tied[index] = first
        elif len(copies) == 1:
            own_bytes[rank] += _num_bytes(item)
        else:
            held[index] = _held(copies)
    shares = spread(list(held.values()), own_bytes=own_bytes, min_piece_bytes=min_piece_bytes)
    shares_of = dict(zip(held, shares, strict=True))
    shares_of |= {index: shares_of[first] for index, first in tied.items() if first in shares_of}
    return [
        dataclasses.replace(plan, items=list(_kept(plan.items, rank, shares_of))) for rank, plan in enumerate(plans)
    ]


def _first_of(
    copies: Sequence[tuple[int, WriteItem]], found: Mapping[MetadataIndex, Sequence[tuple[int, WriteItem]]]
) -> MetadataIndex | None:
    """What an item is tied to on every rank that has it: each of them has the other too, and could save both."""
    firsts = {item.first if isinstance(item, TiedItem) else None for _, item in copies}
    first = firsts.pop()
    if first is None or firsts or len(found[first]) != len(copies):
        return None
    return first if len(copies) == 1 or _held(copies) == _held(found[first]) else None


def _kept(
    items: Iterable[WriteItem], rank: int, shares_of: Mapping[MetadataIndex, Sequence[Share]]
) -> Iterable[WriteItem]:
    for item in items:
        shares = shares_of.get(item.index)
        if shares is None:
            yield item
            continue
        for share in shares:
            if share.rank == rank:
                yield item if len(shares) == 1 else _piece(item, share)


def _held(copies: Sequence[tuple[int, WriteItem]]) -> Held:
    ranks, items = zip(*copies, strict=True)
    first = items[0].tensor_data
    num_rows = 1
    # Where ranks hold different things under one name, one of them is saved, as torch does, and no mixture.
    if first is not None and all(_is_alike(items[0], item) for item in items):
        num_rows = max(first.chunk.sizes[_cut_dim(first.chunk.sizes)], 1) if first.chunk.sizes else 1
    return Held(ranks=ranks, num_bytes=_num_bytes(items[0]), num_rows=num_rows)


def _is_alike(first: WriteItem, other: WriteItem) -> bool:
    one, two = first.tensor_data, other.tensor_data
    if one is None or two is None or {first.type, other.type} != {WriteItemType.SHARD}:
        return False
    return (one.chunk.sizes, one.properties.dtype, one.size) == (two.chunk.sizes, two.properties.dtype, two.size)


def _cut_dim(sizes: Sequence[int]) -> int:
    """The outermost that can be cut: its runs of rows lie together in memory."""
    return next((dim for dim, size in enumerate(sizes) if size > 1), 0)


def _piece(item: WriteItem, share: Share) -> PieceItem:
    data = item.tensor_data
    assert data is not None  # noqa: S101  # only tensors are cut
    dim = _cut_dim(data.chunk.sizes)
    offsets, sizes = list(data.chunk.offsets), list(data.chunk.sizes)
    offsets[dim] += share.begin_row
    sizes[dim] = share.end_row - share.begin_row
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return PieceItem(
        index=MetadataIndex(item.index.fqn, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=dataclasses.replace(data, chunk=chunk),
        whole=item.index,
    )


def _num_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return _VALUE_BYTES
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
