"""The actors in the life of a checkpoint: each calls the real functions of `cloudckpt.commit`."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable

from awscrt.checksums import crc32c
from tests.commit.model import LATER, Actor, Inside, Replayed, World

from cloudckpt.commit.commit import OvertakenError, put_and_check_manifest, remove_superseded
from cloudckpt.commit.entries import manifest_key, manifest_number
from cloudckpt.commit.garbage_removal import WalkedLocation, delete_checkpoint, remove_garbage, walk
from cloudckpt.commit.log import read_log, resolve
from cloudckpt.errors import (
    AccessDeniedError,
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    ObjectNotFoundError,
    StoreError,
)
from cloudckpt.format.codec import decode, encode
from cloudckpt.format.model import Manifest, StoredObject
from cloudckpt.io.client import StoreClient
from cloudckpt.stores.base import ForwardingStore


def manifest_for(attempt: str) -> Manifest:
    """A tiny manifest with one data object."""
    return Manifest(
        format="cloudckpt",
        version=(1, 0),
        attempt=attempt,
        created_at="",
        world_size=1,
        software={},
        tile_bytes=4096,
        objects=[StoredObject(key=data_key_of(attempt), size=0, crc32c="")],
        tensors={},
        values={},
    )


def data_key_of(attempt: str) -> str:
    """Under an id that looks as a real one does, so that gc knows it."""
    return f"data/20260101T000000000Z-{attempt.encode().hex():0>12.12}/0-0.safetensors"


def written_by(*attempts: str) -> World:
    """The data that these saves wrote before they try to commit; nobody else can name it, so its order is free."""
    return tuple((data_key_of(attempt), b"") for attempt in attempts)


def committed(number: int, attempt: str) -> World:
    """A checkpoint that is there."""
    return ((manifest_key(number), encode(manifest_for(attempt))), *written_by(attempt))


def saver(attempt: str, *, overwrite: bool = False, writes: bool = False) -> Actor:
    """A save from its set-up on, as `cloudckpt.pipeline.draft` puts it together.

    Without `writes` its data lies there already. That is as good while nobody else can name it; gc can.
    """

    def act(store: Replayed, client: StoreClient) -> str:
        log = read_log(client)
        if log.current_number is not None and not overwrite:
            if not writes:
                store.delete([data_key_of(attempt)])
            return f"{attempt} refused"
        if writes:
            store.put(data_key_of(attempt), [], crc32c=0)
        return zombie(attempt, number=log.highest_number + 1)(store, client)

    return act


def zombie(attempt: str, *, number: int) -> Actor:
    """A save that fixed its number and wrote its data long ago, and goes on now."""

    def act(store: Replayed, client: StoreClient) -> str:
        manifest = manifest_for(attempt)
        try:
            put_and_check_manifest(client, manifest, number=number, conditional=True)
        except OvertakenError:
            return f"{attempt} overtaken"
        except CommitUnknownError:
            return f"{attempt} unknown"
        except CheckpointExistsError:
            store.delete([data_key_of(attempt)])
            return f"{attempt} lost"
        except StoreError:
            store.delete([data_key_of(attempt)])
            return f"{attempt} failed"
        store.milestones.append(f"{attempt} committed as {number}")
        if number:
            remove_superseded(client, manifest, number=number, on_removing=lambda key: None)
        return f"{attempt} committed"

    return act


def siblings_of(client: StoreClient) -> Callable[[str], StoreClient]:
    """Return the clients of the folders below a client's own place."""
    return lambda folder: client.at(Inside(client.store, folder))


def reader(folder: str = "") -> Actor:
    """A load, as `cloudckpt.load` does it: what vanishes is looked for once more."""

    def act(store: Replayed, client: StoreClient) -> str:
        here = siblings_of(client)(folder) if folder else client
        for _ in range(2):
            try:
                manifest = resolve(here).manifest
            except CheckpointNotFoundError:
                return "found nothing"
            except CheckpointChangedError:
                continue
            try:
                for stored in manifest.objects:
                    store.head(f"{stored.folder or folder}/{stored.key}".lstrip("/"))
            except ObjectNotFoundError:
                if not _has_changed(here, manifest.attempt):
                    return f"{manifest.attempt} corrupt"
                continue
            return f"read {manifest.attempt}"
        return "told to read again"

    return act


def _has_changed(client: StoreClient, attempt: str) -> bool:
    try:
        return resolve(client).manifest.attempt != attempt
    except (CheckpointNotFoundError, CheckpointChangedError):
        return True


class _Refusing(ForwardingStore):
    """Refuses to remove keys that have a text in them."""

    def __init__(self, inner: Replayed, refused: str) -> None:
        super().__init__(inner)
        self._refused = refused

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self._refused in key:
                raise AccessDeniedError("no", key=key, operation="delete")
            self.inner.delete([key])


def deleter(folder: str = "", *, refused: str = "") -> Actor:
    """`cloudckpt.delete`, whose credentials may not remove keys that have the text `refused` in them."""

    def act(store: Replayed, client: StoreClient) -> str:
        place = _place(client, folder)
        if refused:
            place = dataclasses.replace(place, root=client.at(_Refusing(store, refused)))
        try:
            was_there = delete_checkpoint(place, conditional=True)
        except AccessDeniedError as error:
            return "refused, put back" if "as before" in str(error) else "refused, hidden"
        except CheckpointChangedError:
            return "changed"
        except CommitUnknownError:
            return "unknown"
        except StoreError:
            return "not deleted"
        return "deleted" if was_there else "nothing there"

    return act


def collector(*folders: str) -> Actor:
    """`cloudckpt.gc` of some folders, or of the client's own place, to which all that lies there is old enough."""

    def act(store: Replayed, client: StoreClient) -> str:
        has_left = False
        try:
            for folder in folders or ("",):
                has_left |= bool(remove_garbage(_place(client, folder), before=LATER, conditional=True).errors)
        except (CheckpointChangedError, CommitUnknownError, StoreError):
            return "gave up"
        return "left something" if has_left else "collected"

    return act


def _place(client: StoreClient, folder: str) -> WalkedLocation:
    if not folder:
        return WalkedLocation(client=client, root=client, prefix="", items=walk(client).items_at(""))
    prefix, siblings = f"{folder}/", siblings_of(client)
    found = walk(client, prefixes=(prefix,)).items_at(prefix)
    return WalkedLocation(client=siblings(folder), root=client, prefix=prefix, items=found, siblings=siblings)


def fence(*, keeps: int | None) -> bytes:
    """One, built from the documented form alone."""
    kept = json.dumps(keeps)
    body = f'{{"format":"cloudckpt-fence","version":[1,0],"id":"0123456789ab","keeps":{kept}'
    return f'{body},"crc32c":"{crc32c(body.encode()):08x}"}}'.encode()


@functools.lru_cache(maxsize=1 << 16)
def counting_in(world: World) -> tuple[int, Manifest] | None:
    """Return what counts, and its number, told without any of the code under test."""
    entries = {number: body for key, body in world if (number := manifest_number(key)) is not None}
    top = max(entries, default=None)
    while top is not None and b"cloudckpt-fence" in entries[top]:
        top = json.loads(entries[top])["keeps"]
    return None if top is None or top not in entries else (top, _decoded(entries[top]))


@functools.cache
def _decoded(body: bytes) -> Manifest:
    return decode(body, uri="memory://model")


def acknowledged(milestone: str) -> tuple[str, int] | None:
    """Attempt and number of a commit that a saver was told of."""
    match = re.fullmatch(r"(\w+) committed as (\d+)", milestone)
    return (match[1], int(match[2])) if match else None
