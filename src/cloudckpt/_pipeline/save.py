"""One save on one rank: check, write, commit; and what to do when one of them fails."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt._commit.attempt import data_key, new_attempt_id
from cloudckpt._commit.publish import publish, remove_superseded
from cloudckpt._commit.resolve import manifest_key, manifest_numbers
from cloudckpt._manifest.model import Manifest
from cloudckpt._manifest.receipts import ItemReceipt, ObjectReceipt
from cloudckpt._manifest.torch_metadata import manifest_of
from cloudckpt._pipeline.context import Context
from cloudckpt._plan.layout import lay_out, storage_order
from cloudckpt._plan.packing import pack
from cloudckpt._stage.arena import Arena, cuda_in_use
from cloudckpt._stage.body import PieceBody, piece_of
from cloudckpt._stage.items import StagedItem, estimated_bytes, staged
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt._transfer.upload import UploadSession
from cloudckpt.errors import (
    CheckpointExistsError,
    CommitUnknownError,
    NoConditionalCommitError,
    StoreError,
)
from cloudckpt.options import MIB
from cloudckpt.report import SaveReport

_log = logging.getLogger("cloudckpt")

# Transformed tensors have to be held until their object's layout is known.
_MAX_TRANSFORMED_OBJECT_BYTES = 256 * MIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a rank and the coordinator tell each other, through a plan's ``storage_data``."""

    nonce: str
    """Drawn by the rank for this save. A cached plan comes with the ticket of an older save, and so with another."""
    attempt: str | None = None


