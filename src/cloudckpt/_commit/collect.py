"""Removing garbage: a fence first, so that nothing that goes can be committed any more.

A save fixes its number before it writes any data. So once the log has an entry that it did not have when some data was
listed, whoever wrote that data has a number that is taken, or decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from cloudckpt._commit.batches import batches
from cloudckpt._commit.fence import Fence
from cloudckpt._commit.garbage import Found, Inventory, Plan, plan_removal
from cloudckpt._commit.put import lay_fence
from cloudckpt._commit.resolve import (
    Entry,
    Log,
    list_entries,
    manifest_key,
    ranks_of,
    read_entry,
    read_log,
    read_manifest,
    settle,
)
from cloudckpt._commit.uploads import noting
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    StoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores.base import Store, UploadInfo

_MOST_REFUSALS = 10
"""In a row: then nothing there can be removed."""
_PARTS = ("manifest", "data/", "rank-")
"""The beginnings of the keys of a checkpoint, and of those of ranks that saved on their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One location under a root that was walked."""

    store: Store
    """Rooted at the location."""
    root: Store
    """Rooted at the root: removals go through it, so that a directory's empty folders go too."""
    prefix: str
    """Of the location's keys, seen from the root; empty, or with a slash at its end."""
    found: Sequence[Found]
    """What lay there besides the log, when it was walked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Something that could not be removed."""

    key: str
    """Seen from the root that was walked."""
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a location's log says, and what may go for it."""

    log: Log
    plan: Plan


def walk(
    store: Store,
    retrier: Retrier,
    *,
    prefixes: Sequence[str] = ("",),
    has_hidden_uploads: bool,
    on_unlisted: Callable[[StoreError], None] | None,
) -> Inventory:
    """What cloudckpt wrote under `store`, from one listing of objects and one of uploads for each of `prefixes`.

    `on_unlisted` is told why unfinished uploads could not be listed; without it, that is an error as any other, and so
    is a folder that could not be looked into. With it, the inventory has these folders as `Inventory.unlisted`.
    """
    inventory = retrier.call(lambda: _objects(store, prefixes, has_hidden_uploads=has_hidden_uploads))
    try:
        found, unlisted = retrier.call(lambda: _uploads(store, prefixes))
        for upload in found:
            inventory.add_upload(upload)
        inventory.unlisted.update(unlisted)
    except UnsupportedOperationError:
        pass  # then none can be open
    except StoreError as error:
        if on_unlisted is None:
            raise
        on_unlisted(error)
    for prefix, denied in inventory.unlisted.items():
        if on_unlisted is None or not prefix:
            raise denied
    return inventory


def walk_checkpoint(store: Store, retrier: Retrier, *, has_hidden_uploads: bool) -> tuple[Inventory, list[str]]:
    """Return what cloudckpt wrote at `store`, a checkpoint's, and the prefixes of its log and of those of its ranks.

    A listing of the folders has to have the same ranks, or two walks in a row: else one listing that lacks a rank would
    leave that rank's part behind. Raises what `walk` raises, and `CheckpointChangedError`.
    """

    def look() -> tuple[Inventory, Hashable]:
        inventory = walk(store, retrier, prefixes=_PARTS, has_hidden_uploads=has_hidden_uploads, on_unlisted=None)
        walked = tuple(ranks_of(prefix.removesuffix("/") for prefix in inventory.locations))
        listed = tuple(ranks_of(retrier.call(lambda: list(store.list_directories()))))
        return inventory, None if inventory.locations and walked == listed else ("ranks", walked, listed)

    inventory = settle(
        look, changing=lambda: CheckpointChangedError(f"what lies at {store.uri} changes all the time", uri=store.uri)
    )
    ranks = ranks_of(prefix.removesuffix("/") for prefix in inventory.locations)
    own = {"", *(f"rank-{rank}/" for rank in ranks)}
    return inventory, [prefix for prefix in inventory.locations if prefix in own]


def _objects(store: Store, prefixes: Sequence[str], *, has_hidden_uploads: bool) -> Inventory:
    inventory = Inventory(has_hidden_uploads=has_hidden_uploads)
    for prefix in prefixes:
        with noting(inventory.unlisted):
            for info in store.list(prefix):
                inventory.add_object(info)
    return inventory


def _uploads(store: Store, prefixes: Sequence[str]) -> tuple[list[UploadInfo], dict[str, StoreError]]:
    found, unlisted = list[UploadInfo](), dict[str, StoreError]()
    for prefix in prefixes:
        with noting(unlisted):
            found.extend(store.list_uploads(prefix))  # by what there is before an error
    return found, unlisted


