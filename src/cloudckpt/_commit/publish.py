"""The commit: one conditional put, and what has to be known about its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from awscrt.checksums import crc32c

from cloudckpt._commit.resolve import manifest_key, manifest_numbers, read_manifest
from cloudckpt._manifest.codec import encode
from cloudckpt._manifest.model import Manifest
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointError,
    CheckpointExistsError,
    ChecksumRefusedError,
    CommitUnknownError,
    CredentialsError,
    ObjectExistsError,
    StoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores.base import Store

_log = logging.getLogger("cloudckpt")

_BATCH = 1000  # keys that one request of S3 can delete

# Errors that say the object was not written. Any other may have come after it was.
_REFUSALS = (
    AccessDeniedError,
    BucketNotFoundError,
    ChecksumRefusedError,
    CredentialsError,
    ObjectExistsError,
    UnsupportedOperationError,
)


class OvertakenError(CheckpointExistsError, CommitUnknownError):
    """Another save's commit counts, but this one's manifest was put too, under a lower number.

    Who removes the other commit makes this one count, so it must keep its data. Nor may it be removed from here:
    meanwhile the number can have been freed again, and taken by a save that was told that it succeeded.
    """


def publish(store: Store, manifest: Manifest, *, number: int, conditional: bool, retrier: Retrier) -> None:
    """Make `manifest` the checkpoint, as the commit with `number`.

    Returns only if it is. Raises `CheckpointExistsError` if another save's commit counts instead, a `StoreError` if
    the store refused, and `CommitUnknownError` if it cannot be known; only in this last case, of which
    `OvertakenError` is one, may the manifest be there or still appear, so that its data must stay.
    """
    key = manifest_key(number)
    document = encode(manifest)
    views = [memoryview(document)]
    checksum = crc32c(document)
    may_have_arrived = False

    def put() -> None:
        nonlocal may_have_arrived
        try:
            store.put(key, views, crc32c=checksum, if_absent=conditional)
        except _REFUSALS:
            raise
        except StoreError:
            may_have_arrived = True
            raise

    try:
        retrier.call(put)
    except StoreError as error:
        # Something at the key may be what an earlier try of this very put left, with only its answer lost. And a
        # refusal says nothing of the tries before it: credentials can expire between two of them.
        is_taken = isinstance(error, ObjectExistsError)
        if not (is_taken or may_have_arrived):
            raise
        if _attempt_at(store, number, retrier) != manifest.attempt:
            raise (_lost(store, key) if is_taken else _unknown(store, key, error)) from error
    # The number was free, but perhaps only because a later overwrite removed the manifest that had it. In that case
    # the later one is there already: it was put before the removal.
    try:
        numbers = retrier.call(lambda: manifest_numbers(store))
    except StoreError as error:
        raise _unknown(store, key, error) from error
    if numbers and numbers[-1] > number:
        raise OvertakenError(
            f"Checkpoint already exists: another save committed {store.url(manifest_key(numbers[-1]))} while this one "
            f"put {key}. It is untouched, and what this save wrote is left to gc. Choose another URI, or pass "
            "overwrite=True to replace it",
            uri=store.uri,
        )


def remove_superseded(
    store: Store, manifest: Manifest, *, number: int, retrier: Retrier, on_removing: Callable[[str], None]
) -> int:
    """After the commit of `manifest` as `number`: remove the commits below it, lowest first, and then their data.

    The order matters: whatever is left at any moment, the highest number is the newest commit. What cannot be
    removed is logged, invisible to readers, and left to gc. `on_removing` is told the first key of each request before
    it is made. Returns how many objects were removed.
    """
    kept = {stored.key for stored in manifest.objects}
    num_removed = 0
    try:
        numbers = retrier.call(lambda: manifest_numbers(store))
        if not numbers or numbers[-1] != number:
            return 0  # overwritten or deleted since: what lies there now is not this save's to judge
        stale = numbers[:-1]
        keys = [key for n in stale for key in _data_keys(store, n, retrier) if key not in kept]
        batches = [keys[i : i + _BATCH] for i in range(0, len(keys), _BATCH)]
        for batch in ([manifest_key(n) for n in stale], *batches):
            if not batch:
                continue
            on_removing(batch[0])
            retrier.call(lambda batch=batch: store.delete(batch))  # type: ignore[misc]  # mypy cannot see the default
            num_removed += len(batch)
    except StoreError as error:
        _log.warning("could not remove what %s replaced, gc will: %s", store.url(manifest_key(number)), error)
    return num_removed


def _data_keys(store: Store, number: int, retrier: Retrier) -> list[str]:
    try:
        manifest = read_manifest(store, number, retrier)
    except CheckpointError as error:
        _log.warning("cannot tell which data belongs to %s, gc will: %s", store.url(manifest_key(number)), error)
        return []
    return [stored.key for stored in manifest.objects] if manifest is not None else []


def _attempt_at(store: Store, number: int, retrier: Retrier) -> str | None:
    """The attempt whose manifest has `number`; None where there is none that can be read."""
    try:
        manifest = read_manifest(store, number, retrier)
    except StoreError as error:
        raise _unknown(store, manifest_key(number), error) from error
    except CheckpointError:
        return None  # somebody else's, and broken
    return manifest.attempt if manifest is not None else None


def _lost(store: Store, key: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"Checkpoint already exists: another save committed {store.url(key)} first. It is untouched and nothing of "
        "this save is visible. Choose another URI, or pass overwrite=True to replace it",
        uri=store.uri,
    )


def _unknown(store: Store, key: str, error: Exception) -> CommitUnknownError:
    return CommitUnknownError(
        f"the commit of {store.url(key)} was sent, but whether it arrived could not be found out: {error}. "
        "Its data was kept. When the store answers, look (cloudckpt.latest) before you save there again",
        uri=store.uri,
    )
