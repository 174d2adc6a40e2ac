"""What torch's default planner makes of a save, in less time for each tensor: most are plain, whole and on one rank.

The plans and the metadata are equal to torch's. Whatever is not plain goes through torch's own functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
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

from cloudckpt._flat import PLAIN_TENSORS, holds_parts

_MAX_SHOWN = 500  # characters, as in torch


def local_items(state_dict: Mapping[str, Any], *, is_coordinator: bool) -> list[WriteItem]:
    """One rank's write items for a flat `state_dict`, in its order (``create_default_local_save_plan``).

    Tensors that are alike share what describes them, which also makes the plan small when it is sent.
    """
    items: list[WriteItem] = []
    alike: dict[tuple[object, ...], TensorWriteData] = {}
    for fqn, value in state_dict.items():
        if type(value) not in PLAIN_TENSORS or holds_parts(value):
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
    return items


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
