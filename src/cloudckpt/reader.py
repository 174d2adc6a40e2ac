"""The DCP storage reader: where manifest, planning and transfer of a load are wired together."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from cloudckpt._commit.resolve import Resolved, holds_torch_checkpoint, resolve
from cloudckpt._legacy import TorchCheckpointReader
from cloudckpt._manifest.codec import unpack_tiles
from cloudckpt._manifest.model import Manifest
from cloudckpt._manifest.receipts import ItemLocation
from cloudckpt._manifest.torch_dtypes import dtype_of
from cloudckpt._manifest.torch_metadata import metadata_of
from cloudckpt._plan.boxes import Box
from cloudckpt._plan.reads import Request, plan_requests
from cloudckpt._stage.arena import Arena, cuda_in_use
from cloudckpt._stage.scatter import opened
from cloudckpt._stage.targets import BytesTarget, Target, TensorTarget
from cloudckpt._stage.transforms import ReadTransforms
from cloudckpt._stage.values import harmless_copy
from cloudckpt._transfer.download import fetch, fetch_verified
from cloudckpt._transfer.retry import Retrier
from cloudckpt._uri import is_valid_location, parse_location
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    UnsafePickleError,
    portable,
)
from cloudckpt.options import Options
from cloudckpt.report import Event, EventName, LoadReport
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

_log = logging.getLogger("cloudckpt")

_UNVERIFIED_TILE_BYTES = 64  # keeps elements of every size whole in each request
_MAX_NAMES = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """Which commit a rank found; it travels in the plan's ``storage_data``."""

    attempt: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Consumer:
    """One read item and what it fills."""

    item: ReadItem
    location: ItemLocation
    target: Target
    tensor: torch.Tensor | None


