"""Turn the items of torch's load plan into the wants of a `Reader`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from cloudckpt.errors import CloudckptError, CorruptCheckpointError, UnsupportedValueError, quote_names
from cloudckpt.format.chunks import dtype_of
from cloudckpt.format.model import ItemLocation, Manifest
from cloudckpt.format.nesting import PLAIN_TENSORS
from cloudckpt.io.addresses import find_overlapping
from cloudckpt.io.boxes import Box
from cloudckpt.pipeline.wants import Want, Wants, want_box, want_value
from cloudckpt.tensors.casts import log_casts, new_cast
from cloudckpt.tensors.load_targets import TensorTarget, find_whole_address
from cloudckpt.tensors.tensor_bytes import address_range, describe_shortage, is_short, refuse_target

_log = logging.getLogger("cloudckpt")


class LoadItems(Sequence[ReadItem]):
    """The items of whole tensors that are stored as one chunk, and then `rest`. Replaces torch's list of items.

    The item of a whole tensor is made on access. The pickle is smaller than that of an equal list.
    """

    __slots__ = ("_sizes", "fqns", "rest")

    def __init__(self, fqns: list[str], sizes: list[torch.Size], rest: list[ReadItem]) -> None:
        self.fqns = fqns
        self.rest = rest
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self.fqns) + len(self.rest)

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadItem]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | list[ReadItem]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position < len(self.fqns):
            return whole_item(self.fqns[position], self._sizes[position])
        return self.rest[position - len(self.fqns)]

    def __iter__(self) -> Iterator[ReadItem]:
        yield from map(whole_item, self.fqns, self._sizes)
        yield from self.rest

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, LoadItems)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(list(self))


def whole_item(fqn: str, size: Sequence[int]) -> ReadItem:
    """Return the read of a whole tensor that was stored as one chunk."""
    origin = torch.Size((0,) * len(size))
    index = MetadataIndex(fqn, origin, 0)
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=origin,
        storage_index=index,
        storage_offsets=origin,
        lengths=torch.Size(size),
    )


def find_wants(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    manifest: Manifest,
    storage_data: Mapping[MetadataIndex, ItemLocation],
    *,
    tensors_of: Callable[[Sequence[str]], list[torch.Tensor]] | None,
    on_value: Callable[[ReadItem, ItemLocation, bytes | bytearray], object],
    allows_lossy_casts: bool,
    uri: str,
    is_logged: bool,
) -> Wants:
    """Return the wants of the items. The planner returns the tensors; `tensors_of`, if given, returns whole ones.

    `on_value` receives the values. The planner receives each filled tensor, except for those of `tensors_of`. With
    `is_logged`, which one rank sets, tensors of another dtype than the stored one are logged.
    """
    fqns: list[str] = []
    tensors: list[torch.Tensor] = []
    rest = items
    if isinstance(items, LoadItems) and tensors_of is not None:
        fqns, rest = items.fqns, items.rest
        tensors = tensors_of(fqns)
    stored = [manifest.tensors[fqn] for fqn in fqns]
    chunks = [tensor.chunks[0] for tensor in stored]
    addresses = list(map(find_whole_address, tensors, stored))
    left = {number: items[number] for number, address in enumerate(addresses) if not address}
    left.update(enumerate(rest, len(fqns)))
    make = functools.partial(
        _find_want, planner, storage_data, on_value=on_value, allows_lossy_casts=allows_lossy_casts, uri=uri
    )
    wants = {number: make(item) for number, item in left.items()}
    ends = [address + chunk.end - chunk.begin for address, chunk in zip(addresses, chunks, strict=True)]
    begins, ends = [*addresses, *(0 for _ in rest)], [*ends, *(0 for _ in rest)]
    for number, want in wants.items():
        memory = None if want.tensor is None else address_range(want.tensor)
        begins[number], ends[number] = memory or (0, 0)
    shared = sorted(find_overlapping(begins, ends))
    for number in shared:
        if number not in wants:
            wants[number] = make(items[number])
    _keep_apart([wants[number] for number in shared])
    if is_logged:
        _log_casts(wants.values(), uri=uri)
    whole = [number for number in range(len(fqns)) if number not in wants]
    return Wants(
        list(wants.values()),
        [fqns[number] for number in whole],
        [tensors[number] for number in whole],
        [chunks[number] for number in whole],
        [addresses[number] for number in whole],
    )


def _keep_apart(wants: Sequence[Want]) -> None:
    """Let tensors that share memory, such as tied weights, be filled by copies.

    If several wants fill the same memory, the last one is copied there, and the others are only verified. `log_dropped`
    compares those that were saved apart with the last one.
    """
    last: dict[tuple[int, int], ItemLocation] = {}
    for want in reversed(wants):
        target, location = want.target, want.location
        if isinstance(target, TensorTarget):
            target.is_shared = True
            memory = address_range(target.tensor)
            if memory is not None and memory[1] - memory[0] == target.tensor.nbytes:
                target.is_dropped = memory in last
                kept = last.setdefault(memory, location)
                if (kept.object_index, kept.begin) != (location.object_index, location.begin):
                    target.dropped_crcs = {}


def _log_casts(wants: Iterable[Want], *, uri: str) -> None:
    """Log which tensors get another dtype than the stored one."""
    casts = []
    for want in wants:
        if want.tensor is not None and want.location.dtype is not None:
            stored = dtype_of(want.location.dtype)
            if want.tensor.dtype is not stored:
                casts.append((want.name, stored, want.tensor.dtype))
    log_casts(casts, uri=uri)


def log_dropped(wants: Wants, *, uri: str) -> None:
    """Warn of tensors whose saved values differ from the values that now fill their memory.

    Each rank compares, and warns of, its own shards alone.
    """
    targets = ((want.name, want.target) for want in wants.single)
    dropped = [name for name, target in targets if isinstance(target, TensorTarget) and target.has_dropped_others()]
    if dropped:
        _log.warning(
            "%s holds other values in %s than in tensors that are the same here, as tied weights are: these values are "
            "dropped. Untie the model to load them",
            uri,
            quote_names(list(dict.fromkeys(dropped))),
        )


def _find_want(
    planner: LoadPlanner,
    storage_data: Mapping[MetadataIndex, ItemLocation],
    item: ReadItem,
    *,
    on_value: Callable[[ReadItem, ItemLocation, bytes | bytearray], object],
    allows_lossy_casts: bool,
    uri: str,
) -> Want:
    index = item.storage_index
    location = storage_data.get(index)
    if location is None:
        raise CorruptCheckpointError(f"{uri} has no data for {index.fqn!r} at {index.offset}", uri=uri)
    if item.type is LoadItemType.BYTE_IO:
        return want_value(index.fqn, location, functools.partial(on_value, item, location))
    tensor, lengths = planner.resolve_tensor(item).detach(), tuple(item.lengths)
    if tensor.shape != lengths:
        raise CloudckptError(
            f"{index.fqn!r}: the planner gave a tensor of shape {tuple(tensor.shape)} for a read of {lengths}"
        )
    if type(tensor) in PLAIN_TENSORS:
        refuse_target(tensor, index.fqn, uri=uri)
        if is_short(tensor):
            raise UnsupportedValueError(
                f"cannot load {index.fqn!r} of {uri}: it is {describe_shortage(tensor)}", uri=uri
            )
        if any(size > 1 and not stride for size, stride in zip(lengths, tensor.stride(), strict=True)):
            raise UnsupportedValueError(
                f"cannot load {index.fqn!r} of {uri}: several elements share memory, as expand() lets them. Load into "
                "a clone() of it",
                uri=uri,
            )
    offsets = tuple(item.storage_offsets)
    if len(offsets) != len(location.lengths) or any(
        begin < 0 or begin + length > extent
        for begin, length, extent in zip(offsets, lengths, location.lengths, strict=False)
    ):
        raise CloudckptError(
            f"{index.fqn!r}: the planner asks for {lengths} at {offsets} of a chunk of {tuple(location.lengths)}"
        )
    cast = None
    if location.dtype is not None and not allows_lossy_casts:
        cast = new_cast(index.fqn, dtype_of(location.dtype), tensor, uri=uri)
    receive = functools.partial(planner.commit_tensor, item)
    box = Box(offsets, lengths)
    return want_box(index.fqn, location, box, tensor, cast=cast, receive=receive, needs_alignment=True)
