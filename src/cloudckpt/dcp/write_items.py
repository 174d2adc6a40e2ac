"""Stage the write items of a plan: tensors that are sent in place, and bytes of other tensors and of values.

`find_aliases` finds items that share storage. `describe_shards` names shards that do not make up their tensors, for the
error of a save.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from cloudckpt._messages import join_first
from cloudckpt._torch_compat import ShardedTensor, local_tensor_of
from cloudckpt.errors import CloudckptError, UnsupportedValueError
from cloudckpt.format.model import ITEMSIZE_BYTES, JSON_VALUE
from cloudckpt.format.safetensors import HeaderEntry
from cloudckpt.io.boxes import Box, intersect
from cloudckpt.tensors.data_objects import SaveItems, StagedItem, wait_for_content
from cloudckpt.tensors.extensions import WriteTransforms
from cloudckpt.tensors.snapshot import Snapshot
from cloudckpt.tensors.tensor_bytes import (
    Source,
    bytes_view,
    classify,
    dtype_name,
    holds_its_values,
    is_viewable,
    layout_of,
    plain_tensor,
    view_memory,
    viewable_address,
)
from cloudckpt.tensors.values import check_value

_ESTIMATED_VALUE_BYTES = 4096  # for a Python object, whose size is known only once it is serialised
_UNKNOWN = Source(None)
_RESOLVING_METHODS = frozenset({"resolve_data", "lookup_object", "transform_object"})
_MAX_NAMES = 5
_MAX_SHARDS = 1000
_MAX_POINTS = 10_000


class PlannerWithSources:
    """A planner that resolves plain tensors as torch's default planner does."""

    sources: Mapping[str, Source] = {}
    """The entries of the flat state dict: an item of a whole tensor resolves to the tensor of its name."""


def find_sources(planner: SavePlanner) -> Mapping[str, Source]:
    """Return the entries of `planner`; nothing if the planner may resolve tensors in a way of its own."""
    if isinstance(planner, PlannerWithSources):
        return planner.sources
    if type(planner) is not DefaultSavePlanner or not _RESOLVING_METHODS.isdisjoint(vars(planner)):
        return {}
    return {fqn: classify(value) for fqn, value in planner.state_dict.items()}


def estimate_bytes(item: WriteItem) -> int:
    """Estimate the size of an item by its plan."""
    if item.tensor_data is None:
        return _ESTIMATED_VALUE_BYTES
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def find_aliases(items: Sequence[WriteItem], sources: Mapping[str, Source]) -> dict[int, int]:
    """Map each item whose tensor shares its storage with an earlier item's to the position of the first such item.

    Aliases are tensors of the same address, strides, dtype and shape in a flat state dict, such as tied weights.
    """
    first_by_address: dict[int, int] = {}
    by_address: dict[int, list[int]] = {}
    for position, item in enumerate(items):
        address = sources.get(item.index.fqn, _UNKNOWN).address
        if address and first_by_address.setdefault(address, position) != position:
            by_address.setdefault(address, [first_by_address[address]]).append(position)
    aliases: dict[int, int] = {}
    for positions in by_address.values():  # compare the layouts of the few tensors with one address
        first_by_key: dict[Hashable, int] = {}
        for position in positions:
            key = _key_of_storage(items[position], sources)
            if key is not None and first_by_key.setdefault(key, position) != position:
                aliases[position] = first_by_key[key]
    return aliases


def _key_of_storage(item: WriteItem, sources: Mapping[str, Source]) -> Hashable | None:
    """Return a key that is equal for items of the same bytes, if their tensors have the same address."""
    source = sources[item.index.fqn]
    tensor = source.tensor
    if tensor is None or item.tensor_data is None or not tensor.numel():
        return None
    layout = (tensor.dtype, tensor.size()) if source.is_in_place else layout_of(tensor)
    return layout, item.index.offset, item.tensor_data.chunk.sizes


def prepare_items(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    transforms: WriteTransforms,
    *,
    uri: str,
    snapshot: Snapshot | None = None,
) -> SaveItems:
    """Return torch's items with their data, as the planner resolves them.

    With a `snapshot` that is still being filled, this waits only for the tensors that it reads, such as those in a
    tuple, which the planner serialises. A planner of the user may read any tensor, so it needs a complete snapshot.

    Raises `UnsupportedValueError`, naming the FQN: for a value before anything is sent, for a tensor when it is staged.
    """
    sources = find_sources(planner)
    aliases = {} if transforms else find_aliases(items, sources)
    encoded: dict[str, bytes | None] = {}
    for item in items:
        if item.type is WriteItemType.BYTE_IO and (source := sources.get(item.index.fqn)) is not None:
            if snapshot is not None:
                _wait_for_tensors_in(source.value, snapshot)
            encoded[item.index.fqn] = check_value(source.value, item.index.fqn, uri=uri)

    def stage(positions: Sequence[int]) -> Iterator[StagedItem]:
        layouts: dict[int, _WholeLayout | None] = {}
        for item in map(items.__getitem__, positions):
            source = sources.get(item.index.fqn)
            if item.type is WriteItemType.BYTE_IO:
                # Encoded by the plan, which refuses values that cannot be saved, and held until it is sent.
                yield _stage_value(item, encoded.pop(item.index.fqn, None), planner, transforms, uri)
            elif transforms or source is None or (staged := _stage_in_place(item, source, layouts)) is None:
                yield _stage_tensor(item, planner.resolve_data(item), transforms, uri, snapshot)
            else:
                yield staged

    return SaveItems(
        sizes_bytes=[0 if position in aliases else estimate_bytes(item) for position, item in enumerate(items)],
        aliases=aliases,
        are_transformed=bool(transforms),
        # A planner that resolves tensors in a way of its own may compute others the next time.
        are_repeatable=[item.tensor_data is not None and item.index.fqn in sources for item in items],
        stage=stage,
    )


