"""One save or load of all ranks: the steps of torch's ``dcp.save`` and ``dcp.load``, and the error that they raise.

`run_save` and `run_load` call planner, writer and reader in the order of torch's functions. They replace torch's
functions for two reasons: torch's ``load`` turns an error of ``read_metadata`` into text, and asks each entry of the
state dict twice if it is ``Stateful``, which costs most of the time of a small tensor
(``docs/design/012-load-planning.md``).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt._display import pairs_to_html
from cloudckpt._this_process import rare_collections
from cloudckpt._torch_compat import DistWrapper
from cloudckpt.dcp.live.completeness import add_placeholders, fill_placeholders, refuse_unloaded, restore_placeholders
from cloudckpt.dcp.live.entry import LiveEntry, LoadSource, ask_state, find_synchronized, load_object, plan_live_entries
from cloudckpt.dcp.load_planner import ExplainingLoadPlanner, find_absent, is_default_planner
from cloudckpt.dcp.ranks.collectives import CollectiveCall
from cloudckpt.dcp.ranks.failures import SaveOrLoadError, causes_of, failure_of, raise_own_interrupt, release_frames
from cloudckpt.dcp.replicas import key_of
from cloudckpt.dcp.save_planner import BalancedSavePlanner, is_stateful
from cloudckpt.dcp.storage_reader import ObjectStoreReader, RankPlanData
from cloudckpt.dcp.storage_writer import ObjectStoreWriter
from cloudckpt.errors import (
    CheckpointChangedError,
    CloudckptError,
    CommitUnknownError,
    RankLostError,
)
from cloudckpt.report import LoadReport, SaveReport
from cloudckpt.tensors.tensor_bytes import training_mode

RanksContext: TypeAlias = AbstractContextManager[DistWrapper]
"""Gives the collectives of one save or load. If a rank leaves it with an error, the call ends on all ranks."""

_num_saves, _last_save_s = 0, 0.0


@dataclasses.dataclass
class SavedMetadata(Metadata):
    """torch's ``Metadata`` of a checkpoint that was saved (`torch.distributed.checkpoint.metadata.Metadata`)."""

    report: SaveReport | None = None
    """Report of this rank. None for a save by torch's process."""

    def __repr__(self) -> str:
        place = "" if self.report is None else f" of {self.report.uri}"
        return f"<SavedMetadata{place}: {len(self.state_dict_metadata)} entries>"

    def _repr_html_(self) -> str:
        return pairs_to_html("SavedMetadata", {"entries": len(self.state_dict_metadata), "report": self.report})


def last_save() -> tuple[int, float]:
    """Return the number of saves that this process has committed, and the seconds of the last, with its planning."""
    return _num_saves, _last_save_s


