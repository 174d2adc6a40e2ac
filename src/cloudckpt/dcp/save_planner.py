"""The save planner of `cloudckpt.save`: torch's default, faster, and balanced over the ranks by bytes.

Most tensors are plain, whole and on one rank: they are planned in bulk. torch's own functions plan all others. The
plans and the metadata equal torch's, except for the ranks that save replicated items.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from cloudckpt._messages import name_ranks
from cloudckpt._torch_compat import ShardedTensor, validate_global_plan
from cloudckpt.dcp.ranks.collectives import refuse_other_calls
from cloudckpt.dcp.replicas import (
    CompareReplicas,
    ItemCopy,
    ItemKey,
    SynchronizedNames,
    are_equal,
    check_replicas,
    copies_of_items,
    key_of,
    take_fingerprints,
)
from cloudckpt.dcp.write_items import PlannerWithSources, describe_shards, estimate_bytes, find_aliases
from cloudckpt.errors import StateDictMismatchError, UnsupportedValueError
from cloudckpt.format.model import StoredWrapper
from cloudckpt.format.nesting import PLAIN_TENSORS, Nesting, Path, flatten, name_path
from cloudckpt.format.wrappers import describe_difference
from cloudckpt.tensors.snapshot import Snapshot
from cloudckpt.tensors.tensor_bytes import Source, classify, plain_tensor

_MAX_SHOWN_CHARACTERS = 500  # as in torch
_MAX_NAMES = 5
_SHARDED = (DTensor, ShardedTensor)  # the latter raises for attributes that any tensor has


def is_stateful(value: Any) -> bool:
    """Return True for a ``Stateful``."""
    # The check of the protocol takes longer than all else that is done with a small tensor.
    return type(value) not in PLAIN_TENSORS and hasattr(value, "load_state_dict") and isinstance(value, Stateful)


@dataclasses.dataclass(frozen=True)
class TiedItem(WriteItem):
    """An item that shares its memory on this rank with the item `first`. Stored once if one rank saves both."""

    first: MetadataIndex | None = None


class BalancedSavePlanner(PlannerWithSources, DefaultSavePlanner):
    """Spreads replicated tensors by bytes, the largest first; torch's planner takes them in their order.

    A tensor, or a shard of it, is never cut. Only replicas that are known to be equal are spread, since others can
    differ: of these, the lowest rank that holds one saves its own (`cloudckpt.dcp.replicas`). The bytes of each rank's
    own shards are part of the balance. One rank saves all names of one tensor, such as tied weights, once.

    Args:
        compare: `Options.compare_replicas`.
        synchronized: Names of tensors that must not differ between ranks; None for no names.

    """

    def __init__(
        self,
        *,
        compare: CompareReplicas = "sample",
        synchronized: SynchronizedNames | None = None,
    ) -> None:
        super().__init__()
        self._uri = "the checkpoint"
        self._common: Sequence[str] = ()
        self.compare = compare
        self.synchronized = synchronized or SynchronizedNames()
        self.snapshot: Snapshot | None = None
        """The copy of the state dict that is saved, while it is still being filled."""
        self.is_alone = False
        """True if no other rank saves."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # torch's signature
    ) -> None:
        self._uri = str(storage_meta.checkpoint_id) if storage_meta is not None else self._uri
        flat = flatten(state_dict, uri=self._uri)
        self._nesting, self._common = Nesting.of(flat, uri=self._uri), flat.compared
        self.state_dict, self.mappings = flat.entries, self._nesting
        self.sources = {fqn: classify(value) for fqn, value in flat.entries.items()}
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = plan_items(self.sources, is_coordinator=self.is_coordinator, uri=self._uri)
        for position, first in find_aliases(items, self.sources).items():
            item = items[position]
            items[position] = TiedItem(
                index=item.index, type=item.type, tensor_data=item.tensor_data, first=items[first].index
            )
        if not self.is_alone:
            self._nesting.fingerprints = take_fingerprints(
                items,
                self.state_dict,
                compare=self.compare,
                synchronized=self.synchronized,
                common=self._common,
                uri=self._uri,
                snapshot=self.snapshot,
            )
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        refuse_other_calls(all_plans, uri=self._uri)
        copies_of = copies_of_items(all_plans)
        check_agreement(copies_of, all_plans, uri=self._uri)
        nestings = [plan.planner_data for plan in all_plans]
        check_wrappers(nestings, {name for name, _ in copies_of}, uri=self._uri)
        check_containers(nestings, uri=self._uri)
        check_replicas(copies_of, all_plans, uri=self._uri)
        plans, metadata = merge_plans(balance_plans(all_plans, copies_of), uri=self._uri)
        metadata.planner_data = Nesting.merge([plan.planner_data for plan in plans])
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata


