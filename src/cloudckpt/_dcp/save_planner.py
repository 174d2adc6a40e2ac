"""The planner that `cloudckpt.save` uses: torch's default, with what several ranks hold spread evenly over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.stateful import Stateful

from cloudckpt._dcp.plain_plan import check_agreement, local_items, merged
from cloudckpt._flat import PLAIN_TENSORS, Nesting, flattened
from cloudckpt._stage.ties import planned_ties

_VALUE_BYTES = 4096  # of a Python object, whose size is known only once it is serialised


def entries_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict` with what its ``Stateful`` objects say in their place, for `BalancedSavePlanner`."""
    return {key: state_of(value) for key, value in state_dict.items()}


def state_of(value: Any) -> Any:
    """Return the state of a ``Stateful``, or `value` itself."""
    return value.state_dict() if is_stateful(value) else value


def is_stateful(value: Any) -> bool:
    # The check of the protocol takes longer than all that is done with a small tensor.
    return type(value) not in PLAIN_TENSORS and hasattr(value, "load_state_dict") and isinstance(value, Stateful)


@dataclasses.dataclass(frozen=True)
class TiedItem(WriteItem):
    """What is of the same memory, on this rank, as the item of another name: stored once, if one rank saves both."""

    first: MetadataIndex | None = None
    """Of that item."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An item that any of `ranks` can save."""

    ranks: tuple[int, ...]
    num_bytes: int


class BalancedSavePlanner(DefaultSavePlanner):
    """Spreads replicated tensors by bytes, the largest first; torch's planner takes them as they come.

    A tensor, or a shard of it, is never cut: replicas can differ, and then one rank's is saved. Each rank's own shards
    count too, wherever they stand.

    Names of one tensor, as of tied weights, are saved by one rank, and so once.

    `entries`, if given, is what is saved, whatever torch's `save` hands over: it makes a log record for each entry.
    """

    def __init__(self, *, entries: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._entries = entries
        self._uri = "the checkpoint"

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        entries = state_dict if self._entries is None else self._entries
        self._uri = str(storage_meta.checkpoint_id) if storage_meta is not None else self._uri
        flat = flattened(entries, uri=self._uri)
        self.state_dict, self.mappings = flat.entries, Nesting.of(flat, uri=self._uri)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = local_items(self.state_dict, is_coordinator=self.is_coordinator, uri=self._uri)
        for position, first in planned_ties(items, self.state_dict).items():
            item = items[position]
            items[position] = TiedItem(
                index=item.index, type=item.type, tensor_data=item.tensor_data, first=items[first].index
            )
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        check_agreement(all_plans, uri=self._uri)
        plans, metadata = merged(balanced(all_plans))
        metadata.planner_data = Nesting.merged([plan.planner_data for plan in plans])
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata

    def plain_tensors(self) -> Mapping[str, Any]:
        """See `cloudckpt._stage.items.KnowsPlainTensors`."""
        return self.state_dict


def balanced(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the ranks' plans with every item in one of them alone, whole."""
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
            held[index] = Held(ranks=tuple(rank for rank, _ in copies), num_bytes=_num_bytes(item))
    rank_of = dict(zip(held, assign_ranks(list(held.values()), own_bytes=own_bytes), strict=True))
    rank_of |= {index: rank_of[first] for index, first in tied.items() if first in rank_of}
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if rank_of.get(item.index, rank) == rank])
        for rank, plan in enumerate(plans)
    ]


def assign_ranks(items: Sequence[Held], *, own_bytes: Sequence[int]) -> list[int]:
    """Return for each item the rank that saves it; `own_bytes` is what each rank saves besides.

    The largest go first, each to the rank with the least so far (Graham, Bounds on Multiprocessing Timing Anomalies,
    1969). Where every rank holds every item and none has bytes of its own, no rank gets more than 4/3 of what the best
    assignment of whole items gives it.
    """
    loads_bytes = list(own_bytes)
    ranks = [0] * len(items)
    for index in sorted(range(len(items)), key=lambda index: -items[index].num_bytes):
        ranks[index] = min(items[index].ranks, key=loads_bytes.__getitem__)
        loads_bytes[ranks[index]] += items[index].num_bytes
    return ranks


def _first_of(
    copies: Sequence[tuple[int, WriteItem]], found: Mapping[MetadataIndex, Sequence[tuple[int, WriteItem]]]
) -> MetadataIndex | None:
    """What an item is tied to on every rank that has it: each of them has the other too, and could save both."""
    firsts = {item.first if isinstance(item, TiedItem) else None for _, item in copies}
    first = firsts.pop()
    if first is None or firsts or len(found[first]) != len(copies):
        return None
    ranks = [[rank for rank, _ in of_one] for of_one in (copies, found[first])]
    return first if ranks[0] == ranks[1] else None


def _num_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return _VALUE_BYTES
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
