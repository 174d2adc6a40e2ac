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

from cloudckpt._api.beginning import in_company_of, location_of, require_state_dict
from cloudckpt._api.failures import raise_own_interrupt, rank_in
from cloudckpt._api.loading import load
from cloudckpt._api.saved import SavedMetadata
from cloudckpt._api.saving import RefusingPlanner, failed, saved
from cloudckpt._background.adopted import Adopted
from cloudckpt._background.asking import in_flight_on
from cloudckpt._background.groups import background_group, require_cpu_backend
from cloudckpt._background.handle import AsyncSave
from cloudckpt._background.in_flight import await_turn, earlier_failure, turn
from cloudckpt._background.runner import BackgroundSave, staged_with
from cloudckpt._background.torchs_process import begin_in_torchs_process
from cloudckpt._dcp.save_planner import entries_of
from cloudckpt._ranks.company import failure_by_loss
from cloudckpt._ranks.group import Call, begin, pass_over
from cloudckpt._uri import parse_location
from cloudckpt.errors import InvalidOptionError, InvalidURIError, RankLostError
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

    With ``use_collectives=False`` each rank commits a checkpoint of its own under ``<uri>/rank-<r>/``, and loads that
    one back. Sharded entries are then refused with `IncompleteSaveError`: no rank has all of them. Tensors that are not
    dense are always refused with `UnsupportedValueError`.

    `checkpoint_id` is torch's name for `uri`. Raises torch's ``CheckpointException``, on every rank, with the causes
    by rank; it is also an instance of the causes' class where they have one in common, such as
    `CheckpointExistsError`. Raises `InvalidURIError`, or ``TypeError`` for what is no dict, before anything else. Where
    a rank dies or hangs, or does not come within `Options.timeout_s`, the others get `RankLostError`; a rank that is
    slow but alive is waited for.
    """
    require_state_dict(state_dict, doing="saving")
    try:
        if storage_writer is not None:
            await_turn()  # the save in flight may be one of the same writer
        writer = _writer(uri, checkpoint_id, storage_writer, overwrite=overwrite, options=options)
    except BaseException as error:
        if _is_interrupt(error) and not _is_alone(storage_writer, no_dist=no_dist, use_collectives=use_collectives):
            pass_over(process_group, "foreground")
        raise
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
    require_state_dict(state_dict, doing="saving")
    # Before anything else: the save in flight may be one of the same writer.
    chosen = storage_writer.options if isinstance(storage_writer, ObjectStoreWriter) else options or Options()
    is_alone = _is_alone(storage_writer, no_dist=no_dist, use_collectives=use_collectives)
    first_with = functools.partial(
        _in_flight_here if is_alone else in_flight_on,
        process_group=process_group,
        uri=_named(uri, checkpoint_id, storage_writer),
        timeout_s=chosen.timeout_s,
    )
    with turn(chosen.async_in_flight, first_with=first_with):
        call: Call | None = None
        save: BackgroundSave | None = None
        is_counted = is_alone
        try:
            await_turn()
            writer = _writer(uri, checkpoint_id, storage_writer, overwrite=overwrite, options=options)
            if async_stager is None and isinstance(writer, AsyncStager):
                async_stager = writer
            in_process = async_checkpointer_type is AsyncCheckpointerType.PROCESS or chosen.async_mode == "process"
            by_torch = in_process and not isinstance(writer, ObjectStoreWriter)
            if not (no_dist or by_torch):
                require_cpu_backend(process_group)
                if use_collectives and isinstance(writer, ObjectStoreWriter):
                    is_counted = True
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
        except BaseException as error:  # nobody gets the handle, and the others must not wait for this rank
            if _is_interrupt(error) and not is_counted:
                pass_over(process_group, "background")
            _leave(save, call)
            raise


def _leave(save: BackgroundSave | None, call: Call | None) -> None:
    if save is not None:
        save.abandon()
    elif call is not None:
        call.end(has_left=True)


def _is_interrupt(error: BaseException) -> bool:
    """Whether this rank was kept from a save that the others make. Wrong arguments are the program's."""
    return not isinstance(error, Exception)


def _is_alone(storage_writer: StorageWriter | None, *, no_dist: bool, use_collectives: bool) -> bool:
    """Whether the ranks make no call together in which they wait for one another."""
    return no_dist or not use_collectives or not isinstance(storage_writer, ObjectStoreWriter | None)


def _named(
    uri: str | os.PathLike[str] | None, checkpoint_id: str | os.PathLike[str] | None, writer: StorageWriter | None
) -> str:
    """The one spelling of where it is saved to, or, where it cannot be, what was given instead."""
    if uri is None and checkpoint_id is None:
        return str(getattr(writer, "checkpoint_id", ""))
    try:
        return parse_location(location_of(uri, checkpoint_id)).uri
    except (InvalidURIError, TypeError):  # it is raised once all ranks have said whether a save is in flight
        return f"{uri}, {checkpoint_id}"


def _in_flight_here(mine: str | None, **_: object) -> tuple[int, str] | None:
    return None if mine is None else (0, mine)


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