def plan_items(sources: Mapping[str, Source], *, is_coordinator: bool, uri: str) -> list[WriteItem]:
    """Return one rank's write items for a flat state dict, in its order (``create_default_local_save_plan``).

    Tensors of one form share their description, which also makes the plan small when it is sent. Raises
    `UnsupportedValueError` for a tensor without sizes or strides, such as a nested one.
    """
    items: list[WriteItem] = []
    data_by_form: dict[tuple[object, ...], TensorWriteData] = {}
    try:
        for fqn, source in sources.items():
            if source.is_whole:
                items.append(_plan_tensor(fqn, source.value, data_by_form))
                continue
            value = source.value
            if isinstance(value, torch.Tensor) and not isinstance(value, _SHARDED) and value.is_nested:
                plain_tensor(value, fqn, uri=uri)  # raises; torch plans jagged ones, and fails on rank 0
            items += create_default_local_save_plan({fqn: value}, is_coordinator).items
    except Exception:
        for fqn, (value, *_) in sources.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, _SHARDED):
                plain_tensor(value, fqn, uri=uri)
            elif isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
                raise UnsupportedValueError(
                    f"{fqn!r} is a DTensor with the placements {value.placements}, so each rank holds a summand of it, "
                    f"and {uri} would have that of one rank. Save value.redistribute(placements=[Replicate()])",
                    uri=uri,
                ) from None
        raise
    return items


def _plan_tensor(fqn: str, tensor: torch.Tensor, data_by_form: dict[tuple[object, ...], TensorWriteData]) -> WriteItem:
    size = tensor.size()
    strides = tensor.stride() if tensor.layout is torch.strided else None
    key = (size, tensor.dtype, tensor.layout, tensor.requires_grad, tensor.is_pinned(), strides)
    data = data_by_form.get(key)
    if data is None:
        data = data_by_form[key] = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size),
            properties=_properties_of(tensor),
            size=size,
        )
    return WriteItem(MetadataIndex(fqn, data.chunk.offsets, 0), WriteItemType.TENSOR, None, data)


def _properties_of(tensor: torch.Tensor) -> TensorProperties:
    try:
        return TensorProperties.create_from_tensor(tensor)
    except RuntimeError:  # newer versions ask for strides; staging refuses a tensor without them by its name
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            pin_memory=tensor.is_pinned(),
        )


def check_agreement(copies_of: Mapping[ItemKey, Sequence[ItemCopy]], plans: Sequence[SavePlan], *, uri: str) -> None:
    """Raise `StateDictMismatchError` if ranks have entries of different kinds, shapes or dtypes under one name.

    torch would save one of them. The others would be lost, and their ranks could not load the checkpoint.
    """
    if len(plans) == 1:
        return
    whole_tensor = WriteItemType.TENSOR
    kinds: dict[int, object] = {}  # many items share their data
    interned: dict[object, object] = {}
    kind_of_name: dict[str, object] = {}
    disputed: set[str] = set()
    in_parts: set[str] = set()
    for (fqn, _), copies in copies_of.items():
        first = kind_of_name.get(fqn)
        for _, item, _ in copies:
            data = item.tensor_data
            if (kind := kinds.get(id(data))) is None:
                described = () if data is None else (data.size, data.properties.dtype)
                kind = kinds[id(data)] = interned.setdefault(described, described)
            if kind is not first:
                first = kind_of_name.setdefault(fqn, kind)
                if kind is not first:
                    disputed.add(fqn)
            if item.type is not whole_tensor and data is not None and data.chunk.sizes != data.size:
                in_parts.add(fqn)
    if in_parts:
        whole = {item.index.fqn for plan in plans for item in plan.items if item.type is whole_tensor}
        disputed |= whole & in_parts
    if disputed:
        more = f", and so for {len(disputed) - _MAX_NAMES} more" if len(disputed) > _MAX_NAMES else ""
        shown = "; ".join(_describe_name(fqn, plans) for fqn in sorted(disputed)[:_MAX_NAMES])
        raise _different_things_error(shown + more, uri)


def _different_things_error(described: str, uri: str) -> StateDictMismatchError:
    return StateDictMismatchError(
        f"the ranks that save {uri} have different things under one name: {described}. Nothing was written. Give "
        "a name one structure, shape, dtype and quantization on all ranks, or each rank names of its own",
        uri=uri,
    )


