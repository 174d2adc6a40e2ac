"""Find the objects and parts of an earlier copy that a copy can use (``docs/design/008-resumable-copies.md``).

A leftover is used only after its tiles were compared with the tiles to send. No error here fails a copy: the copy sends
the bytes of a leftover that cannot be used.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cloudckpt._workers import run_all
from cloudckpt.errors import StoreError
from cloudckpt.format.model import ObjectRef
from cloudckpt.io.body import Body, KnownBody, compute_md5
from cloudckpt.io.client import StoreClient
from cloudckpt.io.download import download_range
from cloudckpt.options import MIB
from cloudckpt.stores.base import FoundPart, Part, UploadedPart, combine_tile_crc32cs, compute_tile_crc32cs

_T = TypeVar("_T")
_log = logging.getLogger("cloudckpt")

_READ_BACK_BYTES = 4 * MIB  # read at once on each connection


@dataclass(slots=True, kw_only=True)
class Leftover:
    """The object or the unfinished uploads at one key of an earlier attempt."""

    key: str
    size_bytes: int | None = None
    """The object's size; None if there is no object."""
    upload_ids: list[str] = field(default_factory=list)
    """The ids of the unfinished uploads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusableParts:
    """The parts of an object that an unfinished upload has, by their numbers."""

    key: str
    upload_id: str
    uploaded: dict[int, UploadedPart]
    crc32cs: dict[int, list[int]]
    """The checksums of the parts' tiles."""

    @property
    def num_bytes(self) -> int:
        return sum(done.part.size_bytes for done in self.uploaded.values())


class _DifferentBytesError(Exception):
    """The store has other bytes."""


def find_leftovers(client: StoreClient, prefix: str) -> list[Leftover]:
    """Return the leftovers whose keys start with `prefix`."""
    by_key: dict[str, Leftover] = {}
    try:
        for info in client.list(prefix):
            by_key.setdefault(info.key, Leftover(key=info.key)).size_bytes = info.size_bytes
        for upload in client.list_uploads(prefix):
            by_key.setdefault(upload.key, Leftover(key=upload.key)).upload_ids.append(upload.upload_id)
    except StoreError as error:
        _log.warning("could not look for what an earlier copy left at %s, so all is sent: %s", client.uri, error)
        return []
    return list(by_key.values())