def _stage_value(
    item: WriteItem, encoded: bytes | None, planner: SavePlanner, transforms: WriteTransforms, uri: str
) -> StagedItem:
    """Return a Python object as tagged JSON, if it is `encoded`, or as the bytes that the planner makes of it."""
    content = _serialize(item, planner, uri).getbuffer() if encoded is None else memoryview(encoded)
    encoding = () if encoded is None else (JSON_VALUE,)
    return _stage_bytes(item, content, transforms, uri, dtype=None, lengths=(), encoding=encoding)


def _serialize(item: WriteItem, planner: SavePlanner, uri: str) -> io.BytesIO:
    try:
        data = planner.resolve_data(item)
    except (CloudckptError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedValueError(
            f"the planner could not serialise the value {item.index.fqn!r} for {uri} ({type(error).__name__}: "
            f"{error}). Leave it out of the state dict",
            uri=uri,
        ) from error
    if not isinstance(data, io.BytesIO):
        raise UnsupportedValueError(
            f"the planner gave a {type(data).__name__} for the value {item.index.fqn!r} of {uri}, not a BytesIO",
            uri=uri,
        )
    return data


def _wait_for_tensors_in(value: object, snapshot: Snapshot) -> None:
    """Wait for the tensors in a Python object that is about to be serialised."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            wait_for_content(snapshot, shard.tensor)
    elif isinstance(value, DTensor):
        wait_for_content(snapshot, local_tensor_of(value))
    elif isinstance(value, torch.Tensor):
        wait_for_content(snapshot, value)
    elif isinstance(value, (tuple, list, Mapping)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            _wait_for_tensors_in(entry, snapshot)


class _WholeLayout(msgspec.Struct, frozen=True):
    """The properties that whole tensors of one shape and dtype have in common. `offsets` are all 0."""

    size: torch.Size
    dtype: torch.dtype
    name: str
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int


def _stage_in_place(item: WriteItem, source: Source, layouts: dict[int, _WholeLayout | None]) -> StagedItem | None:
    """Return the item with its data, if it is a whole plain tensor that is sent from where it is; else None.

    `layouts` caches the layout of each ``tensor_data``: many items share one.
    """
    data, index, tensor = item.tensor_data, item.index, source.tensor
    if not source.is_whole or not source.is_in_place or item.type is not WriteItemType.TENSOR:
        return None
    if tensor is None or data is None:
        return None
    try:
        form = layouts[id(data)]
    except KeyError:
        form = layouts[id(data)] = _whole_layout_of(data)
    if viewable_address(tensor) != source.address:  # the caller's code may have moved the tensor since the plan
        return None
    if form is None or tensor.dtype is not form.dtype or tensor.size() != form.size or index.offset != form.offsets:
        return None
    entry = HeaderEntry(fqn=index.fqn, dtype=form.name, shape=form.lengths, offsets=None, num_bytes=form.num_bytes)
    return StagedItem(
        entry=entry,
        index_offsets=form.offsets,
        content=view_memory(source.address, form.num_bytes, tensor),
        dtype=form.name,
        lengths=form.lengths,
        transforms=(),
        address=source.address,
    )


def _whole_layout_of(data: TensorWriteData) -> _WholeLayout | None:
    size, dtype, offsets = data.size, data.properties.dtype, tuple(data.chunk.offsets)
    name = dtype_name(dtype)
    if data.chunk.sizes != size or any(offsets) or len(offsets) != len(size) or name not in ITEMSIZE_BYTES:
        return None
    num_bytes = math.prod(size) * dtype.itemsize
    return _WholeLayout(size=size, dtype=dtype, name=name, lengths=tuple(size), offsets=offsets, num_bytes=num_bytes)


def _stage_tensor(
    item: WriteItem, data: object, transforms: WriteTransforms, uri: str, snapshot: Snapshot | None
) -> StagedItem:
    fqn, in_plan = item.index.fqn, item.tensor_data
    if not isinstance(data, torch.Tensor) or in_plan is None:
        raise UnsupportedValueError(
            f"the planner gave a {type(data).__name__} for the tensor {fqn!r} of {uri}", uri=uri
        )
    if snapshot is not None and (transforms or not holds_its_values(data)):
        wait_for_content(snapshot, data)
    tensor = plain_tensor(data, fqn, uri=uri)
    if tensor.shape != in_plan.chunk.sizes:
        raise UnsupportedValueError(
            f"{fqn!r} has the shape {tuple(tensor.shape)}, and {tuple(in_plan.chunk.sizes)} in the plan of the save of "
            f"{uri}. Do not cache plans (of torch's planner) if shapes change",
            uri=uri,
        )
    dtype, lengths = dtype_name(tensor.dtype), tuple(tensor.shape)
    if transforms:
        content = bytes_view(tensor if is_viewable(tensor) else tensor.cpu().contiguous())
        return _stage_bytes(item, content, transforms, uri, dtype=dtype, lengths=lengths)
    is_whole = in_plan.chunk.sizes == in_plan.size
    entry = HeaderEntry(
        fqn=fqn,
        dtype=dtype,
        shape=lengths,
        offsets=None if is_whole else tuple(in_plan.chunk.offsets),
        num_bytes=tensor.nbytes,
    )
    return StagedItem(
        entry=entry,
        index_offsets=_index_offsets(item),
        content=tensor,
        dtype=dtype,
        lengths=lengths,
        transforms=(),
        address=tensor.data_ptr(),
    )


def _stage_bytes(
    item: WriteItem,
    content: memoryview,
    transforms: WriteTransforms,
    uri: str,
    *,
    dtype: str | None,
    lengths: tuple[int, ...],
    encoding: tuple[str, ...] = (),
) -> StagedItem:
    """Return an item that is stored as bytes: a Python object, or a tensor that is transformed."""
    descriptors: tuple[str, ...] = ()
    if transforms:
        content, descriptors = transforms.apply(item.index.fqn, content, uri=uri)
    return StagedItem(
        entry=HeaderEntry(fqn=item.index.fqn, dtype=None, shape=(), offsets=None, num_bytes=len(content)),
        index_offsets=_index_offsets(item),
        content=content,
        dtype=dtype,
        lengths=lengths,
        transforms=(*descriptors, *encoding),
    )


def _index_offsets(item: WriteItem) -> tuple[int, ...] | None:
    return None if item.index.offset is None else tuple(item.index.offset)


class _Shard(NamedTuple):
    rank: int
    box: Box

    def __str__(self) -> str:
        return f"{_shown(self.box)} of rank {self.rank}"


def describe_shards(plans: Sequence[SavePlan], entries: Mapping[str, object]) -> str:
    """Return a clause for each of the first `entries` whose shards overlap, or leave a part out; empty if none does."""
    clauses = []
    for fqn, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        shards = [
            _Shard(rank, Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)))
            for rank, plan in enumerate(plans)
            for item in plan.items
            if item.index.fqn == fqn and item.tensor_data is not None
        ][:_MAX_SHARDS]
        problem = _find_problem(tuple(entry.size), shards, has_others=len(plans) > 1)
        if problem is not None:
            shown = ", ".join(map(str, shards[:_MAX_NAMES])) + (", …" if len(shards) > _MAX_NAMES else "")
            clauses.append(f"{fqn!r} of shape {list(entry.size)} {problem} (it has {shown})")
    return join_first(clauses, _MAX_NAMES)


def _find_problem(shape: tuple[int, ...], shards: Sequence[_Shard], *, has_others: bool) -> str | None:
    for shard in shards:
        if any(
            offset + length > size
            for offset, length, size in zip(shard.box.offsets, shard.box.lengths, shape, strict=True)
        ):
            return f"ends before {shard}"
    for first, second in itertools.combinations(shards, 2):
        if (overlap := intersect(first.box, second.box)) is not None:
            return f"has {_shown(overlap)} on rank {first.rank} and on rank {second.rank}"
    if has_others:
        for point in itertools.islice(_corners(shape, shards), _MAX_POINTS):
            if not any(_holds(shard.box, point) for shard in shards):
                return f"has no shard with the element {list(point)}"
    return None


def _corners(shape: tuple[int, ...], shards: Sequence[_Shard]) -> Iterator[tuple[int, ...]]:
    """Yield points. If the shards leave anything out, one of the points is in no shard."""
    boxes = [shard.box for shard in shards]
    ends = [{0, *(box.offsets[dim] + box.lengths[dim] for box in boxes)} for dim in range(len(shape))]
    return itertools.product(
        *(sorted(end for end in ends_of_dim if end < size) for ends_of_dim, size in zip(ends, shape, strict=True))
    )


def _holds(box: Box, point: tuple[int, ...]) -> bool:
    return all(
        offset <= coordinate < offset + length
        for offset, length, coordinate in zip(box.offsets, box.lengths, point, strict=True)
    )


def _shown(box: Box) -> str:
    return (
        f"[{', '.join(f'{offset}:{offset + length}' for offset, length in zip(box.offsets, box.lengths, strict=True))}]"
    )
