"""One load on one rank: from the plan's items to ranged reads to filled tensors."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence

from cloudckpt._this_process import rare_collections
from cloudckpt._workers import each_done
from cloudckpt.commit.log import resolve
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    quote_names,
)
from cloudckpt.format.codec import unpack_tiles
from cloudckpt.format.model import ItemLocation, Manifest
from cloudckpt.io.client import choose_hedge_bytes
from cloudckpt.io.download import fetch, fetch_and_verify, measure, stage_targets
from cloudckpt.io.reads import RangeRead, WantedRange, plan_reads, spread_over_connections
from cloudckpt.options import MIB
from cloudckpt.pipeline.consumers import Consumer, Consumers, Finisher
from cloudckpt.pipeline.context import Context
from cloudckpt.report import LoadReport
from cloudckpt.tensors.casts import log_precision
from cloudckpt.tensors.extensions import ReadTransforms
from cloudckpt.tensors.host_memory import Arena, new_arena
from cloudckpt.tensors.load_targets import BytesTarget, open_request
from cloudckpt.tensors.tensor_bytes import synchronize_streams

_log = logging.getLogger("cloudckpt")

_UNVERIFIED_TILE_BYTES = 64  # keeps elements of every size whole in each request
_UNSEEN_BYTES = 16 * MIB
"""Values and transformed chunks of one object that take more memory than this are believed only after a HEAD."""
_REQUESTS_PER_CONNECTION = 4
_SMALL_REQUEST_BYTES = 8 * MIB


class LoadJob:
    """Reads the data of one manifest."""

    def __init__(
        self,
        context: Context,
        manifest: Manifest,
        *,
        transforms: ReadTransforms,
        on_value: Callable[[Consumer, bytes | bytearray], None],
        on_tensor: Callable[[Consumer], None] = lambda _: None,
    ) -> None:
        """`on_value` and `on_tensor` are called as `Finisher` says."""
        self._context = context
        self._manifest = manifest
        self._finisher = Finisher(context, transforms=transforms, on_value=on_value, on_tensor=on_tensor)
        self._tiles: dict[int, array[int]] = {}
        self._object_sizes_bytes = {index: stored.size for index, stored in enumerate(manifest.objects)}

    def run(self, consumers: Consumers) -> LoadReport:
        """Fill all that `consumers` are, and finish each item when its last byte is there."""
        context, recorder, begun_s = self._context, self._context.recorder, time.monotonic()
        staged_s, transferred_s = recorder.seconds("stage"), recorder.seconds("transfer")
        with recorder.step("read"):
            with rare_collections():
                if context.rank == 0:  # one rank says it for all
                    log_precision(consumers.casts(), uri=context.uri)
                    if dropped := consumers.dropped():
                        _log.warning(
                            "%s holds %s apart from tensors that are the same here, as tied weights are: these values "
                            "are dropped. Untie the model, unless they are equal",
                            context.uri,
                            quote_names(dropped),
                        )
                self._finisher.check(consumers)
                requests = self._plan_requests(consumers)
            self._check_claims(requests, consumers)
            self._execute(requests, consumers)
        return LoadReport(
            uri=context.uri,
            attempt=self._manifest.attempt,
            rank=context.rank,
            num_bytes_wanted=consumers.num_bytes,
            num_bytes_read=sum(request.num_bytes for request in requests),
            num_requests=context.client.num_requests,
            num_retries=context.client.num_retries,
            num_hedges=context.client.hedger.num_hedges,
            plan_s=0.0,
            read_s=time.monotonic() - begun_s,
            transfer_s=recorder.seconds("transfer") - transferred_s,
            stage_s=recorder.seconds("stage") - staged_s,
        )

    def _plan_requests(self, consumers: Consumers) -> list[RangeRead]:
        options, manifest = self._context.options, self._manifest
        synchronize_streams(consumer.tensor for consumer in consumers.others)
        wants = consumers.wants(max_gap_bytes=options.advanced.max_gap_bytes)
        request_bytes = choose_request_bytes(self._context, wants, [target.is_copied for target in consumers.targets])
        return plan_reads(
            wants,
            object_sizes_bytes=self._object_sizes_bytes,
            tile_bytes=manifest.tile_bytes if options.verify else _UNVERIFIED_TILE_BYTES,
            request_bytes=max(request_bytes, manifest.tile_bytes),
            max_gap_bytes=options.advanced.max_gap_bytes,
            max_over_read=options.advanced.max_over_read,
        )

    def _check_claims(self, requests: Sequence[RangeRead], consumers: Consumers) -> None:
        """Check that objects are as large as the manifest says, before it alone makes this load take much memory."""
        held: defaultdict[int, dict[tuple[str, int], ItemLocation]] = defaultdict(dict)
        for consumer in consumers.others:
            if isinstance(consumer.target, BytesTarget):
                location = consumer.location
                held[location.object_index][consumer.name, location.begin] = location
        claimed = {index: sum(at.end - at.begin for at in items.values()) for index, items in held.items()}
        doubtful = {index for index, num_bytes in claimed.items() if num_bytes > _UNSEEN_BYTES}
        for request in requests:
            if request.end - request.begin > self._context.options.read_bytes:  # one tile, larger than all buffers
                doubtful.add(request.object_index)
        for index in sorted(doubtful):
            self._check_size(index, claimed.get(index, 0), ", ".join(repr(name) for name, _ in held[index]))

    def _check_size(self, object_index: int, claimed_bytes: int, names: str) -> None:
        context, stored = self._context, self._manifest.objects[object_index]
        size_bytes = measure(context.client, key=stored.key, size_bytes=stored.size)
        if size_bytes is None:
            raise self._explain_missing(stored.key, names)
        if max(stored.size, claimed_bytes) > size_bytes:
            raise CorruptCheckpointError(
                f"{context.client.url(stored.key)} has {size_bytes} bytes, but {stored.size} were saved, of which "
                f"{claimed_bytes} are asked for. They hold {names}. Load an older checkpoint",
                uri=context.uri,
            )

    def _execute(self, requests: Sequence[RangeRead], consumers: Consumers) -> None:
        context, hedger = self._context, self._context.client.hedger
        arena = new_arena(budget_bytes=context.options.read_bytes - choose_hedge_bytes(context.options))
        reads = each_done(
            requests,
            functools.partial(self._fetch, consumers=consumers, arena=arena),
            num_threads=hedger.connections,
            name="cloudckpt-read",
            on_failure=context.stop,
        )
        with contextlib.closing(arena), hedger.watching(), contextlib.closing(reads) as done:
            self._finisher.finish_all(consumers, requests, done)

    def _fetch(self, request: RangeRead, *, consumers: Consumers, arena: Arena) -> None:
        context, manifest = self._context, self._manifest
        key = manifest.objects[request.object_index].key
        with stage_targets(
            open_request(request, consumers.targets, arena), key=key, recorder=context.recorder
        ) as views:
            try:
                if context.options.verify:
                    fetch_and_verify(
                        context.client,
                        key=key,
                        begin=request.begin,
                        views=views,
                        tile_bytes=manifest.tile_bytes,
                        expected_crc32cs=self._tiles_of(request),
                        holding=lambda begin, end: consumers.names_in(request, begin, end),
                    )
                else:
                    fetch(
                        context.client,
                        key=key,
                        begin=request.begin,
                        views=views,
                    )
            except ObjectNotFoundError as error:
                names = consumers.names_in(request, request.begin, request.end)
                raise self._explain_missing(key, names) from error
        context.emit("load.range_read", key=key, num_bytes=request.end - request.begin)

    def _explain_missing(self, key: str, names: str) -> CloudckptError:
        """Return the reason why an object of the manifest is missing."""
        context = self._context
        try:
            has_changed = resolve(context.client).manifest.attempt != self._manifest.attempt
        except CheckpointNotFoundError:
            has_changed = True
        if has_changed:
            return CheckpointChangedError(
                f"{context.uri} was overwritten or removed while it was being read. What was loaded is not usable; "
                "load again",
                uri=context.uri,
            )
        return CorruptCheckpointError(
            f"{context.client.url(key)} is missing, and with it {names}. Load an older checkpoint", uri=context.uri
        )

    def _tiles_of(self, request: RangeRead) -> array[int]:
        index, tile_bytes = request.object_index, self._manifest.tile_bytes
        if index not in self._tiles:
            self._tiles[index] = unpack_tiles(self._manifest.objects[index].crc32c)
        return self._tiles[index][request.begin // tile_bytes : -(-request.end // tile_bytes)]


def choose_request_bytes(context: Context, wants: Sequence[WantedRange], copied: Sequence[bool]) -> int:
    """Return the size of the reads that bring `wants`; `copied` says which consumers' bytes pass through a buffer.

    Reads are as large as possible, since each costs the client some CPU, but there are some for every connection.
    """
    options = context.options
    wanted_bytes = copied_bytes = 0
    for want in wants:
        num_bytes = want.end - want.begin
        wanted_bytes += num_bytes
        copied_bytes += num_bytes * copied[want.consumer]
    most_bytes = options.advanced.request_bytes
    if 2 * copied_bytes > wanted_bytes:  # each has a buffer, and there should be one for each connection
        most_bytes = min(most_bytes, (options.read_bytes - choose_hedge_bytes(options)) // context.connections)
    return spread_over_connections(
        wanted_bytes,
        connections=context.connections,
        num_for_each=_REQUESTS_PER_CONNECTION,
        least_bytes=_SMALL_REQUEST_BYTES,
        most_bytes=most_bytes,
    )
