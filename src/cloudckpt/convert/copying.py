"""Copy a checkpoint from store to store, and compare every byte with the checksums of the save."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import TypeAlias

import msgspec

from cloudckpt._clock import ns_of
from cloudckpt._display import transferred
from cloudckpt._keywords import suggest_keywords
from cloudckpt._messages import join_first
from cloudckpt._workers import run_as_completed
from cloudckpt.commit.attempts import ATTEMPT, RECEIPT_SUFFIX, copy_suffix, data_prefix, new_attempt_id, receipt_key
from cloudckpt.commit.commit import find_listed
from cloudckpt.commit.entries import manifest_key, read_manifest
from cloudckpt.commit.log import read_log, resolve
from cloudckpt.convert.bodies import CopiedBody
from cloudckpt.convert.transfer import (
    CopyReport,
    OnProgress,
    Transfer,
    choose_buffered_part_bytes,
    is_one_service,
    upload_bodies,
)
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointError,
    CloudckptError,
    CorruptCheckpointError,
    Hint,
    IncompleteSaveError,
    ObjectNotFoundError,
    StoreError,
    UnsupportedOperationError,
    changed_error,
)
from cloudckpt.format.codec import encode, pack_tiles, unpack_tiles
from cloudckpt.format.model import FORMAT_MAJOR, FORMAT_MINOR, REFERENCES_VERSION, Manifest, StoredObject
from cloudckpt.format.safetensors import list_contents
from cloudckpt.inspect.verification import Verification
from cloudckpt.io.leftovers import Leftover, find_leftovers
from cloudckpt.io.upload import logging_store_errors
from cloudckpt.options import MIB, Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.draft import Draft
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.stores.base import combine_tile_crc32cs, crc32c_of
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")

_DIGEST_DIGITS = 32
_MAX_LOOKED_AT = 1_000
_MAX_RECEIPT_BYTES = 64 * MIB
_RECEIPT_DECODER = msgspec.json.Decoder(dict[int, str])
FindBase: TypeAlias = Callable[[], Location | None]
_OWN_NAMES = ("manifest.", ".cloudckpt-")


@suggest_keywords
def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
    on_progress: OnProgress | None = None,
) -> CopyReport:
    """Copy the checkpoint at `source` to `target`, on any store.

    The copy has the same content in objects of its own, and is committed last, as a save is. Every byte is compared
    with the checksums of the save. A service that has both places, with the same ``storage_options``, copies by itself.
    Otherwise the bytes pass through at most ``options.read_bytes`` of memory, or whole objects if the target takes no
    uploads in parts. `gc` removes the remains of a killed copy.

    With ``target_options.resume``, objects that an earlier copy of this checkpoint left are compared, and used. A copy
    that fails then removes nothing. One that is committed already is compared, and nothing is written.

    Args:
        source: URI of the checkpoint.
        target: URI of the copy. It must not be inside `source`, nor the reverse.
        overwrite: Replace a checkpoint at `target`, at the instant of the commit.
        options: Options for the source.
        target_options: Options for the target.
        on_progress: Called with the bytes done and their total.

    Returns:
        Bytes, requests and seconds of the copy.

    Raises:
        CorruptCheckpointError: The source is damaged, or the earlier copy that would be resumed.
        CheckpointChangedError: The source was overwritten or removed during the copy.
        CheckpointExistsError: A checkpoint exists at `target`.
        CheckpointNotFoundError: No checkpoint exists at `source`.
        InvalidURIError: One of the places is inside the other.
        StoreError: A request failed; ``key`` names its object.

    Example::

        report = cloudckpt.copy("s3://bucket/run/step-100", "s3://archive/run/step-100")
        print(report.num_bytes, report.copy_s)

    """
    return run_copy(
        Transfer(
            source, target, options=options, target_options=target_options, overwrite=overwrite, on_progress=on_progress
        )
    )


def run_copy(transfer: Transfer, *, find_base: FindBase = lambda: None) -> CopyReport:
    """Copy the source of a transfer to its target, as `copy` does.

    The copy of a save with `Options.unchanged` refers to the objects that the base has, too: a checkpoint beside the
    target, which `find_base` returns.
    """
    job = CopyJob(transfer, _read_manifest(transfer.source), find_base)
    copied = job.find_earlier() or job.run()
    clients = transfer.source.client, transfer.target.client
    report = CopyReport(
        source=transfer.source.uri,
        target=transfer.target.uri,
        attempt=copied.attempt,
        num_objects=len(copied.objects),
        num_bytes=job.num_bytes,
        num_service_bytes=job.num_service_bytes,
        num_read_back_bytes=job.num_read_back_bytes,
        num_reused_bytes=job.num_reused_bytes,
        was_there=job.was_there,
        num_requests=sum(client.num_requests for client in clients),
        num_retries=sum(client.num_retries for client in clients),
        copy_s=transfer.seconds,
    )
    _log.info("copied %s to %s%s", report.source, report.target, transferred(report.num_bytes, report.copy_s))
    return report


def run_shared_copy(
    transfer: Transfer, *, is_mine: Callable[[int], bool], sends_all: bool, skips_damage: bool, find_base: FindBase
) -> tuple[list[StoredObject], int]:
    """Send the objects that the source has of a checkpoint whose other objects are on other hosts.

    The process that finds all objects at the target commits the copy. The target must have `Options.resume`.

    Args:
        transfer: The source and the target.
        is_mine: Returns False for the index of an object that another process of this host sends.
        sends_all: Also send objects that other hosts have brought here since the commit, and may send themselves.
        skips_damage: Leave out damaged objects instead of raising an error. Reads all objects once more.
        find_base: See `run_copy`. What the base has is neither sent nor missing.

    Returns:
        The objects of the source that no host has sent, none if the copy is committed; and a number that rises when
        more arrives at the target.

    """
    job = CopyJob(transfer, _read_manifest(transfer.source), find_base)
    return job.run_share(is_mine=is_mine, sends_all=sends_all, skips_damage=skips_damage)


def has_all_objects(source: Context) -> bool:
    """Return True if the location of a checkpoint lists all of its objects. A cut one counts: the copy reports it."""
    manifest = _read_manifest(source)
    folders = {stored.folder for stored in manifest.objects}
    listed = {(folder, info.key) for folder in folders for info in source.client_at(folder).list("data/")}
    return all((stored.folder, stored.key) in listed for stored in manifest.objects)


def is_taken(target: str | os.PathLike[str], *, options: Options) -> bool:
    """Return True if a checkpoint is committed at `target`. Lists it, and reads no manifest."""
    context = Context(parse_location(target), options, rank=0)
    return read_log(context.client).current_number is not None


def is_copy(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, options: tuple[Options, Options]
) -> bool:
    """Return True if the checkpoint at `target` is a copy of the one at `source`. `options` are those of both."""
    places = [Context(parse_location(uri), own, rank=0) for uri, own in zip((source, target), options, strict=True)]
    return _copy_at(places[1], _read_manifest(places[0])) is not None


def list_others(target: str | os.PathLike[str], *, options: Options) -> list[str]:
    """Return the names in the folder `target` that a checkpoint would not write; none if a checkpoint exists there."""
    context = Context(parse_location(target), options, rank=0)
    if read_log(context.client).current_number is not None:
        return []
    names = (info.key.partition("/")[0] for info in context.client.list(max_results=_MAX_LOOKED_AT))
    return [name for name in dict.fromkeys(names) if name != "data" and not name.startswith(_OWN_NAMES)]


def _read_manifest(source: Context) -> Manifest:
    """Read the manifest to copy. If it has no commit time (format 1.0), it gets the store's time."""
    resolved = resolve(source.client)
    if resolved.manifest.committed_at_ns is not None:
        return resolved.manifest
    info = source.client.head(manifest_key(resolved.number))
    if info is None:
        raise changed_error(source.uri, doing="looked at", advice="Copy again")
    version = max(resolved.manifest.version, (FORMAT_MAJOR, FORMAT_MINOR))
    return msgspec.structs.replace(resolved.manifest, version=version, committed_at_ns=ns_of(info.modified_at))


