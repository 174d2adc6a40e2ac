"""The last look before a commit: what the manifest names is really there."""

from __future__ import annotations

from cloudckpt._commit.resolve import list_entries, manifest_key
from cloudckpt._manifest.model import Manifest
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import CheckpointExistsError, IncompleteSaveError, ObjectNotFoundError
from cloudckpt.stores.base import Store

_MAX_SHOWN = 3


def check_objects_present(store: Store, manifest: Manifest, retrier: Retrier) -> None:
    """Raises `IncompleteSaveError` unless every data object of `manifest` lies on the store with its size.

    One listing; what it lacks is asked for by itself, since a listing may lag.
    """
    wanted = {stored.key: stored.size for stored in manifest.objects}
    if not wanted:
        return
    folders = {key.rpartition("/")[0] + "/" for key in wanted}
    prefix = folders.pop() if len(folders) == 1 else "data/"
    found = retrier.call(lambda: {info.key: info.size_bytes for info in store.list(prefix) if info.key in wanted})
    problems = [
        problem
        for key, size_bytes in wanted.items()
        if found.get(key) != size_bytes and (problem := _problem(store, key, size_bytes, retrier))
    ]
    if problems:
        more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise IncompleteSaveError(
            f"nothing was committed at {store.uri}: {'; '.join(problems[:_MAX_SHOWN])}{more}. Something removed or "
            "replaced what this save wrote (a gc with too short an older_than, a lifecycle rule?): save again",
            uri=store.uri,
        )


def check_still_next(store: Store, number: int, retrier: Retrier) -> None:
    """Raises `CheckpointExistsError` if the entry before `number` is gone: then this number decides nothing any more.

    It was the highest one when the save began. It goes only when a higher one has come, or together with the whole
    log, long after a deletion; the numbers then begin anew.
    """
    if not number:
        return
    key = manifest_key(number - 1)
    try:
        retrier.call(lambda: store.head(key))
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
        info = retrier.call(lambda: store.head(key))
    except ObjectNotFoundError:
        return f"{store.url(key)} is gone"
    if info.size_bytes != size_bytes:
        return f"{store.url(key)} has {info.size_bytes} bytes, not {size_bytes}"
    return ""
