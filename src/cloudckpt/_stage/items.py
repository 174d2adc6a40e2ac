"""A plan's write items, resolved: what they hold, as bytes or as tensors that become bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from cloudckpt._manifest.torch_dtypes import dtype_name
from cloudckpt._plan.layout import Entry
from cloudckpt._stage.tensors import bytes_view, is_viewable, plain
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt.errors import UnsupportedValueError

_ESTIMATED_VALUE_BYTES = 4096  # of a Python object, whose size is known only once it is serialised


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedItem:
    """One write item, ready to be laid out. `content` refers to memory; nothing has been copied."""

    index: MetadataIndex
    entry: Entry
    content: torch.Tensor | memoryview
    dtype: str | None
    lengths: tuple[int, ...]
    transforms: tuple[str, ...]


def estimated_bytes(item: WriteItem) -> int:
    """About how much an item will take, by its plan."""
    if item.tensor_data is None:
        return _ESTIMATED_VALUE_BYTES
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def staged(
    items: Sequence[WriteItem], planner: SavePlanner, transforms: WriteTransforms, *, uri: str
) -> Iterator[StagedItem]:
    """The items' data, as the planner gives it. Raises `UnsupportedValueError`, naming the FQN."""
    for item in items:
        data = planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            yield _staged_value(item, data, transforms, uri)
        else:
            yield _staged_tensor(item, data, transforms, uri)


def _staged_value(item: WriteItem, data: object, transforms: WriteTransforms, uri: str) -> StagedItem:
    if not isinstance(data, io.BytesIO):
        raise UnsupportedValueError(
            f"the planner gave a {type(data).__name__} for the value {item.index.fqn!r} of {uri}, not a BytesIO",
            uri=uri,
        )
    content: memoryview = data.getbuffer()
    descriptors: tuple[str, ...] = ()
    if transforms:
        content, descriptors = transforms.apply(item, content)
    return StagedItem(
        index=item.index,
        entry=Entry(fqn=item.index.fqn, dtype=None, shape=(), offsets=None, num_bytes=len(content)),
        content=content,
        dtype=None,
        lengths=(),
        transforms=descriptors,
    )


def _staged_tensor(item: WriteItem, data: object, transforms: WriteTransforms, uri: str) -> StagedItem:
    fqn, planned = item.index.fqn, item.tensor_data
    if not isinstance(data, torch.Tensor) or planned is None:
        raise UnsupportedValueError(
            f"the planner gave a {type(data).__name__} for the tensor {fqn!r} of {uri}", uri=uri
        )
    tensor = plain(data, fqn, uri=uri)
    if tensor.shape != planned.chunk.sizes:
        raise UnsupportedValueError(
            f"{fqn!r} was planned with shape {tuple(planned.chunk.sizes)} for {uri}, but is {tuple(tensor.shape)} now. "
            "A cached plan does not fit a state dict whose shapes changed",
            uri=uri,
        )
    dtype, lengths = dtype_name(tensor.dtype), tuple(tensor.shape)
    if transforms:
        content, descriptors = transforms.apply(item, _all_bytes(tensor))
        entry = Entry(fqn=fqn, dtype=None, shape=(), offsets=None, num_bytes=len(content))
        return StagedItem(
            index=item.index,
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
    return StagedItem(index=item.index, entry=entry, content=tensor, dtype=dtype, lengths=lengths, transforms=())


def _all_bytes(tensor: torch.Tensor) -> memoryview:
    return bytes_view(tensor if is_viewable(tensor) else tensor.cpu().contiguous())