def states_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with the state of each object in place of the object.

    Every rank asks the objects in the order of their keys, since their methods may be collective.
    """
    states = {
        key: ask_state(state_dict[key], where=key) if is_stateful(state_dict[key]) else state_dict[key]
        for key in sorted(state_dict, key=str)
    }
    return {key: states[key] for key in state_dict}


@rare_collections()
def run_save(
    state_dict: Mapping[str, Any],
    writer: ObjectStoreWriter,
    *,
    planner: SavePlanner | None,
    ranks_context: RanksContext,
    refusal: BaseException | None = None,
) -> SavedMetadata:
    """Save `state_dict` from all ranks.

    Args:
        state_dict: The entries of this rank.
        writer: Writes the entries; on rank 0 it commits.
        planner: Plans the save; None stands for `BalancedSavePlanner`.
        ranks_context: Gives the collectives of the save, also for another try (`ObjectStoreWriter.find_next`).
        refusal: The reason why this rank cannot save. It takes part all the same, so that all ranks raise the reason.

    Raises:
        CheckpointException: The save failed on some rank. The exception is `SaveOrLoadError`, which is also an instance
            of the class that the causes have in common. This rank has removed its objects, except after
            `CommitUnknownError` and `RankLostError` (`end_failed_save`).

    """
    try:
        with ranks_context as ranks:
            while True:
                try:
                    writer.is_alone = ranks.get_world_size() == 1
                    save = _Save(state_dict, writer, planner or BalancedSavePlanner(), ranks, refusal)
                    save.plan = ranks.reduce_scatter("plan", save.plan_locally, save.plan_globally)
                    metadata = ranks.all_reduce("write", save.write, save.finish)
                    if writer.hosts is not None:
                        writer.keep_objects()
                        manifest_bytes = ranks.broadcast("commit", writer.encode_manifest)
                        ranks.all_gather("commit", functools.partial(writer.commit_on_host, manifest_bytes))
                    break
                except CheckpointException as error:
                    failure = end_failed_save(error, writer)
                    next_writer = writer.find_next(failure)  # all ranks have the same failure, so all get one, or none
                    if next_writer is None:
                        raise failure from None
                    writer = next_writer
                    if isinstance(ranks, CollectiveCall):
                        ranks.note_uri(writer.checkpoint_id)
    except CheckpointException as error:
        failure = error if isinstance(error, SaveOrLoadError) else end_failed_save(error, writer)
        try:
            raise failure from None
        finally:
            del failure  # its traceback holds this frame, and so the state dict
    return end_save(metadata, writer)


def end_save(metadata: Metadata, writer: ObjectStoreWriter) -> SavedMetadata:
    """Finish the trace and the events of a save that was committed, and add its report."""
    global _num_saves, _last_save_s  # of the process
    report = writer.report
    writer.flush_trace()
    writer.lifecycle.end(report)
    if report is not None:
        _num_saves, _last_save_s = _num_saves + 1, report.plan_s + report.write_s + report.commit_s
    values = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(Metadata)}
    return SavedMetadata(**values, report=report)


def end_failed_save(error: CheckpointException, writer: ObjectStoreWriter) -> CheckpointException:
    """Return the error that a failed save raises. Remove this rank's objects, unless a manifest may name them."""
    # All ranks know that the save failed, so each can remove its objects. But after these two errors the manifest may
    # exist, or a lost rank 0 may still put it: then the data belongs to it.
    if not any(isinstance(cause, CommitUnknownError | RankLostError) for cause in causes_of(error)):
        writer.discard()
    writer.flush_trace()
    writer.lifecycle.end(error)
    subject = f"saving {writer.checkpoint_id}{writer.earlier_failure}"
    return failure_of(error, subject=subject, is_alone=writer.is_alone)


