"""What takes part in the life of a checkpoint, in terms of the real functions of `cloudckpt._commit`."""

from __future__ import annotations

import functools
import re

from tests.commit.model import Actor, Replayed, World

from cloudckpt._commit.publish import OvertakenError, publish, remove_superseded
from cloudckpt._commit.resolve import manifest_key, manifest_number, manifest_numbers, read_manifest, resolve
from cloudckpt._manifest.codec import decode, encode
from cloudckpt._manifest.model import Manifest, StoredObject
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    ObjectNotFoundError,
    StoreError,
)


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
        objects=[StoredObject(key=f"data/{attempt}/0-0.safetensors", size=0, crc32c="")],
        tensors={},
        values={},
    )


def data_key_of(attempt: str) -> str:
    return manifest_for(attempt).objects[0].key


def written_by(*attempts: str) -> World:
    """The data that these saves wrote before they try to commit; nobody else can name it, so its order is free."""
    return tuple((data_key_of(attempt), b"") for attempt in attempts)


def committed(number: int, attempt: str) -> World:
    """A checkpoint that is there."""
    return ((manifest_key(number), encode(manifest_for(attempt))), *written_by(attempt))


def saver(attempt: str, *, overwrite: bool = False) -> Actor:
    """A save from its set-up on, as `cloudckpt._pipeline.save` puts it together."""

    def act(store: Replayed, retrier: Retrier) -> str:
        numbers = retrier.call(lambda: manifest_numbers(store))
        if numbers and not overwrite:
            store.delete([data_key_of(attempt)])
            return f"{attempt} refused"
        number = numbers[-1] + 1 if numbers else 0
        manifest = manifest_for(attempt)
        try:
            publish(store, manifest, number=number, conditional=True, retrier=retrier)
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
            remove_superseded(store, manifest, number=number, retrier=retrier, on_removing=lambda key: None)
        return f"{attempt} committed"

    return act


def reader() -> Actor:
    """A load, as `cloudckpt.load` does it: what vanishes is looked for once more."""

    def act(store: Replayed, retrier: Retrier) -> str:
        for _ in range(2):
            try:
                manifest = resolve(store, retrier).manifest
            except CheckpointNotFoundError:
                return "found nothing"
            except CheckpointChangedError:
                continue
            try:
                for stored in manifest.objects:
                    store.head(stored.key)
            except ObjectNotFoundError:
                if not _has_changed(store, retrier, manifest.attempt):
                    return f"{manifest.attempt} corrupt"
                continue
            return f"read {manifest.attempt}"
        return "told to read again"

    return act


def _has_changed(store: Replayed, retrier: Retrier, attempt: str) -> bool:
    try:
        return resolve(store, retrier).manifest.attempt != attempt
    except (CheckpointNotFoundError, CheckpointChangedError):
        return True


def deleter() -> Actor:
    """Removes the whole checkpoint: manifests first, lowest first, then their data."""

    def act(store: Replayed, retrier: Retrier) -> str:
        numbers = manifest_numbers(store)
        manifests = [read_manifest(store, number, retrier) for number in numbers]
        store.delete([manifest_key(number) for number in numbers])
        store.milestones.append("deleted")
        store.delete([stored.key for manifest in manifests if manifest for stored in manifest.objects])
        return "deleted"

    return act


def commits_in(world: World) -> dict[int, Manifest]:
    """Every manifest that lies there, by number."""
    found = {}
    for key, body in world:
        number = manifest_number(key)
        if number is not None:
            found[number] = _decoded(body)
    return found


@functools.cache
def _decoded(body: bytes) -> Manifest:
    return decode(body, uri="memory://model")


def acknowledged(milestone: str) -> tuple[str, int] | None:
    """Attempt and number of a commit that a saver was told of."""
    match = re.fullmatch(r"(\w+) committed as (\d+)", milestone)
    return (match[1], int(match[2])) if match else None
