"""Copies of tensors that give planners the answers of the originals. See ``docs/design/030-answers-of-a-snapshot.md``.

The hooks of a tensor (`PLANNER_HOOKS`) mostly read the memory that training changes. A copy of a hook would send a save
back there, so the copy of the tensor gets the hooks' answers instead.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from cloudckpt._torch_compat import chunks_wanted_by, local_tensor_of
from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.nesting import PLAIN_TENSORS, PLANNER_HOOKS, flatten, has_planner_hooks


class HookAnswers:
    """The answers of a tensor's hooks: write items, chunks, and the shard of each item."""

    def __init__(self, fqn: str, tensor: torch.Tensor) -> None:
        """Ask the hooks of `tensor`, whose name is `fqn`, as torch does."""
        self._fqn = fqn
        self.items: list[WriteItem] = copy.deepcopy(
            create_default_local_save_plan({fqn: tensor}, is_coordinator=True).items
        )
        self._chunks = copy.deepcopy(chunks_wanted_by(tensor) or [])
        self.shards: dict[Any, torch.Tensor] = {}
        """The copies of the shards by their offset, once they are made."""

    def as_hooks(self) -> dict[str, Any]:
        """Return the attributes that give the answers."""
        return {
            "__create_write_items__": self._create_write_items,
            "__create_chunk_list__": self._create_chunk_list,
            "__get_tensor_shard__": self._get_tensor_shard,
        }

    def _create_write_items(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=fqn))
            if item.index.fqn == self._fqn
            else item
            for item in self.items
        ]

    def _create_chunk_list(self) -> list[Any]:
        return list(self._chunks)

    def _get_tensor_shard(self, index: MetadataIndex) -> torch.Tensor:
        return self.shards[index.offset]


def has_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if one of `tensors` has hooks as its own attributes. Hooks of a class need no answers."""
    return any(not PLANNER_HOOKS.isdisjoint(tensor.__dict__) for tensor in tensors)


def refuse_attributes(state_dict: Mapping[str, Any]) -> None:
    """Raise `UnsupportedValueError` for an entry that would lose the attributes that planners ask for.

    A plain tensor loses them when it is sent to another process.
    """
    for name, value in flatten(state_dict, uri="", takes_apart=False).entries.items():
        tensor = local_tensor_of(value) if isinstance(value, DTensor) else value
        if type(tensor) in PLAIN_TENSORS and has_planner_hooks(tensor):
            raise UnsupportedValueError(
                f"the stager's copy of {name!r} has attributes that say which part of a tensor it is, and another "
                "process does not get them. Save without async_stager, or with AsyncCheckpointerType.THREAD",
                uri="",
            )
