"""Checkpoints whose objects are in a directory of each host: which ranks share one, and what a load brings to others.

See ``docs/design/039-host-local-places.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cloudckpt.commit.attempts import rank_of_key
from cloudckpt.dcp.collectives import CollectiveCall
from cloudckpt.errors import StoreError
from cloudckpt.format.model import Manifest, StoredObject
from cloudckpt.io.client import StoreClient
from cloudckpt.options import MIB
from cloudckpt.stores.base import Part, UploadedPart, crc32c_of

_log = logging.getLogger("cloudckpt")

_PIECE_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroups:
    """The ranks of one job by the directory that they see under one path. The lowest rank of each group leads it."""

    rank: int
    """This rank."""
    leaders: tuple[int, ...]
    """The leader of each rank's group."""

    @property
    def leads(self) -> bool:
        """True if this rank leads its group."""
        return self.leaders[self.rank] == self.rank

    def is_here(self, key: str) -> bool:
        """Return True if a rank of this rank's group has written the data object at `key`."""
        writer = rank_of_key(key)
        return writer < len(self.leaders) and self.leaders[writer] == self.leaders[self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldObjects:
    """The objects of a manifest, by index, that one rank wants, and those that it has found in its directory."""

    wanted: frozenset[int]
    found: frozenset[int]
    """Only of a rank that leads its group."""


def find_held(client: StoreClient, manifest: Manifest, wanted: Collection[int], hosts: HostGroups) -> HeldObjects:
    """Return what this rank wants, and what its directory has: listed, with the size that was saved."""
    found: frozenset[int] = frozenset()
    if hosts.leads:
        try:
            listed = {info.key: info.size_bytes for info in client.list("data/")}
        except StoreError as error:
            _log.warning("using no object in %s, because it cannot be listed: %s", client.uri, error)
            listed = {}
        found = frozenset(at for at, one in enumerate(manifest.objects) if listed.get(one.key) == one.size)
    return HeldObjects(wanted=frozenset(wanted), found=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """An object that one leader reads, and others write into their directories."""

    object_index: int
    source: int
    targets: frozenset[int]


def plan_transfers(held: Sequence[HeldObjects], leaders: Sequence[int]) -> list[Transfer]:
    """Plan how each group gets the objects that its ranks want and do not have. What no group has is left out."""
    targets: dict[int, set[int]] = {}
    for rank, one in enumerate(held):
        for index in one.wanted - held[leaders[rank]].found:
            targets.setdefault(index, set()).add(leaders[rank])
    sources = {index: rank for rank in reversed(range(len(held))) for index in held[rank].found}
    return [
        Transfer(object_index=index, source=sources[index], targets=frozenset(targets[index]))
        for index in sorted(targets.keys() & sources.keys())
    ]


def run_transfers(
    ranks: CollectiveCall, client: StoreClient, manifest: Manifest, transfers: Sequence[Transfer]
) -> None:
    """Send each object from its host to those that want it. All ranks call it together.

    A failure of a host is logged. Then the object is missing where it was wanted, and the load says so.
    """
    for transfer in transfers:
        stored = manifest.objects[transfer.object_index]
        copy = _Copy(client, stored) if ranks.rank in transfer.targets else None
        for begin in range(0, stored.size, _PIECE_BYTES):
            size_bytes = min(_PIECE_BYTES, stored.size - begin)
            is_source = ranks.rank == transfer.source
            piece = ranks.broadcast_object(
                _read(client, stored, begin, size_bytes) if is_source else None, transfer.source
            )
            if copy is not None:
                copy.add(begin, piece)
        if copy is not None:
            copy.end()


def _read(client: StoreClient, stored: StoredObject, begin: int, size_bytes: int) -> bytearray | None:
    piece = bytearray(size_bytes)
    try:
        client.call(client.store.read_into, stored.key, begin, [memoryview(piece)])
    except StoreError as error:
        _log.warning("could not send %s to other hosts: %s", client.url(stored.key), error)
        return None
    return piece


class _Copy:
    """An object of another host that is written here, under the same key."""

    def __init__(self, client: StoreClient, stored: StoredObject) -> None:
        self._client, self._stored = client, stored
        self._parts: list[UploadedPart] = []
        self._upload_id = ""
        self._has_failed = False

    def add(self, begin: int, piece: bytearray | None) -> None:
        store, key = self._client.store, self._stored.key
        if piece is None or self._has_failed:
            self._fail("its host could not read it" if piece is None else "")
            return
        try:
            self._upload_id = self._upload_id or self._client.create_multipart(key)
            part = Part(number=len(self._parts) + 1, offset_bytes=begin, size_bytes=len(piece))
            views = [memoryview(piece)]
            self._parts.append(
                self._client.call(store.upload_part, key, self._upload_id, part, views, crc32c=crc32c_of(views))
            )
        except StoreError as error:
            self._fail(str(error))

    def end(self) -> None:
        try:
            if self._has_failed and self._upload_id:
                self._client.abort_multipart(self._stored.key, self._upload_id)
            elif not self._has_failed:
                store = self._client.store
                self._client.call(store.complete_multipart, self._stored.key, self._upload_id, self._parts)
        except StoreError as error:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            _log.warning("could not take %s from another host: %s", self._client.url(self._stored.key), why)
        self._has_failed = True


def choose_groups(rank: int, views: Sequence[frozenset[int]]) -> HostGroups | None:
    """Return the groups of the ranks, by the ranks whose objects each one sees. None if the views contradict."""
    leaders = tuple(map(min, views))
    members = {leader: {rank for rank, its in enumerate(leaders) if its == leader} for leader in leaders}
    is_sound = all(view == members[leader] for view, leader in zip(views, leaders, strict=True))
    return HostGroups(rank=rank, leaders=leaders) if is_sound else None
