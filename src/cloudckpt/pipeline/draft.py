"""A checkpoint that one rank writes and commits, and the clean-up when that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from cloudckpt._clock import draw_commit_time_ns
from cloudckpt._workers import call_together
from cloudckpt.commit.attempts import data_key, new_attempt_id
from cloudckpt.commit.commit import (
    check_conditional_create,
    check_objects_present,
    check_still_next,
    put_and_check_manifest,
    remove_superseded,
)
from cloudckpt.commit.entries import (
    CommitTimes,
    LogEntry,
    manifest_key,
    manifest_number,
    read_entry,
    refuse_foreign_entries,
)
from cloudckpt.commit.log import find_newest_step, list_entries, lists_torch_checkpoint, read_log, read_log_once
from cloudckpt.errors import (
    OVERWRITE_HINT,
    AccessDeniedError,
    CheckpointError,
    CheckpointExistsError,
    CloudckptError,
    CommitUnknownError,
    InvalidOptionError,
    StoreError,
    UnsupportedValueError,
)
from cloudckpt.format.build import Content, build_manifest
from cloudckpt.format.model import ItemReceipts, Manifest, ObjectRef, StoredObject
from cloudckpt.io.body import Body
from cloudckpt.io.client import NUM_LOOKS_AT_ABSENCE
from cloudckpt.io.upload import choose_part_bytes, logging_store_errors
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.unchanged import BaseCheckpoint
from cloudckpt.report import SaveReport, place_of
from cloudckpt.tensors.data_objects import PieceBody, SaveItems, lay_out_objects
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.tensors.snapshot import Snapshot
from cloudckpt.uri import STEP_FOLDER, Location

_OBJECTS_PER_CONNECTION = 2  # tensors differ in size, so objects do, too
_MIN_OBJECT_BYTES = 64 << 20  # a file of less is written sooner than another one is made and flushed
_log = logging.getLogger("cloudckpt")


def require_no_resume(options: Options) -> None:
    """Raise `InvalidOptionError` for a save with `Options.resume`, which applies to copies."""
    if options.resume:
        raise InvalidOptionError(
            "Options(resume=True) applies to copies: pass it as target_options of cloudckpt.copy. A save that is tried "
            "again sends everything, so remove the option here"
        )


def exists_error(uri: str) -> CheckpointExistsError:
    """Return the error about a checkpoint at the place of a save that may not overwrite it."""
    return CheckpointExistsError(
        f"Checkpoint already exists at {uri}: nothing was written", uri=uri, hint=OVERWRITE_HINT
    )


class Draft:
    """A checkpoint that is being written, on one rank.

    In a save, the rank that commits calls `begin`, `write` and `commit`. The leader of a host with a directory of its
    own calls `begin`, `write` and `commit_manifest`, and any other rank `write` alone. All ranks write under one
    `attempt`, which the caller sets before `write`. After a failure, each rank calls `remove_unless_committed`. A copy
    puts its objects itself, and calls `begin` and `commit_manifest`.

    Args:
        context: The place of the checkpoint.
        save_id: The id of the save, for the manifest. Copies keep it, and have an attempt of their own.
        attempt: The attempt whose keys this rank writes; a new one by default.

    """

    report: SaveReport | None = None
    """None before `write`. `commit` adds its own requests and seconds."""

    def __init__(self, context: Context, *, save_id: str, attempt: str | None = None) -> None:
        self.context = context
        self.attempt = attempt or new_attempt_id()
        """Identifier of this attempt, part of every key. Set it before `write`, so that all ranks have the same."""
        self.number = 0
        """The number of the commit's manifest. `begin` finds it."""
        self.base: BaseCheckpoint | None = None
        """The checkpoint that this save may refer to, on the ranks that claim its objects."""
        self.is_here: Callable[[str], bool] = lambda _key: True
        """Returns False for the key of an object that was written to another host's directory."""
        self.committed: Manifest | None = None
        """The manifest that this rank has committed."""
        self._save_id = save_id
        self._written_keys: list[str] = []
        self._is_kept = False
        self._started_s = time.monotonic()

    def key(self, number: int) -> str:
        """Return the key of this rank's data object with that number."""
        return data_key(self.attempt, self.context.rank, number)

    def begin(self, *, overwrite: bool) -> None:
        """Find the number of the commit, before any data is sent. Ranks that commit nothing do not call this."""
        context, uri = self.context, self.context.uri
        entries = self._entries_to_replace() if overwrite else self._require_no_checkpoint()
        self.number = entries[-1].number + 1 if entries else 0
        if manifest_number(manifest_key(self.number)) is None:
            key = context.client.url(manifest_key(entries[-1].number))
            raise CheckpointExistsError(
                f"Checkpoint already exists at {uri}, and no number comes after {key}, which no cloudckpt wrote. "
                "Remove that object, or choose another URI",
                uri=uri,
            )
        if context.options.commit != "unconditional":
            # The answer is kept for the process, so the report does not count the requests.
            check_conditional_create(context.client.unstopped_copy())

    def refer_to(self, base: Location, *, is_required: bool, base_attempt: str | None = None) -> None:
        """Let the save refer to objects of `base`, a checkpoint beside it. Call it after `begin`.

        With `base_attempt`, only if `base` is the checkpoint of that attempt.

        Raises `InvalidOptionError` for a place that is not beside the save. With `is_required`, raises the errors of
        `BaseCheckpoint`; otherwise logs them, and the save sends everything.
        """
        location = self.context.location
        is_link = base.local_path is not None and Path(base.local_path).is_symlink()  # it may name another folder later
        if base == location or not location.name or base.parent != location.parent or is_link:
            raise InvalidOptionError(
                f"a checkpoint can refer only to others in its folder, by their own names: {location.uri} cannot refer "
                f"to {base.uri}"
            )
        try:
            self.base = BaseCheckpoint(self.context, base.name, attempt=self.attempt, base_attempt=base_attempt)
        except (InvalidOptionError, CheckpointError, AccessDeniedError) as error:
            if is_required:
                raise
            _log.warning("%s is saved whole, because %s", self.context.uri, error)

    def _entries_to_replace(self) -> Sequence[LogEntry]:
        client = self.context.client
        entries = list_entries(client)  # damaged ones too
        if entries and not client.list("data/", max_results=1):
            refuse_foreign_entries(client, entries)
        for entry in [entry for entry in entries if not entry.has_fence_size][-1:]:
            # The time of this commit must be later than the replaced one's.
            CommitTimes().read(client, manifest_key(entry.number), entry)
        return entries

    def _require_no_checkpoint(self) -> Sequence[LogEntry]:
        """Return the entries of the log. Raise `CheckpointExistsError` if a checkpoint, also one of torch's, exists."""
        context, client = self.context, self.context.client
        log, step, *has_torch_checkpoint = call_together(
            # A conditional commit creates only what is absent, so one look is enough.
            functools.partial(read_log_once if context.options.commit == "conditional" else read_log, client),
            self._find_step_below,
            # Make the looks of `confirm` at the same time, because round trips dominate a small save.
            *[functools.partial(lists_torch_checkpoint, client)] * NUM_LOOKS_AT_ABSENCE,
            num_threads=1 if context.store.capabilities.is_near else context.max_connections,
            on_interrupt=client.stop,
        )
        if log.current_number is not None or any(has_torch_checkpoint):
            raise exists_error(context.uri)
        if step:
            _log.warning(
                "%s becomes a checkpoint itself, and has steps in it, such as %s. To save a step, name its folder: "
                "%s/step-<n>",
                context.uri,
                step,
                context.uri,
            )
        elif not context.location.name and context.location.service.bucket_name is not None:
            _log.warning(
                "%s becomes a checkpoint as a whole. To keep several in it, save each to a folder, such as %s/step-1",
                context.uri,
                context.uri,
            )
        entries: Sequence[LogEntry] = log.entries
        return entries

    def _find_step_below(self) -> str:
        """Return the name of a step that would be inside this checkpoint; "" if there is none, or nobody may look."""
        name = self.context.location.name
        if STEP_FOLDER.fullmatch(name):  # the usual case, which needs no request
            return ""
        with contextlib.suppress(StoreError):
            return find_newest_step(self.context.client)
        return ""

    def write(
        self,
        bodies: Iterable[tuple[Body, int]],
        *,
        in_memory: bool = False,
        num_bytes_unchanged: int = 0,
        on_failure: Callable[[], None] = lambda: None,
    ) -> list[ObjectRef]:
        """Upload this rank's objects, all or none.

        Args:
            bodies: The body of each object, and the size of its parts.
            in_memory: See `UploadSession.submit`.
            num_bytes_unchanged: Bytes that need not be sent, for the report.
            on_failure: Called before the wait for the parts in flight.

        """
        begun_s = time.monotonic()
        context, recorder, advanced = self.context, self.context.recorder, self.context.options.advanced
        staged_s, transferred_s = recorder.seconds("stage"), recorder.seconds("transfer")
        with context.new_uploads(part_bytes=advanced.part_bytes, tile_bytes=advanced.tile_bytes) as session:
            try:
                for number, (body, part_bytes) in enumerate(bodies):
                    session.submit(self.key(number), body, part_bytes=part_bytes, in_memory=in_memory)
                session.tasks.join()
                objects = session.receipts()
            except BaseException:
                on_failure()
                raise
        self._written_keys = [stored_in.key for stored_in in objects]
        self.report = SaveReport(
            uri=context.uri,
            place=place_of(context.options.metadata),
            attempt=self.attempt,
            rank=context.rank,
            num_bytes=sum(stored_in.size_bytes for stored_in in objects),
            num_bytes_unchanged=num_bytes_unchanged,
            num_objects=len(objects),
            num_requests=context.client.num_requests,
            num_retries=context.client.num_retries,
            num_hedges=context.client.hedger.num_hedges,
            plan_s=begun_s - self._started_s,
            write_s=time.monotonic() - begun_s,
            stage_s=recorder.seconds("stage") - staged_s,
            transfer_s=recorder.seconds("transfer") - transferred_s,
            commit_s=0.0,
        )
        context.emit("save.written", num_bytes=self.report.num_bytes)
        return objects

    def commit(self, content: Content, keys: Iterable[str] = ()) -> None:
        """Make the checkpoint exist. Unless its outcome is unknown, a failure removes what all ranks wrote.

        `keys` name written objects that `content` does not have. A failure removes them with the others.
        """
        begun_s = time.monotonic()
        context = self.context
        keys = {*keys, *(receipt.key for receipts in content.objects for receipt in receipts if not receipt.folder)}
        with self.removing_on_error(keys):
            manifest = build_manifest(
                content,
                uri=context.uri,
                attempt=self.attempt,
                save_id=self._save_id,
                tile_bytes=context.options.advanced.tile_bytes,
                user_metadata=context.options.metadata,
            )
        self.commit_manifest(manifest, keys)
        if self.report is not None:
            self.report = dataclasses.replace(
                self.report,
                num_requests=context.client.num_requests,
                num_retries=context.client.num_retries,
                commit_s=time.monotonic() - begun_s,
            )

    def commit_manifest(self, manifest: Manifest, keys: Iterable[str]) -> None:
        """Make `manifest` the checkpoint, with a time if it has none.

        Unless the outcome is unknown, a failure removes the objects at `keys`.
        """
        context = self.context
        with self.removing_on_error(keys):
            if self.base is not None:
                self.base.keep_claims(manifest)
            objects = [stored for stored in manifest.objects if self._has(stored)]
            written_at = check_objects_present(context.client_at, msgspec.structs.replace(manifest, objects=objects))
            if manifest.committed_at_ns is None:
                duration_s = time.monotonic() - self._started_s
                committed_at_ns = draw_commit_time_ns(written_at, longest_since_s=duration_s)
                manifest = msgspec.structs.replace(manifest, committed_at_ns=committed_at_ns)
            context.emit("save.committing", key=manifest_key(self.number))
            check_still_next(context.client, self.number)  # last: the listener of the event may have taken long
        self._put_manifest(manifest, keys)
        self.committed = manifest
        self.keep_written()
        self.base = None  # its claims belong to the checkpoint now
        self._tidy_up(manifest)

    def _has(self, stored: StoredObject) -> bool:
        """Return True if the directory of this host must have an object of the checkpoint."""
        if stored.folder:
            return self.base is not None and self.base.has(stored.key)
        return self.is_here(stored.key)

    def keep_written(self) -> None:
        """Keep the objects and the claims that this rank wrote, because a committed checkpoint has them."""
        self._written_keys, self._is_kept = [], True

    def remove_unless_committed(self) -> None:
        """Remove the objects that this rank wrote, after its save failed.

        Keeps them if a manifest names one of them, or if a manifest cannot be read.
        """
        keys, self._written_keys = self._written_keys, []
        if (keys or self.base is not None) and not self._may_be_committed(keys):
            self.remove(keys)

    def _may_be_committed(self, keys: Iterable[str]) -> bool:
        """Return True if a manifest names one of `keys` or this attempt, or cannot be read.

        A save that torch reports as failed may be committed: the failure may follow the commit.
        """
        context = self.context
        client = context.client.unstopped_copy()
        try:
            for entry in list_entries(client):
                content = read_entry(client, entry.number)
                if content is None:
                    return True  # it was listed, and may name the keys
                if isinstance(content, Manifest) and (
                    content.attempt == self.attempt or not {stored.key for stored in content.objects}.isdisjoint(keys)
                ):
                    return True
        except CloudckptError as error:
            _log.warning("kept what a failed save left at %s, because it cannot be judged: %s", context.uri, error)
            return True
        return False

    def _put_manifest(self, manifest: Manifest, keys: Iterable[str]) -> None:
        context = self.context
        try:
            put_and_check_manifest(
                context.client,
                manifest,
                number=self.number,
                conditional=context.options.commit == "conditional",
                sizes_bytes=[
                    stored.size for stored in manifest.objects if not stored.folder and self.is_here(stored.key)
                ],
            )
        except CommitUnknownError:
            raise  # the manifest may exist, so its data must stay
        except (CheckpointExistsError, StoreError, UnsupportedValueError):
            self.remove(keys)  # another save won, or nothing was put
            raise
        except BaseException as error:
            raise self._interrupted_error(error) from error

    def _tidy_up(self, manifest: Manifest) -> None:
        """Remove what the commit superseded. An interrupt becomes an error after which all ranks keep their data."""
        context = self.context
        with self.keeping_data_on_error():
            try:
                context.emit("save.committed", key=manifest_key(self.number))
                if self.number:
                    remove_superseded(
                        context.client,
                        manifest,
                        number=self.number,
                        on_removing=lambda key: context.emit("save.removing", key=key),
                    )
                    context.emit("save.cleaned_up")
            except Exception:  # noqa: BLE001  # it is logged, and must not undo a commit
                _log.exception("%s is committed, but tidying up after it failed", context.uri)

    @contextlib.contextmanager
    def keeping_data_on_error(self) -> Iterator[None]:
        """Raise `CommitUnknownError` in place of any error of the body, so that no rank removes its data.

        For code that follows a commit.
        """
        try:
            yield
        except BaseException as error:
            raise self._interrupted_error(error) from error

    def _interrupted_error(self, error: BaseException) -> CommitUnknownError:
        uri = self.context.uri
        return CommitUnknownError(
            f"the commit of {uri} was interrupted ({type(error).__name__}: {error}); it may be there. Its data was "
            "kept. Look (cloudckpt ls) before you save there again",
            uri=uri,
        )

    @contextlib.contextmanager
    def removing_on_error(self, keys: Iterable[str]) -> Iterator[None]:
        """Remove the objects at `keys` if the body raises an `Exception`. After an interrupt, gc removes them."""
        try:
            yield
        except Exception:
            self.remove(keys)
            raise

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects that no manifest names, and the claims of this save. A failure is logged.

        With `Options.resume`, the objects stay.
        """
        base, self.base = self.base, None
        if base is not None and not self._is_kept:
            base.drop_claims()
        # A later copy may resume from these objects, and its manifest may already name them.
        if (sorted_keys := sorted(keys)) and not self.context.options.resume:
            with logging_store_errors("remove what a failed save left", uri=self.context.uri):
                self.context.client.unstopped_copy().delete(sorted_keys)


def bodies_of(
    context: Context,
    items: SaveItems,
    arena: Arena,
    snapshot: Snapshot | None,
    receipt_makers: list[Callable[..., ItemReceipts]],
) -> Iterator[tuple[PieceBody, int]]:
    """Yield the bodies of a save's objects with the sizes of their parts, for `Draft.write`.

    Args:
        context: The place of the save.
        items: The items to save.
        arena: Memory for tensors that cannot be sent in place.
        snapshot: The snapshot that holds the tensors, and may still be filled. Each part is read once it is copied.
        receipt_makers: Gets a function for each object, which takes the object's `ObjectRef` as `stored_in` and
            returns the receipts of its items.

    """
    options, num_bytes = context.options, sum(items.sizes_bytes)
    object_bytes, most_part_bytes = options.advanced.object_bytes, options.advanced.part_bytes
    capabilities = context.store.capabilities
    bytes_per_connection = max(most_part_bytes, options.staging_bytes // context.max_connections)
    if not capabilities.multipart:
        # Each object is one part, and is staged whole. Only several objects can be sent at the same time.
        object_bytes = min(object_bytes, bytes_per_connection)
    elif not capabilities.parallel_parts:
        share_bytes = num_bytes // (_OBJECTS_PER_CONNECTION * context.max_connections)
        if items.are_transformed:  # each object in flight is in memory as a whole
            share_bytes = min(share_bytes, bytes_per_connection)
        object_bytes = min(object_bytes, max(share_bytes, _MIN_OBJECT_BYTES))
    for body, make_receipts in lay_out_objects(items, arena, snapshot, object_bytes=object_bytes):
        receipt_makers.append(make_receipts)
        part_bytes = choose_part_bytes(
            num_bytes,
            connections=context.max_connections,
            max_bytes=most_part_bytes,
            buffer_bytes=options.staging_bytes if 2 * body.copied_bytes > body.size_bytes else None,
        )
        yield body, part_bytes
