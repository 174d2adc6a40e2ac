"""One manifest and its data, copied to another place."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal, TypeAlias

import msgspec

from cloudckpt._convert.bodies import CopiedBody, missing
from cloudckpt._convert.progress import Progress
from cloudckpt._convert.sides import is_one_service, part_bytes_for, upload_session
from cloudckpt._convert.target import TargetJob
from cloudckpt._manifest.codec import pack_tiles, unpack_tiles
from cloudckpt._manifest.model import Manifest, StoredObject
from cloudckpt._pipeline.context import Context
from cloudckpt._plan.header import contents_of
from cloudckpt._stage.arena import Arena
from cloudckpt._transfer.checksum import combined
from cloudckpt._workers import each_done
from cloudckpt.errors import (
    AccessDeniedError,
    CorruptCheckpointError,
    IncompleteSaveError,
    ObjectNotFoundError,
    StoreError,
    UnsupportedOperationError,
)

_log = logging.getLogger("cloudckpt")

_Outcome: TypeAlias = Literal["told", "read back"]
"""How it is known that a copy by the service is good."""


@dataclass(slots=True, kw_only=True)
class Copied:
    """What was done."""

    keys: dict[int, str] = field(default_factory=dict)
    """Of the new objects, by the numbers of the old ones."""
    num_service_bytes: int = 0
    num_read_back_bytes: int = 0


class CopyJob:
    """The copy of one manifest and its data. Holds at most ``options.read_bytes`` of the source's options."""

    def __init__(self, source: Context, target: Context, manifest: Manifest, progress: Progress) -> None:
        self._source = source
        self._target = target
        self._manifest = manifest
        self._progress = progress
        self._contents = contents_of(manifest)
        self._job = TargetJob(target, save_id=manifest.save_id or "")
        self._done = Copied()
        self._bad: list[str] = []
        """The keys of what the service made, and what was not good."""
        budget_bytes = source.options.read_bytes
        self._part_bytes = part_bytes_for(target, budget_bytes=budget_bytes, tile_bytes=manifest.tile_bytes)

    def run(self, *, overwrite: bool) -> tuple[Manifest, Copied]:
        """The manifest that was committed at the target, and what it took.

        Raises `CorruptCheckpointError` where an object of the source is not what was saved, or gone.
        """
        objects, job, done = self._manifest.objects, self._job, self._done
        job.check(overwrite=overwrite)
        self._progress.expect(sum(stored.size for stored in objects))
        keys = [job.key(number) for number in range(2 * len(objects))]
        try:
            with contextlib.closing(Arena(budget_bytes=self._source.options.read_bytes)) as arena:
                if is_one_service(self._source, self._target):
                    # Under keys of their own: a copy that was given up may still come to lie there.
                    self._ask_service(keys[len(objects) :], arena)
                self._stream(keys[: len(objects)], arena)
            copied = msgspec.structs.replace(
                self._manifest,
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

    def _ask_service(self, keys: list[str], arena: Arena) -> None:
        """Have the service copy what it can; the rest stays to be read and written."""
        source, target, tile_bytes = self._source, self._target, self._manifest.tile_bytes
        refused: list[StoreError] = []
        outcomes: dict[int, _Outcome] = {}  # each written by one thread

        def ask(number: int) -> None:
            if refused:
                return
            stored = self._manifest.objects[number]
            try:
                said = target.retrier.call(lambda: target.store.copy_from(source.store.url(stored.key), keys[number]))
            except (UnsupportedOperationError, AccessDeniedError) as error:
                refused.append(error)  # who may read and write may still not be allowed this
                return
            except ObjectNotFoundError as error:
                raise missing(source, stored, self._contents[number]) from error
            if said == combined(unpack_tiles(stored.crc32c), tile_bytes=tile_bytes, size_bytes=stored.size):
                outcomes[number] = "told"
            elif said is None and self._is_good(number, keys[number], arena):
                outcomes[number] = "read back"
            else:
                # It is read from the source, which will say whether it is that which is damaged. A good copy about
                # which the service believes something wrong is not kept either: other clients would refuse to read it.
                self._bad.append(keys[number])

        for number in each_done(
            range(len(keys)),
            ask,
            num_threads=target.first_connections,
            name="cloudckpt-copy",
            on_failure=target.retrier.stop,
        ):
            if number in outcomes:
                self._count(number, keys[number], outcomes[number])
        if refused:
            _log.info("the service does not copy, so that all is read and written: %s", refused[0])

    def _count(self, number: int, key: str, outcome: _Outcome) -> None:
        num_bytes = self._manifest.objects[number].size
        self._done.keys[number] = key
        if outcome == "told":
            self._done.num_service_bytes += num_bytes
        else:
            self._done.num_read_back_bytes += num_bytes
        self._progress.add(num_bytes)

    def _is_good(self, number: int, key: str, arena: Arena) -> bool:
        """Whether what the service made is what was saved: all of it is read."""
        target, stored = self._target, self._manifest.objects[number]
        if target.retrier.call(lambda: target.store.head(key)).size_bytes != stored.size:
            return False
        copied = StoredObject(key=key, size=stored.size, crc32c=stored.crc32c)
        body = CopiedBody(target, copied, self._contents[number], arena, tile_bytes=self._manifest.tile_bytes)
        try:
            for begin in range(0, stored.size, self._part_bytes):
                with body.open(begin, min(begin + self._part_bytes, stored.size)):
                    pass
        except CorruptCheckpointError as error:
            _log.warning("the service's copy is not what was saved: %s", error)
            return False
        return True

    def _stream(self, keys: list[str], arena: Arena) -> None:
        """Read and write whatever is not there yet."""
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
                receipts = session.finish()
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
