"""Run a save beside training, in a thread that the interpreter waits for at its exit.

See ``docs/design/017-background-saves.md``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import datetime as dt
import functools
import threading
import traceback
import warnings
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

from cloudckpt._this_process import note_users_line, refuse_in_fork
from cloudckpt._torch_compat import DistWrapper, has_cpu_backend
from cloudckpt.background.handle import AsyncSave
from cloudckpt.background.hook_answers import refuse_attributes
from cloudckpt.background.in_flight import forget, set_in_flight, stager_of_process
from cloudckpt.background.process import ProcessSave, end_process
from cloudckpt.background.stager import PinnedStager
from cloudckpt.cancellation import Cancellation
from cloudckpt.dcp.ranks.collectives import CollectiveCall, begin_call, unguarded_collectives
from cloudckpt.dcp.save_and_load import SavedMetadata, end_failed_save, run_save
from cloudckpt.dcp.save_planner import BalancedSavePlanner
from cloudckpt.dcp.storage_writer import ObjectStoreWriter
from cloudckpt.errors import RankLostError, make_picklable
from cloudckpt.pipeline.context import Lifecycle
from cloudckpt.tensors.snapshot import Snapshot


class GlooGroupCache:
    """Makes one gloo group for each process group, of the same ranks, and returns the same one later."""

    def __init__(self) -> None:
        self._groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def group_like(self, source: dist.ProcessGroup, *, timeout_s: float | None = None) -> dist.ProcessGroup:
        """Return the gloo group of the ranks of `source`. Collective on the first call.

        If this call makes the group, its collectives have `timeout_s`.
        """
        refuse_in_fork()
        for cached_source, group in list(self._groups.items()):
            if not (_exists(cached_source) and _exists(group)):
                del self._groups[cached_source]
        if source not in self._groups:
            self._groups[source] = dist.new_group(
                dist.get_process_group_ranks(source),
                backend="gloo",
                timeout=None if timeout_s is None else dt.timedelta(seconds=timeout_s),
                use_local_synchronization=source is not dist.group.WORLD,
            )
        return self._groups[source]


_background_groups = GlooGroupCache()


def require_cpu_backend(process_group: dist.ProcessGroup | None) -> None:
    """Raise ``AssertionError``, as torch itself does, if the group has no CPU backend."""
    if not dist.is_available() or not dist.is_initialized():
        return
    source = process_group if process_group is not None else dist.group.WORLD
    if source is not None and not has_cpu_backend(source):
        raise AssertionError(
            "A CPU backend must be enabled for async save; try initializing process group with 'cpu:gloo,cuda:nccl'"
        )


def background_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks, for a save beside training. Collective on its first call."""
    source = process_group if process_group is not None else dist.group.WORLD if dist.is_available() else None
    return None if source is None else _background_groups.group_like(source)


def background_ranks(
    writer: ObjectStoreWriter, process_group: dist.ProcessGroup | None, *, no_dist: bool
) -> DistWrapper:
    """Return the collectives of a save beside training, guarded if possible. The first call is collective."""
    if no_dist:
        return unguarded_collectives(process_group, no_dist=True)
    require_cpu_backend(process_group)
    uri, timeout_s = writer.agreed_id, writer.options.timeout_s
    try:
        call = begin_call(process_group, "background", doing="saving", uri=uri, timeout_s=timeout_s)
    except CheckpointException as error:
        raise end_failed_save(error, writer) from None
    if call is not None:
        return call
    ranks = unguarded_collectives(process_group, no_dist=False)
    return DistWrapper(background_group(process_group), use_dist=True, coordinator_rank=0) if ranks.use_dist else ranks