class ObjectStoreReader(StorageReader):
    """Reads checkpoints from `uri`, every byte checked, and only the bytes that are needed.

    For ``dcp.load(state_dict, storage_reader=ObjectStoreReader("s3://bucket/run/step-100"))``. Python objects load
    under ``weights_only=True``, whatever the planner does; `allow_pickle` lifts that, and with it also reads the
    checkpoints of torch's own writers. It can be pickled, and opens its store in the process that uses it.
    """

    failure: CloudckptError | None
    """Why no metadata could be read, if so: torch hands on only its text."""
    _store: Store | None
    _resolved: Resolved | None
    _torch_reader: TorchCheckpointReader | None
    _storage_data: dict[MetadataIndex, ItemLocation]
    _tiles: dict[int, array[int]]

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        options: Options | None = None,
        allow_pickle: bool = False,
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        super().__init__()
        self._options = options or Options()
        self._reporting_rank: int | None = None
        self._allow_pickle = allow_pickle
        self._registry = _extension_registry
        self.report: LoadReport | None = None
        """Of this reader's last load on this rank."""
        self._point_to(uri)

    @property
    def checkpoint_id(self) -> str:
        """The URI that is read."""
        return self._base.uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Get ready for another load, from `checkpoint_id` if one is given."""
        self._point_to(self._base if checkpoint_id is None else checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` can be read from, by its form alone."""
        return is_valid_location(checkpoint_id)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint, fetched if need be."""
        if self._resolved is None:
            self._resolved = resolve(self._open_store(), self._retrier)
        return self._resolved.manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002  # torch's signature; it looks for "kwargs"
        """Torch's view of the checkpoint.

        With ``rank=``, of what that rank saved for itself, without collectives. Raises `CheckpointNotFoundError`,
        `CorruptCheckpointError`, `UnsupportedFormatError` or `UnsafePickleError`.
        """
        rank = kwargs.get("rank")
        try:
            if rank is None:
                return self._read_metadata()
            if self.failure is not None and not isinstance(self.failure, CheckpointNotFoundError):
                raise self.failure  # asking again would only take as long again
            return self._read_rank_metadata(rank)
        except CloudckptError as error:
            self.failure = self.failure or error
            if self._reporting_rank is None:
                raise
        return self._read_rank_metadata_or_report(self._reporting_rank)

    def report_failures_in_set_up(self, *, rank: int) -> None:
        """For `cloudckpt.load`: let `read_metadata` succeed, and `set_up_storage_reader` raise its error.

        torch turns what `read_metadata` raises into a log entry and an ``AssertionError`` with its text.
        """
        self._reporting_rank = rank

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  # torch's signature
        self._rank = int(kwargs.get("rank") or 0)
        if self.failure is not None and self._reporting_rank is not None:
            raise self.failure
        self._storage_data = metadata.storage_data
        if self._torch_reader is not None:
            self._torch_reader.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        # What each rank saved for itself differs, of course.
        is_shared = self._resolved is not None and self._location == self._base
        attempt = self.manifest.attempt if is_shared else ""
        return dataclasses.replace(plan, storage_data=_Ticket(attempt=attempt))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse to mix: raises `CheckpointChangedError` where the ranks found different commits."""
        tickets = {plan.storage_data.attempt for plan in plans if isinstance(plan.storage_data, _Ticket)}
        if len(tickets) > 1:
            raise CheckpointChangedError(
                f"{self._location.uri} was overwritten while the ranks looked at it: they found "
                f"{len(tickets)} different saves. Nothing was loaded; load again",
                uri=self._location.uri,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for. After an error, what the tensors hold is undefined."""
        begun_s = time.monotonic()
        self._emit("load.planned")
        try:
            if self._torch_reader is not None:
                return self._torch_reader.read_data(plan, planner)
            consumers = [self._consumer_of(item, planner) for item in plan.items]
            num_bytes_read = self._read(consumers, planner)
        except CloudckptError:
            raise
        except Exception as error:
            raise portable(error) from error
        self.report = LoadReport(
            uri=self._location.uri,
            attempt=self.manifest.attempt,
            rank=self._rank,
            num_bytes_wanted=sum(consumer.target.num_bytes for consumer in consumers),
            num_bytes_read=num_bytes_read,
            num_requests=self._retrier.num_requests,
            num_retries=self._retrier.num_retries,
            plan_s=begun_s - self._started_s,
            read_s=time.monotonic() - begun_s,
        )
        self._emit("load.done", num_bytes=num_bytes_read)
        _log.info("loaded %s", self.report)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def __getstate__(self) -> dict[str, Any]:
        # A retrier holds locks, and a store is opened where it is used.
        return {**self.__dict__, "_store": None, "_retrier": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._retrier = self._new_retrier()

    def _point_to(self, uri: Any) -> None:
        self._base = parse_location(uri)
        self._location = self._base
        self._load_id = str(uuid.uuid4())
        self._store = None
        self._retrier = self._new_retrier()
        self._resolved = None
        self._torch_reader = None
        self._storage_data = {}
        self._tiles = {}
        self._rank = 0
        self._started_s = time.monotonic()
        self.failure = None

    def _new_retrier(self) -> Retrier:
        return Retrier(
            retries=self._options.retries,
            timeout_s=self._options.timeout_s,
            on_retry=lambda error: self._emit("retry", key=error.key),
        )

    def _open_store(self) -> Store:
        if self._store is None:
            self._store = open_store(self._location.uri, self._options)
        return self._store

    def _read_metadata(self) -> Metadata:
        self._resolved = None
        self._torch_reader = None
        store = self._open_store()
        try:
            manifest = self.manifest
        except CheckpointNotFoundError:
            if not self._retrier.call(lambda: holds_torch_checkpoint(store)):
                raise
            return self._read_torch_metadata(store)
        self._tiles = {}
        return metadata_of(manifest, checkpoint_id=self.checkpoint_id, load_id=self._load_id)

    def _read_rank_metadata(self, rank: int) -> Metadata:
        """Of the checkpoint that `rank` saved for itself."""
        self._location = self._base.child(f"rank-{rank}")
        self._store = None
        return self._read_metadata()

    def _read_rank_metadata_or_report(self, rank: int) -> Metadata:
        if isinstance(self.failure, CheckpointNotFoundError):
            with contextlib.suppress(CheckpointNotFoundError):
                metadata = self._read_rank_metadata(rank)
                self.failure = None
                return metadata
        return Metadata(state_dict_metadata={})  # never used: set_up_storage_reader raises

    def _read_torch_metadata(self, store: Store) -> Metadata:
        uri = self._location.uri
        if not self._allow_pickle:
            raise UnsafePickleError(
                f"{uri} holds a checkpoint of torch's own writer, whose .metadata is a pickle: reading it could run "
                "any code. If you trust who wrote it, pass allow_pickle=True (and save it with cloudckpt afterwards)",
                uri=uri,
            )
        self._torch_reader = TorchCheckpointReader(store, self._retrier, self._registry)
        try:
            return self._torch_reader.read_metadata()
        except CloudckptError:
            raise
        except Exception as error:  # a pickle can raise anything
            raise CorruptCheckpointError(
                f"the .metadata of {uri} cannot be read ({type(error).__name__}: {error})", uri=uri
            ) from error

    def _consumer_of(self, item: ReadItem, planner: LoadPlanner) -> _Consumer:
        fqn = item.storage_index.fqn
        location = self._storage_data.get(item.storage_index)
        if location is None:
            raise CorruptCheckpointError(
                f"{self._location.uri} has no data for {fqn!r} at {item.storage_index.offset}",
                uri=self._location.uri,
            )
        if item.type is LoadItemType.BYTE_IO:
            return _Consumer(item=item, location=location, target=BytesTarget(location), tensor=None)
        tensor = planner.resolve_tensor(item).detach()
        if tuple(tensor.shape) != tuple(item.lengths):
            raise CloudckptError(
                f"{fqn!r}: the planner gave a tensor of shape {tuple(tensor.shape)} for a read of {tuple(item.lengths)}"
            )
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        target: Target = BytesTarget(location) if location.transforms else TensorTarget(location, box, tensor)
        return _Consumer(item=item, location=location, target=target, tensor=tensor)

    def _read(self, consumers: Sequence[_Consumer], planner: LoadPlanner) -> int:
        """Fetch all, finish each item as its last byte arrives, and return how many bytes were fetched."""
        options, manifest = self._options, self.manifest
        wants = [
            want
            for index, consumer in enumerate(consumers)
            for want in consumer.target.wants(index, max_gap_bytes=options.max_gap_bytes)
        ]
        requests = plan_requests(
            wants,
            object_sizes_bytes={index: stored.size for index, stored in enumerate(manifest.objects)},
            tile_bytes=manifest.tile_bytes if options.verify else _UNVERIFIED_TILE_BYTES,
            request_bytes=options.request_bytes,
            max_gap_bytes=options.max_gap_bytes,
        )
        outstanding = Counter(want.consumer for request in requests for want in request.wants)
        for index, consumer in enumerate(consumers):
            if index not in outstanding:
                self._finish(consumer, planner)
        arena = Arena(budget_bytes=options.read_bytes, pinned=cuda_in_use())
        with ThreadPoolExecutor(options.connections, thread_name_prefix="cloudckpt-read") as pool:
            running = {pool.submit(self._fetch, request, consumers, arena): request for request in requests}
            try:
                while running:
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                        for want in running.pop(future).wants:
                            outstanding[want.consumer] -= 1
                            if not outstanding[want.consumer]:
                                self._finish(consumers[want.consumer], planner)
            except BaseException:
                self._retrier.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return sum(request.end - request.begin for request in requests)

    def _fetch(self, request: Request, consumers: Sequence[_Consumer], arena: Arena) -> None:
        stored = self.manifest.objects[request.object_index]
        with opened(request, [consumer.target for consumer in consumers], arena) as views:
            try:
                if self._options.verify:
                    tile_bytes = self.manifest.tile_bytes
                    first, last = request.begin // tile_bytes, -(-request.end // tile_bytes)
                    fetch_verified(
                        self._open_store(),
                        self._retrier,
                        key=stored.key,
                        begin=request.begin,
                        views=views,
                        tile_bytes=tile_bytes,
                        expected_crc32cs=self._tiles_of(request.object_index)[first:last],
                        holding=lambda begin, end: _names(request, consumers, begin, end),
                    )
                else:
                    fetch(self._open_store(), self._retrier, key=stored.key, begin=request.begin, views=views)
            except ObjectNotFoundError as error:
                raise self._vanished(error, _names(request, consumers, request.begin, request.end)) from error
        self._emit("load.range_read", key=stored.key, num_bytes=request.end - request.begin)

    def _vanished(self, error: ObjectNotFoundError, names: str) -> CloudckptError:
        """Why an object of the manifest is not there."""
        uri, attempt = self._location.uri, self.manifest.attempt
        try:
            changed = resolve(self._open_store(), self._retrier).manifest.attempt != attempt
        except CheckpointNotFoundError:
            changed = True
        if changed:
            return CheckpointChangedError(
                f"{uri} was overwritten or removed while it was being read. What was loaded is not usable; load again",
                uri=uri,
            )
        return CorruptCheckpointError(f"{error.key} is missing, and with it {names}. Load an older checkpoint", uri=uri)

    def _tiles_of(self, object_index: int) -> array[int]:
        if object_index not in self._tiles:
            self._tiles[object_index] = unpack_tiles(self.manifest.objects[object_index].crc32c)
        return self._tiles[object_index]

    def _finish(self, consumer: _Consumer, planner: LoadPlanner) -> None:
        """All bytes of this item are there."""
        item, location, target = consumer.item, consumer.location, consumer.target
        if isinstance(target, BytesTarget):
            content: Any = target.content
            if location.transforms:
                content = ReadTransforms(self._registry).undo(item, location.transforms, content)
            if consumer.tensor is None:
                planner.load_bytes(item, self._value(item, content))
                return
            consumer.tensor.copy_(_block(item, location, content))
        assert consumer.tensor is not None  # noqa: S101  # the value's case returned
        planner.commit_tensor(item, consumer.tensor)

    def _value(self, item: ReadItem, content: bytes | bytearray) -> io.BytesIO:
        if self._allow_pickle:
            return io.BytesIO(content)
        return harmless_copy(content, item.storage_index.fqn, uri=self._location.uri)

    def _emit(self, name: EventName, *, key: str = "", num_bytes: int = 0) -> None:
        if self._options.on_event is not None:
            self._options.on_event(
                Event(name=name, uri=self._location.uri, rank=self._rank, key=key, num_bytes=num_bytes)
            )


def _block(item: ReadItem, location: ItemLocation, content: bytes) -> torch.Tensor:
    """The wanted block of a chunk whose bytes were transformed, and so had to be read whole."""
    assert location.dtype is not None  # noqa: S101  # it is a tensor's
    chunk = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype_of(location.dtype))
    chunk = chunk.view(location.lengths)
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, offset, length)
    return chunk


def _names(request: Request, consumers: Sequence[_Consumer], begin: int, end: int) -> str:
    """The tensors and values that bytes ``[begin, end)`` of the request's object belong to, for a message."""
    fqns = {
        consumers[want.consumer].item.storage_index.fqn: None
        for want in request.wants
        if want.begin < end and want.end > begin
    }
    shown = ", ".join(repr(fqn) for fqn in list(fqns)[:_MAX_NAMES])
    return shown + (f" and {len(fqns) - _MAX_NAMES} more" if len(fqns) > _MAX_NAMES else "")
