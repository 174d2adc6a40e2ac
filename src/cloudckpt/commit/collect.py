"""Removing garbage: a fence first, so that nothing that goes can be committed any more.

A save fixes its number before it writes any data. So once the log has an entry that it did not have when some data was
listed, whoever wrote that data has a number that is taken, or decides nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from cloudckpt.commit.fences import Fence
from cloudckpt.commit.garbage import FoundItem, Inventory, RemovalPlan, plan_removal
from cloudckpt.commit.manifest_log import (
    Entry,
    Log,
    check_ours,
    list_entries,
    manifest_key,
    put_entry,
    put_fence,
    read_counting,
    read_entry,
    read_log,
)
from cloudckpt.commit.publish import check_still_next, split_into_batches
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CloudckptError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.io.retry import Retrier
from cloudckpt.stores.base import Store, UploadInfo

_MOST_REFUSALS = 10
"""In a row: then nothing there can be removed."""
_NUM_FENCES = 8
_MOST_KEPT_BYTES = 64 * 1024 * 1024
"""The size of the largest manifest that a deletion holds to put it back."""
_NO_OBJECT = "data/.cloudckpt-probe-0000000000000000"
"""A key that no object has."""
_Error = TypeVar("_Error", bound=CloudckptError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkedLocation:
    """One location under a root that was walked."""

    store: Store
    """Rooted at the location."""
    root: Store
    """Rooted at the root: removals go through it, so that a directory's empty folders go too."""
    prefix: str
    """The prefix of the location's keys under the root; empty, or with a slash at its end."""
    found: Sequence[FoundItem]
    """The items that the walk found there besides the log."""


def walk(
    store: Store,
    retrier: Retrier,
    *,
    prefixes: Sequence[str] = ("",),
    has_hidden_uploads: bool,
    on_unlisted: Callable[[StoreError], None] | None,
) -> Inventory:
    """List what cloudckpt wrote under `store`: one listing of objects and one of uploads for each of `prefixes`.

    `on_unlisted` is told why a service does not list unfinished uploads. Without it, and for files, that is an error.
    """
    inventory = Inventory(has_hidden_uploads=has_hidden_uploads)
    for info in retrier.call(lambda: [found for prefix in prefixes for found in store.list(prefix)]):
        inventory.add_object(info)
    try:
        for upload in retrier.call(lambda: [found for prefix in prefixes for found in store.list_uploads(prefix)]):
            inventory.add_upload(upload)
    except UnsupportedOperationError:
        pass  # then none can be open
    except StoreError as error:
        if on_unlisted is None or has_hidden_uploads:  # beside an upload that is not seen, data looks dead
            raise
        on_unlisted(error)
    return inventory


