"""Copy one manifest and its data to another place."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal, TypeAlias

import msgspec

from cloudckpt._workers import each_done
from cloudckpt.convert.bodies import CopiedBody
from cloudckpt.convert.endpoints import TargetJob, is_one_service, part_bytes_for, upload_session
from cloudckpt.convert.reports import Progress
from cloudckpt.errors import (
    AccessDeniedError,
    CloudckptError,
    CorruptCheckpointError,
    IncompleteSaveError,
    ObjectNotFoundError,
    StoreError,
    UnsupportedOperationError,
)
from cloudckpt.format.codec import encode, pack_tiles, unpack_tiles
from cloudckpt.format.model import FORMAT_MAJOR, FORMAT_MINOR, Manifest, StoredObject
from cloudckpt.format.safetensors import list_contents
from cloudckpt.io.checksum import combine_tile_crc32cs
from cloudckpt.io.resume import Leftover
from cloudckpt.io.upload import UploadSession
from cloudckpt.pipeline.context import Context
from cloudckpt.tensors.host_memory import Arena

_log = logging.getLogger("cloudckpt")

_DIGEST_DIGITS = 32
_Outcome: TypeAlias = Literal["told", "read back"]
"""Way in which a copy by the service was checked."""


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
        self._leftovers: dict[str, list[Leftover]] = {}
        """Objects that earlier copies of this manifest left, by the keys of this one."""
        self._declined: set[bool] = set()
        """The kinds of copies that the service refuses or makes wrongly: False by one request, True by many."""
        self._bad: list[str] = []
        """Keys of wrong copies that the service made."""
        budget_bytes = source.options.read_bytes
        self._part_bytes = part_bytes_for(target, budget_bytes=budget_bytes, tile_bytes=manifest.tile_bytes)

    def run(self, *, overwrite: bool) -> tuple[Manifest, CopyOutcome]:
        """Copy and commit. Return the new manifest and how it was made.

        Raises `CorruptCheckpointError` if an object of the source is missing or not what was saved.
        """
        objects, job, done = self._manifest.objects, self._job, self._done
        job.check(overwrite=overwrite)
        self._progress.expect(sum(stored.size for stored in objects))
        keys = [job.key(number) for number in range(2 * len(objects))]
        self._leftovers = job.leftovers()
        try:
            with contextlib.closing(Arena(budget_bytes=self._source.options.read_bytes)) as arena:
                if is_one_service(self._source, self._target):
                    # These keys are used for nothing else: a copy that was given up may still appear there.
                    self._try_service(keys[len(objects) :], arena)
                    if self._leftovers:
                        self._take_up(keys, arena)
                    self._ask_service(self._servable(), keys[len(objects) :], arena)
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
        if self._bad:
            job.remove(self._bad)
        return copied, done

    def _missing(self) -> list[int]:
        return [number for number in range(len(self._manifest.objects)) if number not in self._done.keys]

    def _servable(self) -> list[int]:
        return [number for number in self._missing() if self._takes_many(number) not in self._declined]

    def _takes_many(self, number: int) -> bool:
        """Return True if a copy takes many requests. A service may support only one of the two kinds."""
        return self._manifest.objects[number].size > self._target.store.limits.max_single_copy_bytes

    def _try_service(self, keys: list[str], arena: Arena) -> None:
        """Ask the service for one object of each kind first. If it fails, no other object of that kind is asked for."""
        objects, found = self._manifest.objects, self._leftovers
        for takes_many in (False, True):
            of_kind = [number for number in self._missing() if self._takes_many(number) == takes_many]
            if of_kind:
                # An object that an earlier copy left may not need another copy.
                trial = min(of_kind, key=lambda number: (keys[number] in found, objects[number].size))
                self._ask_service([trial], keys, arena)
                if trial not in self._done.keys:
                    self._declined.add(takes_many)

    def _take_up(self, keys: list[str], arena: Arena) -> None:
        """Use good objects that an earlier copy left, instead of asking the service again."""
        objects, found = self._manifest.objects, self._leftovers
        by_service = keys[len(objects) :]
        # An object that the service made is used only if its copies are good now: it may record wrong checksums.
        servable = {*self._servable()}
        kept: dict[int, str] = {}  # each key is set by one thread

        def look(number: int) -> None:
            leftovers = [
                *found.get(keys[number], []),
                *(found.get(by_service[number], []) if number in servable else []),
            ]
            for leftover in leftovers:
                if leftover.size_bytes == objects[number].size and self._is_good(number, leftover.key, arena):
                    kept[number] = leftover.key
                    return

        for number in self._each(self._missing(), look):
            if number in kept:
                self._done.keys[number] = kept[number]
                self._reused(objects[number].size)

    def _ask_service(self, numbers: list[int], keys: list[str], arena: Arena) -> None:
        """Ask the service to copy these objects. The others remain to be read and written."""
        source, target, tile_bytes = self._source, self._target, self._manifest.tile_bytes
        refused: list[StoreError] = []
        outcomes: dict[int, _Outcome] = {}  # each key is set by one thread

        def ask(number: int) -> None:
            stored = self._manifest.objects[number]
            try:
                said = target.store.copy_from(source.store.url(stored.key), keys[number], tried=target.retrier.call)
            # Copies need a permission of their own. A missing object is the source, or an aborted upload: reading the
            # source tells which.
            except (UnsupportedOperationError, AccessDeniedError, ObjectNotFoundError) as error:
                refused.append(error)
                return
            if said == combine_tile_crc32cs(unpack_tiles(stored.crc32c), tile_bytes=tile_bytes, size_bytes=stored.size):
                outcomes[number] = "told"
            elif said is None and self._is_good(number, keys[number], arena):
                outcomes[number] = "read back"
            else:
                # The object is read from the source next, which shows if that is damaged. A good copy with a wrong
                # checksum is not kept either, because other clients would refuse to read it.
                self._bad.append(keys[number])

        for number in self._each(numbers, ask):
            if number in outcomes:
                self._count(number, keys[number], outcomes[number])
        if refused:
            _log.info(
                "the service did not copy %d objects, which are read and written instead: %s", len(refused), refused[0]
            )

    def _each(self, numbers: list[int], work: Callable[[int], None]) -> Iterator[int]:
        return each_done(
            numbers,
            work,
            num_threads=self._target.connections,
            name="cloudckpt-copy",
            # One copy can take thousands of requests. The rest of them must not begin.
            on_failure=lambda: self._target.retrier.stop(CloudckptError("the copy of another object failed")),
        )

    def _reused(self, num_bytes: int) -> None:
        self._done.num_reused_bytes += num_bytes
        self._progress.add(num_bytes)

    def _count(self, number: int, key: str, outcome: _Outcome) -> None:
        num_bytes = self._manifest.objects[number].size
        self._done.keys[number] = key
        if outcome == "told":
            self._done.num_service_bytes += num_bytes
        else:
            self._done.num_read_back_bytes += num_bytes
        self._progress.add(num_bytes)

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
        """Read and write the objects that are not copied yet."""
        source, target, tile_bytes = self._source, self._target, self._manifest.tile_bytes
        numbers = self._missing()
        if not numbers:
            return
        with upload_session(
            target,
            self._progress,
            part_bytes=self._part_bytes,
            tile_bytes=tile_bytes,
            resumable=target.options.resume,
        ) as session:
            num_told_bytes = 0
            try:
                for number in numbers:
                    stored = self._manifest.objects[number]
                    body = CopiedBody(source, stored, self._contents[number], arena, tile_bytes=tile_bytes)
                    session.submit(keys[number], body, self._leftovers.get(keys[number], []))
                    num_told_bytes = self._tell_reused(session, num_told_bytes)
                session.tasks.join()
                receipts = session.receipts()
                self._tell_reused(session, num_told_bytes)
            except BaseException:
                source.retrier.stop()
                raise
        for number, receipt in zip(numbers, receipts, strict=True):
            stored = self._manifest.objects[number]
            if receipt.size_bytes != stored.size or pack_tiles(receipt.tile_crc32cs) != stored.crc32c:
                raise IncompleteSaveError(
                    f"what was sent to {target.store.url(receipt.key)} is not what was read from "
                    f"{source.store.url(stored.key)}: this machine's memory is not reliable. Nothing was committed",
                    uri=target.uri,
                )
            self._done.keys[number] = receipt.key

    def _tell_reused(self, session: UploadSession, num_told_bytes: int) -> int:
        num_bytes = session.num_reused_bytes
        self._reused(num_bytes - num_told_bytes)
        return num_bytes
