"""The items of a load plan: what each of them fills, and the end of each once its bytes are there."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from cloudckpt.errors import CheckpointError, CloudckptError, CorruptCheckpointError, UnsupportedValueError
from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, ItemLocation, Manifest
from cloudckpt.format.nesting import PLAIN_TENSORS
from cloudckpt.format.torch_metadata import dtype_of
from cloudckpt.io.addresses import find_overlapping
from cloudckpt.io.boxes import Box
from cloudckpt.io.reads import RangeRead, WantedRange
from cloudckpt.pipeline.context import Context
from cloudckpt.tensors.casts import Cast, new_cast
from cloudckpt.tensors.extensions import ReadTransforms, decoded_chunk
from cloudckpt.tensors.load_targets import (
    BytesTarget,
    Target,
    TensorTarget,
    find_runs_of,
    find_whole_address,
    new_block_target,
)
from cloudckpt.tensors.tensor_bytes import address_range, describe_shortage, is_short, writable
from cloudckpt.tensors.values import copy_safely

_MAX_NAMES = 5


class LoadItems(Sequence[ReadItem]):
    """Stands for torch's list of items: those for whole tensors stored as one chunk, and then `others`.

    An item of a whole tensor is made when it is asked for. Equal to a list of the same; can be pickled, and is smaller
    then.
    """

    __slots__ = ("_sizes", "fqns", "others")

    def __init__(self, fqns: list[str], sizes: list[torch.Size], others: list[ReadItem]) -> None:
        self.fqns = fqns
        self.others = others
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self.fqns) + len(self.others)

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
        return self.others[position - len(self.fqns)]

    def __iter__(self) -> Iterator[ReadItem]:
        yield from map(whole_item, self.fqns, self._sizes)
        yield from self.others

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


class Consumer(NamedTuple):
    """One read item and what it fills; `tensor` is None for a Python object."""

    item: ReadItem
    location: ItemLocation
    target: Target
    tensor: torch.Tensor | None
    cast: Cast | None = None


class Consumers:
    """All that a load fills, numbered: the `others`, each with an item of its own, and then runs of whole tensors."""

    __slots__ = ("_chunks", "_fqns", "others", "targets")

    def __init__(
        self,
        others: Sequence[Consumer],
        fqns: Sequence[str] = (),
        tensors: Sequence[torch.Tensor] = (),
        chunks: Sequence[Chunk] = (),
        addresses: Sequence[int] = (),
    ) -> None:
        """`fqns`, `tensors`, `chunks` and `addresses` are columns of whole tensors, which share no memory."""
        self._fqns, self._chunks = fqns, chunks
        self.others = others
        runs = find_runs_of(tensors, chunks, addresses)
        self.targets: list[Target] = [*(consumer.target for consumer in others), *runs]

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are wanted."""
        return sum(target.num_bytes for target in self.targets)

    def casts(self) -> Iterator[tuple[str, torch.dtype, torch.dtype]]:
        """Yield each tensor's name, the dtype that is stored, and another one that it is loaded as."""
        for consumer in self.others:
            if consumer.tensor is not None and consumer.location.dtype is not None:
                stored = dtype_of(consumer.location.dtype)
                if consumer.tensor.dtype is not stored:
                    yield consumer.item.storage_index.fqn, stored, consumer.tensor.dtype

    def dropped(self) -> list[str]:
        """Return the names of tensors that were saved apart, and fill the memory of another one, whose values count."""
        kept: dict[object, tuple[int, int]] = {}
        dropped: list[tuple[object, tuple[int, int], str]] = []
        for consumer in self.others:
            target, place = consumer.target, (consumer.location.object_index, consumer.location.begin)
            if isinstance(target, TensorTarget) and target.is_shared:
                memory = address_range(target.tensor)
                if target.is_dropped:
                    dropped.append((memory, place, consumer.item.storage_index.fqn))
                else:
                    kept[memory] = place
        return [fqn for memory, place, fqn in dropped if kept[memory] != place]

    def names_in(self, request: RangeRead, begin: int, end: int) -> str:
        """Return the names, for a message, that bytes ``[begin, end)`` of the request's object belong to."""
        fqns = [
            fqn
            for fqn, chunk in zip(self._fqns, self._chunks, strict=True)
            if chunk.object_index == request.object_index and chunk.begin < end and chunk.end > begin
        ]
        wants = (want for want in request.wants if want.begin < end and want.end > begin)
        fqns += {self.others[number].item.storage_index.fqn: None for number in self.numbers_of_others(wants)}
        shown = ", ".join(repr(fqn) for fqn in list(fqns)[:_MAX_NAMES])
        return shown + (f" and {len(fqns) - _MAX_NAMES} more" if len(fqns) > _MAX_NAMES else "")

    def numbers_of_others(self, wants: Iterable[WantedRange]) -> Iterator[int]:
        """Yield the consumer of each want that is of `others`."""
        return (want.consumer for want in wants if want.consumer < len(self.others))

    def wants(self, *, max_gap_bytes: int) -> list[WantedRange]:
        """Return the ranges to fetch."""
        return [
            want
            for number, target in enumerate(self.targets)
            for want in target.wants(number, max_gap_bytes=max_gap_bytes)
        ]


