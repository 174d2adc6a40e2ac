"""Copy a checkpoint from store to store, and compare every byte with the checksums of the save."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from datetime import datetime, timezone

import msgspec

from cloudckpt._display import transferred
from cloudckpt._workers import each_done
from cloudckpt.commit.attempts import ATTEMPT, copy_mark, data_prefix, new_attempt_id
from cloudckpt.commit.entries import manifest_key, read_manifest
from cloudckpt.commit.log import read_log, resolve
from cloudckpt.commit.times import ns_of
from cloudckpt.convert.bodies import CopiedBody
from cloudckpt.convert.conversion import Conversion, CopyReport, OnProgress, choose_buffered_part_bytes, upload
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
    join_first,
)
from cloudckpt.format.codec import encode, pack_tiles, unpack_tiles
from cloudckpt.format.model import FORMAT_MAJOR, FORMAT_MINOR, Manifest, StoredObject
from cloudckpt.format.safetensors import list_contents
from cloudckpt.inspect.verification import Verification
from cloudckpt.io.resume import Leftover, find_leftovers
from cloudckpt.options import Options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.draft import Draft
from cloudckpt.pipeline.reader import Reader
from cloudckpt.stores.base import combine_tile_crc32cs
from cloudckpt.tensors.host_memory import Arena
from cloudckpt.uri import parse_location

_log = logging.getLogger("cloudckpt")

_DIGEST_DIGITS = 32
_MAX_LOOKED_AT = 1_000
_OWN_NAMES = ("manifest.", ".cloudckpt-")


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
        Conversion(
            source, target, options=options, target_options=target_options, overwrite=overwrite, on_progress=on_progress
        )
    )


def run_copy(conversion: Conversion) -> CopyReport:
    """Copy the source of a conversion to its target, as `copy` does."""
    job = CopyJob(conversion, _read_manifest(conversion.source))
    copied = job.find_earlier() or job.run()
    clients = conversion.source.client, conversion.target.client
    report = CopyReport(
        source=conversion.source.uri,
        target=conversion.target.uri,
        attempt=copied.attempt,
        num_objects=len(copied.objects),
        num_bytes=job.num_bytes,
        num_service_bytes=job.num_service_bytes,
        num_read_back_bytes=job.num_read_back_bytes,
        num_reused_bytes=job.num_reused_bytes,
        was_there=job.was_there,
        num_requests=sum(client.num_requests for client in clients),
        num_retries=sum(client.num_retries for client in clients),
        copy_s=conversion.seconds,
    )
    _log.info("copied %s to %s%s", report.source, report.target, transferred(report.num_bytes, report.copy_s))
    return report


def is_taken(target: str | os.PathLike[str], *, options: Options) -> bool:
    """Return True if a checkpoint is committed at `target`. Lists it, and reads no manifest."""
    context = Context(parse_location(target), options, rank=0)
    return read_log(context.client).current_number is not None


def list_others(target: str | os.PathLike[str], *, options: Options) -> list[str]:
    """Return the names in the folder `target` that a checkpoint would not write; none if a checkpoint exists there."""
    context = Context(parse_location(target), options, rank=0)
    if read_log(context.client).current_number is not None:
        return []
    names = (info.key.partition("/")[0] for info in context.client.list(most=_MAX_LOOKED_AT))
    return [name for name in dict.fromkeys(names) if name != "data" and not name.startswith(_OWN_NAMES)]


def _read_manifest(source: Context) -> Manifest:
    """Read the manifest to copy. If it has no commit time (format 1.0), it gets the store's time."""
    resolved = resolve(source.client)
    if resolved.manifest.committed_at_ns is not None:
        return resolved.manifest
    info = source.client.head(manifest_key(resolved.number))
    if info is None:
        raise CheckpointChangedError(
            f"{source.uri} was overwritten or removed while it was being looked at. Copy again", uri=source.uri
        )
    version = max(resolved.manifest.version, (FORMAT_MAJOR, FORMAT_MINOR))
    return msgspec.structs.replace(resolved.manifest, version=version, committed_at_ns=ns_of(info.modified_at))


def _copy_at(target: Context, manifest: Manifest) -> Manifest | None:
    """Return the manifest at the target if it is an earlier copy of exactly `manifest`."""
    try:
        number = read_log(target.client).current_number
        copied = None if number is None else read_manifest(target.client, number)
    except CheckpointError:
        return None  # an unreadable manifest is no copy
    return copied if copied is not None and copied.is_copy_of(manifest) else None


def _is_one_service(source: Context, target: Context) -> bool:
    """Return True if one service holds both with the same storage options, so that it can copy by itself."""
    source_options, target_options = source.options.storage_options, target.options.storage_options
    service = target.store.capabilities.copies_within
    return (
        service != ""
        and source.store.capabilities.copies_within == service
        and dict(source_options) == dict(target_options)
    )


