"""Saving and loading by URI. Each takes every keyword of its torch counterpart and behaves as that does."""

from __future__ import annotations

import dataclasses
import os
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from cloudckpt._async import AsyncSave, background_group, require_cpu_backend, wait_for_previous
from cloudckpt._collecting import rare_collections
from cloudckpt._failures import causes_of, failure_of, raise_own_interrupt, rank_in
from cloudckpt._group import Call, MetGroup, begin, failure_by_loss, in_company
from cloudckpt._planner import planned
from cloudckpt._save_planner import BalancedSavePlanner, entries_of
from cloudckpt._saved import SavedMetadata
from cloudckpt._stage.snapshot import SnapshotStager
from cloudckpt._uri import redacted
from cloudckpt.errors import (
    CheckpointChangedError,
    CommitUnknownError,
    InvalidOptionError,
    InvalidURIError,
    RankLostError,
)
from cloudckpt.options import Options
from cloudckpt.reader import ObjectStoreReader
from cloudckpt.report import LoadReport
from cloudckpt.writer import ObjectStoreWriter

StateDict = dict[str, Any]


def save(
    state_dict: StateDict,
    uri: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool = False,
    options: Options | None = None,
) -> SavedMetadata:
    """Save `state_dict` to `uri` from all ranks; returns once it is committed (`torch.distributed.checkpoint.save`).

    Atomic: until it returns, nothing at `uri` changes for readers. A checkpoint that is there already is left alone
    and makes it fail, unless `overwrite`, which replaces it at the instant of the commit.

    `checkpoint_id` is torch's name for `uri`. Raises torch's ``CheckpointException``, on every rank, with the causes
    by rank; it is also an instance of the causes' class where they have one in common, such as
    `CheckpointExistsError`. Raises `InvalidURIError` before anything else. Where a rank dies or hangs, or does not come
    within `Options.timeout_s`, the others get `RankLostError`; a rank that is slow but alive is waited for.
    """
    if storage_writer is not None:
        wait_for_previous()  # it may be one of the same writer
    writer = _writer(uri, checkpoint_id, storage_writer, overwrite=overwrite, options=options)
    try:
        with (
            rare_collections(),
            _in_company(writer, process_group, doing="saving", alone=no_dist or not use_collectives) as group,
        ):
            is_balanced = planner is None and isinstance(writer, ObjectStoreWriter)
            metadata = state_dict_saver.save(
                {} if is_balanced else state_dict,  # the planner knows it better
                storage_writer=writer,
                planner=BalancedSavePlanner(entries=entries_of(state_dict)) if is_balanced else planner,
                process_group=group,
                no_dist=no_dist,
                use_collectives=use_collectives,
            )
    except CheckpointException as error:
        failure = _failed_save(error, writer)
        raise_own_interrupt(error, rank_in(process_group, no_dist=no_dist))
        try:
            raise failure from None
        finally:
            del failure  # its traceback holds this frame: a cycle otherwise, with the state dict in it
    except Exception as error:
        if use_collectives or no_dist or not dist.is_initialized():
            raise
        # Without collectives each rank fails alone, and torch lets the others wait for it.
        dist.barrier(group=process_group)
        failures: Any = {dist.get_rank(process_group): (error, traceback.extract_tb(error.__traceback__))}
        raise _failed_save(CheckpointException("write", failures), writer) from None
    return _with_report(metadata, writer)


