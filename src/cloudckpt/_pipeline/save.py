"""One save on one rank: check, write, commit; and what to do when one of them fails."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from cloudckpt._commit.attempt import new_attempt_id
from cloudckpt._commit.commit_time import CommitTimes, draw_commit_time_ns
from cloudckpt._commit.condition import check_condition
from cloudckpt._commit.present import check_objects_present, check_still_next
from cloudckpt._commit.publish import publish, remove_superseded
from cloudckpt._commit.resolve import (
    check_ours,
    holds_rank_checkpoints,
    holds_torch_checkpoint,
    list_entries,
    manifest_key,
    manifest_number,
    read_entry,
    read_log,
)
from cloudckpt._commit.resuming import attempts_to_resume
from cloudckpt._manifest.build import manifest_of
from cloudckpt._manifest.model import Manifest
from cloudckpt._pipeline.answers import answers
from cloudckpt._pipeline.context import Context
from cloudckpt._pipeline.write import write_items
from cloudckpt._stage.body import Filled
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt._trace.recorder import Recorder
from cloudckpt.errors import (
    CheckpointExistsError,
    CloudckptError,
    CommitUnknownError,
    StoreError,
    UnsupportedValueError,
)
from cloudckpt.report import SaveReport

_log = logging.getLogger("cloudckpt")
_NEAR = frozenset({"file", "memory"})
"""Schemes of stores that answer sooner than a thread has begun."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a rank and the coordinator tell each other, through a plan's ``storage_data``."""

    nonce: str
    """Drawn by the rank for this save. A cached plan comes with the ticket of an older save, and so with another."""
    attempt: str | None = None
    resumed: tuple[str, ...] = ()
    """Attempts whose objects are to be taken up, where they are the same."""


