"""One save by torch's `save`, in whichever thread, and its failure as the caller gets it."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from cloudckpt._api.failures import causes_of, failure_of
from cloudckpt._api.saved import SavedMetadata
from cloudckpt._collecting import rare_collections
from cloudckpt._dcp.save_planner import BalancedSavePlanner
from cloudckpt.errors import CommitUnknownError, RankLostError
from cloudckpt.writer import ObjectStoreWriter

_last_s = 0.0


def last_seconds() -> float:
    """How long the last save of this process that was committed has taken, from its planning on; 0 before the first."""
    return _last_s


class RefusingPlanner(DefaultSavePlanner):
    """Lets a rank take part in a save only to say why it cannot: all ranks get `error`, and none writes anything."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002  # torch looks at the names
        raise self._error


def saved(
    entries: Callable[[], dict[str, Any]],
    writer: StorageWriter,
    *,
    planner: SavePlanner | None,
    company: AbstractContextManager[dist.ProcessGroup | None],
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    use_collectives: bool,
) -> SavedMetadata:
    """Save what `entries` makes; without a `planner`, ``Stateful`` objects in it have been asked.

    `company` gives the group for DCP's collectives, which is one of the ranks of `process_group`. Raises torch's
    ``CheckpointException``, also an instance of its causes' class, with nothing left of what this rank wrote.
    """
    is_balanced = planner is None and isinstance(writer, ObjectStoreWriter)
    # Without collectives each rank fails alone, and torch lets the others wait for it.
    is_awaited = not (use_collectives or no_dist) and dist.is_available() and dist.is_initialized()
    try:
        with rare_collections(), company as group:
            made = {} if isinstance(planner, RefusingPlanner) else entries()
            metadata = state_dict_saver.save(
                {} if is_balanced else made,  # the planner knows it better
                storage_writer=writer,
                planner=BalancedSavePlanner(entries=made) if is_balanced else planner,
                process_group=group,
                no_dist=no_dist,
                use_collectives=use_collectives,
            )
    except CheckpointException as error:
        failure = failed(error, writer)
        if is_awaited:
            dist.barrier(group=process_group)
        try:
            raise failure from None
        finally:
            del failure  # its traceback holds this frame: a cycle otherwise, with the state dict in it
    except Exception as error:
        if not is_awaited:
            raise
        dist.barrier(group=process_group)
        failures: Any = {dist.get_rank(process_group): (error, traceback.extract_tb(error.__traceback__))}
        raise failed(CheckpointException("write", failures), writer) from None
    return with_report(metadata, writer)


def with_report(metadata: Metadata, writer: StorageWriter) -> SavedMetadata:
    """What a save returns."""
    if isinstance(writer, ObjectStoreWriter):
        writer.flush_trace()
        writer.lifecycle.end(writer.report)
    global _last_s  # noqa: PLW0603  # of the process
    report = writer.report if isinstance(writer, ObjectStoreWriter) else None
    if report is not None:
        _last_s = report.plan_s + report.write_s + report.commit_s
    values = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(Metadata)}
    return SavedMetadata(**values, report=report)


def failed(error: CheckpointException, writer: StorageWriter) -> CheckpointException:
    """What a save raises, with what this rank wrote removed."""
    # Every rank has been told that the save failed, so each can remove what it wrote. Not so where the manifest may
    # be there, or a rank that was given up may yet put it: then the data belongs to it.
    may_be_committed = any(isinstance(cause, (CommitUnknownError, RankLostError)) for cause in causes_of(error))
    if isinstance(writer, ObjectStoreWriter):
        if not may_be_committed:
            writer.discard()
        writer.flush_trace()
        writer.lifecycle.end(error)
    return failure_of(error, what=f"saving {getattr(writer, 'checkpoint_id', 'the checkpoint')}")
