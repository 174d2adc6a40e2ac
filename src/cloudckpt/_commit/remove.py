"""Removing a whole checkpoint: a fence first, so that it is gone at once, and no save of before can come to count."""

from __future__ import annotations

from cloudckpt._commit.batches import batches
from cloudckpt._commit.collect import Place
from cloudckpt._commit.put import lay_fence
from cloudckpt._commit.resolve import Log, check_ours, manifest_key, manifest_number, read_log
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import CheckpointChangedError, InvalidManifestError
from cloudckpt.stores.base import Store

_NUM_FENCES = 8


def delete_checkpoint(place: Place, retrier: Retrier, *, conditional: bool) -> bool:
    """Remove the checkpoint at a location, and all that saves had written there; False where there is none.

    With its fence it is gone, at once. Raises `InvalidManifestError` where what lies there is another program's;
    `CheckpointChangedError` where another save's commit came between, which is left untouched; `CommitUnknownError`
    where it is not known whether the fence was laid; `StoreError`.
    """
    log = read_log(place.store, retrier, is_lenient=True)
    if log.counting is None and all(entry.is_fence for entry in log.entries):
        return False
    if not any(item.kind == "data" for item in place.found):  # beside data of ours it is ours, and damaged
        check_ours(place.store, log.entries, retrier)
    if conditional:
        if manifest_number(manifest_key(log.top + 1)) is None:
            url = place.store.url(manifest_key(log.top))
            raise InvalidManifestError(
                f"{url} has the highest number that there is, and no cloudckpt wrote it. Remove it, and delete again",
                uri=place.store.uri,
            )
        log = _fenced_off(place.store, log, retrier)
    doomed = [entry.number for entry in log.entries if entry.number < log.top or not conditional]
    for keys in (
        [place.prefix + manifest_key(number) for number in doomed],
        sorted(item.key for item in place.found if item.kind == "data"),
    ):
        for batch in batches(keys):
            retrier.call(lambda batch=batch: place.root.delete(batch))  # type: ignore[misc]  # mypy cannot see the default
    for item in place.found:
        if item.kind == "upload":
            retrier.call(lambda item=item: place.root.abort_multipart(item.key, item.upload_id))  # type: ignore[misc]  # as above
    return True


def _fenced_off(store: Store, log: Log, retrier: Retrier) -> Log:
    """The log with a fence above all that counted."""
    counted = log.counting
    for _ in range(_NUM_FENCES):
        has_laid = lay_fence(store, log.top + 1, keeps=None, retrier=retrier)
        log = read_log(store, retrier)
        if log.counting is None:
            return log  # by this fence, or by that of another deletion
        if has_laid or log.counting != counted:
            raise CheckpointChangedError(
                f"{store.uri} was overwritten while it was being deleted. What another save has committed there is "
                "untouched: delete it, too, if it is to go",
                uri=store.uri,
            )
        # A fence of gc's, which keeps what is to go.
    raise CheckpointChangedError(f"{store.uri} changes all the time: it was not deleted. Try again", uri=store.uri)