class SaveJob:
    """One save, from set-up to commit. `report` is filled in as it goes."""

    report: SaveReport | None = None

    def __init__(self, context: Context, *, save_id: str, transforms: WriteTransforms) -> None:
        self.ticket = Ticket(nonce=new_attempt_id())
        self._context = context
        self._save_id = save_id
        self._transforms = transforms
        self._attempt = self.ticket.nonce
        self._number = 0
        self._written_keys: list[str] = []
        self._started_s = time.monotonic()

    def check(self, *, overwrite: bool) -> None:
        """On whoever will commit: find the number of the commit, before any byte moves."""
        context, uri = self._context, self._context.uri
        if context.options.commit == "conditional" and not context.store.capabilities.conditional_create:
            raise NoConditionalCommitError(
                f"{uri}: this store cannot create an object only if it is absent, so it cannot keep two saves from "
                "overwriting each other. Use another store, or accept that with Options(commit='unconditional')",
                uri=uri,
            )
        numbers = context.retrier.call(lambda: manifest_numbers(context.store))
        if numbers and not overwrite:
            raise CheckpointExistsError(
                f"Checkpoint already exists at {uri} and overwrite is False: nothing was written. Choose another URI, "
                "or pass overwrite=True to replace it atomically",
                uri=uri,
            )
        self._number = numbers[-1] + 1 if numbers else 0

    def handed_out(self, ticket: object) -> object:
        """On the coordinator: a rank's ticket, with the attempt that all ranks write under."""
        return dataclasses.replace(ticket, attempt=self._attempt) if isinstance(ticket, Ticket) else ticket

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Upload this rank's items, all of them or none."""
        begun_s = time.monotonic()
        ticket = plan.storage_data
        # A cached plan brings the ticket of an older save, whose keys are taken. Then this rank's own id stands in:
        # the manifest names every object by its whole key.
        if isinstance(ticket, Ticket) and ticket.nonce == self.ticket.nonce and ticket.attempt is not None:
            self._attempt = ticket.attempt
        context = self._context
        object_bytes = context.options.object_bytes
        if self._transforms:
            object_bytes = min(object_bytes, _MAX_TRANSFORMED_OBJECT_BYTES)
        groups = pack([estimated_bytes(item) for item in plan.items], object_bytes=object_bytes)
        if cuda_in_use():
            torch.cuda.synchronize()  # what training still has in flight is part of the tensors' values
        results, objects = self._upload([[plan.items[i] for i in group] for group in groups], planner)
        self._written_keys = [receipt.key for receipt in objects]
        self.report = SaveReport(
            uri=context.uri,
            attempt=self._attempt,
            rank=context.rank,
            num_bytes=sum(receipt.size_bytes for receipt in objects),
            num_objects=len(objects),
            num_requests=context.retrier.num_requests,
            num_retries=context.retrier.num_retries,
            plan_s=begun_s - self._started_s,
            write_s=time.monotonic() - begun_s,
            commit_s=0.0,
        )
        context.emit("save.written", num_bytes=self.report.num_bytes)
        return results

    def commit(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Make the checkpoint exist. Unless its outcome is unknown, a failure removes what all ranks wrote."""
        begun_s = time.monotonic()
        context = self._context
        receipts = [{result.index: result.storage_data for result in of_rank} for of_rank in results]
        keys = {receipt.stored_in.key for of_rank in receipts for receipt in of_rank.values()}
        try:
            manifest = manifest_of(
                metadata,
                receipts,
                uri=context.uri,
                attempt=self._attempt,
                save_id=self._save_id,
                tile_bytes=context.options.tile_bytes,
                user_metadata=context.options.metadata,
            )
            context.emit("save.committing", key=manifest_key(self._number))
        except Exception:
            self._remove(keys)
            raise
        self._publish(manifest, keys)
        self._written_keys = []  # they are the checkpoint's now
        self._tidy_up(manifest)
        if self.report is not None:
            self.report = dataclasses.replace(
                self.report,
                num_requests=context.retrier.num_requests,
                num_retries=context.retrier.num_retries,
                commit_s=time.monotonic() - begun_s,
            )
            _log.info("saved %s", self.report)

    def discard(self) -> None:
        """Remove what this rank wrote. Only for a save that is known to have failed."""
        self._remove(self._written_keys)
        self._written_keys = []

    def _upload(
        self, groups: Iterable[Sequence[WriteItem]], planner: SavePlanner
    ) -> tuple[list[WriteResult], list[ObjectReceipt]]:
        context, options = self._context, self._context.options
        arena = Arena(budget_bytes=options.staging_bytes, pinned=cuda_in_use())
        laid_out: list[list[tuple[StagedItem, int]]] = []
        with UploadSession(
            context.store,
            context.retrier,
            connections=options.connections,
            part_bytes=options.part_bytes,
            tile_bytes=options.tile_bytes,
            on_part=lambda key, num_bytes: context.emit("save.part_uploaded", key=key, num_bytes=num_bytes),
            on_object=lambda key, num_bytes: context.emit("save.object_uploaded", key=key, num_bytes=num_bytes),
        ) as session:
            # Object by object, so that what a planner makes while resolving is not all held at once.
            for number, write_items in enumerate(groups):
                items = list(staged(write_items, planner, self._transforms, uri=context.uri))
                items = [items[i] for i in storage_order([item.entry for item in items])]
                layout = lay_out([item.entry for item in items])
                placed = list(zip(items, layout.begins, strict=True))
                pieces = [piece_of(memoryview(layout.header), begin=0)]
                pieces += [piece_of(item.content, begin=begin) for item, begin in placed]
                laid_out.append(placed)
                session.submit(data_key(self._attempt, context.rank, number), PieceBody(pieces, arena))
            objects = session.finish()
        results = [
            _result_of(item, begin, stored_in)
            for placed, stored_in in zip(laid_out, objects, strict=True)
            for item, begin in placed
        ]
        return results, objects

    def _publish(self, manifest: Manifest, keys: Iterable[str]) -> None:
        context = self._context
        try:
            publish(
                context.store,
                manifest,
                number=self._number,
                conditional=context.options.commit == "conditional",
                retrier=context.retrier,
            )
        except CommitUnknownError:
            raise  # the manifest may be there, so its data must stay
        except (CheckpointExistsError, StoreError):
            self._remove(keys)  # another save won, or the store refused the put itself
            raise
        except BaseException as error:
            raise self._interrupted(error) from error

    def _tidy_up(self, manifest: Manifest) -> None:
        """After the commit. Only an interrupt gets out of here, and as one that tells the ranks to keep their data."""
        context = self._context
        try:
            context.emit("save.committed", key=manifest_key(self._number))
            if self._number:
                remove_superseded(context.store, manifest, number=self._number, retrier=context.retrier)
                context.emit("save.cleaned_up")
        except Exception:  # noqa: BLE001  # it is logged, and must not undo a commit
            _log.exception("%s is committed, but tidying up after it failed", context.uri)
        except BaseException as error:
            raise self._interrupted(error) from error

    def _interrupted(self, error: BaseException) -> CommitUnknownError:
        uri = self._context.uri
        return CommitUnknownError(
            f"the commit of {uri} was interrupted ({type(error).__name__}: {error}); it may be there. Its data was "
            "kept. Look (cloudckpt.latest) before you save there again",
            uri=uri,
        )

    def _remove(self, keys: Iterable[str]) -> None:
        doomed = sorted(keys)
        if doomed:
            try:
                self._context.store.delete(doomed)
            except StoreError as error:
                _log.warning("could not remove what a failed save left, gc will: %s", error)


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
