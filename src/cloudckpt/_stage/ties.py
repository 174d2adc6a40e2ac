"""Tied tensors: several names of one piece of memory, of which the bytes are stored once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from cloudckpt._flat import PLAIN_TENSORS
from cloudckpt._stage.items import StagedItem, estimated_bytes, known_tensors_of
from cloudckpt._stage.tensors import is_viewable


@runtime_checkable
class KnowsPlaces(Protocol):
    """A planner that can tell which of its items are of one memory, before it resolves them."""

    def place_of(self, item: WriteItem) -> Hashable | None:
        """Equal for items of one memory, dtype, shape and strides; None for what is like no other."""


def ties_by_planner(items: Sequence[WriteItem], planner: SavePlanner) -> dict[int, int]:
    """As `planned_ties`, by what `planner` knows of them; nothing seems tied where it is one with a way of its own."""
    if not isinstance(planner, KnowsPlaces):
        return planned_ties(items, known_tensors_of(planner))
    first_of: dict[Hashable, int] = {}
    leaders: dict[int, int] = {}
    for position, item in enumerate(items):
        place = planner.place_of(item)
        if place is not None and first_of.setdefault(place, position) != position:
            leaders[position] = first_of[place]
    return leaders


def estimated_total_bytes(items: Sequence[WriteItem], planner: SavePlanner) -> int:
    """About how much `items` will take, by their plan: each memory once."""
    ties = ties_by_planner(items, planner)
    return sum(estimated_bytes(item) for position, item in enumerate(items) if position not in ties)


def planned_ties(items: Sequence[WriteItem], state_dict: Mapping[str, Any]) -> dict[int, int]:
    """Of each item that is of the same memory as one before it, the position of the first such.

    By the tensors of a flat state dict, before anything is resolved: it says what to keep together. What is really one
    memory, `staged_ties` says.
    """
    addresses = [_address_of(state_dict.get(item.index.fqn)) for item in items]
    return _alike(addresses, lambda position: _planned_place(items[position], state_dict))


def staged_ties(items: Sequence[StagedItem]) -> dict[int, int]:
    """Of each item that has the same bytes, dtype and shape as one before it, from one memory, the first's position."""
    return _alike([item.address for item in items], lambda position: _staged_place(items[position]))


def _alike(addresses: Sequence[int], place_of: Callable[[int], Hashable | None]) -> dict[int, int]:
    """Where addresses meet, which is rare, `place_of` decides; None is like nothing. An address of 0 is none."""
    first_at: dict[int, int] = {}
    meeting: dict[int, list[int]] = {}
    for position, address in enumerate(addresses):
        if address:
            first = first_at.setdefault(address, position)
            if first != position:
                meeting.setdefault(address, [first]).append(position)
    leaders: dict[int, int] = {}
    for positions in meeting.values():
        first_of: dict[Hashable, int] = {}
        for position in positions:
            place = place_of(position)
            if place is not None and first_of.setdefault(place, position) != position:
                leaders[position] = first_of[place]
    return leaders


def _memory_of(value: object) -> torch.Tensor | None:
    """The plain tensor that a state dict's value is, or has as its local shard."""
    tensor = value._local_tensor if type(value) is DTensor else value  # noqa: SLF001  # to_local() makes a new one
    return tensor if type(tensor) in PLAIN_TENSORS else None  # type: ignore[return-value]  # which mypy cannot follow


def _address_of(value: object) -> int:
    tensor = _memory_of(value)
    if tensor is None:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a layout without one
        return 0


def _planned_place(item: WriteItem, state_dict: Mapping[str, Any]) -> Hashable | None:
    tensor = _memory_of(state_dict.get(item.index.fqn))
    if tensor is None or item.tensor_data is None or not tensor.numel():
        return None
    return (*_form_of(tensor), tensor.dtype, tensor.size(), item.index.offset, item.tensor_data.chunk.sizes)


def _staged_place(item: StagedItem) -> Hashable | None:
    if item.transforms or not item.entry.num_bytes:
        return None
    form = ("in order",) if isinstance(item.content, memoryview) else _form_of(item.content)
    return (*form, item.dtype, item.lengths)


def _form_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """How its values lie from its address on."""
    if is_viewable(tensor):
        return ("in order",)
    return str(tensor.device), tensor.stride(), tensor.is_conj(), tensor.is_neg()