@dataclasses.dataclass(slots=True)
class _Save:
    """The steps of one save on one rank."""

    state_dict: Mapping[str, Any]
    writer: ObjectStoreWriter
    planner: SavePlanner
    ranks: DistWrapper
    refusal: BaseException | None
    metadata: Metadata | None = None
    plan: SavePlan | None = None

    def plan_locally(self) -> SavePlan:
        if self.refusal is not None:
            raise self.refusal
        entries = states_of(self.state_dict)
        storage_meta, is_coordinator = self.writer.storage_meta(), self.ranks.is_coordinator
        if isinstance(self.planner, BalancedSavePlanner):
            self.planner.snapshot = self.writer.snapshot
            self.planner.compare = self.writer.options.compare_replicas
            self.planner.is_alone = self.ranks.get_world_size() == 1
            if any(isinstance(value, LiveEntry) for value in self.state_dict.values()):
                self.planner.synchronized = find_synchronized(self.state_dict)
        if "storage_meta" in inspect.signature(self.planner.set_up_planner).parameters:
            self.planner.set_up_planner(state_dict=entries, storage_meta=storage_meta, is_coordinator=is_coordinator)
        else:  # planners for older versions of torch
            self.planner.set_up_planner(entries, is_coordinator)  # type: ignore[arg-type]  # the older signature
        self.writer.set_up_storage_writer(is_coordinator, rank=self.ranks.rank)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def plan_globally(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.writer.hosts is not None:
            self.writer.common = Counter(key_of(item.index) for plan in plans for item in plan.items)
        plans, self.metadata = self.planner.create_global_plan(plans)
        return self.writer.prepare_global_plan(plans)

    def write(self) -> list[WriteResult]:
        assert self.plan is not None  # noqa: S101  # the first step has set it
        writing = self.writer.write_data(self.planner.finish_plan(self.plan), self.planner)
        writing.wait()
        results = writing.value()
        self.writer.check_references(results)
        return results

    def finish(self, results: list[list[WriteResult]]) -> Metadata:
        assert self.metadata is not None  # noqa: S101  # the coordinator has planned
        self.writer.finish(metadata=self.metadata, results=results)
        return self.metadata


def run_load(
    state_dict: dict[str, Any],
    reader: ObjectStoreReader,
    *,
    planner: LoadPlanner | None,
    new_ranks_context: Callable[[], RanksContext],
    rank: int,
) -> LoadReport:
    """Load into `state_dict` on all ranks. If the checkpoint is overwritten during the load, load the new one.

    Raises `SaveOrLoadError` (`failure_of`) if the load fails on some rank, or this rank's own Ctrl-C or exit.
    """
    for is_last in (False, True):
        try:
            _load_once(state_dict, reader, planner=planner, ranks_context=new_ranks_context())
            break
        except CheckpointException as error:
            # All ranks get the same failures, so all of them try again, or none does.
            if not is_last and any(isinstance(cause, CheckpointChangedError) for cause in causes_of(error)):
                reader.reset()
                continue
            raise_own_interrupt(error, rank)
            raise failure_of(error, subject=f"loading {reader.checkpoint_id}", is_alone=reader.is_alone) from None
    assert reader.report is not None  # noqa: S101  # the reader makes one
    return reader.report


@training_mode()
def _load_once(
    state_dict: dict[str, Any],
    reader: ObjectStoreReader,
    *,
    planner: LoadPlanner | None,
    ranks_context: RanksContext,
) -> None:
    """Make one try of `run_load`. Raises torch's own ``CheckpointException``.

    `ExplainingLoadPlanner` replaces torch's default planner with its default flattening. Any other planner is used.
    """
    if has_default_planner := planner is None or is_default_planner(planner):
        is_partial = planner is not None and planner.allow_partial_load
        is_live = any(isinstance(value, LiveEntry) for value in state_dict.values())
        planner = ExplainingLoadPlanner(
            reader.checkpoint_id,
            allow_partial_load=is_partial,
            has_live_objects=is_live,
            is_renamed=reader.is_renamed,
            via=reader.lifecycle.via,
        )
    rank = 0
    try:
        with ranks_context as ranks:
            rank = ranks.rank
            reader.is_alone = ranks.get_world_size() == 1
            if isinstance(planner, ExplainingLoadPlanner):
                planner.num_ranks = ranks.get_world_size()
            # In one order on all ranks: the methods of the objects may be collective.
            entries = {key: state_dict[key] for key in sorted(state_dict, key=str)}
            objects = {key: value for key, value in entries.items() if is_stateful(value)}
            # A live object plans its values once the checkpoint is known.
            stateful = {key: value for key, value in objects.items() if not isinstance(value, LiveEntry)}
            entries.update(states_of(stateful))
            have_objects = _load(
                entries,
                reader,
                planner,
                ranks,
                has_default_planner=has_default_planner,
                stateful=stateful,
                has_objects=bool(objects),
            )
            for key, value in entries.items():
                if key in state_dict and key not in objects:
                    state_dict[key] = value
            if have_objects:
                ranks.all_gather("load_state_dict", functools.partial(_load_objects, objects, entries))
    except BaseException as error:
        reader.lifecycle.end(error)
        if not isinstance(error, CloudckptError) or isinstance(error, CheckpointException):
            raise
        # It was raised before the first step. The other ranks learned it at the end of the context.
        failures: Any = {rank: (error, traceback.extract_tb(error.__traceback__))}
        raise CheckpointException("begin", failures) from None
    finally:
        if (failure := reader.end_call()) is not None:
            release_frames([failure])  # torch raises a copy of it, so its own frames would stay


def _has_values(value: Any) -> bool:
    return not isinstance(value, Mapping) or any(map(_has_values, value.values()))


def _load_objects(objects: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    for key, value in objects.items():
        if key not in entries:  # the checkpoint has none
            continue
        if isinstance(value, LiveEntry):
            value.load_state_dict(entries[key], where=key)
        else:
            load_object(value, entries[key], where=key)


def _load(
    entries: dict[str, Any],
    reader: ObjectStoreReader,
    planner: LoadPlanner,
    ranks: DistWrapper,
    *,
    has_default_planner: bool,
    stateful: Mapping[str, Any],
    has_objects: bool,
) -> bool:
    """Fill `entries`, which have the states of the `stateful` objects. Return True if any rank has objects to load."""
    live_keys = [key for key, value in entries.items() if isinstance(value, LiveEntry)]
    takes_what_fits = not reader.is_strict and bool(live_keys) and len(live_keys) == len(entries)
    # Without strictness, a warning names what the live objects leave behind, also whole objects.
    whole_keys = None if takes_what_fits else live_keys
    reader.begin_call(
        ranks, is_lazy=has_default_planner and not live_keys, whole_keys=whole_keys, keys=[*map(str, entries)]
    )

    def plan_locally() -> LoadPlan:
        metadata = reader.read_metadata()
        source = LoadSource(
            uri=reader.checkpoint_id,
            entries=metadata.state_dict_metadata,
            renaming=reader.renaming,
            is_strict=reader.is_strict,
            keys=[*map(str, entries)],
            whole_keys=None if reader.takes_all else whole_keys,
            is_logged=ranks.rank == 0,
        )
        unused = plan_live_entries(entries, metadata, source=source, num_ranks=ranks.get_world_size())
        if has_default_planner:
            padded = {key: add_placeholders(entries[key], key, metadata.state_dict_metadata) for key in stateful}
            entries.update(padded)
        if isinstance(planner, ExplainingLoadPlanner):
            planner.renaming, planner.whole_keys = reader.renaming, source.whole_keys
        planner.set_up_planner(entries, metadata, ranks.is_coordinator)
        reader.set_up_storage_reader(metadata, ranks.is_coordinator, rank=ranks.rank)
        return reader.prepare_local_plan(
            planner.create_local_plan(),
            unused=unused,
            objects=[*stateful] if has_default_planner else (),
            absent=find_absent(planner),
            is_empty=not has_objects and not _has_values(entries),
        )

    def plan_globally(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def plan_again() -> LoadPlan:
        assert isinstance(planner, ExplainingLoadPlanner) and planner.metadata is not None  # noqa: S101, PT018
        unasked = [name for name in plan.storage_data.unasked if name not in planner.state_dict]
        fill_placeholders(
            entries,
            stateful,
            unasked,
            reader.nested_metadata(),
            is_strict=reader.is_strict,
            num_ranks=ranks.get_world_size(),
        )
        planner.set_up_planner(entries, planner.metadata, ranks.is_coordinator)
        unloaded = [name for name in unasked if name not in planner.state_dict]
        refuse_unloaded(unloaded, stateful, is_strict=reader.is_strict, rank=ranks.rank, uri=reader.checkpoint_id)
        return reader.prepare_local_plan(
            planner.create_local_plan(), unused=plan.storage_data.unused, absent=find_absent(planner)
        )

    plan = ranks.reduce_scatter("plan", plan_locally, plan_globally)
    if isinstance(plan.storage_data, RankPlanData) and plan.storage_data.unasked:
        plan = ranks.reduce_scatter("plan", plan_again, plan_globally)

    reader.fetch_from_hosts(plan, ranks)

    def read() -> bool:
        with reader.sharing_reads(plan, ranks):
            reader.read_data(planner.finish_plan(plan), planner).wait()
        if has_default_planner:
            entries.update({key: restore_placeholders(entries[key]) for key in stateful})
        return has_objects

    return any(ranks.all_gather("read", read))
