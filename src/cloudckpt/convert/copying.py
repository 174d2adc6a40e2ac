"""Copy a checkpoint from store to store: whole, checked, and committed last."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone

import msgspec

from cloudckpt._workers import each_done
from cloudckpt.commit.commit_time import ns_of
from cloudckpt.commit.manifest_log import manifest_key, read_log, read_manifest, resolve
from cloudckpt.convert.bodies import CopiedBody
from cloudckpt.convert.endpoints import TargetJob, check_apart, is_one_service, upload_session
from cloudckpt.convert.reports import CopyReport, OnProgress, Progress
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
)
from cloudckpt.format.codec import encode, pack_tiles, unpack_tiles
from cloudckpt.format.model import FORMAT_MAJOR, FORMAT_MINOR, Manifest, StoredObject
from cloudckpt.format.safetensors import list_contents
from cloudckpt.inspect.verification import has_changed
from cloudckpt.io.checksum import combine_tile_crc32cs
from cloudckpt.io.upload import choose_held_part_bytes
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.verify import VerifyJob
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.uri import parse_location

_log = logging.getLogger("cloudckpt")

_DIGEST_DIGITS = 32


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

    The copy has the same tensors, values and chunks, in objects of its own, and is committed last, as a save is. Every
    byte is compared with the checksums of the save. If one service has both places, with the same ``storage_options``,
    it is asked to copy, and its CRC32C of each object is compared; without one, the copy is read back. Everything else
    is read and written in at most ``options.read_bytes`` of memory; a target without uploads in parts takes whole
    objects. What a killed copy leaves, `gc` removes.

    With ``target_options.resume``, objects that an earlier copy of exactly this checkpoint left are read at the target,
    compared, and used. A copy that fails then removes nothing. If all of it is committed already, it is compared, and
    nothing is written (`CopyReport.was_there`).

    Args:
        source: URI of the checkpoint. Folders of ranks that saved separately are copied one by one.
        target: URI of the copy. It must not lie inside `source`, nor the reverse.
        overwrite: Replace a checkpoint at `target`, at the instant of the commit.
        options: Options for the source.
        target_options: Options for the target.
        on_progress: Called with the bytes done and their total.

    Raises:
        CorruptCheckpointError: The source is damaged, or the earlier copy that would be resumed.
        CheckpointChangedError: The source was overwritten or removed during the copy.
        CheckpointExistsError: A checkpoint exists at `target`.
        CheckpointNotFoundError: No checkpoint exists at `source`.
        InvalidURIError: One place lies inside the other.
        StoreError: A request failed; ``key`` tells on which side.

    """
    begun_s = time.monotonic()
    options, target_options = options or Options(), target_options or Options()
    here, there = parse_location(source), parse_location(target)
    check_apart(here, there, options, target_options)
    progress = Progress(on_progress)
    of_source, of_target = Context(here, options, rank=0), Context(there, target_options, rank=0)
    manifest = _read_manifest(of_source)
    copied = _copy_at(of_target, manifest) if target_options.resume else None
    if copied is not None and _is_whole(of_target, copied, progress, overwrite=overwrite):
        outcome = CopyOutcome(num_reused_bytes=sum(stored.size for stored in copied.objects), was_there=True)
    else:
        copied, outcome = _copy_manifest(of_source, of_target, manifest, progress, overwrite=overwrite)
    report = CopyReport(
        source=here.uri,
        target=there.uri,
        attempts=(copied.attempt,),
        num_objects=len(copied.objects),
        num_bytes=sum(stored.size for stored in copied.objects),
        num_service_bytes=outcome.num_service_bytes,
        num_read_back_bytes=outcome.num_read_back_bytes,
        num_reused_bytes=outcome.num_reused_bytes,
        was_there=outcome.was_there,
        num_requests=of_source.retrier.num_requests + of_target.retrier.num_requests,
        num_retries=of_source.retrier.num_retries + of_target.retrier.num_retries,
        copy_s=time.monotonic() - begun_s,
    )
    _log.info("copied %s", report)
    return report


def is_taken(target: str | os.PathLike[str], *, options: Options) -> bool:
    """Return True if a checkpoint is committed at `target`. Lists it, and reads no manifest."""
    there = Context(parse_location(target), options, rank=0)
    return read_log(there.store, there.retrier).counting is not None


def _read_manifest(source: Context) -> Manifest:
    """Read the manifest to copy. One without a commit time (format 1.0) gets the store's time."""
    found = resolve(source.store, source.retrier)
    if found.manifest.committed_at_ns is not None:
        return found.manifest
    try:
        info = source.retrier.call(source.store.head, manifest_key(found.number))
    except ObjectNotFoundError as error:
        raise CheckpointChangedError(
            f"{source.uri} was overwritten or removed while it was being looked at. Copy again", uri=source.uri
        ) from error
    version = max(found.manifest.version, (FORMAT_MAJOR, FORMAT_MINOR))
    return msgspec.structs.replace(found.manifest, version=version, committed_at_ns=ns_of(info.modified_at))


