"""Checkpoints whose objects are in a directory of each host: which ranks share one, and what a load brings to others.

See ``docs/design/039-host-local-places.md``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass

from cloudckpt.commit.attempts import rank_of_key
from cloudckpt.commit.commit import find_listed, put_and_check_manifest, remove_superseded
from cloudckpt.commit.entries import read_entry
from cloudckpt.commit.log import read_log
from cloudckpt.commit.references import put_claims
from cloudckpt.dcp.ranks.collectives import CollectiveCall
from cloudckpt.errors import CloudckptError, StoreError
from cloudckpt.format.codec import decode
from cloudckpt.format.model import Manifest, StoredObject
from cloudckpt.io.client import StoreClient
from cloudckpt.options import MIB
from cloudckpt.pipeline.context import Context
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
    names: tuple[str, ...] = ()
    """The name of each rank's host, for messages."""

    @property
    def leads(self) -> bool:
        """True if this rank leads its group."""
        return self.leaders[self.rank] == self.rank

    def is_mine(self, index: int) -> bool:
        """Return True if this rank sends object `index` to the root: the ranks of a host take turns."""
        members = [rank for rank, leader in enumerate(self.leaders) if leader == self.leaders[self.rank]]
        return members[index % len(members)] == self.rank

    def is_here(self, key: str) -> bool:
        """Return True if a rank of this rank's group has written the data object at `key`."""
        writer = rank_of_key(key)
        return writer < len(self.leaders) and self.leaders[writer] == self.leaders[self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedAndHeld:
    """The objects of a manifest, by index, that one rank wants, and those that it has found in its directory."""

    wanted: frozenset[int]
    found: frozenset[int]
    """Only of a rank that leads its group."""


def find_wanted_and_held(
    context: Context, manifest: Manifest, wanted: Collection[int], hosts: HostGroups
) -> WantedAndHeld:
    """Return what this rank wants, and what its directory has: listed, with the size that was saved."""
    found: frozenset[int] = frozenset()
    if hosts.leads:
        try:
            found = frozenset(find_listed(context.client_at, manifest))
        except StoreError as error:
            _log.warning("using no object in %s, because it cannot be listed: %s", context.uri, error)
    return WantedAndHeld(wanted=frozenset(wanted), found=found)


def mend_manifest(context: Context, document: bytes, hosts: HostGroups) -> None:
    """Commit the manifest of another host in the directory of this one, unless it is there. A failure is logged.

    A crash has left this host without it. The host then knows of its share of the step, to send it or to remove it.
    """
    client = context.client
    try:
        manifest, log = decode(document, uri=client.uri), read_log(client)
        found = None if log.current_number is None else read_entry(client, log.current_number)
        if isinstance(found, Manifest) and found.attempt == manifest.attempt:
            return
        number = log.highest_number + 1
        for folder in {stored.folder for stored in manifest.objects} - {""}:
            _claim(context, manifest, folder)
        here = [manifest.objects[index] for index in find_wanted_and_held(context, manifest, (), hosts).found]
        sizes_bytes = [stored.size for stored in here if not stored.folder]
        put_and_check_manifest(client, manifest, number=number, conditional=True, sizes_bytes=sizes_bytes)
        remove_superseded(client, manifest, number=number, on_removing=lambda _: None)
    except CloudckptError as error:
        _log.warning("%s is committed on another host, and not here: %s", client.uri, error)


def _claim(context: Context, manifest: Manifest, folder: str) -> None:
    """Claim what `manifest` names in another folder, as its save has done in the directories of its hosts."""
    keys = [stored.key for stored in manifest.objects if stored.folder == folder]
    put_claims(context.client_at, {folder: keys}, attempt=manifest.attempt, folder=context.location.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTransfer:
    """An object that one leader reads, and others write into their directories."""

    object_index: int
    source: int
    targets: frozenset[int]


def plan_transfers(held: Sequence[WantedAndHeld], leaders: Sequence[int]) -> list[HostTransfer]:
    """Plan how each group gets the objects that its ranks want and do not have. Objects of no group are left out."""
    targets: dict[int, set[int]] = {}
    for leader, held_by_rank in zip(leaders, held, strict=True):
        for index in held_by_rank.wanted - held[leader].found:
            targets.setdefault(index, set()).add(leader)
    sources = {index: rank for rank in reversed(range(len(held))) for index in held[rank].found}
    return [
        HostTransfer(object_index=index, source=sources[index], targets=frozenset(targets[index]))
        for index in sorted(targets.keys() & sources.keys())
    ]


def run_transfers(
    ranks: CollectiveCall, context: Context, manifest: Manifest, transfers: Sequence[HostTransfer]
) -> None:
    """Write each object on the hosts that want it. All ranks call this together, and receive each piece of it.

    A failure of a host is logged. The load then reports the object as missing.
    """
    for transfer in transfers:
        stored = manifest.objects[transfer.object_index]
        client = context.client_at(stored.folder)
        claim = functools.partial(_claim, context, manifest, stored.folder) if stored.folder else None
        copy = _write(client, stored, claim) if ranks.rank in transfer.targets else None
        if copy is not None:
            next(copy)
        for begin in range(0, stored.size, _PIECE_BYTES):
            size_bytes = min(_PIECE_BYTES, stored.size - begin)
            is_source = ranks.rank == transfer.source
            piece = ranks.broadcast_object(
                _read(client, stored, begin, size_bytes) if is_source else None, transfer.source
            )
            if copy is not None:
                copy.send(piece)


def _read(client: StoreClient, stored: StoredObject, begin: int, size_bytes: int) -> bytearray | None:
    piece = bytearray(size_bytes)
    try:
        client.call(client.store.read_into, stored.key, begin, [memoryview(piece)])
    except StoreError as error:
        _log.warning("could not send %s to other hosts: %s", client.url(stored.key), error)
        return None
    return piece


def _write(
    client: StoreClient, stored: StoredObject, claim: Callable[[], None] | None
) -> Generator[None, bytearray | None, None]:
    """Write an object of another host under the same key, in the pieces that this generator is sent. Logs a failure.

    Calls `claim` first, so that no deletion of the folder takes the object.
    """
    key, store, upload_id, parts = stored.key, client.store, "", list[UploadedPart]()
    failure = "its host could not read it"
    try:
        if claim is not None:
            claim()
        upload_id = client.create_multipart(key)
        for begin in range(0, stored.size, _PIECE_BYTES):
            if (piece := (yield)) is None:
                break
            part = Part(number=len(parts) + 1, offset_bytes=begin, size_bytes=len(piece))
            views = [memoryview(piece)]
            parts.append(client.call(store.upload_part, key, upload_id, part, views, crc32c=crc32c_of(views)))
        else:
            client.call(store.complete_multipart, key, upload_id, parts)
            failure = ""
    except StoreError as error:
        failure = str(error)
    if failure:
        _log.warning("could not take %s from another host: %s", client.url(key), failure)
        if upload_id:
            with contextlib.suppress(StoreError):
                client.abort_multipart(key, upload_id)
    while True:
        yield  # the other pieces


def choose_groups(rank: int, views: Sequence[frozenset[int]], names: Sequence[str] = ()) -> HostGroups | None:
    """Return the groups of the ranks, by the ranks whose objects each one sees. None if the views contradict.

    `names` are those of the ranks' hosts.
    """
    leaders = tuple(map(min, views))
    members = {leader: {rank for rank, own in enumerate(leaders) if own == leader} for leader in leaders}
    is_sound = all(view == members[leader] for view, leader in zip(views, leaders, strict=True))
    return HostGroups(rank=rank, leaders=leaders, names=tuple(names)) if is_sound else None