class ExternalSnapshot:
    """A snapshot that a stager of torch's protocol makes. The number of copied bytes is unknown."""

    num_bytes = copied_bytes = 0

    def __init__(self, *, is_sent: bool = False) -> None:
        self._is_sent = is_sent
        """True if the copy is sent to another process."""
        self.completed: Future[None] = Future()
        """Done when all bytes are copied, or with the exception that ended the copying."""
        self.is_overlapped = False
        """True if the stager returned before all bytes were copied."""
        self.state_dict: dict[str, Any] = {}
        """The copy, once `completed` is done."""

    @classmethod
    def from_error(cls, error: BaseException) -> ExternalSnapshot:
        """Return a copy that failed with `error`."""
        snapshot = cls()
        snapshot.completed.set_exception(error)
        return snapshot

    @classmethod
    def begin(cls, stager: AsyncStager, entries: dict[str, Any], *, is_sent: bool) -> ExternalSnapshot:
        """Let `stager` copy `entries`. Raises the errors of `stager`."""
        snapshot = cls(is_sent=is_sent and not isinstance(stager, PinnedStager))
        result = stager.stage(entries)
        if isinstance(result, Future):
            snapshot.is_overlapped = True
            result.add_done_callback(snapshot._receive)
            return snapshot
        if stager.should_synchronize_after_execute:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch calls it, too
                stager.synchronize_staging()
        snapshot._end(result)
        return snapshot

    def _receive(self, future: Future[dict[str, Any]]) -> None:
        try:
            state_dict = future.result()
        except BaseException as error:  # the stager failed, or has cancelled its future
            self.completed.set_exception(error)
        else:
            self._end(state_dict)

    def _end(self, state_dict: dict[str, Any]) -> None:
        try:
            if self._is_sent:
                refuse_attributes(state_dict)
        except BaseException as error:  # a waiter for the copy raises it
            self.completed.set_exception(error)
            return
        self.state_dict = state_dict
        self.completed.set_result(None)


def begin_snapshot(
    stager: AsyncStager | None,
    entries: dict[str, Any],
    *,
    by_process: bool,
    parameters: Iterable[torch.Tensor] | None = None,
) -> Snapshot | ExternalSnapshot:
    """Begin to copy `entries` with `stager`, or into this process's own memory. A failure is the copy's outcome.

    With `parameters`, only these may still be copied once `Snapshot.wait_for_urgent` has returned.
    """
    try:
        if stager is None and not by_process:
            return stager_of_process(is_shared=False).begin(entries, parameters=parameters)
        stager = stager_of_process(is_shared=True) if stager is None else stager
        return ExternalSnapshot.begin(stager, entries, is_sent=by_process)
    except Exception as error:  # it is the save's failure, which all ranks have to learn of
        return ExternalSnapshot.from_error(error)