def check_containers(nestings: Sequence[Nesting], *, uri: str) -> None:
    """Raise `StateDictMismatchError` if ranks have different containers, or a container and an entry, under one name.

    A save would store the entries of both, and no state dict holds both. None and an empty container may stand for a
    container of another rank.
    """
    if len(nestings) == 1:
        return
    entries: dict[Path, int] = {}
    containers: dict[Path, tuple[str, int]] = {}
    seen_forms: set[tuple[object, ...]] = set()
    for rank, nesting in enumerate(nestings):
        form = (*nesting, *nesting.tuples.items(), *nesting.placeholders)
        if form in seen_forms:
            continue
        seen_forms.add(form)
        paths = {**nesting, **nesting.typed}
        kinds = _find_containers(paths.values(), nesting)
        for name, path in paths.items():
            if name not in nesting.placeholders and path not in kinds:  # a wrapper has its parts below its name
                entries.setdefault(path, rank)
        for path, kind in kinds.items():
            first = containers.setdefault(path, (kind, rank))
            if first[0] != kind:
                raise _different_containers_error(path, first, (kind, rank), uri)
    for path in entries.keys() & containers.keys():
        raise _different_containers_error(path, containers[path], ("value or a tensor", entries[path]), uri)


def _find_containers(paths: Iterable[Path], nesting: Nesting) -> dict[Path, str]:
    """Return the kinds of all containers on the way to the entries."""
    kinds: dict[Path, str] = {}
    for path in paths:
        for depth in range(len(path) - 1, 0, -1):
            if (container := path[:depth]) in kinds:
                break
            kinds[container] = "list" if type(path[depth]) is int else "dict"
    return kinds | {path: kind or "tuple" for path, kind in nesting.tuples.items()}


def _different_containers_error(
    path: Path, first: tuple[str, int], second: tuple[str, int], uri: str
) -> StateDictMismatchError:
    described = f"{name_path(path)!r} is a {first[0]} on rank {first[1]}, a {second[0]} on rank {second[1]}"
    return _different_things_error(described, uri)


def check_wrappers(nestings: Sequence[Nesting], names: Collection[str], *, uri: str) -> None:
    """Raise `StateDictMismatchError` if ranks hold different tensors of a class that consists of others.

    `names` are those of all items of the ranks' plans.
    """
    wrappers: dict[str, tuple[StoredWrapper, int]] = {}
    for rank, nesting in enumerate(nestings if len(nestings) > 1 else ()):
        for name, stored in nesting.wrappers.items():
            first, first_rank = wrappers.setdefault(name, (stored, rank))
            difference = describe_difference(first, stored)
            if difference is not None:
                raise _different_things_error(f"{name!r} of ranks {first_rank}, {rank} has the {difference}", uri)
            if name in names:
                raise _different_things_error(
                    f"{name!r} is a wrapper of class {stored.kind} on rank {rank}, a plain tensor or value on another",
                    uri,
                )


