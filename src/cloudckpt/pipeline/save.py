"""One save on one rank: check, write, commit; and the clean-up when one of them fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from cloudckpt._workers import each_done
from cloudckpt.commit.attempts import data_key, draw_commit_time_ns, new_attempt_id
from cloudckpt.commit.entries import CommitTimes, Entry, check_ours, manifest_key, manifest_number, read_entry
from cloudckpt.commit.log import list_entries, lists_torch_checkpoint, read_log, read_log_once
from cloudckpt.commit.publish import (
    check_conditional_create,
    check_objects_present,
    check_still_next,
    publish,
    remove_superseded,
)
from cloudckpt.errors import (
    OVERWRITE_HINT,
    CheckpointExistsError,
    CloudckptError,
    CommitUnknownError,
    InvalidOptionError,
    StoreError,
    UnsupportedValueError,
    gc_advice,
)
from cloudckpt.format.build import Content, build_manifest
from cloudckpt.format.model import ItemReceipts, Manifest
from cloudckpt.format.safetensors import HeaderEntry, lay_out, pack, sort_for_storage
from cloudckpt.io.upload import choose_part_bytes
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.report import SaveReport
from cloudckpt.telemetry.timeline import Recorder
from cloudckpt.tensors.body import PieceBody, new_piece, new_side_streams
from cloudckpt.tensors.copying import Staging
from cloudckpt.tensors.host_memory import new_arena

_log = logging.getLogger("cloudckpt")

# An object's layout needs all of its tensors; meanwhile the object before it is sent.
_MAX_TENSORS_PER_OBJECT = 4096
# Transformed tensors are held until the layout of their object is known.
_MAX_TRANSFORMED_OBJECT_BYTES = 256 * MIB


class StagedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a save, ready to be laid out. `content` refers to memory; nothing has been copied."""

    entry: HeaderEntry
    index_offsets: tuple[int, ...] | None
    """The offsets in the item's index."""
    content: torch.Tensor | memoryview
    dtype: str | None
    lengths: tuple[int, ...]
    transforms: tuple[str, ...]
    address: int = 0
    """The address of a tensor's first element; 0 if the content is no tensor's memory."""