@dataclass(slots=True, kw_only=True)
class BackgroundSave:
    """One save, from the copy of its state dict to its outcome."""

    snapshot: Snapshot | ExternalSnapshot | None
    """None once the save has ended."""
    writer: ObjectStoreWriter
    by_process: bool
    planner: SavePlanner | None
    ranks: DistWrapper
    process_group: dist.ProcessGroup | None
    no_dist: bool
    process: ProcessSave | None = None
    handle: AsyncSave | None = None
    thread: threading.Thread | None = None

    @property
    def call(self) -> CollectiveCall | None:
        """The call of all ranks, if it can find a lost rank; otherwise None."""
        return self.ranks if isinstance(self.ranks, CollectiveCall) else None

    def begin(self, *, is_overlapped: bool) -> AsyncSave:
        """Start the save in a thread of its own. Waits for the copy, or if `is_overlapped`, for that of urgent tensors.

        Raises the failure of the save if the copy failed. After any exception, the caller calls `abandon`.
        """
        snapshot = self.snapshot
        assert snapshot is not None  # noqa: S101  # it has not run yet
        uri = self.writer.checkpoint_id
        cancellation = Cancellation(uri, rank=self.ranks.rank)
        self.writer.begin(self.ranks.rank)
        snapshot.completed.add_done_callback(functools.partial(_announce_copy, snapshot, self.writer.lifecycle))
        cancel_others = None
        if self.by_process:
            self._start_process(snapshot)
            cancellation.enter("uploading")
        elif self.call is not None:
            self.call.set_on_cancel(cancellation.cancel)
            cancel_others = self.call.cancel
        self.handle = handle = AsyncSave(
            uri,
            cancellation=cancellation,
            can_be_cancelled=not self.by_process,
            snapshot=snapshot,
            cancel_others=cancel_others,
        )
        run = functools.partial(self._run, snapshot, handle, cancellation, is_overlapped=is_overlapped)
        context = contextvars.copy_context()
        context.run(note_users_line)
        self.thread = threading.Thread(target=context.run, args=(run,), name="cloudckpt-async", daemon=False)
        set_in_flight(handle, self.thread)
        self.thread.start()
        if is_overlapped:
            if isinstance(snapshot, Snapshot):
                snapshot.wait_for_urgent()
            if not snapshot.completed.done():
                return handle
        concurrent.futures.wait([snapshot.completed])
        if snapshot.completed.exception() is not None and (error := handle.exception()) is not None:
            raise error
        return handle

    def _start_process(self, snapshot: Snapshot | ExternalSnapshot) -> None:
        assert isinstance(snapshot, ExternalSnapshot)  # noqa: S101  # `begin_snapshot` has made it
        self.process = ProcessSave(
            self.writer,
            planner=self.planner,
            ranks=self.ranks,
            make_group=lambda: self.process_group if self.no_dist else background_group(self.process_group),
            no_dist=self.no_dist,
        )
        try:
            self.process.start(snapshot)
        except CheckpointException as error:
            if self.call is not None and not isinstance(error, RankLostError):
                self.call.end(None)  # the others raise it, too
            self.writer.lifecycle.end(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """End the save after `begin` raised, so that no caller has its handle."""
        if self.thread is not None and self.thread.ident is not None and self.handle is not None:
            self.handle.cancel()
            return
        forget(self.handle)
        if self.process is not None:
            end_process()
        if self.call is not None:
            self.call.end(error)

    def _run(
        self,
        snapshot: Snapshot | ExternalSnapshot,
        handle: AsyncSave,
        cancellation: Cancellation,
        *,
        is_overlapped: bool,
    ) -> None:
        outcome: SavedMetadata | BaseException
        try:
            if self.process is not None:
                outcome = self.process.result()
            else:
                outcome = self._save(snapshot, cancellation, is_overlapped=is_overlapped)
        except BaseException as error:  # the handle holds it
            traceback.clear_frames(error.__traceback__)  # the frames hold the copy
            outcome = error
            if isinstance(error, CheckpointException):
                error.__traceback__ = None  # its text holds its traceback, and the object would keep this frame
        try:
            if isinstance(outcome, BaseException):
                self.writer.lifecycle.end(outcome)
        finally:  # a waiter for the handle waits for this thread
            concurrent.futures.wait([snapshot.completed])  # the memory is written to until then
            snapshot.state_dict = {}  # or its tensors would live until the next save
            self.snapshot = self.planner = self.process = self.handle = None
            handle.end(outcome)
        if not isinstance(outcome, BaseException) or handle.cancelled():
            forget(handle)
        del outcome  # whose traceback holds this frame

    def _save(
        self, snapshot: Snapshot | ExternalSnapshot, cancellation: Cancellation, *, is_overlapped: bool
    ) -> SavedMetadata:
        writer, planner = self.writer, self.planner
        unfinished: Snapshot | None = None
        refusal: BaseException | None = None
        try:
            if isinstance(snapshot, Snapshot) and type(planner) is BalancedSavePlanner and not writer.has_transforms:
                # The save reads only bytes of tensors, each after it is copied. An upload beside the copy costs more
                # time than it saves if the copy keeps every core busy and the caller waits for it.
                unfinished = snapshot
                unfinished.is_awaited_whole = not (is_overlapped or snapshot.leaves_cores)
            else:
                cancellation.wait_for(snapshot.completed)
            cancellation.check()
            if snapshot.completed.done():
                snapshot.completed.result()
        except (Exception, CheckpointException) as error:  # all ranks have to learn of it
            refusal = make_picklable(error) if isinstance(error, Exception) else error
        except BaseException as error:  # the copy was interrupted
            if self.call is not None:
                self.call.end(error)  # or the others would wait for this rank
            raise
        writer.set_background_state(cancellation, unfinished)
        try:
            return run_save(
                {} if refusal is not None else snapshot.state_dict,
                writer,
                planner=planner,
                ranks_context=contextlib.nullcontext(self.ranks) if self.call is None else self.call.ending(),
                refusal=refusal,
            )
        finally:
            if self.call is not None:
                self.call.set_on_cancel(None)
            writer.set_background_state(None)


def _announce_copy(snapshot: Snapshot | ExternalSnapshot, lifecycle: Lifecycle, completed: Future[None]) -> None:
    if completed.exception() is None:
        lifecycle.end_staging(snapshot.copied_bytes)


def _exists(group: dist.ProcessGroup) -> bool:
    """Return True if the group was not destroyed. All groups are destroyed together with the default one."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True
