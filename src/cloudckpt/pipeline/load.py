"""One load on one rank: from the plan's items to ranged reads to filled tensors."""

from __future__ import annotations

import bisect
import contextlib
import functools
import queue
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from typing_extensions import Self

from cloudckpt._this_process import rare_collections
from cloudckpt._workers import each_done
from cloudckpt.commit.manifest_log import resolve
from cloudckpt.distributed.shared_reads.exchange import Exchange
from cloudckpt.distributed.shared_reads.plan import Range, Segment, wanted_ranges
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    ObjectNotFoundError,
)
from cloudckpt.format.codec import unpack_tiles
from cloudckpt.format.model import ItemLocation, Manifest
from cloudckpt.format.torch_metadata import locate_chunk
from cloudckpt.io.checksum import compute_tile_crc32cs
from cloudckpt.io.download import fetch, fetch_and_verify, measure, stage_targets
from cloudckpt.io.reads import RangeRead, WantedRange, plan_reads, spread_over_connections
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.consumers import Consumers, Finisher, LoadItems, consumers_of
from cloudckpt.pipeline.context import Context
from cloudckpt.report import LoadReport
from cloudckpt.stores.base import Views
from cloudckpt.tensors.casts import log_precision
from cloudckpt.tensors.extensions import ReadTransforms
from cloudckpt.tensors.host_memory import Arena, new_arena
from cloudckpt.tensors.load_targets import BytesTarget, open_request
from cloudckpt.tensors.tensor_bytes import synchronize_streams

_UNVERIFIED_TILE_BYTES = 64  # keeps elements of every size whole in each request
_NO_BOUND = 1 << 62
_UNSEEN_BYTES = 16 * MIB
"""Values and transformed chunks of one object that take more memory than this are believed only after a HEAD."""
_REQUESTS_PER_CONNECTION = 4
_SMALL_REQUEST_BYTES = 8 * MIB
_SHARED_READS = 8  # of a load that hands bytes on; smaller requests would cost more CPU than more of them bring