def consumers_of(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    manifest: Manifest,
    storage_data: Mapping[MetadataIndex, ItemLocation],
    *,
    tensors_of: Callable[[Sequence[str]], list[torch.Tensor]] | None,
    allows_lossy_casts: bool,
    uri: str,
) -> Consumers:
    """Return what the items fill. The planner gives the tensors; `tensors_of`, if given, those of whole tensors.

    Tensors that share memory, such as tied weights, are filled by copies. Of those that fill the same memory, the last
    one is copied there, and the others are only checked.
    """
    fqns: list[str] = []
    tensors: list[torch.Tensor] = []
    rest = items
    if isinstance(items, LoadItems) and tensors_of is not None:
        fqns, rest = items.fqns, items.others
        tensors = tensors_of(fqns)
    stored = [manifest.tensors[fqn] for fqn in fqns]
    chunks = [tensor.chunks[0] for tensor in stored]
    addresses = list(map(find_whole_address, tensors, stored))
    left = {number: items[number] for number, address in enumerate(addresses) if not address}
    left.update(enumerate(rest, len(fqns)))
    make = functools.partial(_consumer_of, planner, storage_data, allows_lossy_casts=allows_lossy_casts, uri=uri)
    consumers = {number: make(item) for number, item in left.items()}
    ends = [address + chunk.end - chunk.begin for address, chunk in zip(addresses, chunks, strict=True)]
    begins, ends = [*addresses, *(0 for _ in rest)], [*ends, *(0 for _ in rest)]
    for number, consumer in consumers.items():
        memory = None if consumer.tensor is None else address_range(consumer.tensor)
        begins[number], ends[number] = memory or (0, 0)
    shared = sorted(find_overlapping(begins, ends))
    for number in shared:
        if number not in consumers:
            consumers[number] = make(items[number])
    _keep_apart(consumers[number] for number in shared)
    whole = [number for number in range(len(fqns)) if number not in consumers]
    return Consumers(
        list(consumers.values()),
        [fqns[number] for number in whole],
        [tensors[number] for number in whole],
        [chunks[number] for number in whole],
        [addresses[number] for number in whole],
    )


def _keep_apart(consumers: Iterable[Consumer]) -> None:
    """Fill tensors that share memory by copies. Of those that fill the same memory, the last one is copied there."""
    last: dict[tuple[int, int], TensorTarget] = {}
    for consumer in consumers:
        target = consumer.target
        if isinstance(target, TensorTarget):
            target.is_shared = True
            memory = address_range(target.tensor)
            if memory is not None and memory[1] - memory[0] == target.tensor.nbytes:
                if memory in last:
                    last[memory].is_dropped = True
                last[memory] = target


def _consumer_of(
    planner: LoadPlanner,
    storage_data: Mapping[MetadataIndex, ItemLocation],
    item: ReadItem,
    *,
    allows_lossy_casts: bool,
    uri: str,
) -> Consumer:
    index = item.storage_index
    location = storage_data.get(index)
    if location is None:
        raise CorruptCheckpointError(f"{uri} has no data for {index.fqn!r} at {index.offset}", uri=uri)
    if item.type is LoadItemType.BYTE_IO:
        return Consumer(item, location, BytesTarget(location), None)
    tensor, lengths = planner.resolve_tensor(item).detach(), tuple(item.lengths)
    if tensor.shape != lengths:
        raise CloudckptError(
            f"{index.fqn!r}: the planner gave a tensor of shape {tuple(tensor.shape)} for a read of {lengths}"
        )
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
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
    if location.transforms:
        return Consumer(item, location, BytesTarget(location), tensor, cast)
    return Consumer(item, location, new_block_target(location, Box(offsets, lengths), tensor, cast=cast), tensor, cast)


