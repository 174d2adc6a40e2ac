"""Remove garbage: a fence first, so that data being removed can no longer be committed.

A save fixes its number before it writes any data. So once the log has an entry that came after data was listed, the
save that wrote that data has a number that is taken, or that is not the highest.
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

from cloudckpt.commit.entries import Entry, Fence, check_ours, manifest_key, put_entry, put_fence, read_entry
from cloudckpt.commit.garbage import FoundItem, Inventory, RemovalPlan, attempt_time, plan_removal
from cloudckpt.commit.log import Log, list_entries, read_current, read_log
from cloudckpt.commit.publish import check_still_next, split_into_batches
from cloudckpt.commit.references import Siblings, find_claimed, find_spent
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
from cloudckpt.stores.probe import error_of

_MAX_REFUSALS = 10
"""Number of refusals in a row after which no more keys are tried."""
_NUM_FENCES = 8
_MAX_KEPT_BYTES = 64 * 1024 * 1024
"""The size of the largest manifest that a deletion holds to put it back."""
_NO_OBJECT = "data/.cloudckpt-probe-0000000000000000"
"""A key that no object has."""
_Error = TypeVar("_Error", bound=CloudckptError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkedLocation:
    """One location under a root that was walked."""

    client: StoreClient
    """Rooted at the location."""
    root: StoreClient
    """Rooted at the root: removals are made by it, so that a directory's empty folders are removed, too."""
    prefix: str
    """The prefix of the location's keys under the root; empty, or with a slash at its end."""
    found: Sequence[FoundItem]
    """The items that the walk found there besides the log."""
    siblings: Siblings | None = None
    """Returns the clients of the folders beside the location; None if the root has none, which keeps every claim."""


