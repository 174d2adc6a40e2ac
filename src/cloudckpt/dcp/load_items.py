"""Turn the items of torch's load plan into the `WantedItems` of a `CheckpointReader`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from cloudckpt._messages import quote_names
from cloudckpt.dcp.torch_metadata import LazyList
from cloudckpt.errors import CloudckptError, CorruptCheckpointError, UnsupportedValueError
from cloudckpt.format.model import FilesManifest, ItemLocation, Manifest
from cloudckpt.format.nesting import PLAIN_TENSORS
from cloudckpt.io.boxes import Box
from cloudckpt.pipeline.wanted_items import WantedItem, WantedItems, new_wanted_box, new_wanted_value
from cloudckpt.tensors.addresses import find_overlapping
from cloudckpt.tensors.casts import Casts, group_casts, log_casts, new_cast_check, refuse_rounding
from cloudckpt.tensors.load_targets import TensorTarget, find_whole_address
from cloudckpt.tensors.tensor_bytes import address_range, describe_shortage, dtype_of, is_short, refuse_target

_log = logging.getLogger("cloudckpt")


class LoadItems(LazyList[ReadItem]):
    """The items of whole tensors that are stored as one chunk, and then the `others`.

    The pickle is smaller than that of an equal list.
    """

    __slots__ = ("_sizes", "fqns", "others")

    def __init__(self, fqns: list[str], sizes: list[torch.Size], others: list[ReadItem]) -> None:
        self.fqns = fqns
        self.others = others
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self.fqns) + len(self.others)

    def make(self, position: int) -> ReadItem:
        if position < len(self.fqns):
            return whole_item(self.fqns[position], self._sizes[position])
        return self.others[position - len(self.fqns)]

    def __iter__(self) -> Iterator[ReadItem]:
        yield from map(whole_item, self.fqns, self._sizes)
        yield from self.others


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


def find_wanted_items(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    manifest: Manifest,
    storage_data: Mapping[MetadataIndex, ItemLocation],
    *,
    tensors_of: Callable[[Sequence[str]], list[torch.Tensor]] | None,
    on_value: Callable[[ReadItem, ItemLocation, bytes | bytearray], object],
    allows_lossy_casts: bool | Literal["rounding"],
    uri: str,
    is_logged: bool,
) -> WantedItems:
    """Return the stored parts to read for the items of a plan, with the memory that each fills.

    Args:
        items: The items of this rank.
        planner: Returns the tensor of an item, and receives it when it is filled.
        manifest: The manifest of the checkpoint.
        storage_data: The location of each stored chunk and value.
        tensors_of: Returns the tensors of whole entries by their names, in place of `planner`, which does not receive
            them; None if it returns all.
        on_value: Receives the bytes of each value.
        allows_lossy_casts: `Options.allow_lossy_casts`.
        uri: The checkpoint, for messages.
        is_logged: Log which tensors get another dtype than the stored one. One rank sets it.

    """
    fqns: list[str] = []
    tensors: list[torch.Tensor] = []
    other_items = items
    if isinstance(items, LoadItems) and tensors_of is not None:
        fqns, other_items = items.fqns, items.others
        tensors = tensors_of(fqns)
    stored = [manifest.tensors[fqn] for fqn in fqns]
    chunks = [tensor.chunks[0] for tensor in stored]
    addresses = list(map(find_whole_address, tensors, stored))
    single = {number: items[number] for number, address in enumerate(addresses) if not address}
    single.update(enumerate(other_items, len(fqns)))
    make = functools.partial(
        _new_wanted_item,
        planner,
        storage_data,
        on_value=on_value,
        allows_lossy_casts=allows_lossy_casts is True,
        uri=uri,
    )
    wanted = {number: make(item) for number, item in single.items()}
    ends = [address + chunk.end - chunk.begin for address, chunk in zip(addresses, chunks, strict=True)]
    begins, ends = [*addresses, *(0 for _ in other_items)], [*ends, *(0 for _ in other_items)]
    for number, wanted_item in wanted.items():
        memory = None if wanted_item.tensor is None else address_range(wanted_item.tensor)
        begins[number], ends[number] = memory or (0, 0)
    overlapping = sorted(find_overlapping(begins, ends))
    for number in overlapping:
        if number not in wanted:
            wanted[number] = make(items[number])
    _copy_into_shared_memory([wanted[number] for number in overlapping])
    is_of_files = isinstance(manifest, FilesManifest)  # their dtype is another program's choice
    if is_logged or is_of_files:
        casts = _find_casts(wanted.values())
        if is_of_files and not allows_lossy_casts:
            refuse_rounding(casts, uri=uri)
        if is_logged:
            log_casts(casts, uri=uri)
    whole = [number for number in range(len(fqns)) if number not in wanted]
    return WantedItems(
        list(wanted.values()),
        [fqns[number] for number in whole],
        [tensors[number] for number in whole],
        [chunks[number] for number in whole],
        [addresses[number] for number in whole],
    )


def _copy_into_shared_memory(wanted: Sequence[WantedItem]) -> None:
    """Let tensors that share memory, such as tied weights, be filled by copies.

    If several items fill the same memory, the last one is copied there, and the others are only verified. `log_dropped`
    compares those that were saved apart with the last one.
    """
    last: dict[tuple[int, int], ItemLocation] = {}
    for item in reversed(wanted):
        target, location = item.target, item.location
        if isinstance(target, TensorTarget):
            target.is_shared = True
            memory = address_range(target.tensor)
            if memory is not None and memory[1] - memory[0] == target.tensor.nbytes:
                target.is_dropped = memory in last
                last_location = last.setdefault(memory, location)
                if (last_location.object_index, last_location.begin) != (location.object_index, location.begin):
                    target.dropped_crcs = {}


def _find_casts(wanted: Iterable[WantedItem]) -> Casts:
    """Return which tensors get another dtype than the stored one."""
    casts = []
    for item in wanted:
        if item.tensor is not None and item.location.dtype is not None:
            stored = dtype_of(item.location.dtype)
            if item.tensor.dtype is not stored:
                casts.append((item.name, stored, item.tensor.dtype))
    return group_casts(casts)


def log_dropped(wanted: WantedItems, *, uri: str) -> None:
    """Warn of tensors whose saved values differ from the values that now fill their memory.

    Each rank compares, and warns of, its own shards alone.
    """
    targets = ((item.name, item.target) for item in wanted.items)
    dropped = [name for name, target in targets if isinstance(target, TensorTarget) and target.has_dropped_others()]
    if dropped:
        _log.warning(
            "%s holds other values in %s than in tensors that are the same here, as tied weights are: these values are "
            "dropped. Untie the model to load them",
            uri,
            quote_names(list(dict.fromkeys(dropped))),
        )


def _new_wanted_item(
    planner: LoadPlanner,
    storage_data: Mapping[MetadataIndex, ItemLocation],
    item: ReadItem,
    *,
    on_value: Callable[[ReadItem, ItemLocation, bytes | bytearray], object],
    allows_lossy_casts: bool,
    uri: str,
) -> WantedItem:
    index = item.storage_index
    location = storage_data.get(index)
    if location is None:
        raise CorruptCheckpointError(f"{uri} has no data for {index.fqn!r} at {index.offset}", uri=uri)
    if item.type is LoadItemType.BYTE_IO:
        return new_wanted_value(index.fqn, location, functools.partial(on_value, item, location))
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
        cast = new_cast_check(index.fqn, dtype_of(location.dtype), tensor, uri=uri)
    receive = functools.partial(planner.commit_tensor, item)
    box = Box(offsets, lengths)
    return new_wanted_box(index.fqn, location, box, tensor, cast=cast, receive=receive, needs_alignment=True)
