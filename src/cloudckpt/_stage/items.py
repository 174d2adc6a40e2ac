"""A plan's write items, resolved: what they hold, as bytes or as tensors that become bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from cloudckpt._flat import PLAIN_TENSORS
from cloudckpt._manifest.torch_dtypes import dtype_name
from cloudckpt._plan.layout import Entry
from cloudckpt._stage.body import Filled, wait_for
from cloudckpt._stage.tensors import bytes_view, holds_its_values, is_viewable, plain, quick_view
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt.errors import CloudckptError, UnsupportedValueError

_ESTIMATED_VALUE_BYTES = 4096  # of a Python object, whose size is known only once it is serialised
_OF_PLANNERS = frozenset({"resolve_data", "lookup_object", "transform_object"})


class StagedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One write item, ready to be laid out. `content` refers to memory; nothing has been copied."""

    entry: Entry
    index_offsets: tuple[int, ...] | None
    """As its index has them."""
    content: torch.Tensor | memoryview
    dtype: str | None
    lengths: tuple[int, ...]
    transforms: tuple[str, ...]
    address: int = 0
    """Of a tensor's first element; 0 where the content is no tensor's memory."""


@runtime_checkable
class KnowsPlainTensors(Protocol):
    """A planner of ours, which resolves plain tensors as torch's default planner does."""

    def plain_tensors(self) -> Mapping[str, Any]:
        """The flat state dict: the items of whole tensors in it resolve to what it has under their names."""


def estimated_bytes(item: WriteItem) -> int:
    """About how much an item will take, by its plan."""
    if item.tensor_data is None:
        return _ESTIMATED_VALUE_BYTES
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def staged(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    transforms: WriteTransforms,
    *,
    uri: str,
    filled: Filled | None = None,
) -> Iterator[StagedItem]:
    """The items' data, as the planner gives it. Raises `UnsupportedValueError`, naming the FQN.

    Of memory that is still being `filled`, tensors that have to be read here are waited for, as those in tuples are, of
    which the planner makes bytes; the rest are only referred to. A planner that has a way of its own reads what it
    likes: for such, all has to be there already.
    """
    state_dict = known_tensors_of(planner)
    known = state_dict if not transforms else {}
    kinds: dict[int, _Kind | None] = {}
    for item in items:
        quick = _staged_quickly(item, known, kinds)
        if quick is not None:
            yield quick
            continue
        if filled is not None and item.type is WriteItemType.BYTE_IO:
            _wait_within(filled, state_dict.get(item.index.fqn))
        data = _resolved(item, planner, uri)
        if item.type is WriteItemType.BYTE_IO:
            yield _staged_value(item, data, transforms, uri)
        else:
            yield _staged_tensor(item, data, transforms, uri, filled)


def _resolved(item: WriteItem, planner: SavePlanner, uri: str) -> object:
    try:
        return planner.resolve_data(item)
    except Exception as error:
        if item.type is not WriteItemType.BYTE_IO or isinstance(error, (CloudckptError, MemoryError)):
            raise
        raise UnsupportedValueError(
            f"the planner could not serialise the value {item.index.fqn!r} for {uri} ({type(error).__name__}: "
            f"{error}). Leave it out of the state dict",
            uri=uri,
        ) from error