def _describe_name(fqn: str, plans: Sequence[SavePlan]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        item = next((item for item in plan.items if item.index.fqn == fqn), None)
        if item is not None:
            ranks_of.setdefault(_describe_item(item), []).append(rank)
    return f"{fqn!r} is " + ", ".join(f"{kind} on {name_ranks(ranks)}" for kind, ranks in ranks_of.items())


def _describe_item(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "a value"
    kind = "a tensor" if item.type is WriteItemType.TENSOR else "a DTensor or sharded tensor"
    return f"{kind} of {data.properties.dtype} {list(data.size)}"


def merge_plans(plans: Sequence[SavePlan], *, uri: str = "the checkpoint") -> tuple[list[SavePlan], Metadata]:
    """Return the plans with the position of each item among its tensor's chunks, and the metadata of all plans.

    No item may be in two plans. Raises `StateDictMismatchError` if the chunks of a tensor overlap, or do not fill it
    (``create_default_global_save_plan`` and the check that follows it in ``DefaultSavePlanner``).
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    new_plans = [dataclasses.replace(plan, items=[_add_item(item, entries) for item in plan.items]) for plan in plans]
    in_chunks = {fqn: entry for fqn, entry in entries.items() if not _is_whole(entry)}
    problems = "; ".join(validate_global_plan(new_plans, Metadata(in_chunks)))
    if problems:
        if described := describe_shards(plans, in_chunks):
            raise StateDictMismatchError(
                f"the shards that the ranks save to {uri} do not make up their tensors: {described}. Nothing was "
                "written. Save from all ranks that hold shards, each with its own",
                uri=uri,
            )
        shown = problems[:_MAX_SHOWN_CHARACTERS] + ("... (truncated)" if len(problems) > _MAX_SHOWN_CHARACTERS else "")
        raise ValueError(f"Failed to validate global plan: {shown}")
    return new_plans, Metadata(entries)


def _add_item(item: WriteItem, entries: dict[str, TensorStorageMetadata | BytesStorageMetadata]) -> WriteItem:
    """Add the chunk or value of `item` to `entries`. Returns the item with its position in the hint of its index."""
    fqn, data = item.index.fqn, item.tensor_data
    entry = entries.get(fqn)
    if entry is not None and item.type is not WriteItemType.SHARD:
        raise AssertionError(f"{fqn!r} is planned twice")
    if data is None:
        entries[fqn] = BytesStorageMetadata()
        return item
    position = 0
    if isinstance(entry, TensorStorageMetadata):
        position = len(entry.chunks)
        entry.chunks.append(data.chunk)
    else:
        entries[fqn] = TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[data.chunk])
    if item.index.index == position:
        return item
    return dataclasses.replace(item, index=dataclasses.replace(item.index, index=position))


def _is_whole(entry: TensorStorageMetadata | BytesStorageMetadata) -> bool:
    if not isinstance(entry, TensorStorageMetadata):
        return True
    if len(entry.chunks) != 1:
        return False
    chunk = entry.chunks[0]
    return chunk.sizes == entry.size and not any(chunk.offsets)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedItem:
    """An item that any of `ranks` can save."""

    ranks: tuple[int, ...]
    num_bytes: int


def balance_plans(plans: Sequence[SavePlan], copies_of: Mapping[ItemKey, Sequence[ItemCopy]]) -> list[SavePlan]:
    """Return the ranks' plans with each item, whole, in only one of them.

    Any rank may save an item whose copies are known to be equal. The lowest rank that has memory for it saves any other
    item: stages of a pipeline hold the others' layers on the meta device.
    """
    if len(plans) == 1:
        return list(plans)
    own_bytes = [0] * len(plans)
    rank_of: dict[ItemKey, int] = {}
    replicated: dict[ItemKey, ReplicatedItem] = {}
    tied: dict[ItemKey, ItemKey] = {}
    for key, copies in copies_of.items():
        # A tensor without memory has no fingerprint.
        rank, item, _ = next((copy for copy in copies if copy.fingerprint), copies[0])
        first = _find_common_first(copies, copies_of)
        if first is not None:
            tied[key] = first
        elif len(copies) > 1 and item.tensor_data is not None and are_equal(copies):
            replicated[key] = ReplicatedItem(ranks=tuple(copy.rank for copy in copies), num_bytes=estimate_bytes(item))
        else:
            own_bytes[rank] += estimate_bytes(item)
            rank_of[key] = rank
    rank_of |= zip(replicated, assign_ranks(list(replicated.values()), own_bytes=own_bytes), strict=True)
    rank_of |= {key: rank_of[first] for key, first in tied.items()}
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if rank_of.get(key_of(item.index), rank) == rank])
        for rank, plan in enumerate(plans)
    ]


def assign_ranks(items: Sequence[ReplicatedItem], *, own_bytes: Sequence[int]) -> list[int]:
    """Return for each item the rank that saves it; `own_bytes` is the size of each rank's own items.

    Items are assigned largest first, each to the rank with the fewest bytes so far (Graham, Bounds on Multiprocessing
    Timing Anomalies, 1969). If every rank holds every item and no rank has bytes of its own, no rank gets more than 4/3
    of its share in the best assignment of whole items.
    """
    loads_bytes = list(own_bytes)
    ranks = [0] * len(items)
    for index in sorted(range(len(items)), key=lambda index: -items[index].num_bytes):
        ranks[index] = min(items[index].ranks, key=loads_bytes.__getitem__)
        loads_bytes[ranks[index]] += items[index].num_bytes
    return ranks


def _find_common_first(copies: Sequence[ItemCopy], copies_of: Mapping[ItemKey, Sequence[ItemCopy]]) -> ItemKey | None:
    """Return the key of the item to which all `copies` are tied, if the same ranks have both items; else None."""
    if not isinstance(copies[0].item, TiedItem):
        return None
    firsts = {copy.item.first if isinstance(copy.item, TiedItem) else None for copy in copies}
    index = firsts.pop()
    if index is None or firsts:
        return None
    first = key_of(index)
    ranks = [[copy.rank for copy in copies_of_item] for copies_of_item in (copies, copies_of[first])]
    return first if ranks[0] == ranks[1] else None