def judge(
    walked: WalkedLocation, retrier: Retrier, *, before: datetime, is_fenced: bool = False
) -> tuple[Log, RemovalPlan]:
    """Read a location's log, and plan what may be removed.

    Raises `CheckpointError` where it cannot be told what counts there.
    """
    plan_with = functools.partial(
        plan_removal, walked.found, location=walked.prefix, before=before, is_fenced=is_fenced
    )
    log = read_log(walked.store, retrier)
    # Manifests can be large: none is read where nothing would go even if they named nothing.
    sketch = plan_with(log.entries, counting=log.counting, references={})
    if sketch.is_empty:
        return log, sketch
    log, manifest = read_counting(walked.store, retrier)
    if manifest is None:  # perhaps removed by other means than ours, while a fence keeps it
        log = replace(log, counting=None)
    references = {
        entry.number: _references(walked.store, entry, retrier)
        for entry in log.entries
        if entry.number != log.counting and not entry.is_fence
    }
    if log.counting is not None and manifest is not None:
        references[log.counting] = frozenset(stored.key for stored in manifest.objects)
    return log, plan_with(log.entries, counting=log.counting, references=references)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The outcome of `collect` at one location."""

    removed: RemovalPlan
    """The part of the plan that was carried out."""
    young: tuple[FoundItem, ...]
    """See `RemovalPlan.young`."""
    left: dict[str, StoreError]
    """The errors by the keys that could not be removed."""
    num_untried: int
    """The number of further items that were planned and not tried, after these errors."""


def collect(walked: WalkedLocation, retrier: Retrier, *, before: datetime, conditional: bool) -> Removal:
    """Remove a location's garbage.

    May be interrupted at any moment, run again, and run twice at once. Raises what `judge` raises, `StoreError`, and
    `CommitUnknownError` where it is not known whether a fence was laid; nothing was removed then.
    """
    log, plan = judge(walked, retrier, before=before)
    left: dict[str, StoreError] = {}
    done: set[str] = set()

    def remove(keys: Sequence[str]) -> bool:
        """Return True if all of them are gone."""
        failed, gone = _remove(walked.root, keys, retrier)
        left.update(failed)
        done.update(gone)
        return not failed

    if any(item.kind == "data" for item in plan.objects):
        is_fenced = plan.needs_fence and conditional
        top = log.top
        if is_fenced:
            try:
                _check_may_delete(walked, log, retrier)
            except StoreError as error:
                # Each run would leave one more fence.
                return _describe(walked, log, plan, done=set(), left={plan.objects[0].key: error})
            # Whether the number was free does not matter: from here on it is taken.
            put_fence(walked.store, top + 1, keeps=log.counting, conditional=True, retrier=retrier)
        log, second = judge(walked, retrier, before=before, is_fenced=is_fenced)
        if is_fenced and log.top <= top:
            raise CheckpointChangedError(
                f"{walked.store.url(manifest_key(top + 1))} is not listed, though it was just put: nothing was removed",
                uri=walked.store.uri,
            )
        # A proxy can answer one of the two reads with another checkpoint's manifest, which names none of the data here.
        agreed = set(plan.objects)
        plan = replace(second, objects=tuple(item for item in second.objects if item in agreed))
    _abort_uploads(walked.root, plan.uploads, retrier, done=done, left=left)
    # If a manifest stays, so must its data.
    if remove([walked.prefix + manifest_key(entry.number) for entry in plan.entries]):
        remove([item.key for item in plan.objects])
        if plan.lone_fence is not None and not left and _is_alone(walked.store, plan.lone_fence, retrier):
            remove([walked.prefix + manifest_key(plan.lone_fence.number)])
    return _describe(walked, log, plan, done=done, left=left)


def _abort_uploads(
    store: Store, uploads: Sequence[FoundItem], retrier: Retrier, *, done: set[str], left: dict[str, StoreError]
) -> None:
    for upload in uploads:
        failure = _try_removal(retrier, store.abort_multipart, upload.key, upload.upload_id)
        if failure is None:
            done.add(upload.upload_id)
        else:
            left[upload.key] = failure


def _describe(
    walked: WalkedLocation, log: Log, plan: RemovalPlan, *, done: set[str], left: dict[str, StoreError]
) -> Removal:
    """Describe what was `done` of a plan: keys, and ids of uploads."""
    lone_key = walked.prefix + manifest_key(log.top)
    removed = replace(
        plan,
        uploads=tuple(item for item in plan.uploads if item.upload_id in done),
        entries=tuple(entry for entry in plan.entries if walked.prefix + manifest_key(entry.number) in done),
        objects=tuple(item for item in plan.objects if item.key in done),
        lone_fence=plan.lone_fence if plan.lone_fence is not None and lone_key in done else None,
    )
    num_planned, num_removed = (len(one.uploads) + len(one.entries) + len(one.objects) for one in (plan, removed))
    num_untried = max(0, num_planned - num_removed - len(left)) if left else 0
    return Removal(removed=removed, young=plan.young, left=left, num_untried=num_untried)


def _check_may_delete(walked: WalkedLocation, log: Log, retrier: Retrier) -> None:
    """Raise what the store answers to deletions that change nothing, before a fence is laid for more of them.

    A service checks the permission first, whether there is such an object or not. Below the top of the log, a fence
    that an earlier removal left decides nothing any more.
    """
    retrier.call(walked.root.delete, [walked.prefix + _NO_OBJECT])
    spent = [entry.number for entry in log.entries[:-1] if entry.is_fence and entry.number != log.counting]
    for batch in split_into_batches([walked.prefix + manifest_key(number) for number in spent]):
        retrier.call(walked.root.delete, batch)


def _references(store: Store, entry: Entry, retrier: Retrier) -> frozenset[str]:
    """Return the keys that a superseded manifest names; none if it cannot be read."""
    try:
        found = read_entry(store, entry.number, retrier)
    except CheckpointError:
        return frozenset()
    if found is None or isinstance(found, Fence):
        return frozenset()
    return frozenset(stored.key for stored in found.objects)


def _is_alone(store: Store, fence: Entry, retrier: Retrier) -> bool:
    """Return whether nothing but the fence is there, and no save is under way."""
    if [entry.number for entry in list_entries(store, retrier)] != [fence.number]:
        return False
    return retrier.call(
        lambda: next(iter(store.list("data/")), None) is None and next(iter(store.list_uploads("data/")), None) is None
    )


def _remove(store: Store, keys: Sequence[str], retrier: Retrier) -> tuple[dict[str, StoreError], list[str]]:
    """Remove `keys` in their order; if a request fails, its keys one by one. Return the errors by key, and the rest.

    After many refusals in a row, the keys that follow are not tried, and in neither.
    """
    left: dict[str, StoreError] = {}
    gone: list[str] = []
    for batch in split_into_batches(keys):
        if _try_removal(retrier, store.delete, batch) is None:
            gone += batch
            continue
        num_refused = 0
        for key in batch:
            error = _try_removal(retrier, store.delete, [key])
            num_refused = num_refused + 1 if error is not None else 0
            if error is None:
                gone.append(key)
            else:
                left[key] = error
            if num_refused == _MOST_REFUSALS:
                return left, gone
    return left, gone


def _try_removal(retrier: Retrier, removal: Callable[..., None], *arguments: object) -> StoreError | None:
    try:
        retrier.call(removal, *arguments)
    except StoreError as error:
        return error
    return None


def group_uploads(store: Store, retrier: Retrier) -> Mapping[str, list[UploadInfo]]:
    """Unfinished uploads by the directory that they are for, with keys relative to it; the root's own under ``""``.

    Those that may not be listed are left out.
    """
    by_place: defaultdict[str, list[UploadInfo]] = defaultdict(list)
    with contextlib.suppress(StoreError):
        for upload in retrier.collect(store.list_uploads):
            name, _, key = upload.key.partition("/")
            if name == "data":
                by_place[""].append(upload)
            else:
                relative = UploadInfo(key=key, upload_id=upload.upload_id, started_at=upload.started_at)
                by_place[name].append(relative)
    return by_place


def delete_checkpoint(walked: WalkedLocation, retrier: Retrier, *, conditional: bool) -> bool:
    """Remove the checkpoint at this location, and all that saves had written there; False where there is none.

    With its fence it is gone, at once. If the store then refuses to remove the first of its objects, another entry
    makes it count again. The error that is raised says so. Raises `InvalidManifestError` where what lies there is
    another program's; `CheckpointChangedError` where another save's commit came between, which is left untouched;
    `CommitUnknownError` where it is not known whether the fence was laid; `StoreError`.
    """
    log = read_log(walked.store, retrier, is_lenient=True)
    if log.counting is None and all(entry.is_fence for entry in log.entries):
        return False
    unchanged = "Nothing was deleted, and the checkpoint " + (
        "is as it was before" if log.counting is None else "can be loaded as before"
    )
    if not any(item.kind == "data" for item in walked.found):  # beside data of ours it is ours, and damaged
        check_ours(walked.store, log.entries, retrier)
    try:
        _check_may_delete(walked, log, retrier)
    except StoreError as error:
        raise _told(error, f"{unchanged}. Deletions are refused at {walked.store.uri}") from error
    fenced = _fence_off(walked.store, log, retrier, conditional=conditional)
    doomed = [entry.number for entry in fenced.log.entries if entry.number < fenced.log.top]
    failure, is_certain = _remove_whole(walked, doomed, retrier)
    if failure is None:
        return True
    if is_certain and _put_back(walked, fenced, retrier, conditional=conditional):
        raise _told(failure, unchanged) from failure
    hiding = walked.store.url(manifest_key(fenced.number))
    raise _told(
        failure,
        f"The checkpoint was removed in part, or may have been, and can no longer be loaded: {hiding} hides it. When "
        f"the store permits it, delete it again, or run `cloudckpt gc {walked.store.uri}`",
    ) from failure


def _remove_whole(walked: WalkedLocation, doomed: Sequence[int], retrier: Retrier) -> tuple[StoreError | None, bool]:
    """Remove the `doomed` entries, and all that the walk found. Return the error that ended it.

    And return whether each request that failed was refused: another one can still be carried out.
    """
    is_certain = True

    def delete(keys: Sequence[str]) -> None:
        nonlocal is_certain
        try:
            walked.root.delete(keys)
        except TransientStoreError:
            is_certain = False
            raise

    try:
        for keys in (
            # First what can be put back.
            [walked.prefix + manifest_key(number) for number in doomed],
            sorted(item.key for item in walked.found if item.kind == "data"),
        ):
            for batch in split_into_batches(keys):
                retrier.call(delete, batch)
        for item in walked.found:
            if item.kind == "upload":
                retrier.call(walked.root.abort_multipart, item.key, item.upload_id)
    except StoreError as error:
        return error, is_certain
    return None, True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fenced:
    """A deletion's own fence, which hides all that counted."""

    log: Log
    """With the fence."""
    number: int
    """The number of the fence."""
    hidden: int | None
    """The number of the manifest that counted directly before; None if it did not, or that is not certain."""
    document: bytes | None
    """That manifest; None if it is large or could not be read."""


