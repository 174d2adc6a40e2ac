"""The reader of a checkpoint's objects: plan ranged reads, fetch them, verify them, and fill the tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

import torch

from cloudckpt._this_process import rare_collections
from cloudckpt._workers import requests_per_connection, run_all, run_as_completed
from cloudckpt.commit.log import resolve
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    TransientStoreError,
    changed_error,
)
from cloudckpt.events import EventName
from cloudckpt.format.codec import unpack_tiles
from cloudckpt.format.model import (
    ITEMSIZE_BYTES,
    Chunk,
    FilesManifest,
    ItemLocation,
    Manifest,
    StoredTensor,
    find_overlapping_chunks,
    locate_chunk,
    locate_value,
)
from cloudckpt.io.boxes import Box, intersect, split_into_boxes
from cloudckpt.io.client import StoreClient, choose_hedge_bytes
from cloudckpt.io.download import download_range, find_size, find_wrong_tiles
from cloudckpt.io.reads import RangeRead, WantedRange, plan_reads, spread_over_connections
from cloudckpt.options import MIB
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.wanted_items import TensorBytes, WantedItem, WantedItems, new_wanted_box, new_wanted_value
from cloudckpt.report import LoadReport, place_of
from cloudckpt.stores.base import Views, copy_into
from cloudckpt.telemetry.timeline import now_ns
from cloudckpt.tensors.casts import CastCheck, new_cast_check
from cloudckpt.tensors.extensions import ReadTransforms, decode_chunk
from cloudckpt.tensors.host_memory import new_arena
from cloudckpt.tensors.load_targets import BytesTarget, open_request
from cloudckpt.tensors.tensor_bytes import dtype_of, synchronize_streams, writable

if TYPE_CHECKING:
    from cloudckpt.pipeline.shared_reads import SharedReads

_log = logging.getLogger("cloudckpt")

_UNVERIFIED_TILE_BYTES = 64  # keeps elements of every size whole in each request
_MAX_UNCHECKED_BYTES = 16 * MIB
"""A read allocates more memory for values and transformed chunks of one object only after a HEAD of the object."""
_SMALL_REQUEST_BYTES = 8 * MIB
_MAX_KEPT_BYTES = 512 * MIB
"""The size of all chunks that a reader keeps, unless a single one is larger."""
_LOAD_AN_OLDER_ONE = "Load an older checkpoint"
_MAX_NAMED = 5


class CheckpointReader:
    """Reads the objects of one manifest, and checks each byte.

    `read` fills all targets of a load, and `read_bytes` buffers with the bytes of tensors, across chunks. Both read in
    threads of their own. `read_tiles` reads whole tiles of one object in the caller's thread. Safe to share between
    threads.

    Args:
        context: Location of the checkpoint.
        manifest: Manifest to read from.
        fallback_copy: Copy of the same save, for the objects that cannot be read at `context`.
        transforms: Undo the transforms of the save; by default, with the extensions of the context's options.
        is_of_other_host: The manifest is that of another host, which may have its objects in a directory of its own.

    Raises:
        CorruptCheckpointError: An object is missing, cut or damaged. The message names the entries in it.
        CheckpointChangedError: An object is missing because the checkpoint was overwritten or removed.

    Example::

        reader = CheckpointReader(context, resolve(context.client).manifest)
        buffer = torch.empty(16, dtype=torch.uint8)
        reader.read_bytes([TensorBytes(name="model.weight", begin=0, end=16, buffer=buffer)])

    """

    def __init__(
        self,
        context: Context,
        manifest: Manifest,
        *,
        fallback_copy: FallbackCopy | None = None,
        transforms: ReadTransforms | None = None,
        is_of_other_host: bool = False,
    ) -> None:
        self.context = context
        self.manifest = manifest
        self._fallback_copy = fallback_copy
        self._is_of_other_host = is_of_other_host
        self._transforms = transforms or ReadTransforms(None, context.options.extensions)
        self._tiles: dict[int, array[int]] = {}
        self._unpack_lock = threading.Lock()
        self._read_indices: set[int] = set()
        self._is_verified = context.options.verify and manifest.has_checksums
        self._unpacked: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        """Whole chunks that `read_bytes` keeps, by tensor and offsets, in the order of their last use."""

    def read(self, wanted: WantedItems, *, shared: SharedReads | None = None) -> LoadReport:
        """Fill the targets of all `wanted`, and return the report. With `shared`, ranks send each other bytes.

        Calls `WantedItem.receive` in this thread, once the last byte of the item has arrived and is verified.
        """
        context, recorder, begun_s = self.context, self.context.recorder, time.monotonic()
        staged_s, transferred_s = recorder.seconds("stage"), recorder.seconds("transfer")
        with recorder.step("read"):
            with rare_collections():
                self._check_extensions(wanted)
                requests = self._plan(wanted, max_request_bytes=None if shared is None else shared.max_range_bytes)
            self._read_indices.update(request.object_index for request in requests)
            self._check_sizes(requests, wanted)
            if shared is not None and not shared.plan(requests, read_bytes=context.options.read_bytes):
                requests, shared = self._plan(wanted, max_request_bytes=None), None
            hedger, arena = context.client.hedger, new_arena(budget_bytes=_buffer_bytes(context))
            read = functools.partial(
                self.read_tiles,
                open_views=functools.partial(open_request, targets=wanted.targets, arena=arena),
                names_in=wanted.names_in,
                is_verified=self._is_verified,
                event="load.range_read",
            )
            read_all = functools.partial(
                run_as_completed, num_threads=self._num_connections, name="cloudckpt-read", on_failure=self._stop
            )
            reads = read_all(requests, read) if shared is None else shared.run(read, read_all, self._stop)
            # Python leaves the contexts in reverse order: the reads, which use the other two, end first.
            with contextlib.closing(arena), hedger.watching(), contextlib.closing(reads) as reads_done:
                self._hand_over(wanted, requests, reads_done)
        num_bytes_received = 0 if shared is None else shared.num_bytes_received
        return LoadReport(
            uri=context.uri,
            place=place_of(context.options.metadata),
            attempt=self.manifest.attempt,
            rank=context.rank,
            num_bytes_wanted=wanted.num_bytes,
            num_bytes_read=sum(request.num_bytes for request in requests) - num_bytes_received,
            num_bytes_received=num_bytes_received,
            num_requests=sum(context.client.num_requests for context in self._contexts()),
            num_retries=sum(context.client.num_retries for context in self._contexts()),
            num_hedges=hedger.num_hedges,
            num_objects_of_copy=0 if self._fallback_copy is None else len(self._fallback_copy.read_indices),
            plan_s=0.0,
            read_s=time.monotonic() - begun_s,
            transfer_s=recorder.seconds("transfer") - transferred_s,
            stage_s=recorder.seconds("stage") - staged_s,
        )

    def read_bytes(
        self,
        wanted: Sequence[TensorBytes],
        *,
        values: Mapping[str, Callable[[bytes | bytearray], object]] | None = None,
    ) -> None:
        """Fill the buffers of all `wanted`. `values` are the receivers of stored values by name.

        A chunk that was saved through an extension can only be unpacked whole. If a part of it is wanted, one chunk is
        unpacked at a time. The reader keeps the last chunks for the next reads, up to `_MAX_KEPT_BYTES` in all.
        """
        items = [item for tensor_bytes in wanted for item in self._wanted_items_of(tensor_bytes)]
        for name, receive in (values or {}).items():
            items.append(new_wanted_value(name, locate_value(self.manifest.values[name]), receive))
        if items:
            self.read(WantedItems(items))

    def locate(self, object_index: int) -> tuple[StoreClient, str]:
        """Return the client of the folder that holds an object, and the object's key there.

        The folder may be another checkpoint's.
        """
        stored = self.manifest.objects[object_index]
        return self.context.client_at(stored.folder), stored.key

    def read_tiles(
        self,
        request: RangeRead,
        *,
        open_views: Callable[[RangeRead], AbstractContextManager[Views]],
        names_in: Callable[[RangeRead, int, int], str],
        is_verified: bool,
        event: EventName | None = None,
        received: memoryview | None = None,
    ) -> None:
        """Read one range of whole tiles of one object, in this thread.

        Args:
            request: The range.
            open_views: Opens the memory to read into. The reader closes it once the range is read and verified.
            names_in: Returns the names of the tensors and values in a byte range of the object, for a message.
            is_verified: Compare the checksums of the tiles.
            event: The event to emit at the end.
            received: The bytes of the range, from another rank. Tiles of it that are damaged are read from the store.

        """
        client, key = self.locate(request.object_index)
        recorder, begun_ns = client.recorder, now_ns()
        with open_views(request) as views:
            recorder.span("stage", begun_ns, key=key)
            recorder.add_time_since("stage", begun_ns)
            names = functools.partial(names_in, request, request.begin, request.end)

            def read_copy(reader: CheckpointReader) -> None:
                reader.read_tiles(
                    request,
                    open_views=lambda _: contextlib.nullcontext(views),
                    names_in=names_in,
                    is_verified=is_verified,
                )

            with self._falling_back_to_copy(request.object_index, read_copy, names):
                self._raise_known_failure(request.object_index)
                if received is None:
                    download_range(client, key=key, begin=request.begin, views=views)
                else:
                    copy_into(views, received)
                if is_verified:
                    self._check_tiles(request, views, names_in)
            begun_ns = now_ns()
        recorder.span("place", begun_ns, key=key)
        recorder.add_time_since("stage", begun_ns)
        if event is not None:
            self.context.emit(event, key=key, num_bytes=request.num_bytes)

    def _check_tiles(self, request: RangeRead, views: Views, names_in: Callable[[RangeRead, int, int], str]) -> None:
        """Raise `CorruptCheckpointError` unless all tiles in `views` have their checksums."""
        wrong = self.compare_tiles(request, views)
        if not wrong:
            return
        client, key = self.locate(request.object_index)
        index, actual = next(iter(wrong.items()))
        low = request.begin + index * self.manifest.tile_bytes
        high = min(low + self.manifest.tile_bytes, request.end)
        raise CorruptCheckpointError(
            f"{client.url(key)} is damaged: bytes [{low}, {high}) have CRC32C {actual:08x}, but "
            f"{self.tiles_of(request)[index]:08x} was saved. They hold {names_in(request, low, high)}. "
            f"{_LOAD_AN_OLDER_ONE}",
            uri=self.context.uri,
        )

    @contextlib.contextmanager
    def _falling_back_to_copy(
        self, index: int, read: Callable[[CheckpointReader], None], names: Callable[[], str]
    ) -> Iterator[None]:
        """Let the body read object `index` here. If it fails, call `read` with the reader of the copy.

        If both fail, raise an error of the store rather than one that reports damage. `names` returns the names of the
        object's entries, for the message.
        """
        copy_of_save = self._fallback_copy
        try:
            yield
        except (StoreError, CorruptCheckpointError) as error:
            if copy_of_save is None:
                self._raise(error, index, names())
            failure = copy_of_save.note_failure(index, error)
        else:
            return
        client, key = self.locate(index)
        copy_of_save.note_reading(index, client.url(key), failure)
        try:
            read(copy_of_save.open())
        except (StoreError, CheckpointError) as error:
            _log.warning("the copy in %s is of no use: %s", copy_of_save.context.uri, error)
            if is_no_answer(error) and not is_no_answer(failure):
                raise
            self._raise(copy.copy(failure), index, names())

    def _raise_known_failure(self, index: int) -> None:
        """Raise the failure after which object `index` is read from the copy alone."""
        failure = None if self._fallback_copy is None else self._fallback_copy.failure_of(index)
        if failure is not None:
            raise copy.copy(failure)

    def _raise(self, error: Exception, index: int, names: str) -> NoReturn:
        """Raise `error`, or an error that says which entries (`names`) are lost with object `index`."""
        client, key = self.locate(index)
        if isinstance(error, ObjectNotFoundError):
            raise self._explain_missing(client.url(key), names) from error
        if isinstance(error, ShortObjectError) and self._is_any_replaced([index]):
            raise self._changed_error() from error
        if isinstance(error, ShortObjectError):
            raise CorruptCheckpointError(
                f"{client.url(key)} is shorter than when it was saved, so {names} cannot be loaded: {error}",
                uri=self.context.uri,
            ) from error
        raise error

    def _contexts(self) -> list[Context]:
        """Return the contexts that this reader has read from."""
        copy_of_save = self._fallback_copy
        return (
            [self.context]
            if copy_of_save is None or not copy_of_save.read_indices
            else [self.context, copy_of_save.context]
        )

    def _num_connections(self) -> int:
        return max(context.client.hedger.connections_now() for context in self._contexts())

    def _stop(self) -> None:
        self.context.stop()
        if self._fallback_copy is not None:
            self._fallback_copy.context.stop()

    def compare_tiles(self, request: RangeRead, views: Views) -> dict[int, int]:
        """Return index and actual CRC32C of each damaged tile of the request. `views` hold the request's bytes."""
        client, key = self.locate(request.object_index)
        return find_wrong_tiles(
            client,
            key=key,
            begin=request.begin,
            views=views,
            tile_bytes=self.manifest.tile_bytes,
            expected_crc32cs=self.tiles_of(request),
        )

    def tiles_of(self, request: RangeRead) -> array[int]:
        """Return the saved checksums of the request's tiles."""
        index, tile_bytes = request.object_index, self.manifest.tile_bytes
        if index not in self._tiles:
            self._tiles[index] = unpack_tiles(self.manifest.objects[index].crc32c)
        return self._tiles[index][request.begin // tile_bytes : -(-request.end // tile_bytes)]

    def measure_object(self, object_index: int) -> int | None:
        """Return the size of an object in the store, or None if it is missing."""
        client, key = self.locate(object_index)
        return find_size(client, key=key, size_bytes=self.manifest.objects[object_index].size)

    def check_unchanged(self, *, every: bool = False) -> None:
        """Raise `CheckpointChangedError` if a file without checksums was replaced since its header was read.

        Call it after the last read. It asks for the files that this reader has read, or for `every` file. It makes no
        request for a checkpoint with checksums, whose objects never change.
        """
        if self._is_any_replaced(range(len(self.manifest.objects)) if every else sorted(self._read_indices)):
            raise self._changed_error()

    def has_changed(self) -> bool:
        """Return True if the checkpoint was removed or replaced since its manifest was read."""
        if isinstance(self.manifest, FilesManifest):
            return self._is_any_replaced(range(len(self.manifest.objects)))
        if self._is_of_other_host:  # the manifest here, if there is one, may be of an earlier save
            return False
        try:
            return resolve(self.context.client.unstopped_copy()).manifest.attempt != self.manifest.attempt
        except (CheckpointNotFoundError, CheckpointChangedError):
            return True

    def _is_any_replaced(self, indices: Sequence[int]) -> bool:
        """Return True if one of these safetensors files was replaced since its header was read."""
        manifest, client = self.manifest, self.context.client.unstopped_copy()
        if not isinstance(manifest, FilesManifest):
            return False
        replaced: list[int] = []

        def look(index: int) -> None:
            def is_replaced() -> bool:
                info = client.head(manifest.objects[index].key)
                return info is None or info.write_id != manifest.write_ids[index]

            if client.confirm(is_replaced, unconfirmed=bool):
                replaced.append(index)

        num_threads = self._num_connections
        run_all(indices, look, num_threads=num_threads, name="cloudckpt-check", on_failure=client.stop)
        return bool(replaced)

    def _explain_missing(self, url: str, names: str) -> CheckpointError:
        """Return the error for a missing object of the manifest: the checkpoint has changed, or is damaged."""
        if self.has_changed():
            return self._changed_error()
        uri = self.context.uri
        return CorruptCheckpointError(f"{url} is missing, and with it {names}. {_LOAD_AN_OLDER_ONE}", uri=uri)

    def _changed_error(self) -> CheckpointChangedError:
        uri, rank = self.context.uri, self.context.rank
        apart = ""
        if rank and self.context.store.capabilities.is_near:
            apart = f", unless rank {rank} sees another directory there than rank 0 (a mount that its host lacks?)"
        advice = "The result is not usable: load again, or repeat the command"
        return changed_error(uri, doing=f"read{apart}", advice=advice)

    def _check_extensions(self, wanted: WantedItems) -> None:
        """Raise for a missing extension before anything is read."""
        checked: set[tuple[str, ...]] = set()
        for item in wanted.items:
            descriptors = item.location.transforms
            if descriptors and descriptors not in checked:
                checked.add(descriptors)
                self._transforms.check(descriptors, fqn=item.name, uri=self.context.uri)

    def _plan(self, wanted: WantedItems, *, max_request_bytes: int | None) -> list[RangeRead]:
        options, manifest = self.context.options, self.manifest
        synchronize_streams(item.tensor for item in wanted.items)
        max_gap_bytes = options.advanced.max_gap_bytes
        ranges = wanted.ranges(max_gap_bytes=max_gap_bytes)
        request_bytes = choose_request_bytes(self.context, ranges, [target.is_copied for target in wanted.targets])
        return plan_reads(
            ranges,
            object_sizes_bytes={index: stored.size for index, stored in enumerate(manifest.objects)},
            tile_bytes=manifest.tile_bytes if self._is_verified else _UNVERIFIED_TILE_BYTES,
            request_bytes=max(min(request_bytes, max_request_bytes or request_bytes), manifest.tile_bytes),
            max_gap_bytes=max_gap_bytes,
            max_over_read=options.advanced.max_over_read,
            is_aligned=max_request_bytes is not None,
        )

    def _check_sizes(self, requests: Sequence[RangeRead], wanted: WantedItems) -> None:
        """Check that objects are as large as the manifest says, before this read allocates memory of that size."""
        locations: defaultdict[int, dict[tuple[str, int], ItemLocation]] = defaultdict(dict)
        for item in wanted.items:
            if isinstance(item.target, BytesTarget):
                locations[item.location.object_index][item.name, item.location.begin] = item.location
        claimed_bytes = {
            index: sum(location.end - location.begin for location in of_object.values())
            for index, of_object in locations.items()
        }
        read_bytes = self.context.options.read_bytes
        large = {request.object_index: request for request in requests if request.num_bytes > read_bytes}  # one tile
        claims = {index for index, num_bytes in claimed_bytes.items() if num_bytes > _MAX_UNCHECKED_BYTES}
        for index in sorted(large.keys() | claims):
            names = ", ".join(repr(name) for name, _ in locations[index])
            if not names:
                names = wanted.names_in(large[index], large[index].begin, large[index].end)
            check = functools.partial(
                CheckpointReader._check_size, index=index, claimed_bytes=claimed_bytes.get(index, 0), names=names
            )
            with self._falling_back_to_copy(index, check, functools.partial(str, names)):
                self._raise_known_failure(index)
                check(self)

    def _check_size(self, *, index: int, claimed_bytes: int, names: str) -> None:
        """Raise unless object `index` exists, with all bytes that were saved and all bytes that are wanted."""
        stored, size_bytes = self.manifest.objects[index], self.measure_object(index)
        store = self.locate(index)[0].store
        if size_bytes is None:
            raise store.error(ObjectNotFoundError, "head", stored.key, "there is no such object.")
        if size_bytes < max(stored.size, claimed_bytes):
            raise CorruptCheckpointError(
                f"{store.url(stored.key)} has {size_bytes} bytes, but {stored.size} were saved, of "
                f"which {claimed_bytes} are asked for. They hold {names}. {_LOAD_AN_OLDER_ONE}",
                uri=self.context.uri,
            )

    def _hand_over(self, wanted: WantedItems, requests: Sequence[RangeRead], reads_done: Iterable[RangeRead]) -> None:
        """Hand over each wanted item once the last of its `requests` is done, and at once if it has none.

        The whole tensors of `WantedItems` have no receiver.
        """
        context, num_reads_open = self.context, len(requests)
        num_reads_left = [0] * len(wanted.items)
        for request in requests:
            for number in wanted.numbers_of_items(request.wanted):
                num_reads_left[number] += 1
        for item, num_ranges in zip(wanted.items, num_reads_left, strict=True):
            if not num_ranges:  # empty
                self._finish(item)
        for request in reads_done:
            num_reads_open -= 1
            for number in wanted.numbers_of_items(request.wanted):
                num_reads_left[number] -= 1
                if not num_reads_left[number]:
                    self._finish(wanted.items[number])
        if num_reads_open or any(num_reads_left):
            raise CheckpointError(
                f"the load of {context.uri} ended before all was read. What was loaded is not usable; load again",
                uri=context.uri,
            )

    def _finish(self, item: WantedItem) -> None:
        """Undo the transforms and casts of an item, all of whose bytes have arrived, and hand it over."""
        location, target, tensor = item.location, item.target, item.tensor
        received: bytes | bytearray | torch.Tensor | None = tensor
        if isinstance(target, BytesTarget):
            received = target.content
            target.release()
            if location.transforms:
                received = self._undo_transforms(item, received)
            if tensor is not None and location.dtype is not None:
                part = decode_chunk(received, location.dtype, location.lengths)[item.box.slices]
                with writable([tensor]):
                    tensor.copy_(part if item.cast is None else item.cast.check(part))
                received = tensor
        if item.receive is not None:
            item.receive(received)

    def _undo_transforms(self, item: WantedItem, stored: bytes | bytearray) -> bytearray:
        location, uri = item.location, self.context.uri
        fqn, read_bytes = item.name, self.context.options.read_bytes
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
                f"{list(location.lengths)} of {location.dtype} take. {_LOAD_AN_OLDER_ONE}",
                uri=uri,
            )
        return content

    def _wanted_items_of(self, wanted: TensorBytes) -> Iterator[WantedItem]:
        """Yield the wanted items that fill one buffer."""
        tensor = self.manifest.tensors[wanted.name]
        dtype = wanted.dtype or tensor.dtype
        itemsize_bytes, stored_dtype = ITEMSIZE_BYTES[dtype], dtype_of(tensor.dtype)
        elements = wanted.buffer.view(dtype_of(dtype))
        cast = self.find_cast(wanted.name, stored_dtype, elements)
        position = 0
        for box in split_into_boxes(wanted.begin // itemsize_bytes, wanted.end // itemsize_bytes, tensor.shape):
            size = math.prod(box.lengths)
            elements_of_box = elements[position : position + size].view(box.lengths)
            position += size
            for chunk, overlap in _find_chunks(tensor.chunks, box):
                within = overlap.relative_to(chunk.offsets)
                target = elements_of_box  # not a view of it: there can be very many, and each takes memory
                if overlap.lengths != box.lengths:
                    target = elements_of_box[overlap.relative_to(box.offsets).slices]
                if tensor.transforms and overlap.lengths != chunk.lengths:
                    unpacked = self._unpack_kept(wanted.name, tensor, chunk)[within.slices]
                    target.copy_(unpacked if cast is None else cast.check(unpacked))
                    continue
                is_cast = dtype != tensor.dtype
                location = locate_chunk(tensor, chunk)
                yield new_wanted_box(wanted.name, location, within, target, cast=cast, needs_alignment=is_cast)

    def find_cast(self, name: str, stored: torch.dtype, tensor: torch.Tensor) -> CastCheck | None:
        """Return the check of a cast to the dtype of `tensor`, unless none is needed or the options allow any loss."""
        if self.context.options.allow_lossy_casts is True:
            return None
        return new_cast_check(name, stored, tensor, uri=self.context.uri, remedy="Choose another dtype")

    def _unpack_kept(self, name: str, tensor: StoredTensor, chunk: Chunk) -> torch.Tensor:
        """Return a chunk that can only be unpacked whole, and keep it."""
        key = (name, chunk.offsets)
        with self._unpack_lock:  # a second thread that needs the chunk waits instead of unpacking it again
            whole = self._unpacked.pop(key, None)
            if whole is None:
                num_bytes = math.prod(chunk.lengths) * ITEMSIZE_BYTES[tensor.dtype]
                self._make_room(num_bytes)
                buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                whole = buffer.view(dtype_of(tensor.dtype)).view(chunk.lengths)
                within = Box((0,) * len(chunk.lengths), chunk.lengths)
                self.read(WantedItems([new_wanted_box(name, locate_chunk(tensor, chunk), within, whole)]))
            self._unpacked[key] = whole
            return whole

    def _make_room(self, num_bytes: int) -> None:
        while self._unpacked and sum(kept.nbytes for kept in self._unpacked.values()) + num_bytes > _MAX_KEPT_BYTES:
            self._unpacked.pop(next(iter(self._unpacked)))


class FallbackCopy:
    """The copy of a save at a farther place, for objects that cannot be read at the reader's own, nearer place.

    `CheckpointReader` opens the copy for the first such object. `context` is the place of the copy, and `manifest` the
    manifest at the nearer place. Thread-safe.
    """

    def __init__(self, context: Context, manifest: Manifest) -> None:
        self.context = context
        self._manifest = manifest
        self._lock = threading.Lock()
        self._reader: CheckpointReader | None = None
        self._refusal: Exception | None = None
        self._place_failure: Exception | None = None
        """The failure after which no object is read at the nearer place any more."""
        self._failures: dict[int, Exception] = {}
        """The failure of each object that could not be read at the nearer place."""
        self.read_indices: set[int] = set()
        """The indices of the objects that were requested from the copy."""

    def failure_of(self, index: int) -> Exception | None:
        """Return the failure after which object `index` is no longer read at the nearer place, or None."""
        return self._failures.get(index) or self._place_failure

    def note_failure(self, index: int, error: Exception) -> Exception:
        """Keep the failure to read object `index` at the nearer place, and return it without its traceback."""
        failure = copy.copy(error)
        self._failures[index] = failure
        if isinstance(failure, TransientStoreError):
            self._place_failure = failure
        return failure

    def open(self) -> CheckpointReader:
        """Return a reader of the copy. Raises the reason if there is no copy of this save."""
        with self._lock:
            if self._refusal is not None:
                raise copy.copy(self._refusal)
            if self._reader is None:
                try:
                    manifest = resolve(self.context.client).manifest
                    if not manifest.is_copy_of(self._manifest):
                        raise CheckpointNotFoundError(f"{self.context.uri} holds another save", uri=self.context.uri)
                except (StoreError, CheckpointError) as error:
                    self._refusal = copy.copy(error)
                    raise
                self._reader = CheckpointReader(self.context, manifest)
            return self._reader

    def note_reading(self, index: int, url: str, failure: Exception) -> None:
        """Count an object that is read from the copy, and log the first few."""
        with self._lock:
            if index in self.read_indices:
                return
            self.read_indices.add(index)
            number = len(self.read_indices)
        if number <= _MAX_NAMED:
            why = str(failure).removesuffix(f". {_LOAD_AN_OLDER_ONE}")
            _log.warning("reading the copy of %s in %s, because of this failure: %s", url, self.context.uri, why)
        elif number == _MAX_NAMED + 1:
            _log.warning("reading the copies of more objects in %s, which are not named", self.context.uri)


def is_no_answer(error: Exception) -> bool:
    """Return True if a call to the store failed, for another reason than a missing or short object."""
    return isinstance(error, StoreError) and not isinstance(error, (ObjectNotFoundError, ShortObjectError))


def _find_chunks(chunks: Sequence[Chunk], box: Box) -> Iterator[tuple[Chunk, Box]]:
    """Yield the chunks that overlap `box`, each with the overlap."""
    positions = find_overlapping_chunks(chunks, box.offsets, box.lengths) if len(chunks) > 1 else None
    for chunk in chunks if positions is None else [chunks[position] for position in positions]:
        overlap = intersect(box, Box(chunk.offsets, chunk.lengths))
        if overlap is not None:
            yield chunk, overlap


def choose_request_bytes(context: Context, ranges: Sequence[WantedRange], are_copied: Sequence[bool]) -> int:
    """Return the size of the requests that read `ranges`. For each target, `are_copied` is True if it needs a buffer.

    Each request costs the client some CPU, so requests are as large as they can be while every connection has a few.
    """
    wanted_bytes = copied_bytes = 0
    for wanted in ranges:
        num_bytes = wanted.end - wanted.begin
        wanted_bytes += num_bytes
        copied_bytes += num_bytes * are_copied[wanted.target_number]
    max_bytes = context.options.advanced.request_bytes
    if 2 * copied_bytes > wanted_bytes:  # each read takes a buffer, and each connection should have one
        max_bytes = min(max_bytes, _buffer_bytes(context) // context.max_connections)
    return spread_over_connections(
        wanted_bytes,
        connections=context.max_connections,
        requests_per_connection=requests_per_connection(),
        min_bytes=_SMALL_REQUEST_BYTES,
        max_bytes=max_bytes,
    )


def _buffer_bytes(context: Context) -> int:
    """Return how much memory the buffers of a read may take."""
    return context.options.read_bytes - choose_hedge_bytes(context.options)
