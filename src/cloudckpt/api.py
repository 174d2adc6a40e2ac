"""Saving and loading by URI. Each takes every keyword of its torch counterpart and behaves as that does."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import StorageWriter

from cloudckpt._async import AsyncSave
from cloudckpt._background.adopted import Adopted
from cloudckpt._background.groups import background_group, require_cpu_backend
from cloudckpt._background.in_flight import await_turn, earlier_failure, turn
from cloudckpt._background.runner import BackgroundSave, staged_with
from cloudckpt._background.torchs_process import begin_in_torchs_process
from cloudckpt._calls import in_company_of, location_of
from cloudckpt._failures import raise_own_interrupt, rank_in
from cloudckpt._group import Call, begin, failure_by_loss
from cloudckpt._loading import load
from cloudckpt._save_planner import entries_of
from cloudckpt._saved import SavedMetadata
from cloudckpt._saving import RefusingPlanner, failed, saved
from cloudckpt.errors import InvalidOptionError, RankLostError
from cloudckpt.options import Options
from cloudckpt.writer import ObjectStoreWriter

__all__ = ["async_save", "load", "save"]

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
        await_turn()  # the save in flight may be one of the same writer
    writer = _writer(uri, checkpoint_id, storage_writer, overwrite=overwrite, options=options)
    is_balanced = planner is None and isinstance(writer, ObjectStoreWriter)
    try:
        with earlier_failure() as earlier:
            return saved(
                lambda: entries_of(state_dict) if is_balanced and earlier is None else state_dict,
                writer,
                planner=planner if earlier is None else RefusingPlanner(earlier),
                company=in_company_of(writer, process_group, doing="saving", alone=no_dist or not use_collectives),
                process_group=process_group,
                no_dist=no_dist,
                use_collectives=use_collectives,
            )
    except CheckpointException as error:
        raise_own_interrupt(error, rank_in(process_group, no_dist=no_dist))
        raise


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

    `Options.async_overlap` returns before that, and `Options.async_mode` moves the work to a process of its own, as
    ``AsyncCheckpointerType.PROCESS`` does. The copy lies in memory that is kept for the next one, until
    `cloudckpt.close`. The save's collectives run on a gloo group of their own, so they cannot get mixed up with
    training's. A save that is still running is waited for first, or refused (`Options.async_in_flight`). What goes
    wrong is raised by the handle's `AsyncSave.result`; if nobody asks it, by the next save, on all ranks. Where the
    script just ends, the save is still completed.

    Raises `SaveInFlightError`, torch's ``AssertionError`` where the process group has no CPU backend, and
    `RankLostError` where it is the first one and not all ranks come; ``CheckpointException`` where `state_dict` could
    not be copied on this rank.
    """
    # Before anything else: the save in flight may be one of the same writer.
    chosen = storage_writer.options if isinstance(storage_writer, ObjectStoreWriter) else options or Options()
    with turn(chosen.async_in_flight):
        writer = _writer(uri, checkpoint_id, storage_writer, overwrite=overwrite, options=options)
        if async_stager is None and isinstance(writer, AsyncStager):
            async_stager = writer
        in_process = async_checkpointer_type is AsyncCheckpointerType.PROCESS or chosen.async_mode == "process"
        by_torch = in_process and not isinstance(writer, ObjectStoreWriter)
        call: Call | None = None
        save: BackgroundSave | None = None
        try:
            if not (no_dist or by_torch):
                require_cpu_backend(process_group)
                if use_collectives and isinstance(writer, ObjectStoreWriter):
                    call = _begun_in_background(writer, process_group)
                process_group = call.group if call is not None else background_group(process_group)
            with earlier_failure() as earlier:
                if by_torch:
                    if earlier is not None:
                        raise earlier  # noqa: TRY301  # there is no call to end
                    return begin_in_torchs_process(
                        state_dict,
                        writer,
                        planner=planner,
                        process_group=process_group,
                        async_stager=async_stager,
                        no_dist=no_dist,
                        use_collectives=use_collectives,
                    )
                save_of = functools.partial(
                    BackgroundSave,
                    writer=writer,
                    in_process=in_process,
                    call=call,
                    process_group=process_group,
                    no_dist=no_dist,
                    use_collectives=use_collectives,
                )
                if earlier is not None:
                    save = save_of(staging=Adopted.failed(earlier), planner=None)
                    save.begin(is_overlapped=False)
            staging = staged_with(async_stager, entries_of(state_dict), is_shared=in_process)
            is_overlapped = staging.is_overlapped if isinstance(staging, Adopted) else chosen.async_overlap
            save = save_of(staging=staging, planner=planner)
            return save.begin(is_overlapped=is_overlapped)
        except BaseException:  # nobody gets the handle, and the others must not wait for this rank
            if save is not None:
                save.abandon()
            elif call is not None:
                call.end(has_left=True)
            raise


def _begun_in_background(writer: ObjectStoreWriter, process_group: dist.ProcessGroup | None) -> Call | None:
    try:
        return begin(process_group, "background", doing="saving", uri=writer.checkpoint_id, timeout_s=writer.timeout_s)
    except RankLostError as error:
        raise failed(failure_by_loss(error), writer) from None


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
        return ObjectStoreWriter(location_of(uri, checkpoint_id), options=options, overwrite=overwrite)
    if uri is not None or checkpoint_id is not None:
        storage_writer.reset(location_of(uri, checkpoint_id))
    return storage_writer
