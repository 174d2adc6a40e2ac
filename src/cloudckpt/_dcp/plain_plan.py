"""What torch's default planner makes of a save, in less time for each tensor: most are plain, whole and on one rank.

The plans and the metadata are equal to torch's. Whatever is not plain goes through torch's own functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from cloudckpt._flat import PLAIN_TENSORS, holds_parts
from cloudckpt._stage.tensors import plain
from cloudckpt.errors import StateDictMismatchError

_MAX_SHOWN = 500  # characters, as in torch
_MAX_NAMES = 5
_SHARDED = (DTensor, ShardedTensor)  # the latter refuses to be asked for what any tensor has
_MAX_RANKS = 8


def local_items(state_dict: Mapping[str, Any], *, is_coordinator: bool, uri: str) -> list[WriteItem]:
    """One rank's write items for a flat `state_dict`, in its order (``create_default_local_save_plan``).

    Tensors that are alike share what describes them, which also makes the plan small when it is sent. Raises
    `UnsupportedValueError` for a tensor that has no sizes or strides to be planned with, such as a nested one.
    """
    items: list[WriteItem] = []
    try:
        _add_items(items, state_dict, is_coordinator=is_coordinator, uri=uri)
    except Exception:
        for fqn, value in state_dict.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, _SHARDED):
                plain(value, fqn, uri=uri)
        raise
    return items


def _add_items(items: list[WriteItem], state_dict: Mapping[str, Any], *, is_coordinator: bool, uri: str) -> None:
    alike: dict[tuple[object, ...], TensorWriteData] = {}
    for fqn, value in state_dict.items():
        if type(value) not in PLAIN_TENSORS or holds_parts(value):
            if isinstance(value, torch.Tensor) and not isinstance(value, _SHARDED) and value.is_nested:
                plain(value, fqn, uri=uri)  # of a jagged one torch makes a plan, which only the coordinator stumbles at
            items += create_default_local_save_plan({fqn: value}, is_coordinator).items
            continue
        size = value.size()
        strides = value.stride() if value.layout is torch.strided else None
        key = (size, value.dtype, value.layout, value.requires_grad, value.is_pinned(), strides)
        data = alike.get(key)
        if data is None:
            data = alike[key] = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size),
                properties=_properties_of(value),
                size=size,
            )
        index = MetadataIndex(fqn, data.chunk.offsets, 0)
        items.append(WriteItem(index, WriteItemType.TENSOR, None, data))


def _properties_of(tensor: torch.Tensor) -> TensorProperties:
    try:
        return TensorProperties.create_from_tensor(tensor)
    except RuntimeError:  # of torch 2.15, where there are no strides; whoever stages the tensor says it by its name
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            pin_memory=tensor.is_pinned(),
        )


def check_agreement(plans: Sequence[SavePlan], *, uri: str) -> None:
    """Raise `StateDictMismatchError` where ranks have different things under one name.

    torch saves one of them. Then the others are lost, and their ranks cannot load what was saved.
    """
    if len(plans) == 1:
        return
    found: dict[str, tuple[object, ...]] = {}
    disputed: set[str] = set()
    plain: set[str] = set()
    in_parts: set[str] = set()
    for plan in plans:
        for item in plan.items:
            fqn, data = item.index.fqn, item.tensor_data
            kind = () if data is None else (data.size, data.properties.dtype)
            if found.setdefault(fqn, kind) != kind:
                disputed.add(fqn)
            if item.type is WriteItemType.TENSOR:
                plain.add(fqn)
            elif data is not None and data.chunk.sizes != data.size:
                in_parts.add(fqn)
    disputed |= plain & in_parts
    if disputed:
        more = f", and so for {len(disputed) - _MAX_NAMES} more" if len(disputed) > _MAX_NAMES else ""
        shown = "; ".join(_things_called(fqn, plans) for fqn in sorted(disputed)[:_MAX_NAMES])
        raise StateDictMismatchError(
            f"the ranks that save {uri} have different things under one name: {shown}{more}. Nothing was written. Give "
            "a name one kind, shape and dtype on all ranks, or each rank names of its own",
            uri=uri,
        )


def _things_called(fqn: str, plans: Sequence[SavePlan]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        item = next((item for item in plan.items if item.index.fqn == fqn), None)
        if item is not None:
            ranks_of.setdefault(_described(item), []).append(rank)
    return f"{fqn!r} is " + ", ".join(f"{what} on {_ranks_text(ranks)}" for what, ranks in ranks_of.items())


def _described(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "a value"
    what = "a tensor" if item.type is WriteItemType.TENSOR else "a DTensor or sharded tensor"
    return f"{what} of {data.properties.dtype} {list(data.size)}"


def _ranks_text(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_RANKS]))}{more}"


def merged(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """The ranks' plans with each item's place among its tensor's chunks, and the metadata of all of them together.

    No item may be in two plans. Raises ``ValueError`` where the chunks of a tensor overlap, or do not fill it
    (``create_default_global_save_plan`` and what ``DefaultSavePlanner`` does after it).
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    new_plans = [dataclasses.replace(plan, items=[_entered(item, entries) for item in plan.items]) for plan in plans]
    doubtful = {fqn: entry for fqn, entry in entries.items() if not _is_whole(entry)}
    verdict: list[str] | bool = _validate_global_plan(new_plans, Metadata(doubtful))
    if verdict is False:  # torch 2.11 says only whether all is well, and logs what is not
        raise ValueError("Failed to validate global plan")
    if isinstance(verdict, list) and verdict:
        summary = "; ".join(verdict)
        shown = summary[:_MAX_SHOWN] + ("... (truncated)" if len(summary) > _MAX_SHOWN else "")
        raise ValueError(f"Failed to validate global plan: {shown}")
    return new_plans, Metadata(entries)


def _entered(item: WriteItem, entries: dict[str, TensorStorageMetadata | BytesStorageMetadata]) -> WriteItem:
    """`item`, with its index' hint; what it is going to store is added to `entries`."""
    fqn, data = item.index.fqn, item.tensor_data
    entry = entries.get(fqn)
    if entry is not None and item.type is not WriteItemType.SHARD:
        raise AssertionError(f"{fqn!r} is planned twice")
    if data is None:
        entries[fqn] = BytesStorageMetadata()
        return item
    if entry is None:
        entries[fqn] = TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[data.chunk])
        position = 0
    else:
        assert isinstance(entry, TensorStorageMetadata)  # noqa: S101  # a value has no shards
        position = len(entry.chunks)
        entry.chunks.append(data.chunk)
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