def is_same_content(item: StagedItem, first: StagedItem) -> bool:
    """Return True if two items, which were planned as aliases, have the same bytes."""
    return (
        0 < item.address == first.address
        and type(item.content) is type(first.content)
        and (item.dtype, item.lengths, item.transforms) == (first.dtype, first.lengths, first.transforms)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveItems:
    """The items of a save on one rank."""

    sizes_bytes: Sequence[int]
    """The estimated size of each; 0 for an alias."""
    aliases: Mapping[int, int]
    """The position of an earlier item that has the same bytes, by the position of each alias."""
    are_transformed: bool
    """True if extensions compute the stored bytes, so that no item is sent from where it is."""
    stage: Callable[[Sequence[int]], Iterable[StagedItem]]
    """Returns the items at these positions, with their data. It is called object by object, so that tensors that are
    computed are not all held at once."""


def require_no_resume(options: Options) -> None:
    """Raise `InvalidOptionError` for a save with `Options.resume`, which applies to copies."""
    if options.resume:
        raise InvalidOptionError(
            "Options(resume=True) applies to copies: pass it as target_options of cloudckpt.copy. A save that is tried "
            "again sends everything, so remove the option here"
        )


class SaveJob:
    """One save, from set-up to commit. `report` is filled in step by step."""

    report: SaveReport | None = None

    def __init__(self, context: Context, *, save_id: str) -> None:
        self.attempt = new_attempt_id()
        """Identifier of this save. Set it before `write`, so that all ranks have the same."""
        self._context = context
        self._save_id = save_id
        self._number = 0
        self._written_keys: list[str] = []
        self._started_s = time.monotonic()

    def stop(self, error: BaseException) -> None:
        """Make `check` and `write` raise `error` instead of calling the store; clean-up continues. For any thread."""
        self._context.stop(error)

    @property
    def recorder(self) -> Recorder:
        return self._context.recorder

    def check(self, *, overwrite: bool) -> None:
        """Find the number of the commit, before any byte moves. Only the rank that commits calls this."""
        context, uri = self._context, self._context.uri
        entries = self._entries_to_replace() if overwrite else self._entries_beside_no_checkpoint()
        self._number = entries[-1].number + 1 if entries else 0
        if manifest_number(manifest_key(self._number)) is None:
            key = context.client.url(manifest_key(entries[-1].number))
            raise CheckpointExistsError(
                f"Checkpoint already exists at {uri}, and no number comes after {key}, which no cloudckpt wrote. "
                "Remove that object, or choose another URI",
                uri=uri,
            )
        if context.options.commit != "unconditional":
            # The answer is kept for the process, so the report does not count the requests.
            check_conditional_create(context.client.restarted())

    def _entries_to_replace(self) -> Sequence[Entry]:
        client = self._context.client
        entries = list_entries(client)  # damaged ones too
        if entries and not client.list("data/", most=1):
            check_ours(client, entries)
        for entry in [entry for entry in entries if not entry.is_fence][-1:]:
            # This commit has to be later.
            CommitTimes().read(client, manifest_key(entry.number), entry)
        return entries

    def _entries_beside_no_checkpoint(self) -> Sequence[Entry]:
        """Raises `CheckpointExistsError` if a checkpoint of any kind exists."""
        context, client = self._context, self._context.client
        log, *others = _call_together(
            # A conditional commit creates only what is absent, so one look is enough.
            functools.partial(read_log_once if context.options.commit == "conditional" else read_log, client),
            # Two looks, as `observe` takes them, at the same time: a small save has few round trips.
            *[functools.partial(lists_torch_checkpoint, client)] * 2,
            num_threads=1 if context.store.capabilities.is_near else context.connections,
        )
        if log.current is not None or any(others):
            raise CheckpointExistsError(
                f"Checkpoint already exists at {context.uri}: nothing was written",
                uri=context.uri,
                hint=OVERWRITE_HINT,
            )
        entries: Sequence[Entry] = log.entries
        return entries

    def write(
        self, planned: SaveItems, *, pending: Staging | None = None, on_sent: Callable[[int], None] | None = None
    ) -> list[ItemReceipts]:
        """Upload this rank's items, all or none, and return the receipts of each object.

        Args:
            planned: The items.
            pending: Memory that is still being filled. It is read part by part, once it is there.
            on_sent: Called with the size of each part that the store has.

        """
        begun_s = time.monotonic()
        context, options, recorder = self._context, self._context.options, self._context.recorder
        if on_sent is not None:
            context.on_sent = on_sent
        staged_s, transferred_s = recorder.seconds("stage"), recorder.seconds("transfer")
        make_receipts: list[Callable[..., ItemReceipts]] = []
        with (
            contextlib.closing(new_arena(budget_bytes=options.staging_bytes)) as arena,
            context.new_uploads(
                part_bytes=options.advanced.part_bytes, tile_bytes=options.advanced.tile_bytes
            ) as session,
        ):
            for number, group in enumerate(_group_items(context, planned)):
                in_object = list(planned.stage(group))
                body, make = _lay_out_object(
                    in_object, _same_contents(group, in_object, planned.aliases), arena, pending
                )
                make_receipts.append(make)
                del in_object  # the body holds what it still needs, and only until it is sent
                key = data_key(self.attempt, context.rank, number)
                part_bytes = choose_part_bytes(
                    sum(planned.sizes_bytes),
                    connections=context.connections,
                    most_bytes=options.advanced.part_bytes,
                    buffer_bytes=options.staging_bytes if 2 * body.copied_bytes > body.size_bytes else None,
                )
                session.submit(key, body, part_bytes=part_bytes)
            session.tasks.join()
            objects = session.receipts()
        self._written_keys = [receipt.key for receipt in objects]
        self.report = SaveReport(
            uri=context.uri,
            attempt=self.attempt,
            rank=context.rank,
            num_bytes=sum(receipt.size_bytes for receipt in objects),
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
        return [make(stored_in=stored_in) for make, stored_in in zip(make_receipts, objects, strict=True)]

    def commit(self, content: Content, keys: Iterable[str] = ()) -> None:
        """Make the checkpoint exist. Unless its outcome is unknown, a failure removes what all ranks wrote.

        `keys` are those of objects that were written besides those of `content`.
        """
        begun_s = time.monotonic()
        context = self._context
        keys = {*keys, *(each.key for of_rank in content.objects for each in of_rank)}
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
        context = self._context
        with self.removing_on_error(keys):
            written_at = check_objects_present(context.client, manifest)
            if manifest.committed_at_ns is None:
                duration_s = time.monotonic() - self._started_s
                committed_at_ns = draw_commit_time_ns(written_at, longest_since_s=duration_s)
                manifest = msgspec.structs.replace(manifest, committed_at_ns=committed_at_ns)
            context.emit("save.committing", key=manifest_key(self._number))
            check_still_next(context.client, self._number)
        self._publish(manifest, keys)
        self._written_keys = []  # they belong to the checkpoint now
        self._tidy_up(manifest)

    def discard(self) -> None:
        """Remove what this rank wrote in a save that failed, unless a commit refers to it."""
        keys, self._written_keys = self._written_keys, []
        if keys and not self._may_be_committed(keys):
            self._remove(keys)

    def _may_be_committed(self, keys: Iterable[str]) -> bool:
        # torch also reports a failure that came after the commit.
        context = self._context
        client = context.client.restarted()
        try:
            for entry in list_entries(client):
                found = read_entry(client, entry.number)
                if found is None:
                    return True  # it was listed, and cannot be ruled out unread
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
                context.client,
                manifest,
                number=self._number,
                conditional=context.options.commit == "conditional",
            )
        except CommitUnknownError:
            raise  # the manifest may exist, so its data must stay
        except (CheckpointExistsError, StoreError, UnsupportedValueError):
            self._remove(keys)  # another save won, or nothing was put
            raise
        except BaseException as error:
            raise self._interrupted(error) from error

    def _tidy_up(self, manifest: Manifest) -> None:
        """Remove what the commit superseded. Raises only interrupts, in a form that keeps the data of all ranks."""
        context = self._context
        try:
            context.emit("save.committed", key=manifest_key(self._number))
            if self._number:
                remove_superseded(
                    context.client,
                    manifest,
                    number=self._number,
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
            "kept. Look (cloudckpt ls) before you save there again",
            uri=uri,
        )

    @contextlib.contextmanager
    def removing_on_error(self, keys: Iterable[str]) -> Iterator[None]:
        """Remove the objects at `keys` if the body fails."""
        try:
            yield
        except Exception:
            self._remove(keys)
            raise

    def _remove(self, keys: Iterable[str]) -> None:
        doomed = sorted(keys)
        if doomed:
            try:
                self._context.client.restarted().delete(doomed)
            except StoreError as error:
                _log.warning("could not remove what a failed save left: %s. %s", error, gc_advice(self._context.uri))


def _group_items(context: Context, planned: SaveItems) -> Iterator[list[int]]:
    """Yield the positions of the items of each object. Aliases of one tensor are in one object, the first one first."""
    options = context.options
    object_bytes = options.advanced.object_bytes
    if planned.are_transformed:
        object_bytes = min(object_bytes, _MAX_TRANSFORMED_OBJECT_BYTES)
    if not context.store.capabilities.multipart:
        # An object is then one part: it is staged whole, and only several objects are sent side by side.
        share_bytes = options.staging_bytes // context.connections
        object_bytes = min(object_bytes, max(options.advanced.part_bytes, share_bytes))
    firsts = [i for i in range(len(planned.sizes_bytes)) if i not in planned.aliases]
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for follower, first in planned.aliases.items():
        followers[first].append(follower)
    sizes_of_firsts = [planned.sizes_bytes[i] for i in firsts]
    for group in pack(sizes_of_firsts, object_bytes=object_bytes, max_tensors=_MAX_TENSORS_PER_OBJECT):
        yield [j for i in group for j in (firsts[i], *followers.get(firsts[i], ()))]


def _same_contents(
    positions: Sequence[int], in_object: Sequence[StagedItem], aliases: Mapping[int, int]
) -> dict[int, int]:
    """Map each item of an object that has the bytes of an earlier one to that. `positions` are those in the plan."""
    if aliases.keys().isdisjoint(positions):
        return {}
    places = {position: i for i, position in enumerate(positions)}
    firsts = {i: places[aliases[position]] for position, i in places.items() if position in aliases}
    return {i: first for i, first in firsts.items() if is_same_content(in_object[i], in_object[first])}


def _lay_out_object(
    in_object: Sequence[StagedItem], same_as: Mapping[int, int], arena: Any, pending: Staging | None
) -> tuple[PieceBody, Callable[..., ItemReceipts]]:
    """Return the body of an object, and what makes its receipts of the object's own receipt (`stored_in`).

    `same_as` maps an item with the bytes of an earlier one to that one.
    """
    order = sort_for_storage([item.entry for item in in_object])
    places = {i: place for place, i in enumerate(order)}
    same_as = {places[i]: places[first] for i, first in same_as.items()}
    in_object = [in_object[i] for i in order]
    stored = [item for i, item in enumerate(in_object) if i not in same_as]
    layout = lay_out([item.entry for item in stored])
    pieces = [new_piece(memoryview(layout.header), begin=0)]
    pieces += [
        new_piece(item.content, begin=begin, address=item.address)
        for item, begin in zip(stored, layout.begins, strict=True)
    ]
    begins_of_stored, begins = iter(layout.begins), list[int]()
    for position in range(len(in_object)):
        begins.append(begins[same_as[position]] if position in same_as else next(begins_of_stored))
    make_receipts = functools.partial(
        ItemReceipts,
        fqns=[item.entry.fqn for item in in_object],
        offsets=[item.index_offsets for item in in_object],
        begins=array("q", begins),
        ends=array("q", [begin + item.entry.num_bytes for item, begin in zip(in_object, begins, strict=True)]),
        dtypes=[item.dtype for item in in_object],
        lengths=[item.lengths for item in in_object],
        transforms=[item.transforms for item in in_object],
    )
    return PieceBody(pieces, arena, pending, new_side_streams(item.content for item in stored)), make_receipts


def _call_together(*calls: Callable[[], Any], num_threads: int) -> list[Any]:
    """Return the results of `calls`, in their order. Raises the first failure, once nothing runs any more."""
    if num_threads == 1:
        return [call() for call in calls]
    found: dict[int, Any] = {}

    def make(number: int) -> None:
        found[number] = calls[number]()

    numbers = range(len(calls))
    for _ in each_done(numbers, make, num_threads=num_threads, name="cloudckpt-look", on_failure=lambda: None):
        pass
    return [found[number] for number in numbers]
