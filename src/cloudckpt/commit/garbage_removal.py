"""Remove garbage. A fence comes first, so that no save can commit data while it is removed.

A save fixes its number before it writes any data. So once the log has an entry that is newer than a listing of the
data, the number of each save that wrote that data is taken, or is not the highest.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from cloudckpt.commit.commit import check_still_next, split_into_batches
from cloudckpt.commit.entries import (
    LogEntry,
    manifest_key,
    put_entry,
    put_fence,
    read_manifest,
    refuse_foreign_entries,
)
from cloudckpt.commit.garbage_plan import FoundItem, Inventory, RemovalPlan, attempt_time, plan_removal
from cloudckpt.commit.log import Log, list_entries, read_current, read_log
from cloudckpt.commit.references import Siblings, find_claimed, find_spent, parse_claim
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointError,
    CloudckptError,
    InvalidManifestError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.io.client import StoreClient
from cloudckpt.stores.base import UploadInfo
from cloudckpt.stores.probe import try_removal

_MAX_REFUSALS = 10
"""Number of refusals in a row after which no more keys are tried."""
_NUM_FENCES = 8
_MAX_KEPT_BYTES = 64 * 1024 * 1024
"""The size of the largest manifest that a deletion keeps in memory to restore it."""
_NO_OBJECT = "data/.cloudckpt-probe-0000000000000000"
"""A key that no object has."""
_Error = TypeVar("_Error", bound=CloudckptError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkedLocation:
    """One location under a root that was walked."""

    client: StoreClient
    """Rooted at the location."""
    root: StoreClient
    """Rooted at the root. It makes the removals, so that empty folders of a directory are removed, too."""
    prefix: str
    """The prefix of the location's keys under the root; empty, or with a slash at its end."""
    items: Sequence[FoundItem]
    """The items at the location besides the log."""
    siblings: Siblings | None = None
    """Returns the clients of the folders beside the location; None if the root has none, which keeps every claim."""


def walk(client: StoreClient, *, prefixes: Sequence[str] = ("",)) -> Inventory:
    """List the objects and uploads of cloudckpt: one listing of objects and one of uploads for each of `prefixes`.

    An empty result is confirmed. If a service does not list unfinished uploads, `Inventory.unlisted` says why. If a
    store of files does not list them, that is an error: without its upload, data in use looks like garbage.
    """
    return client.confirm(
        functools.partial(_walk_once, client, prefixes),
        unconfirmed=lambda inventory: not inventory.locations,
    )


def _walk_once(client: StoreClient, prefixes: Sequence[str]) -> Inventory:
    has_hidden_uploads = client.store.capabilities.has_hidden_uploads
    inventory = Inventory(has_hidden_uploads=has_hidden_uploads)
    for prefix in prefixes:
        for info in client.list(prefix):
            inventory.add_object(info)
    try:
        for prefix in prefixes:
            for upload in client.list_uploads(prefix):
                inventory.add_upload(upload)
    except UnsupportedOperationError:
        pass  # no upload can be open there
    except StoreError as error:
        if has_hidden_uploads:
            raise
        inventory.unlisted = error
    return inventory


def find_spent_claims(walked: WalkedLocation, *, before: datetime, conditional: bool, is_dry: bool) -> frozenset[str]:
    """Return the keys, relative to the location, of the claims there that gc removes. Raises `StoreError`."""
    claims = [
        item.key.removeprefix(walked.prefix)
        for item in walked.items
        if item.kind == "claim" and max(item.moment, attempt_time(item.attempt)) < before
    ]
    if walked.siblings is None or not claims:
        return frozenset()
    return find_spent(walked.siblings, claims, conditional=conditional, is_dry=is_dry)


