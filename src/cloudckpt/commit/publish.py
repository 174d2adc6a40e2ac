"""The commit: one conditional put, and what has to be known about its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from cloudckpt.commit.fences import Fence
from cloudckpt.commit.manifest_log import (
    Log,
    PutOutcome,
    list_entries,
    manifest_key,
    max_manifest_bytes,
    put_entry,
    read_entry,
    read_log,
)
from cloudckpt.errors import (
    OVERWRITE_HINT,
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    IncompleteSaveError,
    NoConditionalCommitError,
    ObjectNotFoundError,
    StoreError,
    UnsupportedValueError,
    gc_advice,
)
from cloudckpt.format.codec import encode
from cloudckpt.format.model import Manifest
from cloudckpt.io.retry import Retrier
from cloudckpt.stores.base import Store

_log = logging.getLogger("cloudckpt")


class OvertakenError(CheckpointExistsError, CommitUnknownError):
    """Another save's commit counts, but this one's manifest was put too, under a lower number.

    Who removes the other commit makes this one count, so it must keep its data. Nor may it be removed from here:
    meanwhile the number can have been freed again, and taken by a save that was told that it succeeded.
    """


def publish(store: Store, manifest: Manifest, *, number: int, conditional: bool, retrier: Retrier) -> None:
    """Make `manifest` the checkpoint, as the commit with `number`.

    Returns only if it is. Raises `CheckpointExistsError` if another save's commit counts instead, a `StoreError` if
    the store refused, `UnsupportedValueError` if no reader would take a manifest of its size, and `CommitUnknownError`
    if it cannot be known; only in this last case, of which `OvertakenError` is one, may the manifest be there or still
    appear, so that its data must stay.
    """
    document = encode(manifest)
    if len(document) > (max_bytes := max_manifest_bytes(stored.size for stored in manifest.objects)):
        raise UnsupportedValueError(
            f"the manifest of {store.uri} takes {len(document)} bytes, and readers take at most {max_bytes} beside its "
            f"{len(manifest.objects)} data objects. Nothing was committed. Save fewer or shorter names, or less "
            "Options(metadata=…)",
            uri=store.uri,
        )
    outcome = put_entry(store, number, document, conditional=conditional, retrier=retrier)
    if outcome.error is not None:
        _check_arrived(store, manifest, outcome.error, outcome, number=number, retrier=retrier)
    try:
        _check_counts(store, manifest, number=number, retrier=retrier)
    except CommitUnknownError:
        raise
    except Exception as error:
        raise _unknown(store, manifest_key(number), error) from error


def _check_counts(store: Store, manifest: Manifest, *, number: int, retrier: Retrier) -> None:
    """Look that the store has kept the manifest that it acknowledged, and that no later entry counts.

    The number was free, but perhaps only because a later overwrite removed the entry that had it. In that case the
    later one is there already: it was put before the removal. What lies above may also be gc's fence, which keeps
    this commit.
    """
    log = read_log(store, retrier)
    if log.counting == number:
        return
    if log.top > number:
        raise _overtaken(store, log, number)
    found = read_entry(store, number, retrier)  # a listing may lag
    if isinstance(found, Manifest) and found.attempt == manifest.attempt:
        return
    raise _unknown(store, manifest_key(number), "the store has acknowledged it, and neither lists it nor returns it")


def _check_arrived(
    store: Store, manifest: Manifest, error: StoreError, outcome: PutOutcome, *, number: int, retrier: Retrier
) -> None:
    """Return where this very put has arrived. No answer says that it has not: a proxy can refuse what it passed on."""
    key = manifest_key(number)
    found, is_absent = _entry_at(store, number, retrier)
    if isinstance(found, Manifest) and found.attempt == manifest.attempt:
        return
    if outcome.is_refused and (is_absent or found is not None):
        raise error
    if outcome.is_taken and found is not None:
        raise (_fenced(store, key) if isinstance(found, Fence) else _lost(store, key)) from error
    if outcome.is_taken and (_is_overtaken(store, number, retrier) if is_absent else not outcome.may_have_arrived):
        raise _lost(store, key) from error
    # What lies there and cannot be read may be this very manifest, whose data must stay then.
    raise _unknown(store, key, error) from error


def remove_superseded(
    store: Store, manifest: Manifest, *, number: int, retrier: Retrier, on_removing: Callable[[str], None]
) -> int:
    """After the commit of `manifest` as `number`: remove the entries below it, lowest first, and then their data.

    The order matters: whatever is left at any moment, the highest number is the newest commit. What cannot be
    removed is logged, invisible to readers, and left to gc. `on_removing` is told the first key of each request before
    it is made. Returns how many objects were removed.
    """
    kept = {stored.key for stored in manifest.objects}
    num_removed = 0
    try:
        log = read_log(store, retrier)
        if log.counting != number:
            return 0  # overwritten or deleted since: what lies there now is not this save's to judge
        stale = [entry for entry in log.entries if entry.number < number]
        manifests = [entry.number for entry in stale if not entry.is_fence]
        keys = [key for n in manifests for key in _data_keys(store, n, retrier) if key not in kept]
        entries = [manifest_key(entry.number) for entry in stale]
        for batch in (*split_into_batches(entries), *split_into_batches(keys)):
            on_removing(batch[0])
            retrier.call(store.delete, batch)
            num_removed += len(batch)
    except (StoreError, CheckpointError) as error:
        _log.warning(
            "could not remove what %s replaced: %s. %s", store.url(manifest_key(number)), error, gc_advice(store.uri)
        )
    return num_removed


def _data_keys(store: Store, number: int, retrier: Retrier) -> list[str]:
    try:
        found = read_entry(store, number, retrier)
    except CheckpointError as error:
        _log.warning(
            "cannot tell which data belongs to %s: %s. %s", store.url(manifest_key(number)), error, gc_advice(store.uri)
        )
        return []
    return [stored.key for stored in found.objects] if isinstance(found, Manifest) else []


def _entry_at(store: Store, number: int, retrier: Retrier) -> tuple[Manifest | Fence | None, bool]:
    """Return the entry with that number, and whether two reads in a row found none. One that is damaged is neither."""
    try:
        found = read_entry(store, number, retrier) or read_entry(store, number, retrier)
    except StoreError as error:
        raise _unknown(store, manifest_key(number), error) from error
    except CheckpointError:
        return None, False  # broken: somebody else's, or damaged since, or on its way
    return found, found is None


def _is_overtaken(store: Store, number: int, retrier: Retrier) -> bool:
    """Return whether a higher number is there: an overwrite can have removed the entry that had this one."""
    try:
        return read_log(store, retrier).top > number
    except (StoreError, CheckpointError) as error:
        raise _unknown(store, manifest_key(number), error) from error


def _lost(store: Store, key: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"Checkpoint already exists: another save committed {store.url(key)} first. It is untouched and nothing of "
        "this save is visible",
        uri=store.uri,
        hint=OVERWRITE_HINT,
    )


def _fenced(store: Store, key: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"this save can no longer be committed: gc or a deletion came between, and has put {store.url(key)} where the "
        "commit was to be. Nothing of this save is visible. Save again; if gc came between, let it spare what is "
        "younger than a save takes",
        uri=store.uri,
    )


def _overtaken(store: Store, log: Log, number: int) -> OvertakenError:
    key, above = manifest_key(number), store.url(manifest_key(log.top))
    if log.entries[-1].is_fence:
        return OvertakenError(
            f"this save can no longer be committed: gc or a deletion came between, and had put {above} when this save "
            f"put {key}. What this save wrote is invisible, and left to gc. Save again",
            uri=store.uri,
        )
    return OvertakenError(
        f"Checkpoint already exists: another save committed {above} while this one put {key}. It is untouched, and "
        "what this save wrote is left to gc",
        uri=store.uri,
        hint=OVERWRITE_HINT,
    )


def _unknown(store: Store, key: str, why: object) -> CommitUnknownError:
    return CommitUnknownError(
        f"the commit of {store.url(key)} was sent, but whether it arrived could not be found out: "
        f"{str(why).rstrip('.')}. Its data was kept. When the store answers, look (cloudckpt ls) before you "
        "save there again",
        uri=store.uri,
    )


_MAX_SHOWN = 3


def check_objects_present(store: Store, manifest: Manifest, retrier: Retrier) -> datetime | None:
    """Return the time of the newest data object of `manifest`, as the store lists it; None if it lists none.

    Raises `IncompleteSaveError` unless each of them lies on the store with its size. One listing; what it lacks is
    asked for by itself, since a listing may lag.
    """
    wanted = {stored.key: stored.size for stored in manifest.objects}
    if not wanted:
        return None
    folders = {key.rpartition("/")[0] + "/" for key in wanted}
    prefix = folders.pop() if len(folders) == 1 else "data/"
    found = retrier.call(lambda: {info.key: info for info in store.list(prefix) if info.key in wanted})
    problems = [
        problem
        for key, size_bytes in wanted.items()
        if (key not in found or found[key].size_bytes != size_bytes)
        and (problem := _problem(store, key, size_bytes, retrier))
    ]
    if problems:
        more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise IncompleteSaveError(
            f"nothing was committed at {store.uri}: {'; '.join(problems[:_MAX_SHOWN])}{more}. Something removed or "
            "replaced what this save wrote (a gc that spares too little, a lifecycle rule?): save again",
            uri=store.uri,
        )
    return max((info.modified_at for info in found.values()), default=None)


def check_still_next(store: Store, number: int, retrier: Retrier) -> None:
    """Raises `CheckpointExistsError` if the entry before `number` is gone: then this number decides nothing any more.

    It was the highest one when the save began. It goes only when a higher one has come, or together with the whole
    log, long after a deletion; the numbers then begin anew.
    """
    if not number:
        return
    key = manifest_key(number - 1)
    try:
        retrier.call(store.head, key)
    except ObjectNotFoundError as error:
        if any(entry.number == number - 1 for entry in list_entries(store, retrier)):
            return
        raise CheckpointExistsError(
            f"this save can no longer be committed: {store.url(key)}, which was there when it began, was replaced or "
            "removed meanwhile. Nothing of this save is visible. Save again",
            uri=store.uri,
        ) from error


def _problem(store: Store, key: str, size_bytes: int, retrier: Retrier) -> str:
    try:
        info = retrier.call(store.head, key)
    except ObjectNotFoundError:
        return f"{store.url(key)} is gone"
    if info.size_bytes != size_bytes:
        return f"{store.url(key)} has {info.size_bytes} bytes, not {size_bytes}"
    return ""


def check_conditional_create(store: Store, retrier: Retrier) -> None:
    """Raises `NoConditionalCommitError` unless the store can create an object only if it is absent."""
    found = retrier.call(store.probe)
    if not found.conditional_create:
        saw = found.observed or "this store cannot create an object only if it is absent"
        raise NoConditionalCommitError(
            f"{store.uri}: {saw}. So nothing would keep two saves from overwriting each other, and nothing was "
            "written. Use another store, a newer version of this one's server, or, on Ceph, a bucket without "
            "versioning; or accept that with Options(commit='unconditional')",
            uri=store.uri,
        )


_BATCH = 1000  # keys that one request of S3 can delete


def split_into_batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """`keys` in their order, in runs of what one request can remove."""
    for begin in range(0, len(keys), _BATCH):
        yield keys[begin : begin + _BATCH]