def judge(place: Place, retrier: Retrier, *, before: datetime, is_fenced: bool = False) -> Judgement:
    """What may go at a location, by its log as it is now.

    Raises `CheckpointError` where it cannot be told what counts there.
    """
    gone: int | None = None
    for _ in range(2):
        log = read_log(place.store, retrier)
        counting = log.counting
        if counting is not None and counting == gone and all(entry.number != counting for entry in log.entries):
            counting = None  # removed by other means than ours, while a fence keeps it
        # Manifests can be large: none is read where nothing would go even if they named nothing.
        sketch = _plan(place, log, counting, {}, before=before, is_fenced=is_fenced)
        if sketch.is_empty:
            return Judgement(log=log, plan=sketch)
        references: dict[int, frozenset[str]] = {}
        if counting is not None:
            manifest = read_manifest(place.store, counting, retrier)
            if manifest is None:
                gone = counting
                continue
            references[counting] = frozenset(stored.key for stored in manifest.objects)
        for entry in log.entries:
            if entry.number != counting and not entry.is_fence:
                references[entry.number] = _references(place.store, entry, retrier)
        plan = _plan(place, log, counting, references, before=before, is_fenced=is_fenced)
        return Judgement(log=Log(entries=log.entries, counting=counting), plan=plan)
    why = "is being overwritten again and again, or its store lists a manifest that it does not find when it is read"
    raise CheckpointChangedError(f"{place.store.uri} {why}", uri=place.store.uri)


def collect(place: Place, retrier: Retrier, *, before: datetime, conditional: bool) -> tuple[Plan, list[Left]]:
    """Remove a location's garbage: what was to go, and what of it could not be removed.

    May be interrupted at any moment, run again, and run twice at once. Raises what `judge` raises, `StoreError`, and
    `CommitUnknownError` where it is not known whether a fence was laid; nothing was removed then.
    """
    judged = judge(place, retrier, before=before)
    plan, left = judged.plan, list[Left]()
    if any(item.kind == "data" for item in plan.objects):
        is_fenced = plan.needs_fence and conditional
        top = judged.log.top
        if is_fenced:
            # Whether the number was free does not matter: from here on it is taken.
            lay_fence(place.store, top + 1, keeps=judged.log.counting, retrier=retrier)
        judged = judge(place, retrier, before=before, is_fenced=is_fenced)
        if is_fenced and judged.log.top <= top:
            raise CheckpointChangedError(
                f"{place.store.url(manifest_key(top + 1))} is not listed, though it was just put: nothing was removed",
                uri=place.store.uri,
            )
        # A proxy can answer one of the two reads with another checkpoint's manifest, which names none of the data here.
        agreed = set(plan.objects)
        plan = replace(judged.plan, objects=tuple(item for item in judged.plan.objects if item in agreed))
    for upload in plan.uploads:
        left += _abort(place.root, upload, retrier)
    left_of_log = _remove(place.root, [place.prefix + manifest_key(entry.number) for entry in plan.entries], retrier)
    if left_of_log:  # a manifest stays: so must its data
        return plan, left + left_of_log
    left += _remove(place.root, [item.key for item in plan.objects], retrier)
    if plan.lone_fence is not None and not left and _is_alone(place.store, plan.lone_fence, retrier):
        left += _remove(place.root, [place.prefix + manifest_key(plan.lone_fence.number)], retrier)
    return plan, left


def _plan(
    place: Place,
    log: Log,
    counting: int | None,
    references: dict[int, frozenset[str]],
    *,
    before: datetime,
    is_fenced: bool,
) -> Plan:
    return plan_removal(
        place.found,
        log.entries,
        location=place.prefix,
        counting=counting,
        references=references,
        before=before,
        is_fenced=is_fenced,
    )


def _references(store: Store, entry: Entry, retrier: Retrier) -> frozenset[str]:
    """Of a manifest that no longer counts; none where it cannot be read."""
    try:
        found = read_entry(store, entry.number, retrier)
    except CheckpointError:
        return frozenset()
    if found is None or isinstance(found, Fence):
        return frozenset()
    return frozenset(stored.key for stored in found.objects)


def _is_alone(store: Store, fence: Entry, retrier: Retrier) -> bool:
    """Whether nothing but the fence lies there, nor any save under way."""
    if [entry.number for entry in list_entries(store, retrier)] != [fence.number]:
        return False
    return retrier.call(
        lambda: next(iter(store.list("data/")), None) is None and next(iter(store.list_uploads("data/")), None) is None
    )


def _abort(store: Store, upload: Found, retrier: Retrier) -> list[Left]:
    try:
        retrier.call(lambda: store.abort_multipart(upload.key, upload.upload_id))
    except StoreError as error:
        return [Left(key=upload.key, error=error)]
    return []


def _remove(store: Store, keys: Sequence[str], retrier: Retrier) -> list[Left]:
    """Remove `keys` in their order; where a request fails, its keys one by one."""
    left: list[Left] = []
    for batch in batches(keys):
        if _delete(store, batch, retrier) is None:
            continue
        num_refused = 0
        for key in batch:
            error = _delete(store, [key], retrier)
            num_refused = num_refused + 1 if error is not None else 0
            if error is not None:
                left.append(Left(key=key, error=error))
            if num_refused == _MOST_REFUSALS:
                return left
    return left


def _delete(store: Store, keys: Sequence[str], retrier: Retrier) -> StoreError | None:
    try:
        retrier.call(lambda: store.delete(keys))
    except StoreError as error:
        return error
    return None
