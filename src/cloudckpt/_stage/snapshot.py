"""Copies of a state dict for background saves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class SnapshotStager(DefaultStager):
    """torch's default stager, which also copies `ShardedTensor` (FSDP1's sharded state), as torch's cannot.

    Copies to CPU memory in the caller's thread; when `stage` returns, training may change everything.
    """

    def __init__(self) -> None:
        # As dcp.async_save makes its own. Without an accelerator torch refuses anything faster.
        super().__init__(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any] | Future[dict[str, Any]]:
        """A state dict that shares no memory with `state_dict`."""
        copies: list[ShardedTensor] = []
        staged = super().stage(_taken_out(state_dict, copies), **kwargs)
        assert not isinstance(staged, Future)  # noqa: S101  # it was not asked to stage in the background
        result: dict[str, Any] = _put_back(staged, copies)
        return result


class _Place(str):
    """Stands for a ShardedTensor while the rest is copied; a str, because any stager copies those."""

    __slots__ = ()


def _taken_out(value: Any, copies: list[ShardedTensor]) -> Any:
    if isinstance(value, ShardedTensor):
        copies.append(_copied(value))
        return _Place(len(copies) - 1)
    return _mapped(value, lambda item: _taken_out(item, copies))


def _put_back(value: Any, copies: list[ShardedTensor]) -> Any:
    if isinstance(value, _Place):
        return copies[int(value)]
    return _mapped(value, lambda item: _put_back(item, copies))


def _mapped(value: Any, function: Any) -> Any:
    """A container like `value`, of what `function` makes of its items; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    return value


def _copied(tensor: ShardedTensor) -> ShardedTensor:
    """On the CPU, sharing nothing."""
    metadata = copy.deepcopy(tensor.metadata())
    shards = [
        Shard(shard.tensor.detach().to("cpu", copy=True), copy.deepcopy(shard.metadata))
        for shard in tensor.local_shards()
    ]
    for shard_metadata in [*metadata.shards_metadata, *(shard.metadata for shard in shards)]:
        if shard_metadata.placement is not None:
            shard_metadata.placement._device = torch.device("cpu")  # noqa: SLF001  # as ShardedTensor.cpu() does
    return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001  # likewise
        shards,
        sharded_tensor_metadata=metadata,
        process_group=tensor._process_group,  # noqa: SLF001
        init_rrefs=tensor._init_rrefs,  # noqa: SLF001
    )
