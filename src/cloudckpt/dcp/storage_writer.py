"""The DCP storage writer."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cloudckpt._clock import newest_commit_time_ns, note_commit_time_ns
from cloudckpt._torch_compat import StreamTransformExtension
from cloudckpt.cancellation import Cancellation
from cloudckpt.commit.attempts import new_save_id
from cloudckpt.commit.commit import find_missing, raise_if_missing
from cloudckpt.dcp.content import content_of
from cloudckpt.dcp.ranks.failures import causes_of
from cloudckpt.dcp.ranks.hosts import HostGroups, mend_manifest
from cloudckpt.dcp.replicas import ItemKey, key_of
from cloudckpt.dcp.torch_metadata import DCP_VERSION, StoredRanges
from cloudckpt.dcp.write_items import prepare_items
from cloudckpt.errors import (
    CheckpointExistsError,
    CloudckptError,
    InvalidOptionError,
    RemovedObjectsError,
    make_picklable,
)
from cloudckpt.format.codec import decode, encode
from cloudckpt.format.model import ItemReceipts
from cloudckpt.format.nesting import check_names
from cloudckpt.options import Options, require_options
from cloudckpt.pipeline.context import Context, Lifecycle
from cloudckpt.pipeline.draft import Draft, bodies_of, require_no_resume
from cloudckpt.pipeline.unchanged import ChunkKey, KnownChunks, find_unchanged, hash_chunks, receipts_of
from cloudckpt.report import SaveReport, place_of
from cloudckpt.telemetry.timeline import new_recorder, now_ns
from cloudckpt.tensors.data_objects import SaveItems
from cloudckpt.tensors.extensions import WriteTransforms
from cloudckpt.tensors.host_memory import Arena, new_arena
from cloudckpt.tensors.snapshot import Snapshot
from cloudckpt.uri import is_valid_location, parse_location

_log = logging.getLogger("cloudckpt")
_MAX_HASH_THREADS = 4  # each reads as fast as memory gives


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptMessage:
    """A message between a rank and the coordinator, in a plan's ``storage_data``."""

    nonce: str
    """A random text of the rank for this save. It differs in the message of an older save, which a cached plan has."""
    attempt: str | None = None
    known: KnownChunks | None = None
    """Chunks of the save's base that this rank need not send if they are unchanged."""
    base: tuple[str, str] | None = None
    """Folder and attempt of the base, if each host has a directory of its own: the rank looks there itself."""
    common: frozenset[ItemKey] = frozenset()
    """Items that other ranks also hold, if each host has a directory of its own. They get objects of their own."""


def require_collectives(*, use_collectives: bool) -> None:
    """Raise `InvalidOptionError` for torch's ``use_collectives=False``."""
    if not use_collectives:
        raise InvalidOptionError(
            "use_collectives=False is not supported: all ranks of a save commit one checkpoint. To save ranks apart, "
            "give each a URI of its own and no_dist=True, as in "
            "cloudckpt.save(state_dict, f'{uri}/rank-{rank}', no_dist=True)"
        )