def _copy_manifest(
    source: Context, target: Context, manifest: Manifest, progress: Progress, *, overwrite: bool
) -> tuple[Manifest, CopyOutcome]:
    try:
        return CopyJob(source, target, manifest, progress).run(overwrite=overwrite)
    except CorruptCheckpointError as error:
        if not has_changed(source, manifest):
            raise
        raise CheckpointChangedError(
            f"{source.uri} was overwritten or removed while it was being copied. Nothing was committed at "
            f"{target.uri}; copy again",
            uri=source.uri,
        ) from error


def _copy_at(target: Context, manifest: Manifest) -> Manifest | None:
    """Return the manifest at the target if it is an earlier copy of exactly this one."""
    try:
        number = read_log(target.store, target.retrier).counting
        there = None if number is None else read_manifest(target.store, number, target.retrier)
    except CheckpointError:
        return None  # an unreadable manifest is no such copy
    if there is None:
        return None
    pairs = zip(there.objects, manifest.objects, strict=False)
    as_saved = msgspec.structs.replace(
        there,
        version=manifest.version,
        attempt=manifest.attempt,
        created_at=manifest.created_at,
        objects=[msgspec.structs.replace(mine, key=its.key) for mine, its in pairs],
    )
    return there if as_saved == manifest and len(there.objects) == len(manifest.objects) else None


def _is_whole(target: Context, there: Manifest, progress: Progress, *, overwrite: bool) -> bool:
    """Verify an earlier copy. Return True if it is whole, False if it is damaged and may be replaced.

    Raises `CorruptCheckpointError` if it is damaged and may not be replaced.
    """
    progress.expect(sum(stored.size for stored in there.objects))
    problems = VerifyJob(target, there, on_read=progress.add).run()
    if not problems:
        return True
    if has_changed(target, there):
        raise CheckpointChangedError(
            f"{target.uri} was overwritten or removed while it was being compared. Copy again",
            uri=target.uri,
        )
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    what = f"{target.uri}, which an earlier copy has committed, is damaged by now: {problems[0]}{more}"
    if not overwrite:
        raise CorruptCheckpointError(
            what,
            uri=target.uri,
            problems=problems,
            hint=Hint(
                advice="Copy with {option}, which replaces it, or delete it and copy again.",
                option="overwrite",
                value="True",
            ),
        )
    _log.warning("%s. It is copied again", what)
    return False


@dataclass(slots=True, kw_only=True)
class CopyOutcome:
    """Objects of a copy, and how they were made."""

    keys: dict[int, str] = field(default_factory=dict)
    """Keys of the new objects by the numbers of the old ones."""
    num_service_bytes: int = 0
    num_read_back_bytes: int = 0
    num_reused_bytes: int = 0
    was_there: bool = False
    """True if an earlier copy had committed it."""


