"""Loading by URI: every keyword of torch's own call, and its behaviour."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, overload

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from cloudckpt._api.beginning import in_company_of, location_of, require_state_dict
from cloudckpt._api.failures import causes_of, failure_of, raise_own_interrupt, rank_in
from cloudckpt._collecting import rare_collections
from cloudckpt._dcp.load_planner import planned
from cloudckpt._ranks.met_group import MetGroup
from cloudckpt.errors import CheckpointChangedError, InvalidOptionError
from cloudckpt.options import Options
from cloudckpt.reader import ObjectStoreReader
from cloudckpt.report import LoadReport

StateDict = dict[str, Any]


@overload
def load(
    state_dict: StateDict,
    uri: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: ObjectStoreReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
) -> LoadReport: ...


@overload
def load(
    state_dict: StateDict,
    uri: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_pickle: bool = False,
    options: Options | None = None,
) -> LoadReport | None: ...


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
    load one and the same save; if it is overwritten meanwhile, the load is made once more. Plain Python and
    numpy values load, and objects of classes that ``torch.serialization.add_safe_globals`` has allowed. `allow_pickle`
    admits all others, which may run any code, and checkpoints of torch's own writers.

    Raises torch's ``CheckpointException``, also an instance of the cause's class: `CheckpointNotFoundError`,
    `CorruptCheckpointError`, `StateDictMismatchError`, `UnsafePickleError`, `RankLostError`, … After an error, what
    the tensors hold is undefined. Returns this rank's report (None for a reader that makes none).
    """
    require_state_dict(state_dict, doing="loading")
    reader = storage_reader
    if reader is not None and (allow_pickle or options is not None):
        raise InvalidOptionError("allow_pickle and options belong to the reader: pass them to it, not beside it")
    if reader is None:
        reader = ObjectStoreReader(location_of(uri, checkpoint_id), options=options, allow_pickle=allow_pickle)
    elif uri is not None or checkpoint_id is not None:
        reader.reset(location_of(uri, checkpoint_id))
    rank = rank_in(process_group, no_dist=no_dist)
    if isinstance(reader, ObjectStoreReader):
        reader.report_failures_in_set_up(rank=rank, own_planner=planner is None)
    where = str(getattr(reader, "checkpoint_id", "the checkpoint"))
    try:
        for is_last in (False, True):
            try:
                with (
                    _told(reader),
                    rare_collections(),
                    in_company_of(reader, process_group, doing="loading", alone=no_dist) as group,
                    planned(state_dict, planner, where) as (wanted, chosen_planner),
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


@contextlib.contextmanager
def _told(reader: StorageReader) -> Iterator[None]:
    """Whatever ends the load here is told."""
    try:
        yield
    except BaseException as error:
        if isinstance(reader, ObjectStoreReader):
            reader.lifecycle.end(error)
        raise