def plan_garbage(
    walked: WalkedLocation, *, before: datetime, is_fenced: bool = False, spent: Collection[str] = ()
) -> tuple[Log, RemovalPlan]:
    """Read the log of a location, and plan the removal of its garbage and of the claims in `spent`.

    Raises `CheckpointError` if the current checkpoint there is unknown, or a claim cannot be read.
    """
    plan_with = functools.partial(
        plan_removal, walked.items, location=walked.prefix, before=before, is_fenced=is_fenced
    )
    claims = {item.key.removeprefix(walked.prefix) for item in walked.items if item.kind == "claim"}.difference(spent)
    log = read_log(walked.client)
    # Manifests can be large: read none if nothing could be removed even without them, and no second save wrote there.
    sketch = plan_with(log.entries, current=log.current_number, references={}, claimed=claims)
    is_committed = log.current_number is not None
    if sketch.is_empty and not (is_committed and len({item.attempt for item in walked.items if item.attempt}) > 1):
        return log, replace(sketch, young=() if is_committed else sketch.young)
    log, manifest = read_current(walked.client)
    if manifest is None:  # perhaps another program removed it; a fence still names it
        log = replace(log, current_number=None)
    references = {
        entry.number: _read_own_keys(walked.client, entry)
        for entry in log.entries
        if entry.number != log.current_number and not entry.has_fence_size
    }
    if log.current_number is not None and manifest is not None:
        references[log.current_number] = manifest.own_keys
    plan = plan_with(log.entries, current=log.current_number, references=references, claimed=claims)
    if not any(item.kind == "data" for item in (*plan.objects, *plan.young)):
        return log, plan
    # Read the claims after the log: a save that claims later finds that its source is not current.
    claimed = find_claimed(walked.client, spent=spent)
    if claimed is None:
        raise InvalidManifestError(
            f"a claim under {walked.client.url('data/')} is damaged, so it is not known which data other checkpoints "
            "use there. Nothing was removed",
            uri=walked.client.uri,
        )
    return log, plan_with(log.entries, current=log.current_number, references=references, claimed=claims | claimed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The outcome of `remove_garbage` at one location."""

    removed: RemovalPlan
    """The part of the plan that was carried out."""
    young: tuple[FoundItem, ...]
    """See `RemovalPlan.young`."""
    errors: dict[str, StoreError]
    """The errors by the keys that could not be removed."""
    num_untried: int
    """The number of further items that were planned and not tried, after these errors."""


def remove_garbage(walked: WalkedLocation, *, before: datetime, conditional: bool) -> Removal:
    """Remove a location's garbage.

    May be interrupted at any moment, run again, and run twice at once. Raises the errors of `plan_garbage`,
    `StoreError`, and `CommitUnknownError` if the put of a fence has no known outcome; nothing was removed then.
    """
    spent = find_spent_claims(walked, before=before, conditional=conditional, is_dry=False)
    log, plan = plan_garbage(walked, before=before, spent=spent)
    errors: dict[str, StoreError] = {}
    done: set[str] = set()

    def remove(keys: Sequence[str]) -> bool:
        """Remove `keys`. Return True if all of them are gone."""
        failed, gone = _remove(walked.root, keys)
        errors.update(failed)
        done.update(gone)
        return not failed

    if any(item.kind == "data" for item in plan.objects):
        is_fenced = plan.needs_fence and conditional
        highest_number = log.highest_number
        if is_fenced:
            try:
                _check_may_delete(walked, log)
            except StoreError as error:
                # Each run would leave one more fence.
                return _describe(walked, log, plan, done=set(), errors={plan.objects[0].key: error})
            # From here on the number is taken, by this fence or another entry.
            put_fence(walked.client, highest_number + 1, keeps=log.current_number, conditional=True)
        log, second = plan_garbage(walked, before=before, is_fenced=is_fenced, spent=spent)
        if is_fenced and log.highest_number <= highest_number:
            raise CheckpointChangedError(
                f"{walked.client.url(manifest_key(highest_number + 1))} is not listed, though it was just put: nothing "
                "was removed",
                uri=walked.client.uri,
            )
        # A proxy can answer one of the two reads with another checkpoint's manifest, which names none of the data here.
        agreed = set(plan.objects)
        plan = replace(second, objects=tuple(item for item in second.objects if item in agreed))
    _abort_uploads(walked.root, plan.uploads, done=done, errors=errors)
    # The data of a manifest that stays must stay too.
    if remove([walked.prefix + manifest_key(entry.number) for entry in plan.entries]):
        remove([item.key for item in plan.objects])
        if plan.lone_fence is not None and not errors and _holds_nothing_but(walked.client, plan.lone_fence):
            remove([walked.prefix + manifest_key(plan.lone_fence.number)])
    return _describe(walked, log, plan, done=done, errors=errors)


def _abort_uploads(
    client: StoreClient, uploads: Sequence[FoundItem], *, done: set[str], errors: dict[str, StoreError]
) -> None:
    for upload in uploads:
        failure = try_removal(client.abort_multipart, upload.key, upload.upload_id)
        if failure is None:
            done.add(upload.upload_id)
        else:
            errors[upload.key] = failure


def _describe(
    walked: WalkedLocation, log: Log, plan: RemovalPlan, *, done: set[str], errors: dict[str, StoreError]
) -> Removal:
    """Describe a plan whose keys and ids of uploads in `done` were removed."""
    lone_key = walked.prefix + manifest_key(log.highest_number)
    removed = replace(
        plan,
        uploads=tuple(item for item in plan.uploads if item.upload_id in done),
        entries=tuple(entry for entry in plan.entries if walked.prefix + manifest_key(entry.number) in done),
        objects=tuple(item for item in plan.objects if item.key in done),
        lone_fence=plan.lone_fence if plan.lone_fence is not None and lone_key in done else None,
    )
    num_planned, num_removed = (
        len(planned.uploads) + len(planned.entries) + len(planned.objects) for planned in (plan, removed)
    )
    num_untried = max(0, num_planned - num_removed - len(errors)) if errors else 0
    return Removal(removed=removed, young=plan.young, errors=errors, num_untried=num_untried)


def _check_may_delete(walked: WalkedLocation, log: Log) -> None:
    """Raise the store's refusal of harmless deletions, before a fence is put for the others.

    Deletes a key that no object has, since a service checks the permission first. Also deletes the fences of earlier
    removals below the highest entry, which have no effect any more.
    """
    walked.root.delete([walked.prefix + _NO_OBJECT])
    below = [entry.number for entry in log.entries[:-1] if entry.has_fence_size and entry.number != log.current_number]
    for batch in split_into_batches([walked.prefix + manifest_key(number) for number in below]):
        walked.root.delete(batch)


def _read_own_keys(client: StoreClient, entry: LogEntry) -> frozenset[str]:
    """Return the keys that a superseded manifest names; none if it cannot be read."""
    with contextlib.suppress(CheckpointError):
        manifest = read_manifest(client, entry.number)
        return frozenset() if manifest is None else manifest.own_keys
    return frozenset()


def _holds_nothing_but(client: StoreClient, fence: LogEntry) -> bool:
    """Return True if the fence is the only object at the location, and no upload is under way."""
    if [entry.number for entry in list_entries(client)] != [fence.number]:
        return False
    return not client.list("data/", max_results=1) and not client.list_uploads("data/", max_results=1)


def _remove(client: StoreClient, keys: Sequence[str]) -> tuple[dict[str, StoreError], list[str]]:
    """Remove `keys` in their order. Return the errors by key, and the keys that are gone.

    If a request for many keys fails, each key gets a request of its own. After many refusals in a row, the keys that
    follow are not tried, and are in neither result.
    """
    errors: dict[str, StoreError] = {}
    gone: list[str] = []
    for batch in split_into_batches(keys):
        if try_removal(client.delete, batch) is None:
            gone += batch
            continue
        num_refused = 0
        for key in batch:
            error = try_removal(client.delete, [key])
            num_refused = num_refused + 1 if error is not None else 0
            if error is None:
                gone.append(key)
            else:
                errors[key] = error
            if num_refused == _MAX_REFUSALS:
                return errors, gone
    return errors, gone


def group_uploads(client: StoreClient) -> Mapping[str, list[UploadInfo]]:
    """Return the unfinished uploads by directory, with keys relative to it; uploads of the root itself under ``""``.

    Returns nothing if the store refuses to list uploads.
    """
    by_directory: defaultdict[str, list[UploadInfo]] = defaultdict(list)
    with contextlib.suppress(StoreError):
        for upload in client.list_uploads():
            name, _, key = upload.key.partition("/")
            if name == "data" or not key:
                by_directory[""].append(upload)
            else:
                by_directory[name].append(replace(upload, key=key))
    return by_directory


def delete_checkpoint(walked: WalkedLocation, *, conditional: bool) -> bool:
    """Remove the checkpoint at this location, and all that saves have written there. Return False if there is none.

    A fence hides the checkpoint at once. Then its objects are removed, except for objects that other checkpoints have
    claimed: these are left to gc. If the store refuses to remove the first object, another entry makes the checkpoint
    current again, and the error says so.

    Raises:
        InvalidManifestError: Another program wrote the manifest.
        CheckpointChangedError: Another save has committed meanwhile. Its checkpoint is untouched.
        CommitUnknownError: The put of the fence has no known outcome.
        StoreError: The store failed, or refused.

    """
    log = read_log(walked.client, is_lenient=True)
    if log.current_number is None and all(entry.has_fence_size for entry in log.entries):
        return False
    unchanged = "Nothing was deleted, and the checkpoint " + (
        "is as it was before" if log.current_number is None else "can be loaded as before"
    )
    if not any(item.kind == "data" for item in walked.items):  # beside data of cloudckpt, the manifest is damaged
        refuse_foreign_entries(walked.client, log.entries)
    try:
        _check_may_delete(walked, log)
    except StoreError as error:
        raise _with_advice(error, f"{unchanged}. Deletions are refused at {walked.client.uri}") from error
    fence = _fence_off(walked.client, log, conditional=conditional)
    # Read the claims after the fence: a save that claims later finds the fence.
    claimed = find_claimed(walked.client)
    if any(item.kind == "claim" for item in walked.items) or claimed != frozenset():
        kept = None if claimed is None else {walked.prefix + key for key in claimed}
        walked = replace(walked, items=[item for item in walked.items if _is_free(item, kept)])
    numbers = [entry.number for entry in fence.log.entries if entry.number < fence.log.highest_number]
    failure, is_certain = _remove_whole(walked, numbers)
    if failure is None:
        return True
    if is_certain and _put_back(walked, fence, conditional=conditional):
        raise _with_advice(failure, unchanged) from failure
    hiding = walked.client.url(manifest_key(fence.number))
    raise _with_advice(
        failure,
        f"The checkpoint was removed in part, or may have been, and can no longer be loaded: {hiding} hides it. When "
        f"the store permits it, delete it again, or run `cloudckpt gc {walked.client.uri}`",
    ) from failure


def _is_free(item: FoundItem, claimed: Collection[str] | None) -> bool:
    return item.kind != "claim" and (item.kind != "data" or (claimed is not None and item.key not in claimed))


def _remove_whole(walked: WalkedLocation, numbers: Sequence[int]) -> tuple[StoreError | None, bool]:
    """Remove the entries of `numbers` and all items. Return the error that ended the removal, and if it is certain.

    The error is certain if the store has refused each request that failed. After another failure, the store may still
    carry out the request.
    """
    is_certain = True

    def delete(keys: Sequence[str]) -> None:
        nonlocal is_certain
        try:
            walked.root.store.delete(keys)
        except TransientStoreError:
            is_certain = False
            raise

    try:
        for keys in (
            # Remove the manifests first: after a refusal, `_put_back` can restore a manifest, but no data.
            [walked.prefix + manifest_key(number) for number in numbers],
            sorted(item.key for item in walked.items if item.kind == "data"),
        ):
            for batch in split_into_batches(keys):
                walked.root.call(delete, batch)
        for item in walked.items:
            # Another checkpoint's save is putting its claim, and would fail. It looks for the fence afterwards.
            if item.kind == "upload" and parse_claim(item.key.removeprefix(walked.prefix)) is None:
                walked.root.abort_multipart(item.key, item.upload_id)
    except StoreError as error:
        return error, is_certain
    return None, True


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeletionFence:
    """A deletion's own fence, which hides the manifest that was current."""

    log: Log
    """The log with the fence."""
    number: int
    """The number of the fence."""
    hidden: int | None
    """The number of the manifest that was current directly before; None if there was none, or this is uncertain."""
    document: bytes | None
    """The hidden manifest; None if it is large or could not be read."""


def _fence_off(client: StoreClient, log: Log, *, conditional: bool) -> _DeletionFence:
    """Put a fence above all entries of the log, so that no manifest is current.

    The fence of another deletion does not suffice, since that deletion may take it back. Unless `conditional`, the
    fence can replace the manifest of a save that commits at the same moment, and that manifest can replace the fence.
    """
    current_number = log.current_number
    document: bytes | None = None
    if current_number is not None:
        with contextlib.suppress(StoreError):
            document = client.read(manifest_key(current_number), max_bytes=_MAX_KEPT_BYTES)
    for _ in range(_NUM_FENCES):
        below = log
        has_put = put_fence(client, log.highest_number + 1, keeps=None, conditional=conditional)
        log = read_log(client)
        if has_put and log.current_number is None:
            number, hidden = below.highest_number + 1, below.current_number
            return _DeletionFence(log=log, number=number, hidden=hidden, document=document)
        if log.current_number is not None and (has_put or log.current_number != current_number):
            raise CheckpointChangedError(
                f"{client.uri} was overwritten while it was being deleted. The commit of another save there is "
                "untouched: delete it, too, if you do not need it",
                uri=client.uri,
            )
        # The number has a fence of gc, which keeps the checkpoint current, or one of another deletion.
    raise CheckpointChangedError(f"{client.uri} changes all the time: it was not deleted. Try again", uri=client.uri)


def _put_back(walked: WalkedLocation, fence: _DeletionFence, *, conditional: bool) -> bool:
    """Make a checkpoint current again that a deletion has hidden and could not remove. Return True on success.

    Requires that all data of the checkpoint exists. The new entry comes directly above the deletion's own fence, and
    only if that number is free: then no other process has begun to remove the checkpoint since.
    """
    client, number = walked.client, fence.number + 1
    if fence.hidden is None:
        return False
    data = {item.key: item.size_bytes for item in walked.items if item.kind == "data"}
    try:
        listed = {info.key: info.size_bytes for info in walked.root.list(f"{walked.prefix}data/")}
        if any(listed.get(key) != size_bytes for key, size_bytes in data.items()):
            return False
        check_still_next(client, number)
        if any(entry.number == fence.hidden for entry in list_entries(client)):
            put_fence(client, number, keeps=fence.hidden, conditional=conditional)
        elif fence.document is not None:
            put_entry(client, number, fence.document, conditional=conditional)
        return read_log(client).current_number is not None
    except (StoreError, CheckpointError):
        return False


def _with_advice(error: _Error, advice: str) -> _Error:
    """Return the error with a longer message."""
    longer = copy.copy(error)
    longer.args = (error.with_advice(advice),)
    return longer