def _fence_off(store: Store, log: Log, retrier: Retrier, *, conditional: bool) -> _Fenced:
    """Lay a fence of our own above all that counted.

    Never relies on the fence of another deletion: who laid one may take it back. Unless `conditional`, it takes the
    place of what another save commits at the same moment, as that save's manifest could take its place.
    """
    counted = log.counting
    document: bytes | None = None
    if counted is not None:
        with contextlib.suppress(StoreError):
            document = retrier.call(store.read, manifest_key(counted), max_bytes=_MOST_KEPT_BYTES)
    for _ in range(_NUM_FENCES):
        below = log
        has_laid = put_fence(store, log.top + 1, keeps=None, conditional=conditional, retrier=retrier)
        log = read_log(store, retrier)
        if has_laid and log.counting is None:
            return _Fenced(log=log, number=below.top + 1, hidden=below.counting, document=document)
        if log.counting is not None and (has_laid or log.counting != counted):
            raise CheckpointChangedError(
                f"{store.uri} was overwritten while it was being deleted. What another save has committed there is "
                "untouched: delete it, too, if it is to go",
                uri=store.uri,
            )
        # A fence of gc's, which keeps what is to go; or that of another deletion.
    raise CheckpointChangedError(f"{store.uri} changes all the time: it was not deleted. Try again", uri=store.uri)