def async_save(
    state_dict: StateDict,
    uri: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool = False,
    options: Options | None = None,
) -> AsyncSave:
    """Like `save`, in the background: returns once `state_dict` is copied, so that training may go on.

    The save's collectives run on a gloo group of their own, so they cannot get mixed up with training's. A save that
    is still running is waited for first. What goes wrong is raised by the handle's `AsyncSave.result`.

    Raises torch's ``AssertionError`` where the process group has no CPU backend, and `RankLostError` where it is the
    first one and not all ranks come.
    """
    # Before anything else: the save in flight may be one of the same writer.
    wait_for_previous()
    writer = _writer(uri, checkpoint_id, storage_writer, overwrite=overwrite, options=options)
    in_process = async_checkpointer_type is AsyncCheckpointerType.PROCESS
    call = None
    if not (no_dist or in_process):
        require_cpu_backend(process_group)
        if use_collectives and isinstance(writer, ObjectStoreWriter):
            call = _begun_in_background(writer, process_group)
        process_group = call.group if call is not None else background_group(process_group)
    if planner is None and isinstance(writer, ObjectStoreWriter):
        planner = BalancedSavePlanner()
    own_stager = None
    if async_stager is None and not isinstance(writer, AsyncStager):
        async_stager = own_stager = SnapshotStager()
    try:
        response = state_dict_saver.async_save(
            state_dict,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    except BaseException:
        if own_stager is not None:
            own_stager.close()
        if call is not None:
            call.end(has_left=True)
        raise
    return AsyncSave(
        response,
        call=call,
        on_success=lambda metadata: _with_report(metadata, writer),
        on_failure=lambda error: _failed_save(error, writer),
        stager=own_stager,
    )


def load(
    state_dict: StateDict,
    uri: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
) -> LoadReport | None:
    """Load the checkpoint at `uri` into `state_dict`, in place (`torch.distributed.checkpoint.load`).

    Shards are cut anew as the ranks need them. Every byte is checked against the checksums of the save. All ranks
    load one and the same save; if it is overwritten meanwhile, the load is made once more. Python objects load under
    ``weights_only=True`` unless `allow_pickle`, which also admits checkpoints of torch's own writers.

    Raises torch's ``CheckpointException``, also an instance of the cause's class: `CheckpointNotFoundError`,
    `CorruptCheckpointError`, `StateDictMismatchError`, `UnsafePickleError`, `RankLostError`, … After an error, what
    the tensors hold is undefined. Returns this rank's report (None for a reader that makes none).
    """
    reader = storage_reader
    if reader is not None and (allow_pickle or options is not None):
        raise InvalidOptionError("allow_pickle and options belong to the reader: pass them to it, not beside it")
    if reader is None:
        reader = ObjectStoreReader(_location(uri, checkpoint_id), options=options, allow_pickle=allow_pickle)
    elif uri is not None or checkpoint_id is not None:
        reader.reset(_location(uri, checkpoint_id))
    rank = rank_in(process_group, no_dist=no_dist)
    if isinstance(reader, ObjectStoreReader):
        reader.report_failures_in_set_up(rank=rank, own_planner=planner is None)
    where = str(getattr(reader, "checkpoint_id", "the checkpoint"))
    try:
        for is_last in (False, True):
            try:
                with (
                    rare_collections(),
                    planned(state_dict, planner, where) as (wanted, chosen_planner),
                    _in_company(reader, process_group, doing="loading", alone=no_dist) as group,
                ):
                    if isinstance(reader, ObjectStoreReader) and isinstance(group, MetGroup):
                        reader.find_together(group)
                    state_dict_loader.load(
                        wanted,
                        storage_reader=reader,
                        planner=chosen_planner,
                        process_group=group,
                        no_dist=no_dist,
                    )
                break
            except CheckpointException as error:
                # All ranks get the same failures, so all of them try again, or none does.
                if not is_last and any(isinstance(cause, CheckpointChangedError) for cause in causes_of(error)):
                    reader.reset()
                    continue
                raise_own_interrupt(error, rank)
                raise failure_of(
                    error,
                    what=f"loading {where}",
                    local_cause=reader.failure if isinstance(reader, ObjectStoreReader) else None,
                    local_rank=rank,
                ) from None
    finally:
        if isinstance(reader, ObjectStoreReader):
            reader.end_together()
            reader.report_failures_in_set_up(rank=None)
    return reader.report if isinstance(reader, ObjectStoreReader) else None


def _in_company(
    storage: StorageWriter | StorageReader, process_group: dist.ProcessGroup | None, *, doing: str, alone: bool
) -> AbstractContextManager[dist.ProcessGroup | None]:
    """The process group for DCP's call; where the storage is ours, none of its ranks waits for one that is lost."""
    if alone or not isinstance(storage, (ObjectStoreWriter, ObjectStoreReader)):
        return nullcontext(process_group)
    return in_company(process_group, doing=doing, uri=storage.checkpoint_id, timeout_s=storage.timeout_s)


def _begun_in_background(writer: ObjectStoreWriter, process_group: dist.ProcessGroup | None) -> Call | None:
    try:
        return begin(process_group, "background", doing="saving", uri=writer.checkpoint_id, timeout_s=writer.timeout_s)
    except RankLostError as error:
        raise _failed_save(failure_by_loss(error), writer) from None


def _location(
    uri: str | os.PathLike[str] | None, checkpoint_id: str | os.PathLike[str] | None
) -> str | os.PathLike[str]:
    if uri is not None and checkpoint_id is not None and uri != checkpoint_id:
        raise InvalidURIError(
            "uri and checkpoint_id are two names for one thing, but differ: "
            f"{redacted(uri)!r}, {redacted(checkpoint_id)!r}"
        )
    chosen = uri if uri is not None else checkpoint_id
    if chosen is None:
        raise InvalidURIError("no location was given: pass a URI such as 's3://bucket/run/step-100', or a path")
    return chosen


def _writer(
    uri: str | os.PathLike[str] | None,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter | None,
    *,
    overwrite: bool,
    options: Options | None,
) -> StorageWriter:
    if storage_writer is not None and (overwrite or options is not None):
        raise InvalidOptionError("overwrite and options belong to the writer: pass them to it, not beside it")
    if storage_writer is None:
        return ObjectStoreWriter(_location(uri, checkpoint_id), options=options, overwrite=overwrite)
    if uri is not None or checkpoint_id is not None:
        storage_writer.reset(_location(uri, checkpoint_id))
    return storage_writer


def _with_report(metadata: Metadata, writer: StorageWriter) -> SavedMetadata:
    if isinstance(writer, ObjectStoreWriter):
        writer.flush_trace()
    values = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(Metadata)}
    return SavedMetadata(**values, report=writer.report if isinstance(writer, ObjectStoreWriter) else None)


def _failed_save(error: CheckpointException, writer: StorageWriter) -> CheckpointException:
    # Every rank has been told that the save failed, so each can remove what it wrote. Not so where the manifest may
    # be there, or a rank that was given up may yet put it: then the data belongs to it.
    may_be_committed = any(isinstance(cause, (CommitUnknownError, RankLostError)) for cause in causes_of(error))
    if isinstance(writer, ObjectStoreWriter):
        if not may_be_committed:
            writer.discard()
        writer.flush_trace()
    return failure_of(error, what=f"saving {getattr(writer, 'checkpoint_id', 'the checkpoint')}")