class Resumption:
    """Finds the bytes of a session's objects that the store already has."""

    def __init__(self, client: StoreClient, *, tile_bytes: int) -> None:
        self._client = client
        self._tile_bytes = tile_bytes

    def is_at(self, key: str, body: Body) -> bool:
        """Read the object at `key`. Return True if its tiles have the CRC32Cs of the tiles of `body`."""
        read_bytes = max(_READ_BACK_BYTES // self._tile_bytes, 1) * self._tile_bytes
        begins = range(0, body.size_bytes, read_bytes)

        def check(begin: int) -> None:
            end = min(begin + read_bytes, body.size_bytes)
            stored = bytearray(end - begin)
            download_range(self._client, key=key, begin=begin, views=[memoryview(stored)])
            if compute_tile_crc32cs([memoryview(stored)], self._tile_bytes) != self._known_crc32cs(body, begin, end):
                raise _DifferentBytesError

        try:
            # Read the first bytes alone: if the state has changed, nearly every object differs there.
            for group in (begins[:1], begins[1:]):
                self._run_all(group, check)
        except _DifferentBytesError:
            return False
        except StoreError as error:
            _log.info("%s cannot be used: %s", self._client.url(key), error)
            return False
        return True

    def find_finished(self, body: Body, leftovers: Sequence[Leftover]) -> ObjectRef | None:
        """Return the first object of an earlier attempt that has the bytes of `body`."""
        for leftover in leftovers:
            if leftover.size_bytes == body.size_bytes and self.is_at(leftover.key, body):
                values = tuple(self._known_crc32cs(body, 0, body.size_bytes))
                return ObjectRef(
                    key=leftover.key, size_bytes=body.size_bytes, tile_bytes=self._tile_bytes, tile_crc32cs=values
                )
        return None

    def find_earlier_part_bytes(self, leftovers: Sequence[Leftover]) -> int | None:
        """Return the part size of an earlier attempt's upload: parts of another size could not be used."""
        if self._client.store.capabilities.listed_parts == "none":
            return None
        return next(
            (
                part.size_bytes
                for leftover in leftovers
                if leftover.size_bytes is None
                for upload_id in leftover.upload_ids
                for part in self._list_parts(leftover.key, upload_id)
                if part.number == 1
            ),
            None,
        )

    def find_unfinished(self, body: Body, parts: Sequence[Part], leftovers: Sequence[Leftover]) -> ReusableParts | None:
        """Return the parts of the first useful upload, or of all uploads if a part can complete any."""
        kind, best = self._client.store.capabilities.listed_parts, None
        if kind == "none":
            return None
        for leftover in leftovers:
            # If there are two uploads, another process that still runs may complete either. It may not know an upload
            # without a part, and may have made another one to the same key.
            if leftover.size_bytes is None and len(leftover.upload_ids) == 1:
                missing = [part for part in parts if best is None or part.number not in best.uploaded]
                reusable = self._find_reusable_parts(leftover.key, leftover.upload_ids[0], body, missing)
                if reusable.uploaded and kind == "same_upload":
                    return reusable
                if best is not None:
                    best.uploaded.update(reusable.uploaded)
                    best.crc32cs.update(reusable.crc32cs)
                elif reusable.uploaded:
                    best = reusable
        return best

    def _find_reusable_parts(self, key: str, upload_id: str, body: Body, parts: Sequence[Part]) -> ReusableParts:
        reusable = ReusableParts(key=key, upload_id=upload_id, uploaded={}, crc32cs={})
        listed: defaultdict[int, list[FoundPart]] = defaultdict(list)
        for candidate in self._list_parts(key, upload_id):
            listed[candidate.number].append(candidate)

        def check(part: Part) -> None:
            candidates = [candidate for candidate in listed[part.number] if candidate.size_bytes == part.size_bytes]
            begin, end = part.offset_bytes, part.offset_bytes + part.size_bytes
            values = self._known_crc32cs(body, begin, end)
            whole = combine_tile_crc32cs(values, tile_bytes=self._tile_bytes, size_bytes=part.size_bytes)
            same = next((candidate for candidate in candidates if candidate.crc32c == whole), None)
            if same is None and any(candidate.crc32c is None for candidate in candidates):
                md5 = compute_md5(body, part, read_bytes=part.size_bytes)
                same = next(
                    (candidate for candidate in candidates if candidate.crc32c is None and candidate.md5 == md5), None
                )
            if same is not None:
                reusable.crc32cs[part.number] = values
                reusable.uploaded[part.number] = UploadedPart(part=part, token=same.token, crc32c=whole)

        self._run_all([part for part in parts if part.number in listed], check)
        return reusable

    def _list_parts(self, key: str, upload_id: str) -> Sequence[FoundPart]:
        """Return the parts of an upload, and none if they cannot be listed."""
        try:
            return self._client.list_parts(key, upload_id)
        except StoreError as error:
            _log.info("the upload to %s cannot be used: %s", self._client.url(key), error)
            return ()

    def _known_crc32cs(self, body: Body, begin: int, end: int) -> list[int]:
        """Return the CRC32C of each tile in ``[begin, end)``. Both bounds are bounds of tiles."""
        assert isinstance(body, KnownBody)  # noqa: S101  # only copies are resumed
        return list(body.known_crc32cs[begin // self._tile_bytes : -(-end // self._tile_bytes)])

    def _run_all(self, items: Sequence[_T], work: Callable[[_T], None]) -> None:
        connections = self._client.hedger.connections_now
        run_all(items, work, num_threads=connections, name="cloudckpt-resume")