class LoadJob:
    """Reads the data of one manifest."""

    def __init__(
        self,
        context: Context,
        manifest: Manifest,
        storage_data: Mapping[MetadataIndex, ItemLocation],
        *,
        transforms: ReadTransforms,
        allow_pickle: bool,
        exchange: Exchange | None = None,
        tensors_of: Callable[[Sequence[str]], list[torch.Tensor]] | None = None,
    ) -> None:
        self._context = context
        self._manifest = manifest
        self._storage_data = storage_data
        self._finisher = Finisher(context, transforms=transforms, allow_pickle=allow_pickle)
        self._exchange = exchange
        self._tensors_of = tensors_of
        self._tiles: dict[int, array[int]] = {}
        self._object_sizes_bytes = {index: stored.size for index, stored in enumerate(manifest.objects)}

    def run(self, plan: LoadPlan, planner: LoadPlanner) -> LoadReport:
        """Fetch what the plan asks for, and finish each item when its last byte is there."""
        context, recorder, begun_s = self._context, self._context.recorder, time.monotonic()
        staged_s, transferred_s = recorder.seconds("stage"), recorder.seconds("transfer")
        with recorder.step("read"):
            with rare_collections():
                consumers = consumers_of(
                    plan.items,
                    planner,
                    self._manifest,
                    self._storage_data,
                    tensors_of=self._tensors_of,
                    allows_lossy_casts=context.options.allow_lossy_casts,
                    uri=context.uri,
                )
                if context.rank == 0:  # one rank says it for all
                    log_precision(consumers.casts(), uri=context.uri)
                self._finisher.check(consumers)
                shares, requests = self._plan_requests(consumers)
            self._check_claims([*requests, *shares.to_receive], consumers)
            self._execute(requests, shares, consumers, planner)
        return LoadReport(
            uri=context.uri,
            attempt=self._manifest.attempt,
            rank=context.rank,
            num_bytes_wanted=consumers.num_bytes,
            num_bytes_read=sum(request.num_bytes for request in requests) + shares.num_bytes_missed,
            num_bytes_received=shares.num_bytes_received,
            num_requests=context.retrier.num_requests + context.hedger.num_hedges,
            num_retries=context.retrier.num_retries,
            num_hedges=context.hedger.num_hedges,
            plan_s=0.0,
            read_s=time.monotonic() - begun_s,
            transfer_s=recorder.seconds("transfer") - transferred_s,
            stage_s=recorder.seconds("stage") - staged_s,
        )

    def _plan_requests(self, consumers: Consumers) -> tuple[SharedReads, list[RangeRead]]:
        options = self._context.options
        synchronize_streams(consumer.tensor for consumer in consumers.others)
        wants = consumers.wants(max_gap_bytes=options.advanced.max_gap_bytes)
        shares = SharedReads(
            self._exchange, wants, requests_for=lambda some: self._requests_for(some, request_bytes=_NO_BOUND)
        )
        copied = [target.is_copied for target in consumers.targets]
        request_bytes = choose_request_bytes(self._context, shares.rest, copied, is_shared=self._exchange is not None)
        rest = self._requests_for(shares.rest, request_bytes=max(request_bytes, self._manifest.tile_bytes))
        return shares, [*shares.to_read, *rest]

    def _requests_for(self, wants: Sequence[WantedRange], *, request_bytes: int) -> list[RangeRead]:
        options = self._context.options
        return plan_reads(
            wants,
            object_sizes_bytes=self._object_sizes_bytes,
            tile_bytes=_tile_bytes(self._manifest, options),
            request_bytes=request_bytes,
            max_gap_bytes=options.advanced.max_gap_bytes,
            # The gaps may hold what another rank reads.
            max_over_read=options.advanced.max_over_read if self._exchange is None else 0.0,
        )

    def _check_claims(self, requests: Sequence[RangeRead], consumers: Consumers) -> None:
        """Check that objects are as large as the manifest says, before it alone makes this load take much memory."""
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
            raise self._explain_missing(error, names) from error
        if max(stored.size, claimed_bytes) > size_bytes:
            raise CorruptCheckpointError(
                f"{context.store.url(stored.key)} has {size_bytes} bytes, but {stored.size} were saved, of which "
                f"{claimed_bytes} are asked for. They hold {names}. Load an older checkpoint",
                uri=context.uri,
            )

    def _execute(
        self, requests: Sequence[RangeRead], shares: SharedReads, consumers: Consumers, planner: LoadPlanner
    ) -> None:
        context, hedger = self._context, self._context.hedger
        budget_bytes = context.options.read_bytes - context.hedge_bytes - shares.ring_bytes
        arena = new_arena(budget_bytes=budget_bytes)
        fetch_request = functools.partial(self._fetch, consumers=consumers, shares=shares, arena=arena)

        def receive_request(request: RangeRead, copy: Callable[[Views], bool]) -> bool:
            with open_request(request, consumers.targets, arena) as views:
                return self._receive(request, views, copy)

        def stop() -> None:
            context.retrier.stop()
            shares.stop()

        def read(some: Sequence[RangeRead]) -> Generator[RangeRead, None, None]:
            return each_done(
                some,
                fetch_request,
                num_threads=hedger.connections,
                name="cloudckpt-read",
                on_failure=stop,
            )

        reads = shares.each_done(requests, read=read, receive=receive_request)
        with contextlib.closing(arena), hedger.watching(), contextlib.closing(reads) as done:
            self._finisher.finish_all(consumers, planner, [*requests, *shares.to_receive], done)

    def _fetch(self, request: RangeRead, *, consumers: Consumers, shares: SharedReads, arena: Arena) -> None:
        context, manifest = self._context, self._manifest
        key = manifest.objects[request.object_index].key
        with (
            shares.publishing(request) as publish,
            stage_targets(open_request(request, consumers.targets, arena), key=key, recorder=context.recorder) as views,
        ):
            try:
                if context.options.verify:
                    fetch_and_verify(
                        context.store,
                        context.retrier,
                        key=key,
                        begin=request.begin,
                        views=views,
                        tile_bytes=manifest.tile_bytes,
                        expected_crc32cs=self._tiles_of(request),
                        holding=lambda begin, end: consumers.names_in(request, begin, end),
                        hedger=context.hedger,
                    )
                else:
                    fetch(
                        context.store,
                        context.retrier,
                        key=key,
                        begin=request.begin,
                        views=views,
                        hedger=context.hedger,
                    )
            except ObjectNotFoundError as error:
                names = consumers.names_in(request, request.begin, request.end)
                raise self._explain_missing(error, names) from error
            publish(views)
        context.emit("load.range_read", key=key, num_bytes=request.end - request.begin)

    def _explain_missing(self, error: ObjectNotFoundError, names: str) -> CloudckptError:
        """Return the reason why an object of the manifest is missing."""
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

    def _receive(self, request: RangeRead, views: Views, copy: Callable[[Views], bool]) -> bool:
        """Copy what another rank has read. Returns False if the bytes are not those that were saved.

        The other rank has checked them, but not its memory, nor the copy from there.
        """
        is_whole = copy(views)
        if is_whole and self._context.options.verify:
            is_whole = compute_tile_crc32cs(views, self._manifest.tile_bytes) == list(self._tiles_of(request))
        return is_whole

    def _tiles_of(self, request: RangeRead) -> array[int]:
        index, tile_bytes = request.object_index, self._manifest.tile_bytes
        if index not in self._tiles:
            self._tiles[index] = unpack_tiles(self._manifest.objects[index].crc32c)
        return self._tiles[index][request.begin // tile_bytes : -(-request.end // tile_bytes)]


class SharedReads:
    """The segments of one load that ranks of a machine share, each of which is one request; none without an exchange.

    A segment is declined if this rank does not want all of it after all: then each rank reads it itself.
    """

    def __init__(
        self,
        exchange: Exchange | None,
        wants: Sequence[WantedRange],
        *,
        requests_for: Callable[[list[WantedRange]], list[RangeRead]],
    ) -> None:
        self.rest = list(wants)
        """The wants outside of all segments."""
        self.to_read: list[RangeRead] = []
        """The segments that this rank reads for others."""
        self.num_bytes_missed = self.num_bytes_received = 0
        self._exchange = exchange
        self._published: dict[tuple[int, int], Segment] = {}
        self._received: dict[int, RangeRead] = {}
        self._awaited: list[Segment] = []
        if exchange is None:
            return
        inside, self.rest = divide_wants(wants, exchange.segments)
        for segment in exchange.segments:
            members = inside.get(segment.number, [])
            requests = requests_for(members)
            where = (segment.object_index, segment.begin, segment.end)
            if [(request.object_index, request.begin, request.end) for request in requests] != [where]:
                exchange.decline(segment)
                self.rest += members
            elif exchange.reads(segment):
                self._published[segment.object_index, segment.begin] = segment
                self.to_read += requests
            else:
                self._received[segment.number] = requests[0]
                self._awaited.append(segment)

    @property
    def to_receive(self) -> list[RangeRead]:
        """The segments that other ranks read."""
        return list(self._received.values())

    @property
    def ring_bytes(self) -> int:
        """The memory for bytes that other ranks have not copied yet."""
        return self._exchange.ring_bytes if self._exchange is not None else 0

    @contextlib.contextmanager
    def publishing(self, request: RangeRead) -> Iterator[Callable[[Views], None]]:
        """Yield the function to call with the request's bytes, once they are read and checked."""
        segment = self._published.get((request.object_index, request.begin))
        if segment is None or self._exchange is None:
            yield lambda _: None
            return
        with self._exchange.reserve(segment) as publish:
            yield publish

    def stop(self) -> None:
        """Tell the other ranks, after a failure, that no bytes come from this one."""
        if self._exchange is not None:
            self._exchange.stop()

    def each_done(
        self,
        requests: Sequence[RangeRead],
        *,
        read: Callable[[Sequence[RangeRead]], Generator[RangeRead, None, None]],
        receive: Callable[[RangeRead, Callable[[Views], bool]], bool],
    ) -> Generator[RangeRead, None, None]:
        """Yield `requests` and `to_receive`, each once it is done. Read those that other ranks did not bring.

        `receive` fills a request's views with the given function; False if the bytes did not come whole.
        """
        if self._exchange is None:
            yield from read(requests)
            return
        with _Receiver(self._exchange, self._awaited, self._received, receive) as receiver:
            with contextlib.closing(read(requests)) as done:
                for request in done:
                    yield request
                    yield from receiver.received(wait=False)
            yield from receiver.received(wait=True)
        self.num_bytes_received = receiver.num_bytes
        self.num_bytes_missed = sum(request.num_bytes for request in receiver.missed)
        if receiver.missed:
            yield from read(receiver.missed)


class _Receiver:
    """Receives the segments of other ranks in a thread, while the load reads. A context, which joins the thread."""

    def __init__(
        self,
        exchange: Exchange,
        segments: Sequence[Segment],
        requests: Mapping[int, RangeRead],
        receive: Callable[[RangeRead, Callable[[Views], bool]], bool],
    ) -> None:
        self.missed: list[RangeRead] = []
        """The segments that did not come."""
        self.num_bytes = 0
        self._exchange, self._segments, self._requests, self._receive = exchange, segments, requests, receive
        self._is_running = True
        self._done: queue.SimpleQueue[RangeRead | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cloudckpt-share", daemon=False)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._exchange.stop()
        self._thread.join()

    def received(self, *, wait: bool) -> Iterator[RangeRead]:
        """Yield the requests that have come since the last call; with `wait`, all."""
        while self._is_running:
            try:
                done = self._done.get(block=wait)
            except queue.Empty:
                return
            if done is None:
                self._is_running = False
            elif isinstance(done, BaseException):
                raise done
            else:
                yield done

    def _run(self) -> None:
        try:
            for segment, copy in self._exchange.arrivals(self._segments):
                request = self._requests[segment.number]
                if copy is not None and self._receive(request, copy):
                    self.num_bytes += request.num_bytes
                    self._done.put(request)
                else:
                    self.missed.append(request)
        except BaseException as error:  # noqa: BLE001  # the main thread raises it
            self._done.put(error)
        self._done.put(None)


def divide_wants(
    wants: Sequence[WantedRange], segments: Sequence[Segment]
) -> tuple[dict[int, list[WantedRange]], list[WantedRange]]:
    """Cut `wants` into the parts in each of the `segments`, by their number, and the parts in none.

    `segments` rise and do not overlap.
    """
    begins = [(segment.object_index, segment.begin) for segment in segments]
    inside: defaultdict[int, list[WantedRange]] = defaultdict(list)
    rest: list[WantedRange] = []
    for want in wants:
        reached = want.begin
        index = max(bisect.bisect_right(begins, (want.object_index, want.begin)) - 1, 0)
        while index < len(segments) and begins[index] < (want.object_index, want.end):
            segment = segments[index]
            index += 1
            low, high = max(segment.begin, reached), min(segment.end, want.end)
            if segment.object_index != want.object_index or low >= high:
                continue
            if reached < low:
                rest.append(want._replace(begin=reached, end=low))
            inside[segment.number].append(want._replace(begin=low, end=high))
            reached = high
        if reached < want.end:
            rest.append(want._replace(begin=reached))
    return inside, rest


def choose_request_bytes(
    context: Context, wants: Sequence[WantedRange], copied: Sequence[bool], *, is_shared: bool
) -> int:
    """Return the size of the reads that bring `wants`; `copied` says which consumers' bytes pass through a buffer.

    Reads are as large as possible, since each costs the client some CPU, but there are some for every connection.
    A load that `is_shared` hands bytes on, for which half of its memory is kept.
    """
    options = context.options
    wanted_bytes = copied_bytes = 0
    for want in wants:
        num_bytes = want.end - want.begin
        wanted_bytes += num_bytes
        copied_bytes += num_bytes * copied[want.consumer]
    most_bytes = options.advanced.request_bytes
    if is_shared:
        most_bytes = min(most_bytes, options.read_bytes // 4 // min(context.connections, _SHARED_READS))
    elif 2 * copied_bytes > wanted_bytes:  # each has a buffer, and there should be one for each connection
        most_bytes = min(most_bytes, (options.read_bytes - context.hedge_bytes) // context.connections)
    return spread_over_connections(
        wanted_bytes,
        connections=context.connections,
        num_for_each=_REQUESTS_PER_CONNECTION,
        least_bytes=_SMALL_REQUEST_BYTES,
        most_bytes=most_bytes,
    )


def wanted_by(
    plan: LoadPlan, manifest: Manifest, storage_data: Mapping[MetadataIndex, ItemLocation], options: Options
) -> list[Range]:
    """Return the bytes that a load by this plan reads, except for what does not exist."""
    return wanted_ranges(
        _locate(plan.items, manifest, storage_data),
        object_sizes_bytes={index: stored.size for index, stored in enumerate(manifest.objects)},
        tile_bytes=_tile_bytes(manifest, options),
        max_gap_bytes=options.advanced.max_gap_bytes,
    )


def _tile_bytes(manifest: Manifest, options: Options) -> int:
    """Return the unit of reads: each begins at a multiple of it."""
    return manifest.tile_bytes if options.verify else _UNVERIFIED_TILE_BYTES


def _locate(
    items: Sequence[ReadItem], manifest: Manifest, storage_data: Mapping[MetadataIndex, ItemLocation]
) -> Iterator[tuple[ItemLocation, Sequence[int], Sequence[int]]]:
    """Yield the location of each item's chunk, and the offsets and lengths of the item within it."""
    if isinstance(items, LoadItems):
        for tensor in map(manifest.tensors.__getitem__, items.fqns):
            (chunk,) = tensor.chunks
            yield locate_chunk(tensor, chunk), chunk.offsets, chunk.lengths
        items = items.others
    for item in items:
        location = storage_data.get(item.storage_index)
        if location is not None:
            yield location, item.storage_offsets, item.lengths
