"""The end of each item of a load: its bytes, which are all there, given to the planner."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence

from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES
from cloudckpt._pipeline.consumers import Consumer, Consumers
from cloudckpt._pipeline.context import Context
from cloudckpt._plan.reads import Request
from cloudckpt._stage.targets import BytesTarget
from cloudckpt._stage.transforms import ReadTransforms, chunk_of
from cloudckpt._stage.values import harmless_copy
from cloudckpt.errors import CheckpointError, CorruptCheckpointError


class Finisher:
    """For the thread that the planner belongs to: planners need not be thread-safe."""

    def __init__(self, context: Context, *, transforms: ReadTransforms, allow_pickle: bool) -> None:
        self._context = context
        self._transforms = transforms
        self._allow_pickle = allow_pickle

    def check(self, consumers: Consumers) -> None:
        """Raise, before anything is read, what would be raised for lack of an extension."""
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
        requests: Sequence[Request],
        done: Iterable[Request],
    ) -> None:
        """Finish each of `consumers` as the last of its `requests` is `done`, and at once where it has none.

        Whole tensors have no end of their own: there is nothing to be done for them, and the planner is not told.
        """
        num_whole, num_left = len(consumers.wholes), len(requests)
        outstanding = [0] * len(consumers.others)
        for number in _others(requests, num_whole):
            outstanding[number] += 1
        for consumer, num_wants in zip(consumers.others, outstanding, strict=True):
            if not num_wants:  # empty
                self.finish(consumer, planner)
        for request in done:
            num_left -= 1
            for number in _others([request], num_whole):
                outstanding[number] -= 1
                if not outstanding[number]:
                    self.finish(consumers.others[number], planner)
        if num_left or any(outstanding):
            raise CheckpointError(
                f"the load of {self._context.uri} ended before all was read. What was loaded is not usable; load again",
                uri=self._context.uri,
            )

    def finish(self, consumer: Consumer, planner: LoadPlanner) -> None:
        """All bytes of this item are there."""
        item, location, target = consumer.item, consumer.location, consumer.target
        if isinstance(target, BytesTarget):
            content: bytes | bytearray = target.content
            target.release()
            if location.transforms:
                content = self._untransformed(consumer, content)
            if consumer.tensor is None:
                planner.load_bytes(item, self._value(item, content))
                return
            assert location.dtype is not None  # noqa: S101  # it is a tensor's
            chunk = chunk_of(content, location.dtype, location.lengths)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dim, offset, length)
            consumer.tensor.copy_(chunk)
        assert consumer.tensor is not None  # noqa: S101  # the value's case returned
        planner.commit_tensor(item, consumer.tensor)

    def _untransformed(self, consumer: Consumer, stored: bytes | bytearray) -> bytearray:
        item, location, uri = consumer.item, consumer.location, self._context.uri
        fqn, read_bytes = item.storage_index.fqn, self._context.options.read_bytes
        if location.dtype is None:
            content = self._transforms.undo(location.transforms, stored, max_bytes=read_bytes, fqn=fqn, uri=uri)
            if content is None:
                raise CheckpointError(
                    f"the value {fqn!r} of {uri} unpacks to more than Options(read_bytes={read_bytes}). If that is no "
                    "surprise, load with a larger one",
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
        return harmless_copy(
            content, item.storage_index.fqn, uri=self._context.uri, is_verified=self._context.options.verify
        )


def _others(requests: Iterable[Request], num_whole: int) -> Iterator[int]:
    """Which of the consumers beyond the first `num_whole` the requests bring some of, once for each want."""
    for request in requests:
        for want in request.wants:
            if want.consumer >= num_whole:
                yield want.consumer - num_whole