class SaveJob:
    """One save, from set-up to commit. `report` is filled in as it goes."""

    report: SaveReport | None = None
    _copy_of: str | None = None  # what stands for the source, where this is a copy

    def __init__(self, context: Context, *, save_id: str, transforms: WriteTransforms) -> None:
        self.ticket = Ticket(nonce=new_attempt_id())
        self._context = context
        self._save_id = save_id
        self._transforms = transforms
        self._attempt = self.ticket.nonce
        self._resumed: tuple[str, ...] = ()
        self._number = 0
        self._written_keys: list[str] = []
        self._started_s = time.monotonic()

    def stop(self, error: BaseException) -> None:
        """Make no call to the store any more, but to clean up: `check` and `write` raise `error`. For any thread."""
        self._context.retrier.stop(error)

    @property
    def recorder(self) -> Recorder:
        return self._context.recorder

    def check(self, *, overwrite: bool) -> None:
        """On whoever will commit: find the number of the commit, before any byte moves."""
        context, uri = self._context, self._context.uri
        if overwrite:  # of whatever lies there, be it damaged
            entries = list_entries(context.store, context.retrier)
            if entries and not context.retrier.call(lambda: next(iter(context.store.list("data/")), None)):
                check_ours(context.store, entries, context.retrier)
            for entry in [entry for entry in entries if not entry.is_fence][-1:]:
                CommitTimes().read(
                    context.store, manifest_key(entry.number), entry, context.retrier
                )  # this commit is to be later
        else:
            store, retrier = context.store, context.retrier
            log, *others = answers(
                # A conditional commit creates what is absent, so that one look is enough.
                functools.partial(read_log, store, retrier, is_confirmed=context.options.commit != "conditional"),
                # Two looks for each, at once.
                *[functools.partial(holds_torch_checkpoint, store, retrier, is_confirmed=False)] * 2,
                *[functools.partial(holds_rank_checkpoints, store, retrier, is_confirmed=False)] * 2,
                num_at_once=1 if context.location.scheme in _NEAR else context.connections,
            )
            entries = log.entries
            if log.counting is not None or any(others):
                raise CheckpointExistsError(
                    f"Checkpoint already exists at {uri} and overwrite is False: nothing was written. Choose another "
                    "URI, or pass overwrite=True to replace it atomically",
                    uri=uri,
                )
        self._number = entries[-1].number + 1 if entries else 0
        if manifest_number(manifest_key(self._number)) is None:
            key = context.store.url(manifest_key(entries[-1].number))
            raise CheckpointExistsError(
                f"Checkpoint already exists at {uri}, and no number comes after {key}, which no cloudckpt wrote. "
                "Remove that object, or choose another URI",
                uri=uri,
            )
        self._check_condition()
        if context.options.resume:
            self._attempt = new_attempt_id(resumable_as=self._number, copy_of=self._copy_of)
            self._resumed = attempts_to_resume(context.store, self._number, context.retrier, copy_of=self._copy_of)

    def _check_condition(self) -> None:
        """That the store can create-if-absent, unless the caller does without."""
        context = self._context
        if context.options.commit == "unconditional":
            return
        # Asked once per process, and mostly for nothing, so the report does not count it.
        check_condition(context.store, context.new_retrier())

    def check_beside(self, shared: Context) -> None:
        """For a rank that saves alone: a checkpoint of all ranks at the same URI would hide its own."""
        if read_log(shared.store, shared.retrier).counting is not None:
            raise CheckpointExistsError(
                f"Checkpoint already exists at {shared.uri}, saved by all ranks together: a rank's own beside it would "
                "not be found. Choose another URI",
                uri=shared.uri,
            )

    def handed_out(self, ticket: object) -> object:
        """On the coordinator: a rank's ticket, with the attempt that all ranks write under."""
        if not isinstance(ticket, Ticket):
            return ticket
        return dataclasses.replace(ticket, attempt=self._attempt, resumed=self._resumed)

    def write(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        *,
        filled: Filled | None = None,
        on_sent: Callable[[int], None] | None = None,
    ) -> list[WriteResult]:
        """Upload this rank's items, all of them or none. `on_sent` is told the bytes of each part that is there."""
        begun_s = time.monotonic()
        ticket = plan.storage_data
        # A cached plan brings the ticket of an older save, whose keys are taken. Then this rank's own id stands in:
        # the manifest names every object by its whole key.
        if isinstance(ticket, Ticket) and ticket.nonce == self.ticket.nonce and ticket.attempt is not None:
            self._attempt, self._resumed = ticket.attempt, ticket.resumed
        context = self._context
        if on_sent is not None:
            context.on_sent = on_sent
        recorder = context.recorder
        staged_s, transferred_s = recorder.seconds("stage"), recorder.seconds("transfer")
        written = write_items(
            context,
            plan.items,
            planner,
            attempt=self._attempt,
            resumed=self._resumed,
            transforms=self._transforms,
            filled=filled,
        )
        self._written_keys = [receipt.key for receipt in written.objects]
        self.report = SaveReport(
            uri=context.uri,
            attempt=self._attempt,
            rank=context.rank,
            num_bytes=sum(receipt.size_bytes for receipt in written.objects) - written.num_reused_bytes,
            num_reused_bytes=written.num_reused_bytes,
            num_objects=len(written.objects),
            num_requests=context.retrier.num_requests + context.hedger.num_hedges,
            num_retries=context.retrier.num_retries,
            num_hedges=context.hedger.num_hedges,
            plan_s=begun_s - self._started_s,
            write_s=time.monotonic() - begun_s,
            stage_s=recorder.seconds("stage") - staged_s,
            transfer_s=recorder.seconds("transfer") - transferred_s,
            commit_s=0.0,
        )
        if written.num_reused_bytes:
            context.emit("save.resumed", num_bytes=written.num_reused_bytes)
        context.emit("save.written", num_bytes=self.report.num_bytes)
        return written.results

    def commit(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Make the checkpoint exist. Unless its outcome is unknown, a failure removes what all ranks wrote."""
        begun_s = time.monotonic()
        context = self._context
        keys = {result.storage_data.stored_in.key for of_rank in results for result in of_rank}
        try:
            manifest = manifest_of(
                metadata,
                results,
                uri=context.uri,
                attempt=self._attempt,
                save_id=self._save_id,
                committed_at_ns=draw_commit_time_ns(),
                tile_bytes=context.options.tile_bytes,
                user_metadata=context.options.metadata,
            )
            check_objects_present(context.store, manifest, context.retrier)
            context.emit("save.committing", key=manifest_key(self._number))
            check_still_next(context.store, self._number, context.retrier)
        except Exception:
            self._remove(keys)
            raise
        self._publish(manifest, keys)
        self._written_keys = []  # they are the checkpoint's now
        self._tidy_up(manifest)
        if self.report is not None:
            self.report = dataclasses.replace(
                self.report,
                num_requests=context.retrier.num_requests + context.hedger.num_hedges,
                num_retries=context.retrier.num_retries,
                commit_s=time.monotonic() - begun_s,
            )

    def discard(self) -> None:
        """Remove what this rank wrote, for a save that is said to have failed: unless a commit refers to it."""
        keys, self._written_keys = self._written_keys, []
        if keys and not self._may_be_committed(keys):
            self._remove(keys)

    def _may_be_committed(self, keys: Iterable[str]) -> bool:
        # torch also reports a failure where something went wrong only after the commit.
        context = self._context
        retrier = context.new_retrier()
        try:
            for entry in list_entries(context.store, retrier):
                found = read_entry(context.store, entry.number, retrier)
                if found is None:
                    return True  # it was listed: who cannot read it cannot rule it out
                if isinstance(found, Manifest) and not {stored.key for stored in found.objects}.isdisjoint(keys):
                    return True
        except CloudckptError as error:
            _log.warning("kept what a failed save left at %s, because it cannot be judged: %s", context.uri, error)
            return True
        return False

    def _publish(self, manifest: Manifest, keys: Iterable[str]) -> None:
        context = self._context
        try:
            publish(
                context.store,
                manifest,
                number=self._number,
                conditional=context.options.commit == "conditional",
                retrier=context.retrier,
            )
        except CommitUnknownError:
            raise  # the manifest may be there, so its data must stay
        except (CheckpointExistsError, StoreError, UnsupportedValueError):
            self._remove(keys)  # another save won, or nothing was put
            raise
        except BaseException as error:
            raise self._interrupted(error) from error

    def _tidy_up(self, manifest: Manifest) -> None:
        """After the commit. Only an interrupt gets out of here, and as one that tells the ranks to keep their data."""
        context = self._context
        try:
            context.emit("save.committed", key=manifest_key(self._number))
            if self._number:
                remove_superseded(
                    context.store,
                    manifest,
                    number=self._number,
                    retrier=context.retrier,
                    on_removing=lambda key: context.emit("save.removing", key=key),
                )
                context.emit("save.cleaned_up")
        except Exception:  # noqa: BLE001  # it is logged, and must not undo a commit
            _log.exception("%s is committed, but tidying up after it failed", context.uri)
        except BaseException as error:
            raise self._interrupted(error) from error

    def _interrupted(self, error: BaseException) -> CommitUnknownError:
        uri = self._context.uri
        return CommitUnknownError(
            f"the commit of {uri} was interrupted ({type(error).__name__}: {error}); it may be there. Its data was "
            "kept. Look (cloudckpt.latest) before you save there again",
            uri=uri,
        )

    def _remove(self, keys: Iterable[str]) -> None:
        doomed = sorted(keys)
        # What can be resumed belongs to whoever takes it up: another save may name it already.
        if doomed and not self._context.options.resume:
            store = self._context.store
            try:
                self._context.new_retrier().call(lambda: store.delete(doomed))
            except StoreError as error:
                _log.warning("could not remove what a failed save left, gc will: %s", error)