class ObjectStoreWriter(StorageWriter):
    """Writes checkpoints to `uri` for torch's own calls (`torch.distributed.checkpoint.StorageWriter`).

    One writer can be used for several saves, one after the other, each with its ``checkpoint_id``. It can be pickled,
    and opens its store in the process that uses it. A failure reaches all ranks in torch's ``CheckpointException``.

    Args:
        uri: Place of the checkpoint.
        options: Options of its saves.
        overwrite: Replace a checkpoint at `uri` at the instant of the commit. Without it, a save to a place with a
            checkpoint fails before any byte is sent, or at the commit if another save was faster.
        base: See `cloudckpt.save`.

    Raises:
        InvalidURIError: `uri` cannot name a checkpoint.

    Example::

        writer = cloudckpt.ObjectStoreWriter("s3://bucket/run/step-100")
        dcp.save(state_dict, storage_writer=writer)
        print(writer.report.bytes_per_s)

    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        options: Options | None = None,
        overwrite: bool = False,
        base: str | os.PathLike[str] | None = None,
        _find_base: Callable[[], str | None] | None = None,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        _via: str = "writer",  # `CloudckptError.via`
        _hosts: HostGroups | None = None,  # `uri` is a directory of each host
        _find_next: Callable[[CheckpointException], ObjectStoreWriter | None] | None = None,
    ) -> None:
        super().__init__()
        self._location = parse_location(uri)
        self._options = require_options(options)
        self._overwrite = overwrite
        self._base = None if base is None else parse_location(base)
        self._find_base = _find_base
        """Returns the base if `base` is not given. It is called when the save begins: the previous save has ended."""
        self._find_next = _find_next
        """Returns the writer that saves in place of this one after a failure, or None. All ranks call it."""
        self._may_refer = True
        """False once what the save referred to was gone at its commit."""
        self.earlier_failure = ""
        """The failure after which this writer saves in place of another one, for errors."""
        if base is not None and (self._options.extensions or self._options.commit == "unconditional"):
            raise InvalidOptionError("base cannot be used with extensions, or with commit='unconditional'")
        if base is not None and self._options.unchanged == "send":
            self._options = dataclasses.replace(self._options, unchanged="reference")
        require_no_resume(self._options)
        if _extensions and self._options.extensions:
            raise InvalidOptionError("Options: extensions are given twice, here and as torch's _extensions")
        if _extensions and self._options.unchanged == "reference":
            raise InvalidOptionError("Options(unchanged='reference') cannot be used with torch's _extensions")
        self._transforms = WriteTransforms(_extensions or tuple(reversed(self._options.extensions)))
        self.save_id = new_save_id()
        """The id of the save, as torch's writers have it: a new one after each `reset`."""
        self.is_alone = False
        """True if this process saves without others. `run_save` sets it."""
        self.lifecycle = Lifecycle("save", self._options, via=_via)
        """Emits the events of the beginning and the end of the current save."""
        self.hosts = _hosts
        """The groups of ranks that share a directory; None if all ranks share one."""
        self.common: Mapping[ItemKey, int] = {}
        """On the coordinator: the number of ranks that hold each item, if the ranks do not share one directory."""
        self._draft: Draft | None = None
        self._begun_ns = 0
        self._cancellation = Cancellation()
        self._snapshot: Snapshot | None = None
        self._is_coordinator = True

    @property
    def checkpoint_id(self) -> str:
        """URI of the checkpoint to write."""
        return self._location.uri

    @property
    def agreed_id(self) -> str:
        """The name of the place that is equal on all ranks: hosts may have their directories under different paths."""
        return self.checkpoint_id if self.hosts is None else f"{self._location.name} of each host"

    @property
    def options(self) -> Options:
        """Options that were given, or the defaults."""
        return self._options

    @property
    def has_transforms(self) -> bool:
        """True if extensions compute the stored bytes."""
        return bool(self._transforms)

    @property
    def report(self) -> SaveReport | None:
        """Report of this writer's last save on this rank; None before it has written."""
        return self._draft.report if self._draft is not None else None

    @property
    def snapshot(self) -> Snapshot | None:
        """Snapshot that the next save reads, and that may still be in progress."""
        return self._snapshot

    def set_background_state(self, cancellation: Cancellation | None, snapshot: Snapshot | None = None) -> None:
        """Set the `cancellation` that the next save shares with its handle, and the `snapshot` that it reads, or None.

        The snapshot may still be in progress.
        """
        self._cancellation, self._snapshot = cancellation or Cancellation(), snapshot

    def find_next(self, failure: CheckpointException) -> ObjectStoreWriter | None:
        """Return the writer of another try, after a save that failed on all ranks; None if there is none.

        A save that could refer to others is tried once more without references if objects of it are gone.

        Args:
            failure: The failure, the same on all ranks.

        Returns:
            The writer, which may be this one.

        """
        are_gone = all(isinstance(cause, RemovedObjectsError) for cause in causes_of(failure))
        if are_gone and self._may_refer and self._options.unchanged == "reference":
            if self._is_coordinator:
                _log.warning("saving %s again, whole: %s", self.checkpoint_id, failure)
            self.reset()
            self._may_refer = False
            return self
        other = None if self._find_next is None else self._find_next(failure)
        if other is not None:
            other.earlier_failure = f" (after {failure})"
            other.set_background_state(self._cancellation, self._snapshot)
        return other

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save.

        Args:
            checkpoint_id: Place of that save. None keeps the place.

        """
        if checkpoint_id is not None:
            self._location = parse_location(checkpoint_id)
        self.save_id = new_save_id()
        self._draft = None
        self._may_refer = True
        self.lifecycle = Lifecycle("save", self._options, via=self.lifecycle.via)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if `checkpoint_id` has the form of a place that can be written."""
        return is_valid_location(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Return the record that torch keeps with the metadata. torch calls this first, so the last save is over."""
        self._draft = None
        return self._storage_meta()

    def begin(self, rank: int) -> None:
        """Emit the event that a save begins, before `set_up_storage_writer`."""
        self.lifecycle.begin(self._location.uri, operation=self.save_id, rank=rank, is_set_up=False)

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:  # torch's signature; it looks for the name "kwargs"
        """Begin a save. Raises `CheckpointExistsError` before any byte moves."""
        require_collectives(use_collectives=kwargs.get("use_collectives", True))
        rank, location = int(kwargs.get("rank") or 0), self._location
        self.lifecycle.begin(location.uri, operation=self.save_id, rank=rank, is_set_up=True)
        with self.lifecycle.ending_on_error():
            place = place_of(self._options.metadata)
            recorder = new_recorder(
                self._options.trace, verb="save", uri=location.uri, place=place, operation=self.save_id
            )
            recorder.open(rank)
            context = Context(location, self._options, rank=rank, recorder=recorder)
            self._cancellation.enter("planning")
            self._is_coordinator = is_coordinator
            self._draft = Draft(context, save_id=self.save_id)
            self._begun_ns = now_ns()
            with recorder.step("set_up"), self._cancellation.stopping(context.stop):
                if self.hosts is not None:
                    self._draft.is_here = self.hosts.is_here
                if self._is_coordinator or (self.hosts is not None and self.hosts.leads):
                    self._draft.begin(overwrite=self._overwrite)
                if self._is_coordinator:
                    self._refer_to_base(self._draft)
                context.emit("save.set_up")

    def _refer_to_base(self, draft: Draft) -> None:
        if not self._may_refer:
            return
        if self._base is not None:
            draft.refer_to(self._base, is_required=True)
        elif self._find_base is not None and self._options.unchanged == "reference":
            uri = self._find_base()
            if uri is not None:
                draft.refer_to(parse_location(uri), is_required=False)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Attach this rank's `AttemptMessage`. Raises `UnsupportedValueError` for a name that no manifest can hold."""
        check_names((item.index.fqn for item in plan.items), uri=self.checkpoint_id)
        return dataclasses.replace(plan, storage_data=AttemptMessage(nonce=self._require_draft().attempt))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Send the coordinator's attempt, under which they write, to all ranks."""
        with self.lifecycle.ending_on_error():
            draft = self._require_draft()
            self._cancellation.check()
            return [
                dataclasses.replace(plan, storage_data=_answer_rank(plan, plan.storage_data, draft, self))
                if isinstance(plan.storage_data, AttemptMessage)
                else plan
                for plan in plans
            ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's items, all or none."""
        future: Future[list[WriteResult]] = Future()
        with self.lifecycle.ending_on_error():
            try:
                draft = self._require_draft()
                context, receipt_makers = draft.context, list[Callable[..., ItemReceipts]]()
                context.recorder.span("plan", self._begun_ns)
                snapshot = self._snapshot
                if snapshot is not None and snapshot.completed.done():
                    snapshot.completed.result()
                    snapshot = None  # complete: no tensor has to be waited for
                with (
                    context.recorder.step("write"),
                    self._cancellation.stopping(context.stop),
                    contextlib.closing(new_arena(budget_bytes=self._options.staging_bytes)) as arena,
                ):
                    message, uri = plan.storage_data, self.checkpoint_id
                    known: KnownChunks | None = None
                    # A cached plan has the message of an older save, whose keys are taken. This rank then writes under
                    # an attempt of its own: the manifest names every object by its whole key.
                    if isinstance(message, AttemptMessage) and message.nonce == draft.attempt and message.attempt:
                        draft.attempt, known = message.attempt, message.known
                        if message.base is not None:
                            known = self._find_known_here(draft, plan, *message.base)
                    items = prepare_items(plan.items, planner, self._transforms, uri=uri, snapshot=snapshot)
                    groups, hashes, unsent = (
                        [[*range(len(items.sizes_bytes))]],
                        dict[int, bytes](),
                        list[ItemReceipts](),
                    )
                    if self._options.unchanged == "reference":
                        groups, hashes, unsent = self._leave_out_unchanged(
                            items, known, arena, snapshot, context.max_connections
                        )
                    if self.hosts is not None and isinstance(message, AttemptMessage):
                        groups = _split_off_common(items, plan, message.common, groups)
                    parts = [items.select(group, hashes) for group in groups]
                    total_bytes = sum(sum(part.sizes_bytes) for part in parts)
                    self._cancellation.enter("uploading", total_bytes=total_bytes)
                    context.emit("save.planned", num_bytes=total_bytes)
                    context.on_sent = self._cancellation.count_uploaded
                    bodies = (bodies_of(context, part, arena, snapshot, receipt_makers) for part in parts)
                    objects = draft.write(
                        itertools.chain.from_iterable(bodies),
                        in_memory=True,
                        num_bytes_unchanged=sum(sum(receipts.ends) - sum(receipts.begins) for receipts in unsent),
                    )
                if snapshot is not None:
                    snapshot.completed.result()  # raises if a tensor could not be copied, which was not sent either
                if not self._is_coordinator:
                    self._cancellation.seal(commits=False)
                future.set_result(
                    [
                        _result_of(make(stored_in=stored_in))
                        for make, stored_in in zip(receipt_makers, objects, strict=True)
                    ]
                    + [_result_of(receipts) for receipts in unsent]
                )
            except CloudckptError:
                raise
            except Exception as error:
                raise make_picklable(error) from error
        return future

    def _leave_out_unchanged(
        self, items: SaveItems, known: KnownChunks | None, arena: Arena, snapshot: Snapshot | None, connections: int
    ) -> tuple[list[list[int]], dict[int, bytes], list[ItemReceipts]]:
        """Leave out what has not changed.

        Return the positions of the items to send, in groups that do not share objects; the hashes of the items by
        position; and the receipts of the unchanged items.
        """
        num_threads = min(connections, _MAX_HASH_THREADS)
        chunks = hash_chunks(items, arena, snapshot, num_threads=num_threads, check=self._cancellation.check)
        unsent, unchanged = find_unchanged(chunks, known, items.aliases)
        hashes = {position: chunk.xxh3_128 for position, chunk in chunks.items()}
        changed = [
            position
            for position in range(len(items.sizes_bytes))
            if position not in unsent and position not in unchanged
        ]
        groups = [chosen for chosen in (sorted(unchanged), changed) if chosen]
        return groups, hashes, receipts_of(unsent, chunks, known) if known is not None else []

    def _find_known_here(self, draft: Draft, plan: SavePlan, folder: str, base_attempt: str) -> KnownChunks | None:
        """Claim the objects of the base in the directory of this host, and return its chunks that are there."""
        if draft.base is None:  # the coordinator has one
            base = self._location.parent.child(folder)
            draft.refer_to(base, is_required=False, base_attempt=base_attempt)
        return None if draft.base is None else draft.base.known_chunks(_chunk_keys_of(plan))

    def check_references(self, results: Sequence[WriteResult]) -> None:
        """Raise `RemovedObjectsError` unless all that this rank refers to still exists, if each host has a directory.

        The coordinator sees only that of its own host.

        Args:
            results: Those of `write_data`.

        """
        refs = [] if self.hosts is None else [result.storage_data.stored_in for result in results]
        for folder in {ref.folder for ref in refs} - {""}:
            sizes_bytes = {ref.key: ref.size_bytes for ref in refs if ref.folder == folder}
            missing, _ = find_missing(self._require_draft().context.client_at(folder), sizes_bytes)
            raise_if_missing(missing, uri=self.checkpoint_id)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator. Returns only once the checkpoint exists.

        Raises `CheckpointExistsError` if another save committed first, and `IncompleteSaveError` if a planned item was
        not written, or an object is gone. In both cases all ranks' objects are removed. Raises `CommitUnknownError`,
        and removes nothing, if the outcome is unknown. `OvertakenError` is a `CheckpointExistsError`, too, but removes
        nothing either.
        """
        with self.lifecycle.ending_on_error():
            # Before the commit, because a failure after it would report a committed save as failed.
            storage_data = StoredRanges(result.storage_data for of_rank in results for result in of_rank)
            draft = self._require_draft()
            self._cancellation.seal(commits=True)
            with draft.context.recorder.step("commit"):
                refs = [result.storage_data.stored_in for of_rank in results for result in of_rank]
                keys = {stored_in.key for stored_in in refs if not stored_in.folder}
                with draft.removing_on_error(keys):
                    content = content_of(metadata, results, uri=self.checkpoint_id)
                draft.commit(content, keys)
            metadata.version = DCP_VERSION
            metadata.storage_data = storage_data
            metadata.storage_meta = self._storage_meta()
        with draft.keeping_data_on_error():
            self.lifecycle.end(draft.report)

    def encode_manifest(self) -> bytes:
        """Encode the coordinator's manifest for the directories of other hosts.

        Returns:
            The bytes that were committed.

        """
        committed = self._require_draft().committed
        assert committed is not None  # noqa: S101  # `finish` has returned
        return encode(committed)

    def keep_objects(self) -> None:
        """Let what this rank wrote belong to the checkpoint, once the coordinator has committed it."""
        self._require_draft().keep_written()

    def commit_on_host(self, manifest_bytes: bytes) -> None:
        """Commit the coordinator's manifest in the directory of this rank's host, if this rank leads that.

        A failure is logged: the checkpoint exists, and other hosts have its manifest.

        Args:
            manifest_bytes: Those of the coordinator.

        """
        if self.hosts is None or self._is_coordinator or not self.hosts.leads:
            return
        try:
            self._require_draft().commit_manifest(decode(manifest_bytes, uri=self.checkpoint_id), ())
        except CheckpointExistsError:  # retention here has removed an older save of the name since this one began
            context = self._require_draft().context
            mend_manifest(Context(context.location, context.options, rank=context.rank), manifest_bytes, self.hosts)
        except Exception as error:  # the commit must not become a failure
            if isinstance(error.__cause__, (KeyboardInterrupt, SystemExit)):
                raise error.__cause__ from None
            _log.warning(
                "%s is committed, but not in the directory of rank %d: %s", self.checkpoint_id, self.hosts.rank, error
            )

    def flush_trace(self) -> None:
        """Write the rest of `Options.trace`. Each step has written its own part at its end."""
        if self._draft is not None:
            self._draft.context.recorder.end()

    def discard(self) -> None:
        """Remove the objects that this rank wrote in its last save.

        Only for a save that all ranks know to have failed: never after `CommitUnknownError`, or a lost rank.
        """
        if self._draft is not None:
            self._draft.remove_unless_committed()

    def __getstate__(self) -> dict[str, Any]:
        # A save that has begun belongs to its process.
        return {
            **self.__dict__,
            "_draft": None,
            "_snapshot": None,
            "_cancellation": None,
            "_find_base": None,
            "_find_next": None,
            "newest_commit_time_ns": newest_commit_time_ns(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A commit of the other process is later than all commits that this one knows, even if its clock is behind.
        note_commit_time_ns(state.pop("newest_commit_time_ns"))
        self.__dict__.update(state)
        self._cancellation = Cancellation()

    def _storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def _require_draft(self) -> Draft:
        if self._draft is None:
            raise CloudckptError("set_up_storage_writer has to be called before each save, as torch's dcp.save does")
        return self._draft


def _answer_rank(plan: SavePlan, message: AttemptMessage, draft: Draft, writer: ObjectStoreWriter) -> AttemptMessage:
    """Return the coordinator's answer to a rank: the attempt, known chunks, and items that other ranks also hold."""
    known, base = None, None
    if draft.base is not None and writer.hosts is None:
        known = draft.base.known_chunks(_chunk_keys_of(plan))
    elif draft.base is not None:
        base = draft.base.folder, draft.base.attempt
    common = frozenset(key for item in plan.items if writer.common.get(key := key_of(item.index), 1) > 1)
    return dataclasses.replace(message, attempt=draft.attempt, known=known, base=base, common=common)


def _chunk_keys_of(plan: SavePlan) -> Iterator[ChunkKey]:
    indices = (item.index for item in plan.items if item.tensor_data is not None)
    return ((index.fqn, tuple(index.offset or ())) for index in indices)


def _split_off_common(
    items: SaveItems, plan: SavePlan, common: Collection[ItemKey], groups: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Split each group of positions into this rank's own items, and the `common` items and values.

    The groups are stored in different objects, so that a load on another host gets only the objects of the second.
    """
    is_common = [item.tensor_data is None or key_of(item.index) in common for item in plan.items]
    halves = [
        [position for position in group if is_common[items.aliases.get(position, position)] == is_second]
        for group in groups
        for is_second in (False, True)
    ]
    return [half for half in halves if half]


def _result_of(receipts: ItemReceipts) -> WriteResult:
    """Return one result for an object with all of its items. torch passes the results on without reading them."""
    stored_in = receipts.stored_in
    return WriteResult(MetadataIndex(stored_in.key), size_in_bytes=stored_in.size_bytes, storage_data=receipts)