class CopyJob:
    """The copy of one manifest and its data. Holds at most ``options.read_bytes`` of the source's options."""

    def __init__(self, source: Context, target: Context, manifest: Manifest, progress: Progress) -> None:
        self._source = source
        self._target = target
        self._manifest = manifest
        self._progress = progress
        self._contents = list_contents(manifest)
        digest = hashlib.sha256(encode(manifest)).hexdigest()[:_DIGEST_DIGITS]
        self._job = TargetJob(target, save_id=manifest.save_id or "", copy_of=digest)
        self._done = CopyOutcome()
        budget_bytes = source.options.read_bytes
        self._part_bytes = choose_held_part_bytes(
            budget_bytes,
            connections=target.connections,
            most_bytes=target.options.advanced.part_bytes,
            tile_bytes=manifest.tile_bytes,
        )

    def run(self, *, overwrite: bool) -> tuple[Manifest, CopyOutcome]:
        """Copy and commit. Return the new manifest and how it was made.

        Raises `CorruptCheckpointError` if an object of the source is missing or not what was saved.
        """
        objects, job, done = self._manifest.objects, self._job, self._done
        job.check(overwrite=overwrite)
        self._progress.expect(sum(stored.size for stored in objects))
        keys = [job.key(number) for number in range(2 * len(objects))]
        try:
            with contextlib.closing(Arena(budget_bytes=self._source.options.read_bytes)) as arena:
                if is_one_service(self._source, self._target):
                    # These keys are used for nothing else: a copy that was given up may still appear there.
                    self._ask_service(keys[len(objects) :], arena)
                self._stream(keys[: len(objects)], arena)
            copied = msgspec.structs.replace(
                self._manifest,
                # The copy lacks what a newer minor version adds.
                version=min(self._manifest.version, (FORMAT_MAJOR, FORMAT_MINOR)),
                attempt=job.attempt,
                created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                objects=[
                    StoredObject(key=done.keys[number], size=stored.size, crc32c=stored.crc32c)
                    for number, stored in enumerate(objects)
                ],
            )
        except BaseException:
            job.remove(keys)
            raise
        job.commit_manifest(copied, done.keys.values())
        return copied, done

    def _ask_service(self, keys: list[str], arena: Arena) -> None:
        """Ask the service to copy all objects. Those that it refuses or copies wrongly remain to be streamed."""
        source, target, tile_bytes = self._source, self._target, self._manifest.tile_bytes
        objects = self._manifest.objects
        refused: list[StoreError] = []
        told, read_back = set[int](), set[int]()

        def ask(number: int) -> None:
            stored = objects[number]
            try:
                said = target.store.copy_from(source.store.url(stored.key), keys[number], run=target.retrier.call)
            # Copies need a permission of their own. A missing object is the source, or an aborted upload: reading the
            # source tells which.
            except (UnsupportedOperationError, AccessDeniedError, ObjectNotFoundError) as error:
                refused.append(error)
                return
            if said == combine_tile_crc32cs(unpack_tiles(stored.crc32c), tile_bytes=tile_bytes, size_bytes=stored.size):
                told.add(number)
            elif said is None and self._is_good(number, keys[number], arena):
                read_back.add(number)
            else:
                # The object is read from the source next, which shows if that is damaged. A good copy with a wrong
                # checksum is not kept either, because other clients would refuse to read it.
                self._job.remove([keys[number]])

        for number in each_done(
            range(len(objects)),
            ask,
            num_threads=target.connections,
            name="cloudckpt-copy",
            # One copy can take thousands of requests. The rest of them must not begin.
            on_failure=lambda: target.retrier.stop(CloudckptError("the copy of another object failed")),
        ):
            if number in told or number in read_back:
                self._done.keys[number] = keys[number]
                self._progress.add(objects[number].size)
        self._done.num_service_bytes = sum(objects[number].size for number in told)
        self._done.num_read_back_bytes = sum(objects[number].size for number in read_back)
        if refused:
            _log.info(
                "the service did not copy %d objects, which are read and written instead: %s", len(refused), refused[0]
            )

    def _is_good(self, number: int, key: str, arena: Arena) -> bool:
        """Read all of the object at `key`. Return True if it is what was saved."""
        target, stored = self._target, self._manifest.objects[number]
        copied = StoredObject(key=key, size=stored.size, crc32c=stored.crc32c)
        body = CopiedBody(target, copied, self._contents[number], arena, tile_bytes=self._manifest.tile_bytes)
        try:
            if target.retrier.call(target.store.head, key).size_bytes != stored.size:
                return False
            for begin in range(0, stored.size, self._part_bytes):
                with body.open(begin, min(begin + self._part_bytes, stored.size)):
                    pass
        except (CorruptCheckpointError, ObjectNotFoundError) as error:
            _log.warning("a copy is not what was saved: %s", error)
            return False
        return True

    def _stream(self, keys: list[str], arena: Arena) -> None:
        """Read and write the objects that are not copied yet. What an earlier copy left of them is used."""
        source, target, tile_bytes = self._source, self._target, self._manifest.tile_bytes
        numbers = [number for number in range(len(keys)) if number not in self._done.keys]
        if not numbers:
            return
        leftovers = self._job.leftovers()
        with upload_session(
            target,
            self._progress,
            part_bytes=self._part_bytes,
            tile_bytes=tile_bytes,
            resumable=target.options.resume,
        ) as session:
            try:
                for number in numbers:
                    stored = self._manifest.objects[number]
                    body = CopiedBody(source, stored, self._contents[number], arena, tile_bytes=tile_bytes)
                    session.submit(keys[number], body, leftovers.get(keys[number], []))
                session.tasks.join()
                receipts = session.receipts()
            except BaseException:
                source.retrier.stop()
                raise
        self._done.num_reused_bytes = session.num_reused_bytes
        self._progress.add(session.num_reused_bytes)
        for number, receipt in zip(numbers, receipts, strict=True):
            stored = self._manifest.objects[number]
            if receipt.size_bytes != stored.size or pack_tiles(receipt.tile_crc32cs) != stored.crc32c:
                raise IncompleteSaveError(
                    f"what was sent to {target.store.url(receipt.key)} is not what was read from "
                    f"{source.store.url(stored.key)}: this machine's memory is not reliable. Nothing was committed",
                    uri=target.uri,
                )
            self._done.keys[number] = receipt.key
