"""One load on one rank: from the plan's items to ranged reads to filled tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from cloudckpt._collecting import rare_collections
from cloudckpt._commit.resolve import resolve
from cloudckpt._manifest.codec import unpack_tiles
from cloudckpt._manifest.dtypes import ITEMSIZE_BYTES
from cloudckpt._manifest.model import Manifest
from cloudckpt._manifest.receipts import ItemLocation
from cloudckpt._pipeline.consumers import Consumer, consumers_of, names_in
from cloudckpt._pipeline.context import Context
from cloudckpt._plan.reads import Request, plan_requests
from cloudckpt._stage.arena import Arena, cuda_in_use
from cloudckpt._stage.scatter import opened
from cloudckpt._stage.targets import BytesTarget, Target, TensorTarget, keep_apart
from cloudckpt._stage.tensors import synchronize
from cloudckpt._stage.transforms import ReadTransforms, chunk_of
from cloudckpt._stage.values import harmless_copy
from cloudckpt._transfer.download import fetch, fetch_verified
from cloudckpt._transfer.staging import placing
from cloudckpt._workers import each_done
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from cloudckpt.options import MIB

_UNVERIFIED_TILE_BYTES = 64  # keeps elements of every size whole in each request
_MIN_REQUESTS_PER_CONNECTION = 4
_SMALL_REQUEST_BYTES = 8 * MIB
_UNSEEN_BYTES = 16 * MIB
"""Of values and transformed chunks of one object, as much as is believed to be there without a look."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """How much was moved."""

    num_bytes_wanted: int
    num_bytes_read: int


class LoadJob:
    """Reads of one manifest's data."""

    def __init__(
        self,
        context: Context,
        manifest: Manifest,
        storage_data: Mapping[MetadataIndex, ItemLocation],
        *,
        transforms: ReadTransforms,
        allow_pickle: bool,
    ) -> None:
        self._context = context
        self._manifest = manifest
        self._storage_data = storage_data
        self._transforms = transforms
        self._allow_pickle = allow_pickle
        self._tiles: dict[int, array[int]] = {}

    def run(self, plan: LoadPlan, planner: LoadPlanner) -> Loaded:
        """Fetch all that the plan asks for, and finish each item as its last byte arrives."""
        with rare_collections():
            consumers = consumers_of(plan.items, planner, self._storage_data, uri=self._context.uri)
            requests = self._requests_for(consumers)
        self._check_claims(requests, consumers)
        self._execute(requests, consumers, planner)
        return Loaded(
            num_bytes_wanted=sum(consumer.target.num_bytes for consumer in consumers),
            num_bytes_read=sum(request.end - request.begin for request in requests),
        )

    def _requests_for(self, consumers: Sequence[Consumer]) -> list[Request]:
        options = self._context.options
        synchronize(consumer.tensor for consumer in consumers)
        wants = [
            want
            for index, consumer in enumerate(consumers)
            for want in consumer.target.wants(index, max_gap_bytes=options.max_gap_bytes)
        ]
        keep_apart(consumer.target for consumer in consumers if isinstance(consumer.target, TensorTarget))
        return plan_requests(
            wants,
            object_sizes_bytes={index: stored.size for index, stored in enumerate(self._manifest.objects)},
            tile_bytes=self._manifest.tile_bytes if options.verify else _UNVERIFIED_TILE_BYTES,
            request_bytes=self._request_bytes(sum(want.end - want.begin for want in wants)),
            max_gap_bytes=options.max_gap_bytes,
            max_over_read=options.max_over_read,
        )

    def _request_bytes(self, num_bytes: int) -> int:
        """Large reads cost the client least, but a load should have some for every connection."""
        options = self._context.options
        share_bytes = num_bytes // (_MIN_REQUESTS_PER_CONNECTION * self._context.first_connections)
        return min(max(share_bytes, _SMALL_REQUEST_BYTES), options.request_bytes)

    def _check_claims(self, requests: Sequence[Request], consumers: Sequence[Consumer]) -> None:
        """Before memory is taken on the manifest's word alone: the objects have to be as large as it says."""
        held: defaultdict[int, dict[MetadataIndex, ItemLocation]] = defaultdict(dict)
        for consumer in consumers:
            if isinstance(consumer.target, BytesTarget):
                held[consumer.location.object_index][consumer.item.storage_index] = consumer.location
        claimed = {index: sum(at.end - at.begin for at in items.values()) for index, items in held.items()}
        doubtful = {index for index, num_bytes in claimed.items() if num_bytes > _UNSEEN_BYTES}
        for request in requests:
            if request.end - request.begin > self._context.options.read_bytes:  # one tile, larger than all buffers
                doubtful.add(request.object_index)
        for index in sorted(doubtful):
            self._check_size(index, claimed.get(index, 0), ", ".join(map(repr, held[index])))

    def _check_size(self, object_index: int, claimed_bytes: int, names: str) -> None:
        context, stored = self._context, self._manifest.objects[object_index]
        try:
            size_bytes = context.retrier.call(lambda: context.store.head(stored.key)).size_bytes
        except ObjectNotFoundError as error:
            raise self._vanished(error, names) from error
        if max(stored.size, claimed_bytes) > size_bytes:
            raise CorruptCheckpointError(
                f"{context.store.url(stored.key)} has {size_bytes} bytes, but {stored.size} were saved, of which "
                f"{claimed_bytes} are asked for. They hold {names}. Load an older checkpoint",
                uri=context.uri,
            )

    def _execute(self, requests: Sequence[Request], consumers: Sequence[Consumer], planner: LoadPlanner) -> None:
        options = self._context.options
        outstanding = [0] * len(consumers)
        for request in requests:
            for want in request.wants:
                outstanding[want.consumer] += 1
        for consumer, num_wants in zip(consumers, outstanding, strict=True):
            if not num_wants:  # empty
                self._finish(consumer, planner)
        targets = [consumer.target for consumer in consumers]
        arena = Arena(budget_bytes=options.read_bytes - self._context.hedge_bytes, pinned=cuda_in_use())
        in_inference_mode = torch.is_inference_mode_enabled()  # which is a matter of each thread

        def fetch_request(request: Request) -> None:
            with torch.inference_mode(in_inference_mode):
                self._fetch(request, consumers, targets, arena)

        done = each_done(
            requests,
            fetch_request,
            num_threads=self._context.hedger.width,
            name="cloudckpt-read",
            on_failure=self._context.retrier.stop,
            watch=self._context.hedger.watch,
        )
        with contextlib.closing(done):
            for request in done:
                for want in request.wants:
                    outstanding[want.consumer] -= 1
                    if not outstanding[want.consumer]:
                        # Planners need not be thread-safe, so items are finished here.
                        self._finish(consumers[want.consumer], planner)

    def _fetch(self, request: Request, consumers: Sequence[Consumer], targets: Sequence[Target], arena: Arena) -> None:
        context, manifest = self._context, self._manifest
        key = manifest.objects[request.object_index].key
        with placing(opened(request, targets, arena), key=key, recorder=context.recorder) as views:
            try:
                if context.options.verify:
                    first, last = request.begin // manifest.tile_bytes, -(-request.end // manifest.tile_bytes)
                    fetch_verified(
                        context.store,
                        context.retrier,
                        key=key,
                        begin=request.begin,
                        views=views,
                        tile_bytes=manifest.tile_bytes,
                        expected_crc32cs=self._tiles_of(request.object_index)[first:last],
                        holding=lambda begin, end: names_in(request, consumers, begin, end),
                    )
                else:
                    fetch(context.store, context.retrier, key=key, begin=request.begin, views=views)
            except ObjectNotFoundError as error:
                raise self._vanished(error, names_in(request, consumers, request.begin, request.end)) from error
        context.emit("load.range_read", key=key, num_bytes=request.end - request.begin)

    def _vanished(self, error: ObjectNotFoundError, names: str) -> CloudckptError:
        """Why an object of the manifest is not there."""
        context = self._context
        try:
            has_changed = resolve(context.store, context.retrier).manifest.attempt != self._manifest.attempt
        except CheckpointNotFoundError:
            has_changed = True
        if has_changed:
            return CheckpointChangedError(
                f"{context.uri} was overwritten or removed while it was being read. What was loaded is not usable; "
                "load again",
                uri=context.uri,
            )
        return CorruptCheckpointError(
            f"{error.key} is missing, and with it {names}. Load an older checkpoint", uri=context.uri
        )

    def _tiles_of(self, object_index: int) -> array[int]:
        if object_index not in self._tiles:
            self._tiles[object_index] = unpack_tiles(self._manifest.objects[object_index].crc32c)
        return self._tiles[object_index]

    def _finish(self, consumer: Consumer, planner: LoadPlanner) -> None:
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
            content = self._transforms.undo(item, location.transforms, stored, max_bytes=read_bytes)
            if content is None:
                raise CheckpointError(
                    f"the value {fqn!r} of {uri} unpacks to more than Options(read_bytes={read_bytes}). If that is no "
                    "surprise, load with a larger one",
                    uri=uri,
                )
            return content
        num_bytes = math.prod(location.lengths) * ITEMSIZE_BYTES[location.dtype]
        content = self._transforms.undo(item, location.transforms, stored, max_bytes=num_bytes)
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
        return harmless_copy(content, item.storage_index.fqn, uri=self._context.uri)
