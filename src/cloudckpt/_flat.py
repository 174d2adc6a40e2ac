"""A nested state dict made flat as torch's planners do it, for those made of plain tensors and values alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
PART_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""By which, since torch 2.15, any tensor says that it holds parts of a larger one (``CheckpointableTensor``)."""
_LEAVES = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_MAPPINGS = frozenset({dict, OrderedDict})
_CONTAINERS = _MAPPINGS | {list}
_SOUGHT = _MAPPINGS | PLAIN_TENSORS
_STRINGS = frozenset({str})

_Path = tuple[str | int, ...]


def holds_parts(tensor: object) -> bool:
    """Whether torch may take the tensor for parts of a larger one, of which the others are elsewhere."""
    return hasattr(tensor, PART_ATTRIBUTES[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """What torch's ``flatten_state_dict`` returns, in the same order, and what it leaves out."""

    entries: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, _Path] = field(default_factory=dict)
    containers: set[str] = field(default_factory=set)
    """The names of the dicts and lists on the way, under which torch before 2.4 may have saved them whole."""


def flattened(state_dict: Mapping[str, Any]) -> Flat | None:
    """`state_dict` as torch's ``DefaultLoadPlanner`` flattens it; None where that is better left to torch.

    torch goes through it three times, on its way to tensors without memory and to ``ShardedTensor``: where such may
    be, or names meet, or a key is not a string, it is not done here.
    """
    flat = Flat()
    try:
        _add(flat, "", (), _items_of(state_dict))
    except _NotPlainError:
        return None
    return flat


class _NotPlainError(Exception):
    """There is something that only torch can make flat."""


def _add(flat: Flat, prefix: str, path: _Path, items: Iterable[tuple[str | int, Any]]) -> None:
    entries, paths = flat.entries, flat.paths
    for key, value in items:
        kind = type(value)
        name = f"{prefix}{key}"
        if kind in _CONTAINERS:
            flat.containers.add(name)
            if kind is not list or not _LEAVES.issuperset(map(type, value)):
                _add(flat, name + ".", (*path, key), _items_of(value))
                continue
        elif kind in PLAIN_TENSORS:
            if value.is_meta:
                raise _NotPlainError
        elif kind not in _LEAVES and not (kind is tuple and _LEAVES.issuperset(map(type, value))):
            raise _NotPlainError
        if name in entries:
            raise _NotPlainError
        entries[name] = value
        paths[name] = (*path, key)


def _items_of(container: Mapping[str, Any] | list[Any]) -> Iterable[tuple[str | int, Any]]:
    if not isinstance(container, list):
        if not _STRINGS.issuperset(map(type, container)):
            raise _NotPlainError
        return container.items()
    # torch looks into a list in which a tensor or a dict is. Of lists in it, it looks whether one is in there.
    kinds = set(map(type, container))
    if list in kinds or tuple in kinds or kinds.isdisjoint(_SOUGHT):
        raise _NotPlainError
    return enumerate(container)
