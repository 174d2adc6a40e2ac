"""The parts of a checkpoint that a load fills, and the end of each once its bytes are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cloudckpt.errors import CheckpointError, CorruptCheckpointError
from cloudckpt.format.chunks import dtype_of
from cloudckpt.format.model import ITEMSIZE_BYTES, Chunk, ItemLocation
from cloudckpt.io.boxes import Box
from cloudckpt.io.reads import RangeRead, WantedRange
from cloudckpt.pipeline.context import Context
from cloudckpt.tensors.casts import Cast
from cloudckpt.tensors.extensions import ReadTransforms, decoded_chunk
from cloudckpt.tensors.load_targets import BytesTarget, Target, TensorTarget, find_runs_of, new_block_target
from cloudckpt.tensors.tensor_bytes import address_range, writable

_MAX_NAMES = 5


class Consumer(NamedTuple):
    """A part of one stored item, and what it fills; `tensor` is None for a value."""

    name: str
    location: ItemLocation
    box: Box
    """The part of the chunk; nothing for a value, which is read whole."""
    target: Target
    tensor: torch.Tensor | None
    cast: Cast | None
    item: Any
    """The receiver's own."""


def value_consumer(name: str, location: ItemLocation, item: Any) -> Consumer:
    """Return what reads a value."""
    return Consumer(name, location, Box((), ()), BytesTarget(location), None, None, item)


def tensor_consumer(
    name: str, location: ItemLocation, box: Box, tensor: torch.Tensor, *, cast: Cast | None = None, item: Any = None
) -> Consumer:
    """Return what fills `tensor` with the part `box` of a chunk. A transformed chunk is read whole."""
    target: Target = (
        BytesTarget(location) if location.transforms else new_block_target(location, box, tensor, cast=cast)
    )
    return Consumer(name, location, box, target, tensor, cast, item)


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
                    yield consumer.name, stored, consumer.tensor.dtype

    def dropped(self) -> list[str]:
        """Return the names of tensors that were saved apart, and fill the memory of another one, whose values count."""
        kept: dict[object, tuple[int, int]] = {}
        dropped: list[tuple[object, tuple[int, int], str]] = []
        for consumer in self.others:
            target, place = consumer.target, (consumer.location.object_index, consumer.location.begin)
            if isinstance(target, TensorTarget) and target.is_shared:
                memory = address_range(target.tensor)
                if target.is_dropped:
                    dropped.append((memory, place, consumer.name))
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
        fqns += {self.others[number].name: None for number in self.numbers_of_others(wants)}
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


class Finisher:
    """Hands over each item whose bytes are all there, in the thread of the load: receivers need no locks.

    `on_value` gets the bytes of a value. `on_tensor` gets each tensor that is filled, but not of whole tensors,
    which `Consumers` has in columns.
    """

    def __init__(
        self,
        context: Context,
        *,
        transforms: ReadTransforms,
        on_value: Callable[[Consumer, bytes | bytearray], None],
        on_tensor: Callable[[Consumer], None],
    ) -> None:
        self._context = context
        self._transforms = transforms
        self._on_value = on_value
        self._on_tensor = on_tensor

    def check(self, consumers: Consumers) -> None:
        """Raise for a missing extension before anything is read."""
        seen: set[tuple[str, ...]] = set()
        for consumer in consumers.others:
            descriptors = consumer.location.transforms
            if descriptors and descriptors not in seen:
                seen.add(descriptors)
                self._transforms.check(descriptors, fqn=consumer.name, uri=self._context.uri)

    def finish_all(
        self,
        consumers: Consumers,
        requests: Sequence[RangeRead],
        done: Iterable[RangeRead],
    ) -> None:
        """Finish each of `consumers` once the last of its `requests` is `done`, and at once if it has none.

        Whole tensors need no end: they are filled.
        """
        num_left = len(requests)
        outstanding = [0] * len(consumers.others)
        for request in requests:
            for number in consumers.numbers_of_others(request.wants):
                outstanding[number] += 1
        for consumer, num_wants in zip(consumers.others, outstanding, strict=True):
            if not num_wants:  # empty
                self.finish(consumer)
        for request in done:
            num_left -= 1
            for number in consumers.numbers_of_others(request.wants):
                outstanding[number] -= 1
                if not outstanding[number]:
                    self.finish(consumers.others[number])
        if num_left or any(outstanding):
            raise CheckpointError(
                f"the load of {self._context.uri} ended before all was read. What was loaded is not usable; load again",
                uri=self._context.uri,
            )

    def finish(self, consumer: Consumer) -> None:
        """Hand over one item whose bytes are all there."""
        location, target, tensor = consumer.location, consumer.target, consumer.tensor
        if isinstance(target, BytesTarget):
            content: bytes | bytearray = target.content
            target.release()
            if location.transforms:
                content = self._undo_transforms(consumer, content)
            if tensor is None or location.dtype is None:
                self._on_value(consumer, content)
                return
            wanted = decoded_chunk(content, location.dtype, location.lengths)[consumer.box.slices]
            with writable([tensor]):
                tensor.copy_(wanted if consumer.cast is None else consumer.cast.check(wanted))
        if tensor is not None:
            self._on_tensor(consumer)

    def _undo_transforms(self, consumer: Consumer, stored: bytes | bytearray) -> bytearray:
        location, uri = consumer.location, self._context.uri
        fqn, read_bytes = consumer.name, self._context.options.read_bytes
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
