"""Saves by torch's own background process, with writers that are not cloudckpt's."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageWriter

from cloudckpt._api.saving import failed, with_report
from cloudckpt._background.adopted import Adopted
from cloudckpt._background.handle import AsyncSave
from cloudckpt._background.in_flight import keep, own_stager


def begin_in_torchs_process(
    state_dict: dict[str, Any],
    writer: StorageWriter,
    *,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    async_stager: AsyncStager | None,
    no_dist: bool,
    use_collectives: bool,
) -> AsyncSave:
    """Hand the save to torch's ``dcp.async_save`` with its ``PROCESS`` executor."""
    response = state_dict_saver.async_save(
        state_dict,
        storage_writer=writer,
        planner=planner,
        process_group=process_group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        async_stager=async_stager if async_stager is not None else own_stager(is_shared=True),
        no_dist=no_dist,
        use_collectives=use_collectives,
    )
    staging = Adopted()
    upload: Future[Any]
    if isinstance(response, AsyncSaveResponse):
        staging.follow(response.staging_completion)
        upload = response.upload_completion
    else:
        staging.completed.set_result(None)
        upload = response
    handle = AsyncSave(str(getattr(writer, "checkpoint_id", "the checkpoint")), steering=None, staging=staging)
    keep(handle)

    def end(upload: Future[Any]) -> None:
        error = upload.exception()
        if error is None:
            handle.end(with_report(upload.result(), writer))
        else:
            handle.end(failed(error, writer) if isinstance(error, CheckpointException) else error)

    upload.add_done_callback(end)
    return handle
