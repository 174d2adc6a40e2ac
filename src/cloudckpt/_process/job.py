"""A save's job on one rank, carried out in the upload process."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt._commit.commit_time import newest_commit_time_ns, note_commit_time_ns
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.save import Ticket
from cloudckpt._process.contents import SharedMemory, contents_of
from cloudckpt._process.host import LostProcessError, UploadProcess
from cloudckpt._process.mapped import file_id_of
from cloudckpt._process.messages import Reply, Spans, Subject, Task
from cloudckpt._stage.body import Filled
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt._trace.recorder import Recorder
from cloudckpt._trace.watchers import is_watched
from cloudckpt.errors import CloudckptError, CommitUnknownError, InvalidOptionError, UploadProcessError
from cloudckpt.options import Options
from cloudckpt.report import Event, SaveReport

_log = logging.getLogger("cloudckpt")

_DOING: dict[Task, str] = {
    "open": "beginning to save",
    "check": "looking for what lies",
    "check_beside": "looking for what lies",
    "write": "writing",
    "commit": "committing",
    "discard": "removing what it wrote",
}


class Snapshot(SharedMemory, Protocol):
    """A copy of the state dict in shared memory, while it is made."""

    @property
    def completed(self) -> Future[None]:
        """When all of it is there; its exception if that failed."""


class RemoteJob:
    """`cloudckpt._pipeline.save.SaveJob`, but that checks, writes, commits and removes in another process.

    Plans, tickets and events stay in this one. Raises what `SaveJob` raises; and `UploadProcessError` where the process
    is lost, after which only `discard` does anything.
    """

    report: SaveReport | None = None

    def __init__(
        self,
        context: Context,
        *,
        save_id: str,
        transforms: WriteTransforms,
        process: UploadProcess,
        snapshot: Snapshot | None,
    ) -> None:
        self._context = context
        self._process = process
        self._snapshot = snapshot
        self._is_lost = False
        self._on_sent: Callable[[int], None] | None = None
        if context.location.scheme == "memory":
            raise InvalidOptionError(
                f"Options: async_mode='process' cannot save to {context.uri}, which lies in this process's own memory"
            )
        timeline = context.recorder.timeline
        subject = Subject(
            location=context.location,
            # The timeline's file and the user's function belong to this process.
            options=dataclasses.replace(context.options, on_event=None, trace=None, extensions=()),
            rank=context.rank,
            save_id=save_id,
            transforms=transforms,
            tells_events=context.options.on_event is not None or is_watched(),
            traces=None if timeline is None else timeline.subject[1:],
            newest_commit_time_ns=newest_commit_time_ns(),
            log_level=_log.getEffectiveLevel(),
            snapshot_files=frozenset() if snapshot is None else frozenset(map(file_id_of, snapshot.files)),
        )
        _require_picklable(subject)
        self.ticket: Ticket = self._opened(subject)
        self._handed_out = self.ticket

    @property
    def recorder(self) -> Recorder:
        return self._context.recorder

    def check(self, *, overwrite: bool) -> None:
        """See `SaveJob.check`."""
        self._handed_out = self._ask("check", overwrite).value

    def check_beside(self, shared: Context) -> None:
        """See `SaveJob.check_beside`."""
        self._ask("check_beside", shared.location)

    def handed_out(self, ticket: object) -> object:
        """See `SaveJob.handed_out`."""
        if not isinstance(ticket, Ticket):
            return ticket
        return dataclasses.replace(ticket, attempt=self._handed_out.attempt, resumed=self._handed_out.resumed)

    def write(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        *,
        filled: Filled | None = None,
        on_sent: Callable[[int], None] | None = None,
    ) -> list[WriteResult]:
        """See `SaveJob.write`. What is not in the snapshot's shared memory is copied for the other process.

        Begins when the snapshot is complete, whatever is `filled`.
        """
        del filled
        if self._snapshot is not None:
            self._snapshot.completed.result()
        contents = contents_of(plan.items, planner, self._snapshot, uri=self._context.uri)
        self._on_sent = on_sent
        try:
            reply = self._ask("write", contents.order, plan.storage_data, files=contents.files)
        finally:
            self._on_sent = None
            contents.close()
        results: list[WriteResult] = reply.value
        return results

    def commit(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """See `SaveJob.commit`. Where the process is lost meanwhile, it may have been made."""
        note_commit_time_ns(self._ask("commit", metadata, results).value)

    def stop(self, error: BaseException) -> None:
        """See `SaveJob.stop`."""
        self._process.stop(self.ticket.nonce, error)

    def discard(self) -> None:
        """See `SaveJob.discard`. What a process wrote that was lost is left to gc."""
        if self._is_lost:
            return
        try:
            self._ask("discard")
        except UploadProcessError as error:
            _log.warning("could not remove what a failed save left at %s, gc will: %s", self._context.uri, error)

    def on_event(self, event: Event) -> None:
        self._context.deliver(event)

    def on_spans(self, spans: Spans) -> None:
        timeline = self.recorder.timeline
        if timeline is not None:
            timeline.adopt(spans)

    def on_sent(self, num_bytes: int) -> None:
        if self._on_sent is not None:
            self._on_sent(num_bytes)

    def _opened(self, subject: Subject) -> Ticket:
        try:
            self._process.start()
            reply = self._once("open", subject)
        except LostProcessError as error:
            if not self._process.has_answered:
                self._is_lost = True
                raise self._lost("open", error) from None
            # One of an earlier save, which may have ended at that moment. Nothing has been asked of it, so another can
            # begin anew.
            reply = self._ask("open", subject)
        if reply.error is not None:
            raise _not_opened(reply.error)
        ticket: Ticket = reply.value
        return ticket

    def _ask(self, task: Task, *arguments: Any, files: Sequence[int] = ()) -> Reply:
        """The reply. Raises the task's error, but for that of "open"."""
        try:
            if task == "open":
                self._process.start()
            reply = self._once(task, *arguments, files=files)
        except LostProcessError as error:
            self._is_lost = True
            raise self._lost(task, error) from None
        if reply.report is not None:
            self.report = reply.report
        if reply.error is not None and task != "open":
            raise reply.error
        return reply

    def _once(self, task: Task, *arguments: Any, files: Sequence[int] = ()) -> Reply:
        return self._process.ask(task, arguments, files=files, timeout_s=self._context.options.timeout_s, listener=self)

    def _lost(self, task: Task, error: LostProcessError) -> CloudckptError:
        uri = self._context.uri
        what = f"the upload process of rank {self._context.rank} {error}, while it was {_DOING[task]}"
        if error.may_have_committed:
            return CommitUnknownError(
                f"{what} {uri}: the checkpoint may be there. Its data was kept. Look (cloudckpt.latest) before you "
                "save there again",
                uri=uri,
            )
        return UploadProcessError(
            f"{what} {uri}: nothing was committed. Save again: the next save starts another process", uri=uri
        )


def _not_opened(error: BaseException) -> BaseException:
    """What kept the other process from beginning: mostly what it cannot import."""
    if isinstance(error, CloudckptError):
        return error
    return InvalidOptionError(
        "Options: with async_mode='process', wrap_store, storage_options and the writer's extensions have to come from "
        "modules that another process can import, and not from the program's own file: "
        f"{type(error).__name__}: {error}. Nothing was written"
    )


def _require_picklable(subject: Subject) -> None:
    """Raise `InvalidOptionError`, with every option that cannot be sent to another process."""
    values: dict[str, object] = {name: getattr(subject.options, name) for name in Options.__slots__}
    problems = [
        f"{name} ({why})"
        for name, value in {**values, "extensions": subject.transforms}.items()
        if (why := _refusal(value))
    ]
    if problems:
        raise InvalidOptionError(
            f"Options: what is needed to upload in another process (async_mode='process') cannot be pickled: "
            f"{'; '.join(problems)}. Nothing was written"
        )


def _refusal(value: object) -> str | None:
    """Why it cannot be pickled; without what it says of itself, which may be secret."""
    try:
        pickle.dumps(value)
    except Exception as error:  # noqa: BLE001  # whatever its own code raises
        return type(error).__name__
    return None