def _attempt_of(key: str, suffix: str) -> str:
    """Return the attempt of a data object's key if it has that suffix; otherwise an empty text."""
    name = key.split("/")[1] if key.count("/") > 1 else ""
    return name if name.endswith(suffix) and ATTEMPT.fullmatch(name) else ""


def _copy_at(target: Context, manifest: Manifest) -> Manifest | None:
    """Return the manifest at the target if it is an earlier copy of exactly `manifest`."""
    try:
        number = read_log(target.client).current_number
        copied = None if number is None else read_manifest(target.client, number)
    except CheckpointError:
        return None  # an unreadable manifest is no copy
    return copied if copied is not None and copied.is_copy_of(manifest) else None


class CopyJob:
    """The copy of one manifest and its data. Buffers take at most `Options.read_bytes` of the source."""

    def __init__(self, transfer: Transfer, manifest: Manifest, find_base: FindBase = lambda: None) -> None:
        self._find_base = find_base
        self._source = transfer.source
        self._target = transfer.target
        self._overwrite = transfer.overwrite
        self._progress = transfer.progress
        self._manifest = manifest
        self._reader = CheckpointReader(self._source, manifest)
        self._contents = list_contents(manifest)
        self._draft = Draft(self._target, save_id=manifest.save_id or "")
        self._budget_bytes = self._source.options.read_bytes
        self._keys: dict[int, str] = {}  # keys of the copied objects, by their numbers in the source
        self._refs: dict[int, StoredObject] = {}  # the objects of other checkpoints that the copy names
        self.num_bytes = sum(stored.size for stored in manifest.objects)
        self.num_service_bytes = 0
        self.num_read_back_bytes = 0
        self.num_reused_bytes = 0
        self.was_there = False
        self._progress.expect(self.num_bytes)

    def find_earlier(self) -> Manifest | None:
        """Return the manifest of an earlier copy that is committed and whole, if the target has ``resume``.

        Raises `CorruptCheckpointError` if the earlier copy is damaged and may not be replaced.
        """
        target = self._target
        copied = _copy_at(target, self._manifest) if target.options.resume else None
        if copied is None:
            return None
        reader = CheckpointReader(target, copied)
        problems = Verification(reader, on_read=self._progress.add).run()
        if not problems:
            self.num_reused_bytes, self.was_there = self.num_bytes, True
            return copied
        if reader.has_changed():
            raise changed_error(target.uri, doing="compared", advice="Copy again")
        shown = join_first(problems, 1)
        problem = f"{target.uri}, which an earlier copy has committed, is damaged by now: {shown}"
        if not self._overwrite:
            raise CorruptCheckpointError(
                problem,
                uri=target.uri,
                problems=problems,
                hint=Hint(
                    advice="To replace it, {option}; or delete it and copy again.",
                    option="overwrite",
                    value="True",
                ),
            )
        _log.warning("%s. It is copied again", problem)
        self._progress.expect(self.num_bytes)
        return None

    def run(self) -> Manifest:
        """Copy and commit. Return the new manifest.

        Raises `CorruptCheckpointError` if an object of the source is missing or damaged.
        """
        objects, draft = self._manifest.objects, self._draft
        draft.begin(overwrite=self._overwrite)
        if self._target.options.resume:
            draft.attempt = new_attempt_id(self._suffix())
        keys = [draft.key(number) for number in range(2 * len(objects))]
        try:
            self._refer_to_base()
            if is_one_service(self._source, self._target):
                # These keys are used for nothing else: a request that timed out may still put an object there.
                with contextlib.closing(Arena(budget_bytes=self._budget_bytes)) as arena:
                    self._ask_service(keys[len(objects) :], arena)
            self._stream(range(len(objects)))
            copied = self._build_manifest()
        except BaseException as error:
            draft.remove(keys)
            is_in_doubt = isinstance(error, (CorruptCheckpointError, CheckpointChangedError))
            if not is_in_doubt or not self._reader.has_changed():
                raise
            advice = f"Nothing was committed at {self._target.uri}; copy again"
            raise changed_error(self._source.uri, doing="copied", advice=advice) from error
        draft.commit_manifest(copied, self._keys.values())
        return copied

    def _refer_to_base(self) -> None:
        """Leave out what the base has, as a save does: the claims are put first."""
        may_refer = self._manifest.is_referable and self._target.options.commit == "conditional"
        if may_refer and (base := self._find_base()) is not None:
            self._draft.refer_to(base, is_required=False)
        if self._draft.base is not None:
            self._refs = self._draft.base.find_objects(self._manifest)
        num_bytes = sum(stored.size for stored in self._refs.values())
        self.num_bytes -= num_bytes
        self._progress.add(num_bytes)

    def run_share(
        self, *, is_mine: Callable[[int], bool], sends_all: bool, skips_damage: bool
    ) -> tuple[list[StoredObject], int]:
        """Send what the source has, and commit if nothing is missing then. Returns as `run_shared_copy`.

        Other processes copy the same manifest from directories of their own. They exchange receipts at the target: an
        object counts once the process that has sent it, and compared each byte, has put a receipt that names it.
        """
        target, draft = self._target, self._draft
        draft.begin(overwrite=self._overwrite)
        if _copy_at(target, self._manifest) is not None:  # another process has committed just before
            return [], 0
        draft.attempt = new_attempt_id(self._suffix())
        with draft.removing_on_error(()):
            self._refer_to_base()
            missing, receipts, num_listed = self._send_share(is_mine, sends_all=sends_all, skips_damage=skips_damage)
        if missing:
            draft.remove(())  # the claims: another look may refer to another base
            return missing, num_listed
        draft.commit_manifest(self._build_manifest(), ())
        with logging_store_errors("remove the receipts of a copy", uri=target.uri):
            target.client.delete(receipts)
        return [], num_listed

    def _send_share(
        self, is_mine: Callable[[int], bool], *, sends_all: bool, skips_damage: bool
    ) -> tuple[list[StoredObject], list[str], int]:
        """Send what the source has, for `run_share`. Return what is missing then, the receipts, and the listed keys."""
        target, draft, objects = self._target, self._draft, self._manifest.objects
        receipts, num_listed = self._take_receipts()
        unusable = {*self._keys, *self._refs, *(Verification(self._reader).run_each() if skips_damage else ())}
        here = self._find_here(sends_all=sends_all)
        numbers_here = [number for number in here if is_mine(number) and number not in unusable]
        self._stream(numbers_here)
        if numbers_here:
            document = msgspec.json.encode({number: self._keys[number] for number in numbers_here})
            views = [memoryview(document)]
            receipt = receipt_key(draft.attempt, target.rank, 0)
            target.client.call(target.store.put, receipt, views, crc32c=crc32c_of(views))
            receipts, num_listed = self._take_receipts()
        had = {*self._keys, *self._refs}
        return [stored for number, stored in enumerate(objects) if number not in had], receipts, num_listed

    def _take_receipts(self) -> tuple[list[str], int]:
        """Take the listed objects that receipts name. Return the keys of the receipts, and the number of all keys."""
        target, objects, suffix = self._target, self._manifest.objects, self._suffix()
        listed = {info.key: info.size_bytes for info in target.client.list("data/") if _attempt_of(info.key, suffix)}
        receipts = sorted(key for key in listed if key.endswith(RECEIPT_SUFFIX))
        for receipt in receipts:
            try:
                document = target.client.call(target.store.read, receipt, max_bytes=_MAX_RECEIPT_BYTES)
                named = _RECEIPT_DECODER.decode(document)
            except ObjectNotFoundError:
                continue  # another process has committed
            except msgspec.MsgspecError as error:  # its objects are sent again
                _log.warning("ignoring %s: %s", target.client.url(receipt), error)
                continue
            for number, key in named.items():
                if 0 <= number < len(objects) and listed.get(key) == objects[number].size:
                    self._keys.setdefault(number, key)
        return receipts, len(listed)

    def _find_here(self, *, sends_all: bool) -> list[int]:
        """Return the objects that the source lists. Without `sends_all`, those that are older than its manifest."""
        client, number = self._source.client, read_log(self._source.client).current_number
        entry = None if number is None or sends_all else client.head(manifest_key(number))
        no_later_than = None if entry is None else entry.modified_at
        return find_listed(self._source.client_at, self._manifest, no_later_than=no_later_than)

    def _build_manifest(self) -> Manifest:
        return msgspec.structs.replace(
            self._manifest,
            # The copy has no fields of a newer minor version.
            version=REFERENCES_VERSION if self._refs else min(self._manifest.version, (FORMAT_MAJOR, FORMAT_MINOR)),
            attempt=self._draft.attempt,
            created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            objects=[
                self._refs.get(number) or StoredObject(key=self._keys[number], size=stored.size, crc32c=stored.crc32c)
                for number, stored in enumerate(self._manifest.objects)
            ],
        )

    def _suffix(self) -> str:
        """Return the suffix of the ids of attempts that copy this manifest under this number."""
        return copy_suffix(self._draft.number, hashlib.sha256(encode(self._manifest)).hexdigest()[:_DIGEST_DIGITS])

    def _leftovers(self) -> dict[str, list[Leftover]] | None:
        """Find the leftovers of earlier copies of the source, by the keys of this copy. None without `Options.resume`.

        At most one attempt ever commits under a number. While the number is free, none of these attempts has committed,
        no overwrite has replaced one, and no deletion or collection has put a fence there. So nothing removes their
        objects.
        """
        target, attempt = self._target, self._draft.attempt
        if not target.options.resume:
            return None
        # If objects are written as streams, a process of an earlier copy could still write to them.
        if not target.store.capabilities.multipart:
            return {}
        suffix, leftovers_of_key = self._suffix(), defaultdict[str, list[Leftover]](list)
        found = [(_attempt_of(leftover.key, suffix), leftover) for leftover in find_leftovers(target.client, "data/")]
        for earlier, leftover in sorted(found, key=operator.itemgetter(0), reverse=True):
            prefix = data_prefix(earlier, target.rank)
            if earlier not in ("", attempt) and leftover.key.startswith(prefix):
                name = leftover.key.removeprefix(prefix)
                leftovers_of_key[data_prefix(attempt, target.rank) + name].append(leftover)
        return leftovers_of_key

    def _ask_service(self, keys: list[str], arena: Arena) -> None:
        """Ask the service to copy all objects. `_stream` copies those that it refuses or copies wrongly."""
        target, tile_bytes = self._target, self._manifest.tile_bytes
        objects = self._manifest.objects
        refused: list[StoreError] = []
        copied: dict[int, str] = {}

        def ask(number: int) -> None:
            stored, (client, key) = objects[number], self._reader.locate(number)
            try:
                crc32c = target.store.copy_from(client.url(key), keys[number], run=target.client.call)
            # Copies need a permission of their own. A missing object is the source, or an upload that was aborted: a
            # read of the source shows which.
            except (UnsupportedOperationError, AccessDeniedError, ObjectNotFoundError) as error:
                refused.append(error)
                return
            expected = combine_tile_crc32cs(unpack_tiles(stored.crc32c), tile_bytes=tile_bytes, size_bytes=stored.size)
            if crc32c == expected:
                copied[number] = "by checksum"
            elif crc32c is None and self._is_good(number, keys[number], arena):
                copied[number] = "read back"
            else:
                # `_stream` reads the object from the source next, and finds if the source is damaged. A good copy with
                # a wrong checksum is not kept either, because other clients would refuse to read it.
                self._draft.remove([keys[number]])

        for number in run_as_completed(
            [number for number in range(len(objects)) if number not in self._refs],
            ask,
            num_threads=target.max_connections,
            name="cloudckpt-copy",
            # One copy can take thousands of requests: begin no more of them.
            on_failure=lambda: target.stop(CloudckptError("the copy of another object failed")),
        ):
            if number in copied:
                self._keys[number] = keys[number]
                self._progress.add(objects[number].size)
        self.num_service_bytes = sum(objects[number].size for number, how in copied.items() if how == "by checksum")
        self.num_read_back_bytes = sum(objects[number].size for number in copied) - self.num_service_bytes
        if refused:
            _log.info(
                "the service did not copy %d objects, which are read and written instead: %s", len(refused), refused[0]
            )

    def _is_good(self, number: int, key: str, arena: Arena) -> bool:
        """Read all of the object at `key`. Return True if it is undamaged."""
        target, stored = self._target, self._manifest.objects[number]
        copied = StoredObject(key=key, size=stored.size, crc32c=stored.crc32c)
        reader = CheckpointReader(target, msgspec.structs.replace(self._manifest, objects=[copied]))
        body = CopiedBody(reader, 0, self._contents[number], arena)
        try:
            info = target.client.head(key)
            if info is None or info.size_bytes != stored.size:
                return False
            part_bytes = choose_buffered_part_bytes(
                target, budget_bytes=self._budget_bytes, tile_bytes=self._manifest.tile_bytes
            )
            for begin in range(0, stored.size, part_bytes):
                with body.open(begin, min(begin + part_bytes, stored.size)):
                    pass
        except CheckpointError as error:
            _log.warning("a copy is not what was saved: %s", error)
            return False
        return True

    def _stream(self, numbers: Iterable[int]) -> None:
        """Read and write those of some objects that are not copied yet. Parts that an earlier copy sent are used."""
        source, target, tile_bytes = self._source, self._target, self._manifest.tile_bytes
        bodies = {
            number: functools.partial(CopiedBody, self._reader, number, self._contents[number])
            for number in numbers
            if number not in self._keys and number not in self._refs
        }
        if not bodies:
            return
        receipts, self.num_reused_bytes = upload_bodies(
            target,
            {self._draft.key(number): body_in for number, body_in in bodies.items()},
            leftovers=self._leftovers(),
            progress=self._progress,
            budget_bytes=self._budget_bytes,
            tile_bytes=tile_bytes,
            stop_reading=source.stop,
        )
        for number, receipt in zip(bodies, receipts, strict=True):
            stored, (client, key) = self._manifest.objects[number], self._reader.locate(number)
            if receipt.size_bytes != stored.size or pack_tiles(receipt.tile_crc32cs) != stored.crc32c:
                raise IncompleteSaveError(
                    f"what was sent to {target.store.url(receipt.key)} is not what was read from "
                    f"{client.url(key)}: this machine's memory is not reliable. Nothing was committed",
                    uri=target.uri,
                )
            self._keys[number] = receipt.key
