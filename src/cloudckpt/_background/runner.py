"""Saves beside training, in a thread that the interpreter waits for at its exit.

See ``docs/design/017-background-saves.md``.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter

from cloudckpt._api.failures import rank_in
from cloudckpt._api.saved import SavedMetadata
from cloudckpt._api.saving import RefusingPlanner, saved
from cloudckpt._background.adopted import Adopted
from cloudckpt._background.handle import AsyncSave
from cloudckpt._background.in_flight import forget, keep, own_stager
from cloudckpt._pipeline.lifecycle import Lifecycle
from cloudckpt._process.host import upload_process
from cloudckpt._ranks.company import accompanied
from cloudckpt._ranks.group import Call
from cloudckpt._stage.staging import AsAWhole, Staging
from cloudckpt._steering import Steering
from cloudckpt._threads import Thread
from cloudckpt.errors import portable
from cloudckpt.writer import ObjectStoreWriter


def staged_with(stager: AsyncStager | None, entries: dict[str, Any], *, is_shared: bool) -> Staging | Adopted:
    """A copy of `entries`, or the beginning of one; what goes wrong is its outcome. None: in the process's own pool."""
    try:
        return Adopted.of(stager, entries) if stager is not None else own_stager(is_shared=is_shared).begin(entries)
    except Exception as error:  # noqa: BLE001  # it is the save's failure, which all ranks have to learn of
        return Adopted.failed(error)


@dataclass(slots=True, kw_only=True)
class BackgroundSave:
    """One save, after what it saves was given to a stager."""

    staging: Staging | Adopted | None
    writer: StorageWriter
    in_process: bool
    planner: SavePlanner | None
    call: Call | None
    process_group: dist.ProcessGroup | None
    no_dist: bool
    use_collectives: bool
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Taken once: by the thread that makes the save, or by who found that it could not begin."""
    handle: AsyncSave | None = None
    is_abandoned: bool = False

    def begin(self, *, is_overlapped: bool) -> AsyncSave:
        """Save in a thread of its own; return once all is staged, or at once if that is not to be waited for.

        Raises what the save came to where staging has failed by then. Whatever is raised here, `abandon` has to follow.
        """
        staging = self.staging
        assert staging is not None  # noqa: S101  # it has not run yet
        is_ours = isinstance(self.writer, ObjectStoreWriter)
        uri = str(getattr(self.writer, "checkpoint_id", "the checkpoint"))
        rank = rank_in(self.process_group, no_dist=self.no_dist)
        steering = Steering(uri, rank=rank)
        if isinstance(self.writer, ObjectStoreWriter):
            self.writer.begin(rank)
            staging.completed.add_done_callback(functools.partial(_tell_staged, staging, self.writer.lifecycle))
        tell_others = None
        if self.call is not None:
            self.call.heed(steering.cancel)
            tell_others = self.call.cancel
        handle = AsyncSave(uri, steering=steering if is_ours else None, staging=staging, tell_others=tell_others)
        self.handle = handle
        thread = Thread(
            contextvars.copy_context().run,
            *(self._run, handle, steering, is_overlapped),
            name="cloudckpt-async",
            daemon=False,
        )
        keep(handle, thread)
        thread.start()
        if is_overlapped and not staging.completed.done():
            return handle
        staging.completed.wait()
        if staging.completed.exception() is not None and (error := handle.exception()) is not None:
            raise error
        return handle

    def abandon(self) -> None:
        """Where `begin` did not return, nobody has the handle: there must be no save. Can be called again."""
        if self.is_abandoned or self.turn.acquire(blocking=False):
            self.is_abandoned = True
            if self.handle is not None:
                forget(self.handle)
            if self.call is not None:
                self.call.end(has_left=True)
        elif self.handle is not None:
            self.handle.cancel()

    def _run(self, handle: AsyncSave, steering: Steering, is_overlapped: bool) -> None:  # noqa: FBT001  # as a thread's arguments are
        staging = self.staging
        assert staging is not None  # noqa: S101  # as above
        outcome: SavedMetadata | BaseException
        if not self.turn.acquire(blocking=False):
            return  # whoever started this thread was interrupted, and has seen to it that nobody waits
        try:
            outcome = self._saved(staging, steering, is_overlapped=is_overlapped)
        except BaseException as error:  # noqa: BLE001  # whoever waits must learn of it
            traceback.clear_frames(error.__traceback__)  # they hold the copy, and the error would hold them
            outcome = error
            if isinstance(error, CheckpointException):
                error.__traceback__ = None  # it says itself where it comes from, and this frame would go on for it
        if isinstance(self.writer, ObjectStoreWriter) and isinstance(outcome, BaseException):
            self.writer.lifecycle.end(outcome)
        staging.completed.wait()  # until then the memory is written to
        staging.state_dict = {}  # else its tensors live until the next one
        self.staging = self.planner = self.handle = None
        handle.end(outcome)
        if not isinstance(outcome, BaseException) or handle.cancelled():
            forget(handle)
        del outcome  # whose traceback holds this frame

    def _saved(self, staging: Staging | Adopted, steering: Steering, *, is_overlapped: bool) -> SavedMetadata:
        writer, planner = self.writer, self.planner
        ours = writer if isinstance(writer, ObjectStoreWriter) else None
        snapshot: Staging | AsAWhole | None = None
        try:
            if isinstance(staging, Staging) and ours is not None and planner is None and not ours.has_transforms:
                # Only its bytes are looked at, each once it is there. Where the caller waits for a copy that keeps
                # every core busy, an upload beside it would make that wait longer than it would shorten the save.
                snapshot = staging if is_overlapped or staging.leaves_cores else AsAWhole(staging)
            else:
                steering.wait_for(staging.completed)
            steering.check()
            if staging.completed.done():
                staging.completed.result()
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # all ranks have to learn of it
            planner = RefusingPlanner(portable(error) if isinstance(error, Exception) else error)
        except BaseException:  # an interrupt while it was staged
            if self.call is not None:
                self.call.end(has_left=True)  # or the others would wait for as long as this process lives
            raise
        if ours is not None:
            ours.steer(steering, snapshot)
            if self.in_process:
                ours.run_in(upload_process(), staging if isinstance(staging, Staging) else None)
        try:
            return saved(
                lambda: staging.state_dict,
                writer,
                planner=planner,
                company=_company(self.call, self.process_group),
                process_group=self.process_group,
                no_dist=self.no_dist,
                use_collectives=self.use_collectives,
            )
        finally:
            if self.call is not None:
                self.call.heed(None)
            if ours is not None:
                ours.steer(None)
                ours.run_in(None)


def _tell_staged(staging: Staging | Adopted, lifecycle: Lifecycle, completed: Future[None]) -> None:
    if completed.exception() is None:
        lifecycle.staged(staging.copied_bytes)


@contextlib.contextmanager
def _company(call: Call | None, group: dist.ProcessGroup | None) -> Iterator[dist.ProcessGroup | None]:
    with accompanied(call):
        yield group