def _wait_within(filled: Filled, value: object) -> None:
    """For the tensors in a Python object that is about to be serialised."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            wait_for(filled, shard.tensor)
    elif isinstance(value, DTensor):
        wait_for(filled, value._local_tensor)  # noqa: SLF001  # to_local() makes a new one
    elif isinstance(value, torch.Tensor):
        wait_for(filled, value)
    elif isinstance(value, (tuple, list, Mapping)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            _wait_within(filled, entry)


class _Kind(msgspec.Struct, frozen=True):
    """What whole tensors of one shape and dtype have in common. `offsets` are all 0."""

    size: torch.Size
    dtype: torch.dtype
    name: str
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int


def known_tensors_of(planner: SavePlanner) -> Mapping[str, Any]:
    """The flat state dict, where `planner` need not be asked for tensors; empty where it may have a way of its own."""
    if isinstance(planner, KnowsPlainTensors):
        return planner.plain_tensors()
    if type(planner) is not DefaultSavePlanner or not _OF_PLANNERS.isdisjoint(vars(planner)):
        return {}
    return planner.state_dict


def _staged_quickly(item: WriteItem, known: Mapping[str, Any], kinds: dict[int, _Kind | None]) -> StagedItem | None:
    """The item's data, where it is a plain tensor that is sent from where it lies; else None.

    `kinds` is what was found out about each ``tensor_data`` before: many items share one.
    """
    data, index = item.tensor_data, item.index
    if data is None or item.type is not WriteItemType.TENSOR:
        return None
    tensor: Any = known.get(index.fqn)
    if type(tensor) not in PLAIN_TENSORS:
        return None
    try:
        kind = kinds[id(data)]
    except KeyError:
        kind = kinds[id(data)] = _kind_of(data)
    if kind is None or tensor.dtype is not kind.dtype or tensor.size() != kind.size or index.offset != kind.offsets:
        return None
    content = quick_view(tensor)
    if content is None:
        return None
    entry = Entry(fqn=index.fqn, dtype=kind.name, shape=kind.lengths, offsets=None, num_bytes=kind.num_bytes)
    return StagedItem(
        entry=entry,
        index_offsets=kind.offsets,
        content=content,
        dtype=kind.name,
        lengths=kind.lengths,
        transforms=(),
        address=tensor.data_ptr(),
    )


def _kind_of(data: TensorWriteData) -> _Kind | None:
    size, dtype, offsets = data.size, data.properties.dtype, tuple(data.chunk.offsets)
    if data.chunk.sizes != size or any(offsets) or len(offsets) != len(size):
        return None
    num_bytes = math.prod(size) * dtype.itemsize
    return _Kind(
        size=size, dtype=dtype, name=dtype_name(dtype), lengths=tuple(size), offsets=offsets, num_bytes=num_bytes
    )


def _staged_value(item: WriteItem, data: object, transforms: WriteTransforms, uri: str) -> StagedItem:
    if not isinstance(data, io.BytesIO):
        raise UnsupportedValueError(
            f"the planner gave a {type(data).__name__} for the value {item.index.fqn!r} of {uri}, not a BytesIO",
            uri=uri,
        )
    content: memoryview = data.getbuffer()
    descriptors: tuple[str, ...] = ()
    if transforms:
        content, descriptors = transforms.apply(item, content, uri=uri)
    return StagedItem(
        index_offsets=_index_offsets(item),
        entry=Entry(fqn=item.index.fqn, dtype=None, shape=(), offsets=None, num_bytes=len(content)),
        content=content,
        dtype=None,
        lengths=(),
        transforms=descriptors,
    )


def _staged_tensor(
    item: WriteItem, data: object, transforms: WriteTransforms, uri: str, filled: Filled | None
) -> StagedItem:
    fqn, planned = item.index.fqn, item.tensor_data
    if not isinstance(data, torch.Tensor) or planned is None:
        raise UnsupportedValueError(
            f"the planner gave a {type(data).__name__} for the tensor {fqn!r} of {uri}", uri=uri
        )
    if filled is not None and (transforms or not holds_its_values(data)):
        wait_for(filled, data)
    tensor = plain(data, fqn, uri=uri)
    if tensor.shape != planned.chunk.sizes:
        raise UnsupportedValueError(
            f"{fqn!r} was planned with shape {tuple(planned.chunk.sizes)} for {uri}, but is {tuple(tensor.shape)} now. "
            "A cached plan does not fit a state dict whose shapes changed",
            uri=uri,
        )
    dtype, lengths = dtype_name(tensor.dtype), tuple(tensor.shape)
    if transforms:
        content, descriptors = transforms.apply(item, _all_bytes(tensor), uri=uri)
        entry = Entry(fqn=fqn, dtype=None, shape=(), offsets=None, num_bytes=len(content))
        return StagedItem(
            index_offsets=_index_offsets(item),
            entry=entry,
            content=content,
            dtype=dtype,
            lengths=lengths,
            transforms=descriptors,
        )
    is_whole = planned.chunk.sizes == planned.size
    entry = Entry(
        fqn=fqn,
        dtype=dtype,
        shape=lengths,
        offsets=None if is_whole else tuple(planned.chunk.offsets),
        num_bytes=tensor.numel() * tensor.element_size(),
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


def _index_offsets(item: WriteItem) -> tuple[int, ...] | None:
    return None if item.index.offset is None else tuple(item.index.offset)


def _all_bytes(tensor: torch.Tensor) -> memoryview:
    return bytes_view(tensor if is_viewable(tensor) else tensor.cpu().contiguous())
