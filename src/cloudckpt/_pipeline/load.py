"""One load on one rank: from the plan's items to ranged reads to filled tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from cloudckpt._collecting import rare_collections
from cloudckpt._commit.resolve import resolve
from cloudckpt._manifest.codec import unpack_tiles
from cloudckpt._manifest.model import Manifest
from cloudckpt._manifest.receipts import ItemLocation
from cloudckpt._manifest.torch_views import location_of
from cloudckpt._pipeline.consumers import Consumers, consumers_of, names_in
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.finish import Finisher
from cloudckpt._pipeline.items import LoadItems
from cloudckpt._pipeline.shares import SharedSegments
from cloudckpt._pipeline.sizes import request_bytes_of
from cloudckpt._plan.reads import Request, Want, plan_requests
from cloudckpt._share.exchange import Exchange
from cloudckpt._share.plan import Range, wanted_ranges
from cloudckpt._stage.arena import Arena
from cloudckpt._stage.pinned import new_arena
from cloudckpt._stage.scatter import opened
from cloudckpt._stage.targets import BytesTarget
from cloudckpt._stage.tensors import synchronize
from cloudckpt._stage.transforms import ReadTransforms
from cloudckpt._stage.wholes import Targets
from cloudckpt._transfer.checksum import tile_crc32cs
from cloudckpt._transfer.download import fetch, fetch_verified, measure
from cloudckpt._transfer.staging import placing
from cloudckpt._workers import each_done
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from cloudckpt.options import MIB, Options
from cloudckpt.stores.base import Views

_UNVERIFIED_TILE_BYTES = 64  # keeps elements of every size whole in each request
_NO_BOUND = 1 << 62
_UNSEEN_BYTES = 16 * MIB
"""Of values and transformed chunks of one object, as much as is believed to be there without a look."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """How much was moved."""

    num_bytes_wanted: int
    num_bytes_read: int
    num_bytes_received: int


class _IncompleteCopyError(Exception):
    """The bytes of another rank did not come whole."""


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
        exchange: Exchange | None,
    ) -> None:
        self._context = context
        self._manifest = manifest
        self._storage_data = storage_data
        self._finisher = Finisher(context, transforms=transforms, allow_pickle=allow_pickle)
        self._exchange = exchange
        self._tiles: dict[int, array[int]] = {}
        self._object_sizes_bytes = {index: stored.size for index, stored in enumerate(manifest.objects)}

    def run(self, plan: LoadPlan, planner: LoadPlanner) -> Loaded:
        """Fetch all that the plan asks for, and finish each item as its last byte arrives."""
        with rare_collections():
            consumers = consumers_of(plan.items, planner, self._manifest, self._storage_data, uri=self._context.uri)
            self._finisher.check(consumers)
            shares, requests = self._requests_for(consumers)
        self._check_claims([*requests, *shares.to_receive], consumers)
        self._execute(requests, shares, consumers, planner)
        return Loaded(
            num_bytes_wanted=consumers.num_bytes,
            num_bytes_read=sum(request.num_bytes for request in requests) + shares.num_bytes_missed,
            num_bytes_received=shares.num_bytes_received,
        )

    def _requests_for(self, consumers: Consumers) -> tuple[SharedSegments, list[Request]]:
        options = self._context.options
        synchronize(consumer.tensor for consumer in consumers.others)
        wants = consumers.wants(max_gap_bytes=options.max_gap_bytes)
        consumers.keep_apart()
        shares = SharedSegments(
            self._exchange, wants, requests_for=lambda some: self._planned(some, request_bytes=_NO_BOUND)
        )
        copied = consumers.are_copied()
        request_bytes = request_bytes_of(self._context, shares.rest, copied, shares=self._exchange is not None)
        rest = self._planned(shares.rest, request_bytes=max(request_bytes, self._manifest.tile_bytes))
        return shares, [*shares.to_read, *rest]

    def _planned(self, wants: Sequence[Want], *, request_bytes: int) -> list[Request]:
        options = self._context.options
        return plan_requests(
            wants,
            object_sizes_bytes=self._object_sizes_bytes,
            tile_bytes=self._tile_bytes,
            request_bytes=request_bytes,
            max_gap_bytes=options.max_gap_bytes,
            # In the gaps may lie what another rank reads.
            max_over_read=options.max_over_read if self._exchange is None else 0.0,
        )

    @property
    def _tile_bytes(self) -> int:
        """Reads are of so many bytes, or several times that."""
        return self._manifest.tile_bytes if self._context.options.verify else _UNVERIFIED_TILE_BYTES

    def _check_claims(self, requests: Sequence[Request], consumers: Consumers) -> None:
        """Before memory is taken on the manifest's word alone: the objects have to be as large as it says."""
        held: defaultdict[int, dict[MetadataIndex, ItemLocation]] = defaultdict(dict)
        for consumer in consumers.others:
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
            size_bytes = measure(context.store, context.retrier, key=stored.key, size_bytes=stored.size)
        except ObjectNotFoundError as error:
            raise self._vanished(error, names) from error
        if max(stored.size, claimed_bytes) > size_bytes:
            raise CorruptCheckpointError(
                f"{context.store.url(stored.key)} has {size_bytes} bytes, but {stored.size} were saved, of which "
                f"{claimed_bytes} are asked for. They hold {names}. Load an older checkpoint",
                uri=context.uri,
            )

    def _execute(
        self, requests: Sequence[Request], shares: SharedSegments, consumers: Consumers, planner: LoadPlanner
    ) -> None:
        options = self._context.options
        targets = consumers.targets
        budget_bytes = options.read_bytes - self._context.hedge_bytes - shares.ring_bytes
        arena = new_arena(budget_bytes=budget_bytes)
        in_inference_mode = torch.is_inference_mode_enabled()  # which is a matter of each thread

        def fetch_request(request: Request) -> None:
            with torch.inference_mode(in_inference_mode), shares.publishing(request) as publish:
                self._fetch(request, consumers, targets, arena, publish)

        def receive_request(request: Request, copy: Callable[[Views], bool]) -> bool:
            with torch.inference_mode(in_inference_mode), contextlib.suppress(_IncompleteCopyError):
                self._receive(request, targets, arena, copy)
                return True
            return False

        def stop() -> None:
            self._context.retrier.stop()
            shares.stop()

        def read(some: Sequence[Request]) -> Generator[Request, None, None]:
            return each_done(
                some,
                fetch_request,
                num_threads=self._context.hedger.connections,
                name="cloudckpt-read",
                on_failure=stop,
                watch=self._context.hedger.watch,
            )

        reads = shares.each_done(requests, read=read, receive=receive_request)
        with contextlib.closing(arena), contextlib.closing(reads) as done:
            self._finisher.finish_all(consumers, planner, [*requests, *shares.to_receive], done)

    def _fetch(
        self,
        request: Request,
        consumers: Consumers,
        targets: Targets,
        arena: Arena,
        publish: Callable[[Views], None],
    ) -> None:
        context, manifest = self._context, self._manifest
        key = manifest.objects[request.object_index].key
        with placing(opened(request, targets, arena), key=key, recorder=context.recorder) as views:
            try:
                if context.options.verify:
                    fetch_verified(
                        context.store,
                        context.retrier,
                        key=key,
                        begin=request.begin,
                        views=views,
                        tile_bytes=manifest.tile_bytes,
                        expected_crc32cs=self._tiles_of(request),
                        holding=lambda begin, end: names_in(request, consumers, begin, end),
                    )
                else:
                    fetch(context.store, context.retrier, key=key, begin=request.begin, views=views)
            except ObjectNotFoundError as error:
                raise self._vanished(error, names_in(request, consumers, request.begin, request.end)) from error
            publish(views)
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

    def _receive(self, request: Request, targets: Targets, arena: Arena, copy: Callable[[Views], bool]) -> None:
        """Copy what another rank has read. Raises `_IncompleteCopyError` if the bytes are not those that were saved.

        The other rank has checked them, but not what its memory, or the copy from there, makes of them.
        """
        with opened(request, targets, arena) as views:
            is_whole = copy(views)
            if is_whole and self._context.options.verify:
                is_whole = tile_crc32cs(views, self._manifest.tile_bytes) == list(self._tiles_of(request))
            if not is_whole:
                raise _IncompleteCopyError

    def _tiles_of(self, request: Request) -> array[int]:
        index, tile_bytes = request.object_index, self._manifest.tile_bytes
        if index not in self._tiles:
            self._tiles[index] = unpack_tiles(self._manifest.objects[index].crc32c)
        return self._tiles[index][request.begin // tile_bytes : -(-request.end // tile_bytes)]


def wanted_by(
    plan: LoadPlan, manifest: Manifest, storage_data: Mapping[MetadataIndex, ItemLocation], options: Options
) -> list[Range]:
    """The bytes that a load by this plan will read, for others that may want the same; without what is not there."""
    return wanted_ranges(
        _located(plan.items, manifest, storage_data),
        object_sizes_bytes={index: stored.size for index, stored in enumerate(manifest.objects)},
        tile_bytes=manifest.tile_bytes if options.verify else _UNVERIFIED_TILE_BYTES,
        max_gap_bytes=options.max_gap_bytes,
    )


def _located(
    items: Sequence[ReadItem], manifest: Manifest, storage_data: Mapping[MetadataIndex, ItemLocation]
) -> Iterator[tuple[ItemLocation, Sequence[int], Sequence[int]]]:
    """Where each item's chunk lies, and which block of it the item is for."""
    if isinstance(items, LoadItems):
        for tensor in map(manifest.tensors.__getitem__, items.fqns):
            (chunk,) = tensor.chunks
            yield location_of(tensor, chunk), chunk.offsets, chunk.lengths
        items = items.others
    for item in items:
        location = storage_data.get(item.storage_index)
        if location is not None:
            yield location, item.storage_offsets, item.lengths
