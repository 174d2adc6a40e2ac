"""What the upload process does when it is asked to: the tasks of one save after the other."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from cloudckpt._commit.commit_time import newest_commit_time_ns, note_commit_time_ns
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.save import SaveJob
from cloudckpt._process.channel import close_files
from cloudckpt._process.mapped import MappedPlanner, Maps
from cloudckpt._process.messages import Spans, Subject
from cloudckpt._process.relayed import RelayedTimeline
from cloudckpt._trace.recorder import Recorder
from cloudckpt._uri import Location
from cloudckpt.errors import CloudckptError
from cloudckpt.report import Event, SaveReport


class Desk:
    """Holds the job of the save that is under way. Its tasks are done by one thread, one after the other."""

    def __init__(
        self,
        *,
        tell: Callable[[Event], None],
        on_committing: Callable[[], None],
        on_sent: Callable[[int], None],
    ) -> None:
        self._tell = tell
        self._on_committing = on_committing
        self._on_sent = on_sent
        self._job: SaveJob | None = None
        self._subject: Subject | None = None
        self._timeline: RelayedTimeline | None = None
        self._maps = Maps()

    @property
    def report(self) -> SaveReport | None:
        return None if self._job is None else self._job.report

    def do(self, task: str, arguments: bytes, files: Sequence[int]) -> Any:
        """Carry it out. `files` are closed here."""
        try:
            values = pickle.loads(arguments)  # noqa: S301  # from the process that started this one
            return getattr(self, f"_{task}")(*values, *([files] if task == "write" else []))
        finally:
            close_files(files)

    def spans(self) -> Spans:
        """What has come to the timeline since this was asked last. For any thread."""
        timeline = self._timeline
        return [] if timeline is None else timeline.taken()

    def stop(self, nonce: str, error: BaseException) -> None:
        """Have the save with this ticket fail, if it is still under way. For any thread."""
        job = self._job
        if job is not None and job.ticket.nonce == nonce:
            job.stop(error)

    def _open(self, subject: Subject) -> Any:
        logging.getLogger("cloudckpt").setLevel(subject.log_level)
        self._subject = subject
        note_commit_time_ns(subject.newest_commit_time_ns)
        self._maps.keep_only(subject.snapshot_files)
        self._timeline = None
        if subject.traces is not None:
            verb, uri = subject.traces
            self._timeline = RelayedTimeline("", verb=verb, uri=uri)
        context = self._context(subject.location)
        self._job = SaveJob(context, save_id=subject.save_id, transforms=subject.transforms)
        return self._job.ticket

    def _context(self, location: Location) -> Context:
        subject = self._known()
        options = dataclasses.replace(subject.options, on_event=self._on_event)
        return Context(
            location, options, rank=subject.rank, recorder=Recorder(self._timeline, operation=subject.save_id)
        )

    def _on_event(self, event: Event) -> None:
        subject = self._known()
        if subject.tells_events:
            self._tell(event)
        if event.name == "save.committing":
            self._on_committing()  # last: until it has been told, nothing may be put

    def _check(self, overwrite: bool) -> Any:  # noqa: FBT001  # by message
        job = self._begun()
        job.check(overwrite=overwrite)
        return job.handed_out(job.ticket)

    def _check_beside(self, location: Location) -> None:
        self._begun().check_beside(self._context(location))

    def _write(self, order: Any, ticket: object, files: Sequence[int]) -> Any:
        planner = MappedPlanner(order, files, self._maps)
        close_files(files)
        plan = SavePlan(planner.items(), storage_data=ticket)
        return self._begun().write(plan, planner, on_sent=self._on_sent)

    def _commit(self, metadata: Any, results: Any) -> int:
        self._begun().commit(metadata, results)
        return newest_commit_time_ns()

    def _discard(self) -> None:
        if self._job is not None:
            self._job.discard()

    def _known(self) -> Subject:
        if self._subject is None:
            raise CloudckptError("this process has no save under way: it was started anew, or another save has begun")
        return self._subject

    def _begun(self) -> SaveJob:
        self._known()
        assert self._job is not None  # noqa: S101  # it is made with the subject
        return self._job