def _put_back(walked: WalkedLocation, fenced: _Fenced, retrier: Retrier, *, conditional: bool) -> bool:
    """Make the checkpoint count again that a deletion has hidden and then could not remove. Return whether it does.

    All of its data has to be there. The entry is created directly above the deletion's own fence, and only if absent:
    so nobody else has decided to remove anything since the checkpoint counted.
    """
    store, number = walked.store, fenced.number + 1
    if fenced.hidden is None:
        return False
    data = {item.key: item.size_bytes for item in walked.found if item.kind == "data"}
    try:
        listed = retrier.call(lambda: {info.key: info.size_bytes for info in walked.root.list(f"{walked.prefix}data/")})
        if any(listed.get(key) != size_bytes for key, size_bytes in data.items()):
            return False
        check_still_next(store, number, retrier)
        if any(entry.number == fenced.hidden for entry in list_entries(store, retrier)):
            put_fence(store, number, keeps=fenced.hidden, conditional=conditional, retrier=retrier)
        elif fenced.document is not None:
            put_entry(store, number, fenced.document, conditional=conditional, retrier=retrier)
        return read_log(store, retrier).counting is not None
    except (StoreError, CheckpointError):
        return False


def _told(error: _Error, advice: str) -> _Error:
    """Return the error with a longer message."""
    told = copy.copy(error)
    told.args = (error.with_advice(advice),)
    return told
