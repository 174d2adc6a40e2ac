"""The DCP storage writer: where planning, staging, transfer and commit of a save are wired together."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cloudckpt._commit.attempt import data_key, new_attempt_id
from cloudckpt._commit.publish import publish, remove_superseded
from cloudckpt._commit.resolve import manifest_key, manifest_numbers
from cloudckpt._manifest.receipts import ItemReceipt, ObjectReceipt
from cloudckpt._manifest.torch_metadata import DCP_VERSION, manifest_of
from cloudckpt._plan.layout import lay_out, storage_order
from cloudckpt._plan.packing import pack
from cloudckpt._stage.arena import Arena, cuda_in_use
from cloudckpt._stage.body import PieceBody, piece_of
from cloudckpt._stage.items import StagedItem, estimated_bytes, staged
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt._transfer.retry import Retrier
from cloudckpt._transfer.upload import UploadSession
from cloudckpt._uri import is_valid_location, parse_location
from cloudckpt.errors import (
    CheckpointExistsError,
    CloudckptError,
    CommitUnknownError,
    NoConditionalCommitError,
    StoreError,
    portable,
)
from cloudckpt.options import MIB, Options
from cloudckpt.report import Event, EventName, SaveReport
from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

_log = logging.getLogger("cloudckpt")

# Transformed tensors have to be held until their object's layout is known.
_MAX_TRANSFORMED_OBJECT_BYTES = 256 * MIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """What rank and coordinator tell each other through a plan's ``storage_data``."""

    nonce: str
    """Drawn by the rank for this save. A cached plan comes with the ticket of an older save, and so with another."""
    attempt: str | None = None