def walk(client: StoreClient, *, prefixes: Sequence[str] = ("",)) -> Inventory:
    """List the objects and uploads of cloudckpt: one listing of objects and one of uploads for each of `prefixes`.

    An empty result is confirmed. If a service does not list unfinished uploads, `Inventory.unlisted` says why. For
    files that is an error: without its upload, data in use looks like garbage.
    """
    return client.confirm(
        functools.partial(_walk_once, client, prefixes),
        evidence=lambda inventory: not inventory.locations,
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
    """Return the claims at a location, by their keys there, which gc removes. Raises `StoreError`."""
    claims = [
        item.key.removeprefix(walked.prefix)
        for item in walked.found
        if item.kind == "claim" and max(item.moment, attempt_time(item.attempt)) < before
    ]
    if walked.siblings is None or not claims:
        return frozenset()
    return find_spent(walked.siblings, claims, conditional=conditional, is_dry=is_dry)


def plan_collection(
    walked: WalkedLocation, *, before: datetime, is_fenced: bool = False, spent: Collection[str] = ()
) -> tuple[Log, RemovalPlan]:
    """Read a location's log, and plan what may be removed, with the claims in `spent`.

    Raises `CheckpointError` if the current checkpoint there is unknown, or a claim cannot be read.
    """
    plan_with = functools.partial(
        plan_removal, walked.found, location=walked.prefix, before=before, is_fenced=is_fenced
    )
    claims = {item.key.removeprefix(walked.prefix) for item in walked.found if item.kind == "claim"}.difference(spent)
    log = read_log(walked.client)
    # Manifests can be large: none is read if nothing could be removed even without them.
    sketch = plan_with(log.entries, current=log.current_number, references={}, claimed=claims)
    if sketch.is_empty:
        return log, sketch
    log, manifest = read_current(walked.client)
    if manifest is None:  # perhaps another program removed it; a fence still names it
        log = replace(log, current_number=None)
    references = {
        entry.number: _references(walked.client, entry)
        for entry in log.entries
        if entry.number != log.current_number and not entry.has_fence_size
    }
    if log.current_number is not None and manifest is not None:
        references[log.current_number] = manifest.own_keys
    plan = plan_with(log.entries, current=log.current_number, references=references, claimed=claims)
    if not any(item.kind == "data" for item in plan.objects):
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
    """The outcome of `collect` at one location."""

    removed: RemovalPlan
    """The part of the plan that was carried out."""
    young: tuple[FoundItem, ...]
    """See `RemovalPlan.young`."""
    left: dict[str, StoreError]
    """The errors by the keys that could not be removed."""
    num_untried: int
    """The number of further items that were planned and not tried, after these errors."""


def collect(walked: WalkedLocation, *, before: datetime, conditional: bool) -> Removal:
    """Remove a location's garbage.

    May be interrupted at any moment, run again, and run twice at once. Raises what `plan_collection` raises,
    `StoreError`, and `CommitUnknownError` if it is unknown whether a fence was put; nothing was removed then.
    """
    spent = find_spent_claims(walked, before=before, conditional=conditional, is_dry=False)
    log, plan = plan_collection(walked, before=before, spent=spent)
    left: dict[str, StoreError] = {}
    done: set[str] = set()

    def remove(keys: Sequence[str]) -> bool:
        """Return True if all of them are gone."""
        failed, gone = _remove(walked.root, keys)
        left.update(failed)
        done.update(gone)
        return not failed

    if any(item.kind == "data" for item in plan.objects):
        is_fenced = plan.needs_fence and conditional
        top = log.highest_number
        if is_fenced:
            try:
                _check_may_delete(walked, log)
            except StoreError as error:
                # Each run would leave one more fence.
                return _describe(walked, log, plan, done=set(), left={plan.objects[0].key: error})
            # From here on the number is taken, by this fence or another entry.
            put_fence(walked.client, top + 1, keeps=log.current_number, conditional=True)
        log, second = plan_collection(walked, before=before, is_fenced=is_fenced, spent=spent)
        if is_fenced and log.highest_number <= top:
            raise CheckpointChangedError(
                f"{walked.client.url(manifest_key(top + 1))} is not listed, though it was just put: nothing was "
                "removed",
                uri=walked.client.uri,
            )
        # A proxy can answer one of the two reads with another checkpoint's manifest, which names none of the data here.
        agreed = set(plan.objects)
        plan = replace(second, objects=tuple(item for item in second.objects if item in agreed))
    _abort_uploads(walked.root, plan.uploads, done=done, left=left)
    # The data of a manifest that stays must stay too.
    if remove([walked.prefix + manifest_key(entry.number) for entry in plan.entries]):
        remove([item.key for item in plan.objects])
        if plan.lone_fence is not None and not left and _holds_nothing_but(walked.client, plan.lone_fence):
            remove([walked.prefix + manifest_key(plan.lone_fence.number)])
    return _describe(walked, log, plan, done=done, left=left)


def _abort_uploads(
    client: StoreClient, uploads: Sequence[FoundItem], *, done: set[str], left: dict[str, StoreError]
) -> None:
    for upload in uploads:
        failure = error_of(client.abort_multipart, upload.key, upload.upload_id)
        if failure is None:
            done.add(upload.upload_id)
        else:
            left[upload.key] = failure


def _describe(
    walked: WalkedLocation, log: Log, plan: RemovalPlan, *, done: set[str], left: dict[str, StoreError]
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
    num_planned, num_removed = (len(one.uploads) + len(one.entries) + len(one.objects) for one in (plan, removed))
    num_untried = max(0, num_planned - num_removed - len(left)) if left else 0
    return Removal(removed=removed, young=plan.young, left=left, num_untried=num_untried)


def _check_may_delete(walked: WalkedLocation, log: Log) -> None:
    """Raise the store's refusal of harmless deletions, before a fence is put for the others.

    It deletes a key that no object has, since a service checks the permission first; and the fences of earlier removals
    below the highest entry, which have no effect any more.
    """
    walked.root.delete([walked.prefix + _NO_OBJECT])
    spent = [entry.number for entry in log.entries[:-1] if entry.has_fence_size and entry.number != log.current_number]
    for batch in split_into_batches([walked.prefix + manifest_key(number) for number in spent]):
        walked.root.delete(batch)


def _references(client: StoreClient, entry: Entry) -> frozenset[str]:
    """Return the keys that a superseded manifest names; none if it cannot be read."""
    try:
        content = read_entry(client, entry.number)
    except CheckpointError:
        return frozenset()
    if content is None or isinstance(content, Fence):
        return frozenset()
    return content.own_keys


def _holds_nothing_but(client: StoreClient, fence: Entry) -> bool:
    """Return True if the fence is the only object at the location, and no upload is under way."""
    if [entry.number for entry in list_entries(client)] != [fence.number]:
        return False
    return not client.list("data/", most=1) and not client.list_uploads("data/", most=1)


def _remove(client: StoreClient, keys: Sequence[str]) -> tuple[dict[str, StoreError], list[str]]:
    """Remove `keys` in their order. Return the errors by key, and the keys that are gone.

    If a request for many keys fails, each of them is removed by a request of its own. After many refusals in a row, the
    keys that follow are not tried, and are in neither result.
    """
    left: dict[str, StoreError] = {}
    gone: list[str] = []
    for batch in split_into_batches(keys):
        if error_of(client.delete, batch) is None:
            gone += batch
            continue
        num_refused = 0
        for key in batch:
            error = error_of(client.delete, [key])
            num_refused = num_refused + 1 if error is not None else 0
            if error is None:
                gone.append(key)
            else:
                left[key] = error
            if num_refused == _MAX_REFUSALS:
                return left, gone
    return left, gone


def group_uploads(client: StoreClient) -> Mapping[str, list[UploadInfo]]:
    """Return the unfinished uploads by directory, with keys relative to it; those of the root itself under ``""``.

    Returns nothing if they may not be listed.
    """
    by_place: defaultdict[str, list[UploadInfo]] = defaultdict(list)
    with contextlib.suppress(StoreError):
        for upload in client.list_uploads():
            name, _, key = upload.key.partition("/")
            if name == "data" or not key:
                by_place[""].append(upload)
            else:
                by_place[name].append(replace(upload, key=key))
    return by_place


def delete_checkpoint(walked: WalkedLocation, *, conditional: bool) -> bool:
    """Remove the checkpoint at this location, and all that saves have written there. Return False if there is none.

    A fence hides the checkpoint at once. Then its objects are removed, except for those that other checkpoints have
    claimed: they are left to gc. If the store refuses to remove the first of them, another entry makes the checkpoint
    current again, and the error says so.

    Raises:
        InvalidManifestError: Another program wrote the manifest.
        CheckpointChangedError: Another save has committed meanwhile. Its checkpoint is untouched.
        CommitUnknownError: It cannot be found out if the fence exists.
        StoreError: The store failed, or refused.

    """
    log = read_log(walked.client, is_lenient=True)
    if log.current_number is None and all(entry.has_fence_size for entry in log.entries):
        return False
    unchanged = "Nothing was deleted, and the checkpoint " + (
        "is as it was before" if log.current_number is None else "can be loaded as before"
    )
    if not any(item.kind == "data" for item in walked.found):  # beside data of cloudckpt, the manifest is damaged
        check_ours(walked.client, log.entries)
    try:
        _check_may_delete(walked, log)
    except StoreError as error:
        raise _with_advice(error, f"{unchanged}. Deletions are refused at {walked.client.uri}") from error
    fenced = _fence_off(walked.client, log, conditional=conditional)
    # Read the claims after the fence: a save that claims later finds the fence.
    claimed = find_claimed(walked.client)
    if any(item.kind == "claim" for item in walked.found) or claimed != frozenset():
        kept = None if claimed is None else {walked.prefix + key for key in claimed}
        walked = replace(walked, found=[item for item in walked.found if _is_free(item, kept)])
    numbers = [entry.number for entry in fenced.log.entries if entry.number < fenced.log.highest_number]
    failure, is_certain = _remove_whole(walked, numbers)
    if failure is None:
        return True
    if is_certain and _put_back(walked, fenced, conditional=conditional):
        raise _with_advice(failure, unchanged) from failure
    hiding = walked.client.url(manifest_key(fenced.number))
    raise _with_advice(
        failure,
        f"The checkpoint was removed in part, or may have been, and can no longer be loaded: {hiding} hides it. When "
        f"the store permits it, delete it again, or run `cloudckpt gc {walked.client.uri}`",
    ) from failure


def _is_free(item: FoundItem, claimed: Collection[str] | None) -> bool:
    return item.kind != "claim" and (item.kind != "data" or (claimed is not None and item.key not in claimed))


def _remove_whole(walked: WalkedLocation, numbers: Sequence[int]) -> tuple[StoreError | None, bool]:
    """Remove the entries of `numbers` and all found by the walk. Return the error that ended it, and if it is certain.

    It is certain if the store has refused each request that failed. Another failed request may still be carried out.
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
            sorted(item.key for item in walked.found if item.kind == "data"),
        ):
            for batch in split_into_batches(keys):
                walked.root.call(delete, batch)
        for item in walked.found:
            if item.kind == "upload":
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
    """That manifest; None if it is large or could not be read."""


def _fence_off(client: StoreClient, log: Log, *, conditional: bool) -> _DeletionFence:
    """Put a fence above all entries of the log, so that no manifest is current.

    It does not rely on the fence of another deletion, which may be taken back. Unless `conditional`, the fence can
    replace the manifest of a save that commits at the same moment, and that manifest can replace the fence.
    """
    counted = log.current_number
    document: bytes | None = None
    if counted is not None:
        with contextlib.suppress(StoreError):
            document = client.read(manifest_key(counted), max_bytes=_MAX_KEPT_BYTES)
    for _ in range(_NUM_FENCES):
        below = log
        has_laid = put_fence(client, log.highest_number + 1, keeps=None, conditional=conditional)
        log = read_log(client)
        if has_laid and log.current_number is None:
            number, hidden = below.highest_number + 1, below.current_number
            return _DeletionFence(log=log, number=number, hidden=hidden, document=document)
        if log.current_number is not None and (has_laid or log.current_number != counted):
            raise CheckpointChangedError(
                f"{client.uri} was overwritten while it was being deleted. The commit of another save there is "
                "untouched: delete it, too, if you do not need it",
                uri=client.uri,
            )
        # The number has a fence of gc, which keeps the checkpoint current, or one of another deletion.
    raise CheckpointChangedError(f"{client.uri} changes all the time: it was not deleted. Try again", uri=client.uri)


def _put_back(walked: WalkedLocation, fenced: _DeletionFence, *, conditional: bool) -> bool:
    """Make a checkpoint current again that a deletion has hidden, and could not remove. Return True if it is.

    It does so only if all data of the checkpoint exists. It puts the entry directly above the deletion's own fence, and
    only if that number is free. If it is, no other process has begun to remove the checkpoint since.
    """
    client, number = walked.client, fenced.number + 1
    if fenced.hidden is None:
        return False
    data = {item.key: item.size_bytes for item in walked.found if item.kind == "data"}
    try:
        listed = {info.key: info.size_bytes for info in walked.root.list(f"{walked.prefix}data/")}
        if any(listed.get(key) != size_bytes for key, size_bytes in data.items()):
            return False
        check_still_next(client, number)
        if any(entry.number == fenced.hidden for entry in list_entries(client)):
            put_fence(client, number, keeps=fenced.hidden, conditional=conditional)
        elif fenced.document is not None:
            put_entry(client, number, fenced.document, conditional=conditional)
        return read_log(client).current_number is not None
    except (StoreError, CheckpointError):
        return False


def _with_advice(error: _Error, advice: str) -> _Error:
    """Return the error with a longer message."""
    longer = copy.copy(error)
    longer.args = (error.with_advice(advice),)
    return longer
