"""Shards of tensors that consist of others: which shards their parts are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from cloudckpt._torch_compat import chunks_wanted_by
from cloudckpt.format.wrapper_metadata import flatten_wrapper

_MAX_DIVISOR = 65


def spread_shard(
    whole: DTensor, local: torch.Tensor, parts: Mapping[str, torch.Tensor], context: Any
) -> tuple[dict[str, torch.Tensor], Any, list[str]]:
    """Return the parts of a shard as DTensors, the metadata of the whole, and the parts that all shards have alike.

    How a shard relates to the whole is asked of its class: it slices the shard again.
    """
    dims_of: dict[str, dict[int, int | None]] = {part: {} for part in parts}
    following: dict[tuple[Any, ...], int] = {}
    for dim in {dim for placement in whole.placements if (dim := _shard_dim(placement)) is not None}:
        moved, places = _slice_again(local, parts, context, dim)
        following |= dict.fromkeys(places, whole.shape[dim])
        for part, part_dim in moved.items():
            dims_of[part][dim] = part_dim
    for place, length in following.items():
        container = context
        for step in place[:-1]:
            container = container[step]
        container[place[-1]] = length
    spread: dict[str, torch.Tensor] = {
        part: _spread(whole, local, tensor, dims_of[part]) for part, tensor in parts.items()
    }
    return spread, context, [part for part in parts if None in dims_of[part].values()]


def _slice_again(
    local: torch.Tensor, parts: Mapping[str, torch.Tensor], context: Any, dim: int
) -> tuple[dict[str, int | None], list[tuple[Any, ...]]]:
    """Return the dimension in which a slice in `dim` cuts each part, or None, and what follows it in `context`."""
    extent = local.shape[dim]
    for length in dict.fromkeys([*filter(None, (extent // divisor for divisor in range(2, _MAX_DIVISOR))), 0]):
        try:
            first, first_context = flatten_wrapper(local.narrow(dim, 0, length))
            moved = {part: _cut_dim(parts[part].shape, first[part].shape, extent, length) for part in parts}
            places = list(_find_following(context, first_context, (dim, extent, length), ()))
        except Exception:  # noqa: BLE001, S112  # classes slice at blocks, if they slice at all, and raise anything
            continue
        if length or not places:  # without rows, blocks of one row and of all rows look alike
            return moved, places
    raise ValueError(
        f"its shard of shape {list(local.shape)} cannot be sliced in dimension {dim}, which would tell how its parts "
        "are sharded"
    )


def _cut_dim(whole: torch.Size, first: torch.Size, extent: int, length: int) -> int | None:
    cut = [dim for dim in range(len(whole)) if whole[dim] != first[dim]]
    if not cut:
        return None
    (dim,) = cut
    if whole[dim] * length != first[dim] * extent:
        raise ValueError("it is not cut in proportion")
    return dim


def _find_following(
    whole: Any, first: Any, cut: tuple[int, int, int], place: tuple[Any, ...]
) -> Iterator[tuple[Any, ...]]:
    """Yield the places of metadata that hold the length of a shard. `cut` is its dimension, and the two lengths."""
    if whole == first or (isinstance(whole, dict) and "dtype" in whole):  # slices of some classes lose it
        return
    if isinstance(whole, list) and isinstance(first, list) and len(whole) == len(first):
        for position, pair in enumerate(zip(whole, first, strict=True)):
            if (position, *pair) == cut:
                yield (*place, position)
            else:
                yield from _find_following(*pair, cut, (*place, position))
    elif isinstance(whole, dict) and isinstance(first, dict) and whole.keys() == first.keys():
        for key in whole:
            yield from _find_following(whole[key], first[key], cut, (*place, key))
    else:
        raise ValueError("its metadata differs in another way")


def _spread(whole: DTensor, local: torch.Tensor, part: torch.Tensor, dims: Mapping[int, int | None]) -> DTensor:
    """Return the DTensor whose shard on this rank is `part`. A key of `dims` is cut in `local`, its value in `part`."""
    placements: list[Any] = []
    shape = list(part.shape)
    for placement in whole.placements:
        dim = _shard_dim(placement)
        to = None if dim is None else dims[dim]
        placements.append(Replicate() if to is None else _with_dim(placement, to))
    cuts = [(dim, to) for dim, to in dims.items() if to is not None]
    for dim, to in cuts:
        shape[to] = part.shape[to] * whole.shape[dim] // local.shape[dim]
    spec: Any = whole._spec  # noqa: SLF001  # no public function makes a DTensor without a copy
    stride = torch.empty(shape, device="meta").stride()
    meta = spec.tensor_meta._replace(shape=torch.Size(shape), stride=stride, dtype=part.dtype)
    make: Any = DTensor
    spread: DTensor = make(part, type(spec)(spec.mesh, tuple(placements), tensor_meta=meta), requires_grad=False)
    (held,), (wanted,) = chunks_wanted_by(whole) or [None], chunks_wanted_by(spread) or [None]
    if held is None or wanted is None:
        return spread
    is_in_place = all(wanted.offsets[to] * local.shape[dim] == held.offsets[dim] * part.shape[to] for dim, to in cuts)
    if wanted.sizes != part.shape or not is_in_place:
        raise ValueError(f"its part of shape {list(part.shape)} is not sharded where the whole is")
    return spread


def _shard_dim(placement: Any) -> int | None:
    """Return the dimension that a placement shards, or None. Raises ``ValueError`` for a sum that is not made yet."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
        return int(placement.dim)
    raise ValueError(f"its placement is {placement}")


def _with_dim(placement: Any, dim: int) -> Any:
    split = getattr(placement, "split_factor", None)
    return type(placement)(dim) if split is None else type(placement)(dim, split_factor=split)