class ObjectStoreWriter(StorageWriter):
    """Writes checkpoints to `uri`: atomically, never over another one unless `overwrite` says so.

    For ``dcp.save(state_dict, storage_writer=ObjectStoreWriter("s3://bucket/run/step-100"))``. One writer can be used
    for several saves, by giving each its ``checkpoint_id``; it can be pickled, and opens its store in the process
    that uses it.

    Its methods raise `cloudckpt.errors.CloudckptError` subclasses, which DCP carries to all ranks in a
    ``CheckpointException``.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        options: Options | None = None,
        overwrite: bool = False,
        _extensions: Sequence[StreamTransformExtension] | None = None,
    ) -> None:
        super().__init__()
        self._options = options or Options()
        self._overwrite = overwrite
        self._transforms = WriteTransforms(_extensions)
        self.report: SaveReport | None = None
        """Of this writer's last save on this rank, once it has written."""
        self._point_to(uri)

    @property
    def checkpoint_id(self) -> str:
        """The URI that is written to."""
        return self._base.uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Get ready for another save, to `checkpoint_id` if one is given."""
        self._point_to(self._base if checkpoint_id is None else checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` can be written to, by its form alone."""
        return is_valid_location(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001  # torch's signature; it looks for the name "kwargs"
        """Begin a save. Raises `CheckpointExistsError` before any byte moves."""
        self._rank = int(kwargs.get("rank") or 0)
        # Without collectives each rank saves, and commits, a checkpoint of its own.
        is_alone = not kwargs.get("use_collectives", True)
        self._location = self._base.child(f"rank-{self._rank}") if is_alone else self._base
        self._store: Store | None = None
        self._retrier = self._new_retrier()
        self._nonce = new_attempt_id()
        self._attempt = self._nonce
        self._written_keys: list[str] = []
        self._started_s = time.monotonic()
        self.report = None
        if is_coordinator or is_alone:
            self._number = self._next_number()
        self._emit("save.set_up")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=_Ticket(nonce=self._nonce))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Hand the attempt to all ranks."""
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(plan.storage_data, attempt=self._attempt))
            if isinstance(plan.storage_data, _Ticket)
            else plan
            for plan in plans
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's items, all of them or none."""
        begun_s = time.monotonic()
        try:
            results, objects = self._write(plan, planner)
        except CloudckptError:
            raise
        except Exception as error:
            raise portable(error) from error
        self.report = SaveReport(
            uri=self._location.uri,
            attempt=self._attempt,
            rank=self._rank,
            num_bytes=sum(receipt.size_bytes for receipt in objects),
            num_objects=len(objects),
            num_requests=self._retrier.num_requests,
            num_retries=self._retrier.num_retries,
            plan_s=begun_s - self._started_s,
            write_s=time.monotonic() - begun_s,
            commit_s=0.0,
        )
        self._emit("save.written", num_bytes=self.report.num_bytes)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator. Returns only once the checkpoint exists.

        Unless the outcome is unknown (`CommitUnknownError`), a failure removes what all ranks wrote.
        """
        begun_s = time.monotonic()
        receipts = [{result.index: result.storage_data for result in of_rank} for of_rank in results]
        keys = {receipt.stored_in.key for of_rank in receipts for receipt in of_rank.values()}
        try:
            manifest = manifest_of(
                metadata,
                receipts,
                uri=self._location.uri,
                attempt=self._attempt,
                save_id=self._save_id,
                tile_bytes=self._options.tile_bytes,
                user_metadata=self._options.metadata,
            )
        except Exception:
            self._remove(keys)
            raise
        self._emit("save.committing", key=manifest_key(self._number))
        # From here on the commit may be visible. Whatever else goes wrong, the data must then stay.
        try:
            publish(
                self._open_store(),
                manifest,
                number=self._number,
                conditional=self._options.commit == "conditional",
                retrier=self._retrier,
            )
        except (CheckpointExistsError, CommitUnknownError) as error:
            if isinstance(error, CheckpointExistsError):
                self._remove(keys)
            raise
        except StoreError:
            self._remove(keys)  # the store refused the put itself
            raise
        except BaseException as error:
            raise self._interrupted(error) from error
        try:
            self._emit("save.committed", key=manifest_key(self._number))
            if self._number:
                remove_superseded(self._open_store(), manifest, number=self._number, retrier=self._retrier)
                self._emit("save.cleaned_up")
        except BaseException as error:
            # Also an interrupt: reporting it as a failed save would make the ranks remove committed data.
            _log.exception("%s is committed, but tidying up after it failed", self._location.uri)
            if not isinstance(error, Exception):
                raise self._interrupted(error) from error
        self._written_keys = []
        metadata.version = DCP_VERSION
        metadata.storage_data = {index: receipt for of_rank in receipts for index, receipt in of_rank.items()}
        metadata.storage_meta = self.storage_meta()
        if self.report is not None:
            self.report = dataclasses.replace(
                self.report,
                commit_s=time.monotonic() - begun_s,
                num_requests=self._retrier.num_requests,
                num_retries=self._retrier.num_retries,
            )
            _log.info("saved %s", self.report)

    def discard(self) -> None:
        """Remove what this rank wrote in its last save.

        Only for a save that all ranks know to have failed: never after `CommitUnknownError`, or a lost rank.
        """
        self._remove(self._written_keys)
        self._written_keys = []

    def __getstate__(self) -> dict[str, Any]:
        # A retrier holds locks, and a store is opened where it is used.
        return {**self.__dict__, "_store": None, "_retrier": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._retrier = self._new_retrier()

    def _point_to(self, uri: Any) -> None:
        self._base = parse_location(uri)
        self._location = self._base
        self._save_id = str(uuid.uuid4())
        self._store = None
        self._retrier = self._new_retrier()
        self._rank = 0
        self._number = 0
        self._nonce = self._attempt = ""
        self._written_keys = []
        self._started_s = 0.0

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

    def _next_number(self) -> int:
        """The number of this save's commit."""
        store, uri = self._open_store(), self._location.uri
        if self._options.commit == "conditional" and not store.capabilities.conditional_create:
            raise NoConditionalCommitError(
                f"{uri}: this store cannot create an object only if it is absent, so it cannot keep two saves from "
                "overwriting each other. Use another store, or accept that with Options(commit='unconditional')",
                uri=uri,
            )
        numbers = self._retrier.call(lambda: manifest_numbers(store))
        if not numbers:
            return 0
        if not self._overwrite:
            raise CheckpointExistsError(
                f"Checkpoint already exists at {uri} and overwrite is False: nothing was written. Choose another URI, "
                "or pass overwrite=True to replace it atomically",
                uri=uri,
            )
        return numbers[-1] + 1

    def _write(self, plan: SavePlan, planner: SavePlanner) -> tuple[list[WriteResult], list[ObjectReceipt]]:
        ticket = plan.storage_data
        # A cached plan brings the ticket of an older save. Its keys are taken, so this rank's own id stands in: the
        # manifest names every object by its whole key.
        if isinstance(ticket, _Ticket) and ticket.nonce == self._nonce and ticket.attempt is not None:
            self._attempt = ticket.attempt
        options, uri = self._options, self._location.uri
        object_bytes = options.object_bytes
        if self._transforms:
            object_bytes = min(object_bytes, _MAX_TRANSFORMED_OBJECT_BYTES)
        groups = pack([estimated_bytes(item) for item in plan.items], object_bytes=object_bytes)
        laid_out: list[list[tuple[StagedItem, int]]] = []
        arena = Arena(budget_bytes=options.staging_bytes, pinned=cuda_in_use())
        if cuda_in_use():
            torch.cuda.synchronize()  # what training still has in flight is part of the tensors' values
        with UploadSession(
            self._open_store(),
            self._retrier,
            connections=options.connections,
            part_bytes=options.part_bytes,
            tile_bytes=options.tile_bytes,
            on_part=lambda key, num_bytes: self._emit("save.part_uploaded", key=key, num_bytes=num_bytes),
            on_object=lambda key, num_bytes: self._emit("save.object_uploaded", key=key, num_bytes=num_bytes),
        ) as session:
            for number, group in enumerate(groups):
                items = list(staged([plan.items[i] for i in group], planner, self._transforms, uri=uri))
                items = [items[i] for i in storage_order([item.entry for item in items])]
                layout = lay_out([item.entry for item in items])
                pieces = [piece_of(memoryview(layout.header), begin=0)]
                pieces += [
                    piece_of(item.content, begin=begin) for item, begin in zip(items, layout.begins, strict=True)
                ]
                laid_out.append(list(zip(items, layout.begins, strict=True)))
                session.submit(data_key(self._attempt, self._rank, number), PieceBody(pieces, arena))
            objects = session.finish()
        self._written_keys = [receipt.key for receipt in objects]
        results = [
            _result_of(item, begin, stored_in)
            for items_of_object, stored_in in zip(laid_out, objects, strict=True)
            for item, begin in items_of_object
        ]
        return results, objects

    def _remove(self, keys: Any) -> None:
        if keys:
            try:
                self._open_store().delete(sorted(keys))
            except StoreError as error:
                _log.warning("could not remove what a failed save left at %s, gc will: %s", self._location, error)

    def _interrupted(self, error: BaseException) -> CommitUnknownError:
        return CommitUnknownError(
            f"the commit of {self._location.uri} was interrupted ({type(error).__name__}: {error}); it may be there. "
            "Its data was kept. Ask cloudckpt.latest, or load it, before you save there again",
            uri=self._location.uri,
        )

    def _emit(self, name: EventName, *, key: str = "", num_bytes: int = 0) -> None:
        on_event: Callable[[Event], None] | None = self._options.on_event
        if on_event is not None:
            on_event(Event(name=name, uri=self._location.uri, rank=self._rank, key=key, num_bytes=num_bytes))


def _result_of(item: StagedItem, begin: int, stored_in: ObjectReceipt) -> WriteResult:
    receipt = ItemReceipt(
        stored_in=stored_in,
        begin=begin,
        end=begin + item.entry.num_bytes,
        dtype=item.dtype,
        lengths=item.lengths,
        transforms=item.transforms,
    )
    return WriteResult(index=item.index, size_in_bytes=item.entry.num_bytes, storage_data=receipt)
