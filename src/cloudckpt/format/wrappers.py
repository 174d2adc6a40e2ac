"""Tensors that consist of other tensors (``__tensor_flatten__``), taken apart and put together again.

Their parts are entries like any other tensor. See ``docs/design/028-wrapper-tensors.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from cloudckpt._torch_compat import AsyncCollectiveTensor, is_wrapper_subclass, local_tensor_of
from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.model import StoredWrapper
from cloudckpt.format.wrapper_metadata import Registry, flatten_wrapper, name_of
from cloudckpt.format.wrapper_shards import spread_shard

_NOT_TAKEN_APART = (DTensor, AsyncCollectiveTensor)  # they have the methods, and other ways to be saved


class SavedWrapper(NamedTuple):
    """A stored wrapper, with torch's metadata in the place of its parts."""

    registry: Registry
    name: str
    stored: StoredWrapper
    parts: dict[str, Any]

    def rebuild(self, make: Callable[[str, Any], torch.Tensor]) -> torch.Tensor:
        """Return the wrapper of what `make` returns for the name and the entry of each part."""
        parts = {
            part: entry.rebuild(make) if isinstance(entry, SavedWrapper) else make(f"{self.name}.{part}", entry)
            for part, entry in self.parts.items()
        }
        return self.registry.rebuild(self.name, self.stored, parts)


class Parts(NamedTuple):
    """A wrapper that was taken apart."""

    tensors: dict[str, torch.Tensor]
    stored: StoredWrapper | None
    """None on a rank that holds an empty shard."""
    compared: list[str]
    """The parts of a shard that other shards must have with the same bits."""


def is_wrapper(value: object) -> bool:
    """Return whether a tensor is taken apart into the tensors that it consists of."""
    if not isinstance(value, torch.Tensor) or isinstance(value, _NOT_TAKEN_APART):
        return False
    return is_wrapper_subclass(value) and not value.is_nested


def holds_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether `take_apart` takes a tensor apart."""
    return is_wrapper(local_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor)


def take_apart(value: torch.Tensor, name: str, *, uri: str) -> Parts | None:
    """Take a wrapper apart, or a DTensor whose local tensor is one. The parts share its memory. None for other tensors.

    Raises `UnsupportedValueError` if its class or its metadata cannot be stored.
    """
    local = local_tensor_of(value) if isinstance(value, DTensor) else value
    if not is_wrapper(local):
        return None
    try:
        with torch.no_grad():
            tensors, context = flatten_wrapper(local)
            compared: list[str] = []
            if isinstance(value, DTensor):
                if not local.numel() and value.numel():
                    return Parts({}, None, [])  # the other ranks have it
                tensors, context, compared = spread_shard(value, local, tensors, context)
            stored = StoredWrapper(
                kind=name_of(type(local)),
                tensors=list(tensors),
                context=context,
                shape=tuple(value.shape),
                stride=tuple(value.stride()),
            )
    except Exception as error:  # the code of a class can raise anything
        raise UnsupportedValueError(
            f"cannot save {name!r:.200} to {uri}: it is a {type(local).__name__}, which cannot be taken apart "
            f"({type(error).__name__}: {error}). Convert it to a plain tensor (dequantize()), or save its parts under "
            "names of their own",
            uri=uri,
        ) from error
    return Parts(tensors, stored, compared)


def collapse(
    wrappers: Mapping[str, StoredWrapper],
    entries: Mapping[str, Any],
    paths: Mapping[str, tuple[Any, ...]],
    make: Callable[[str, StoredWrapper, dict[str, Any]], Any],
) -> tuple[Mapping[str, Any], Mapping[str, tuple[Any, ...]]]:
    """Return `entries` and their `paths` with each wrapper in the place of its parts, if all of them are there."""
    if not wrappers:
        return entries, paths
    entries, paths = dict(entries), dict(paths)
    order = {name: position for position, name in enumerate(entries)}
    for name in sorted(wrappers, key=len, reverse=True):  # a wrapper in another has the longer name
        stored = wrappers[name]
        names = {part: f"{name}.{part}" for part in stored.tensors}
        if names and name not in entries and all(one in entries for one in names.values()):
            first = names[stored.tensors[0]]
            entries[name] = make(name, stored, {part: entries.pop(one) for part, one in names.items()})
            order[name], paths[name] = order[first], paths.get(first, (name, ""))[:-1] or (name,)
    return {name: entries[name] for name in sorted(entries, key=order.__getitem__)}, paths


def describe_difference(saved: StoredWrapper, wanted: StoredWrapper) -> str | None:
    """Return what differs between a stored wrapper and one that is to take its parts; None if it can."""
    for what, one, other in (
        ("class", saved.kind, wanted.kind),
        ("shape", list(saved.shape), list(wanted.shape)),
        ("parts", saved.tensors, wanted.tensors),
    ):
        if one != other:
            return f"{what} {one}, not {other}"
    return None if saved.context == wanted.context else _find_difference(saved.context, wanted.context, "metadata")


def _find_difference(one: Any, other: Any, where: str) -> str:
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(f".{key}" if len(one) > 1 else "", one[key], other[key]) for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        name = f".{one[0]}" if len(one) == 2 and isinstance(one[0], str) else ""  # noqa: PLR2004  # a key and its value
        pairs = [(name, *pair) for pair in zip(one, other, strict=True)]
    for name, mine, its in pairs:
        if mine != its and isinstance(mine, (dict, list)) and isinstance(its, (dict, list)):
            return _find_difference(mine, its, where + name)
    return f"{where} {one!r:.200}, not {other!r:.200}"