class Finisher:
    """Gives the planner each item whose bytes are all there, in the thread of the load: planners need no locks."""

    def __init__(self, context: Context, *, transforms: ReadTransforms, allow_pickle: bool) -> None:
        self._context = context
        self._transforms = transforms
        self._allow_pickle = allow_pickle

    def check(self, consumers: Consumers) -> None:
        """Raise for a missing extension before anything is read."""
        seen: set[tuple[str, ...]] = set()
        for consumer in consumers.others:
            descriptors = consumer.location.transforms
            if descriptors and descriptors not in seen:
                seen.add(descriptors)
                self._transforms.check(descriptors, fqn=consumer.item.storage_index.fqn, uri=self._context.uri)

    def finish_all(
        self,
        consumers: Consumers,
        planner: LoadPlanner,
        requests: Sequence[RangeRead],
        done: Iterable[RangeRead],
    ) -> None:
        """Finish each of `consumers` once the last of its `requests` is `done`, and at once if it has none.

        Whole tensors need no end: they are filled, and the planner is not told.
        """
        num_left = len(requests)
        outstanding = [0] * len(consumers.others)
        for request in requests:
            for number in consumers.numbers_of_others(request.wants):
                outstanding[number] += 1
        for consumer, num_wants in zip(consumers.others, outstanding, strict=True):
            if not num_wants:  # empty
                self.finish(consumer, planner)
        for request in done:
            num_left -= 1
            for number in consumers.numbers_of_others(request.wants):
                outstanding[number] -= 1
                if not outstanding[number]:
                    self.finish(consumers.others[number], planner)
        if num_left or any(outstanding):
            raise CheckpointError(
                f"the load of {self._context.uri} ended before all was read. What was loaded is not usable; load again",
                uri=self._context.uri,
            )

    def finish(self, consumer: Consumer, planner: LoadPlanner) -> None:
        """Give the planner one item whose bytes are all there."""
        item, location, target, tensor = consumer.item, consumer.location, consumer.target, consumer.tensor
        if isinstance(target, BytesTarget):
            content: bytes | bytearray = target.content
            target.release()
            if location.transforms:
                content = self._undo_transforms(consumer, content)
            if tensor is None or location.dtype is None:
                planner.load_bytes(item, self._value(item, content))
                return
            chunk = decoded_chunk(content, location.dtype, location.lengths)
            wanted = chunk[Box(tuple(item.storage_offsets), tuple(item.lengths)).slices]
            with writable([tensor]):
                tensor.copy_(wanted if consumer.cast is None else consumer.cast.check(wanted))
        if tensor is not None:
            planner.commit_tensor(item, tensor)

    def _undo_transforms(self, consumer: Consumer, stored: bytes | bytearray) -> bytearray:
        item, location, uri = consumer.item, consumer.location, self._context.uri
        fqn, read_bytes = item.storage_index.fqn, self._context.options.read_bytes
        if location.dtype is None:
            content = self._transforms.undo(location.transforms, stored, max_bytes=read_bytes, fqn=fqn, uri=uri)
            if content is None:
                raise CheckpointError(
                    f"the value {fqn!r} of {uri} unpacks to more than Options(read_bytes={read_bytes}). If it may be "
                    "so large, load with a larger read_bytes",
                    uri=uri,
                )
            return content
        num_bytes = math.prod(location.lengths) * ITEMSIZE_BYTES[location.dtype]
        content = self._transforms.undo(location.transforms, stored, max_bytes=num_bytes, fqn=fqn, uri=uri)
        if content is None or len(content) != num_bytes:
            raise CorruptCheckpointError(
                f"{fqn!r} of {uri} unpacks to {'more' if content is None else 'fewer'} than the {num_bytes} bytes that "
                f"{list(location.lengths)} of {location.dtype} take. Load an older checkpoint",
                uri=uri,
            )
        return content

    def _value(self, item: ReadItem, content: bytes | bytearray) -> io.BytesIO:
        if self._allow_pickle:
            return io.BytesIO(content)
        return copy_safely(
            content, item.storage_index.fqn, uri=self._context.uri, is_verified=self._context.options.verify
        )