class CopyJob:
    """The copy of one manifest and its data. Holds at most ``options.read_bytes`` of the source's options."""

    def __init__(self, conversion: Conversion, manifest: Manifest) -> None:
        self._source = conversion.source
        self._target = conversion.target
        self._overwrite = conversion.overwrite
        self._progress = conversion.progress
        self._manifest = manifest
        self._reader = Reader(self._source, manifest)
        self._contents = list_contents(manifest)
        self._draft = Draft(self._target, save_id=manifest.save_id or "")
        self._budget_bytes = self._source.options.read_bytes
        self._keys: dict[int, str] = {}  # keys of the copied objects, by their numbers in the source
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
        reader = Reader(target, copied)
        problems = Verification(reader, on_read=self._progress.add).run()
        if not problems:
            self.num_reused_bytes, self.was_there = self.num_bytes, True
            return copied
        if reader.has_changed():
            raise CheckpointChangedError(
                f"{target.uri} was overwritten or removed while it was being compared. Copy again",
                uri=target.uri,
            )
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
            draft.attempt = new_attempt_id(self._mark())
        keys = [draft.key(number) for number in range(2 * len(objects))]
        try:
            if _is_one_service(self._source, self._target):
                # These keys are used for nothing else: a request that was given up may still put an object there.
                with contextlib.closing(Arena(budget_bytes=self._budget_bytes)) as arena:
                    self._ask_service(keys[len(objects) :], arena)
            self._stream()
            copied = msgspec.structs.replace(
                self._manifest,
                # The copy has no fields of a newer minor version.
                version=min(self._manifest.version, (FORMAT_MAJOR, FORMAT_MINOR)),
                attempt=draft.attempt,
                created_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                objects=[
                    StoredObject(key=self._keys[number], size=stored.size, crc32c=stored.crc32c)
                    for number, stored in enumerate(objects)
                ],
            )
        except BaseException as error:
            draft.remove(keys)
            is_in_doubt = isinstance(error, (CorruptCheckpointError, CheckpointChangedError))
            if not is_in_doubt or not self._reader.has_changed():
                raise
            raise CheckpointChangedError(
                f"{self._source.uri} was overwritten or removed while it was being copied. Nothing was committed at "
                f"{self._target.uri}; copy again",
                uri=self._source.uri,
            ) from error
        draft.commit_manifest(copied, self._keys.values())
        return copied

    def _mark(self) -> str:
        """Return the mark of attempts that copy this manifest under this number."""
        return copy_mark(self._draft.number, hashlib.sha256(encode(self._manifest)).hexdigest()[:_DIGEST_DIGITS])

    def _leftovers(self) -> dict[str, list[Leftover]] | None:
        """Find the leftovers of earlier copies of the source, by the keys of this copy. None without `Options.resume`.

        At most one attempt ever commits under a number. While the number is free, none of these attempts has committed,
        no overwrite has replaced one, and no deletion or collection has put a fence there. So nothing removes their
        objects.
        """
        target, attempt = self._target, self._draft.attempt
        if not target.options.resume:
            return None
        # If objects are written as streams, a process that was thought dead could still write to them.
        if not target.store.capabilities.multipart:
            return {}
        try:
            keys = {info.key for info in target.client.list("data/")}
            keys |= {upload.key for upload in target.client.list_uploads("data/")}
        except StoreError as error:
            _log.warning("could not look for what an earlier copy left at %s, so all is sent: %s", target.uri, error)
            return {}
        mark = self._mark()
        names = {key.split("/")[1] for key in keys if key.count("/") > 1} - {attempt}
        earlier = sorted((name for name in names if name.endswith(mark) and ATTEMPT.fullmatch(name)), reverse=True)
        by_prefix = find_leftovers(target.client, [data_prefix(name, target.rank) for name in earlier])
        return {data_prefix(attempt, target.rank) + rest: leftovers for rest, leftovers in by_prefix.items()}

    def _ask_service(self, keys: list[str], arena: Arena) -> None:
        """Ask the service to copy all objects. Those that it refuses or copies wrongly remain to be streamed."""
        target, tile_bytes = self._target, self._manifest.tile_bytes
        objects = self._manifest.objects
        refused: list[StoreError] = []
        copied: dict[int, str] = {}

        def ask(number: int) -> None:
            stored, (client, key) = objects[number], self._reader.locate(number)
            try:
                crc32c = target.store.copy_from(client.url(key), keys[number], run=target.client.call)
            # Copies need a permission of their own. The missing object is the source, or an upload that was aborted: a
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
                # The object is read from the source next, which shows if that is damaged. A good copy with a wrong
                # checksum is not kept either, because other clients would refuse to read it.
                self._draft.remove([keys[number]])

        for number in each_done(
            range(len(objects)),
            ask,
            num_threads=target.connections,
            name="cloudckpt-copy",
            # One copy can take thousands of requests. The rest of them must not begin.
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
        reader = Reader(target, msgspec.structs.replace(self._manifest, objects=[copied]))
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

    def _stream(self) -> None:
        """Read and write the objects that are not copied yet. Their parts from an earlier copy are used."""
        source, target, tile_bytes = self._source, self._target, self._manifest.tile_bytes
        bodies = {
            number: functools.partial(CopiedBody, self._reader, number, self._contents[number])
            for number in range(len(self._manifest.objects))
            if number not in self._keys
        }
        if not bodies:
            return
        receipts, self.num_reused_bytes = upload(
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
