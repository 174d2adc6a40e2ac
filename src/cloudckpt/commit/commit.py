"""The commit: one conditional put of the manifest, and the checks that it has arrived and is current."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime

from cloudckpt._messages import gc_advice, join_first
from cloudckpt.commit.entries import (
    Fence,
    PutOutcome,
    manifest_key,
    max_manifest_bytes,
    put_entry,
    read_entry,
    read_manifest,
    unknown_error,
)
from cloudckpt.commit.log import Log, list_entries, read_log
from cloudckpt.commit.references import Siblings, find_claimed
from cloudckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    NoConditionalCommitError,
    RemovedObjectsError,
    StoreError,
    UnsupportedValueError,
)
from cloudckpt.format.codec import encode
from cloudckpt.format.model import Manifest
from cloudckpt.io.client import StoreClient

_log = logging.getLogger("cloudckpt")
_ONE_ROOT_PER_JOB = "Nothing of this one is visible. If another job saves here too, give each job a root of its own"
_MAX_SHOWN_PROBLEMS = 3
_KEYS_PER_REQUEST = 1000  # keys that one request of S3 can delete


class OvertakenError(CheckpointExistsError, CommitUnknownError):
    """Another save's commit is current, although this save's manifest was put too, under a lower number.

    If the other commit is deleted, this manifest becomes current. So the data of this save must stay. The save must
    not delete its manifest either: the number can have been freed since then, and a third save can have taken it.
    """


def put_and_check_manifest(
    client: StoreClient,
    manifest: Manifest,
    *,
    number: int,
    conditional: bool,
    sizes_bytes: Sequence[int] | None = None,
) -> None:
    """Make `manifest` the checkpoint, as the commit with `number`. Returns only if it is.

    After a `CommitUnknownError`, the manifest may exist, or may still appear, so its data must stay. After any other
    error, the manifest does not exist, and never will.

    Args:
        client: Client of the checkpoint's location.
        number: The manifest's number in the log, which was free when the save began.
        conditional: Put it only if no entry has this number.
        sizes_bytes: The sizes of its data objects at that location, if it is not that of all its own.

    Raises:
        CheckpointExistsError: Another save's commit is current.
        StoreError: The store refused the put.
        UnsupportedValueError: The manifest is larger than readers accept.
        CommitUnknownError: The outcome cannot be found out.
        OvertakenError: Another save's commit is current, and this manifest exists. It is a `CommitUnknownError`.

    """
    document = encode(manifest)
    sizes_bytes = manifest.own_sizes_bytes if sizes_bytes is None else sizes_bytes
    if len(document) > (max_bytes := max_manifest_bytes(sizes_bytes)):
        raise UnsupportedValueError(
            f"the manifest of {client.uri} takes {len(document)} bytes, and readers take at most {max_bytes} beside "
            f"its {len(sizes_bytes)} data objects. Nothing was committed. Save fewer or shorter names, or less "
            "Options(metadata=…)",
            uri=client.uri,
        )
    outcome = put_entry(client, number, document, conditional=conditional)
    if outcome.error is not None:
        _check_arrived(client, manifest, outcome.error, outcome, number=number)
    try:
        _check_is_current(client, manifest, number=number)
    except CommitUnknownError:
        raise
    except Exception as error:
        raise _unknown_error(client, number, error) from error


def _check_is_current(client: StoreClient, manifest: Manifest, *, number: int) -> None:
    """Check that the store has kept the manifest that it acknowledged, and that no higher entry hides it.

    An overwrite may have freed the number by removing the entry that had it. Then the log already has the overwrite's
    own, higher entry, which was put before the removal. A higher entry can also be a fence of gc that keeps this commit
    current.
    """
    log = read_log(client)
    if log.current_number == number:
        return
    if log.highest_number > number:
        raise _overtaken_error(client, log, number)
    entry = read_entry(client, number)  # a listing may lag
    if isinstance(entry, Manifest) and entry.attempt == manifest.attempt:
        return
    raise _unknown_error(client, number, "the store has acknowledged it, and neither lists it nor returns it")


def _check_arrived(
    client: StoreClient, manifest: Manifest, error: StoreError, outcome: PutOutcome, *, number: int
) -> None:
    """Return if the put has arrived, although its answer was `error`. Otherwise raise the error of the known state.

    No answer alone shows that the put has not arrived: a proxy can answer with a refusal after passing the put on.
    """
    key = manifest_key(number)
    entry, is_absent = _entry_at(client, number)
    if isinstance(entry, Manifest) and entry.attempt == manifest.attempt:
        return
    if outcome.is_refused and (is_absent or entry is not None):
        raise error
    if outcome.is_taken and entry is not None:
        raise (_fenced_error(client, key) if isinstance(entry, Fence) else _lost_error(client, key)) from error
    if outcome.is_taken and (_is_overtaken(client, number) if is_absent else not outcome.may_have_arrived):
        raise _lost_error(client, key) from error
    # An entry that cannot be read may be this very manifest, whose data must stay then.
    raise _unknown_error(client, number, error) from error


def remove_superseded(
    client: StoreClient, manifest: Manifest, *, number: int, on_removing: Callable[[str], None]
) -> None:
    """Remove the entries below `number`, the number of `manifest`, lowest first, and then their data.

    The order matters: at any moment, the highest remaining entry is the newest commit. A failure is logged, and the
    rest left to gc; readers do not notice. `on_removing` gets the first key of each request before the request.
    """
    try:
        log = read_log(client)
        if log.current_number != number:
            return  # overwritten or deleted since: another save's data is there now
        stale = [entry for entry in log.entries if entry.number < number]
        manifests = (_try_to_read(client, entry.number) for entry in stale if not entry.has_fence_size)
        replaced = [superseded for superseded in manifests if superseded is not None]
        keys = sorted(frozenset[str]().union(*(superseded.own_keys for superseded in replaced)) - manifest.own_keys)
        # After the commit: a save whose claim comes later finds that its source was replaced.
        claimed = find_claimed(client) if any(superseded.is_referable for superseded in replaced) else frozenset()
        keys = [key for key in keys if claimed is not None and key not in claimed]
        entries = [manifest_key(entry.number) for entry in stale]
        for batch in (*split_into_batches(entries), *split_into_batches(keys)):
            on_removing(batch[0])
            client.delete(batch)
    except (StoreError, CheckpointError) as error:
        _log.warning(
            "could not remove what %s replaced: %s. %s", client.url(manifest_key(number)), error, gc_advice(client.uri)
        )


def _try_to_read(client: StoreClient, number: int) -> Manifest | None:
    """Return the manifest with that number; None for a fence, or for an entry that cannot be read, which is logged."""
    try:
        return read_manifest(client, number)
    except CheckpointError as error:
        uri = client.url(manifest_key(number))
        _log.warning("cannot tell which data belongs to %s: %s. %s", uri, error, gc_advice(client.uri))
        return None


def _entry_at(client: StoreClient, number: int) -> tuple[Manifest | Fence | None, bool]:
    """Return the entry with that number, and True if it certainly does not exist; None and False if it is damaged."""
    try:
        entry = read_entry(client, number)
    except StoreError as error:
        raise _unknown_error(client, number, error) from error
    except CheckpointError:
        return None, False  # another program's, or damaged since, or on its way
    return entry, entry is None


def _is_overtaken(client: StoreClient, number: int) -> bool:
    """Return True if the log has a higher number: then an overwrite may have removed the entry with `number`."""
    try:
        return read_log(client).highest_number > number
    except (StoreError, CheckpointError) as error:
        raise _unknown_error(client, number, error) from error


def _lost_error(client: StoreClient, key: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"Checkpoint already exists: while this save ran, another one committed {client.url(key)}. {_ONE_ROOT_PER_JOB}",
        uri=client.uri,
    )


def _fenced_error(client: StoreClient, key: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"this save can no longer be committed: gc or a deletion came between, and has put {client.url(key)} where the "
        "commit was to be. Nothing of this save is visible. Save again, and give gc an older_than that is longer than "
        "a save takes",
        uri=client.uri,
    )


def _overtaken_error(client: StoreClient, log: Log, number: int) -> OvertakenError:
    key, above = manifest_key(number), client.url(manifest_key(log.highest_number))
    if log.entries[-1].has_fence_size:
        return OvertakenError(
            f"this save can no longer be committed: gc or a deletion came between, and had put {above} when this save "
            f"put {key}. What this save wrote is invisible, and left to gc. Save again",
            uri=client.uri,
        )
    return OvertakenError(
        f"Checkpoint already exists: while this save put {key}, which is left to gc, another one committed {above}. "
        f"{_ONE_ROOT_PER_JOB}",
        uri=client.uri,
    )


def _unknown_error(client: StoreClient, number: int, why: object) -> CommitUnknownError:
    advice = "Its data was kept. When the store answers, look (cloudckpt ls) before you save there again"
    return unknown_error(client, number, why, advice=advice)


def check_objects_present(siblings: Siblings, manifest: Manifest) -> datetime | None:
    """Return the time of the newest data object of `manifest`, as the store lists it; None if it lists none.

    Raises `RemovedObjectsError` unless each object exists in its folder with its size. Makes one listing for each
    folder, and a HEAD for each object that the listing lacks, since a listing may lag.
    """
    problems: dict[str, str] = {}
    is_of_others = False  # True if an object of another rank than 0 is missing
    newest: datetime | None = None
    for folder in sorted({stored.folder for stored in manifest.objects}):
        wanted = {stored.key: stored.size for stored in manifest.objects if stored.folder == folder}
        missing, modified_at = find_missing(siblings(folder), wanted)
        problems |= missing
        is_of_others |= any(not key.rpartition("/")[2].startswith("0-") for key in missing)
        if not folder:
            newest = modified_at
    cause = "Something"
    if is_of_others and siblings("").store.capabilities.is_near:
        cause = "Do all ranks see the same directory there (a mount that all hosts share)? If so, something"
    raise_if_missing(problems, uri=siblings("").uri, cause=cause)
    return newest


def raise_if_missing(problems: Mapping[str, str], *, uri: str, cause: str = "Something") -> None:
    """Raise `RemovedObjectsError` if `find_missing` has found a problem."""
    if problems:
        raise RemovedObjectsError(
            f"nothing was committed at {uri}: {join_first([*problems.values()], _MAX_SHOWN_PROBLEMS)}. {cause} removed "
            "or replaced what this save wrote or refers to (a gc with a short older_than, a lifecycle rule?): save "
            "again",
            uri=uri,
        )


def find_missing(client: StoreClient, sizes_bytes: Mapping[str, int]) -> tuple[dict[str, str], datetime | None]:
    """Return a problem for each key without an object of its size, and the time of the newest listed object."""
    folders = {key.rpartition("/")[0] + "/" for key in sizes_bytes}
    prefix = folders.pop() if len(folders) == 1 else "data/"
    listed = {info.key: info for info in client.list(prefix) if info.key in sizes_bytes}
    problems = {
        key: problem
        for key, size_bytes in sizes_bytes.items()
        if (key not in listed or listed[key].size_bytes != size_bytes)
        and (problem := _find_problem(client, key, size_bytes))
    }
    return problems, max((info.modified_at for info in listed.values()), default=None)


def find_listed(siblings: Siblings, manifest: Manifest, *, no_later_than: datetime | None = None) -> list[int]:
    """Return the indices of the objects of `manifest` that their folders list, with the size that was saved."""
    sizes_bytes = {
        (folder, info.key): info.size_bytes
        for folder in {stored.folder for stored in manifest.objects}
        for info in siblings(folder).list("data/")
        if no_later_than is None or info.modified_at <= no_later_than
    }
    objects = enumerate(manifest.objects)
    return [index for index, stored in objects if sizes_bytes.get((stored.folder, stored.key)) == stored.size]


def check_still_next(client: StoreClient, number: int) -> None:
    """Raise `CheckpointExistsError` if the entry before `number` is gone: a commit under `number` would not be current.

    The entry before `number` was the highest one when the save began. An overwrite removes it after putting a higher
    entry. gc removes the whole log long after a deletion, so that the numbers begin anew.
    """
    if not number:
        return
    key = manifest_key(number - 1)
    # A service can answer a HEAD wrongly again and again; its listing then shows the entry.
    if client.head(key) is None and all(entry.number != number - 1 for entry in list_entries(client)):
        raise CheckpointExistsError(
            f"this save can no longer be committed: {client.url(key)}, which was there when it began, was replaced or "
            "removed meanwhile. Nothing of this save is visible. Save again",
            uri=client.uri,
        )


def _find_problem(client: StoreClient, key: str, size_bytes: int) -> str:
    info = client.head(key)
    if info is None:
        return f"{client.url(key)} is gone"
    if info.size_bytes != size_bytes:
        return f"{client.url(key)} has {info.size_bytes} bytes, not {size_bytes}"
    return ""


def check_conditional_create(client: StoreClient) -> None:
    """Raise `NoConditionalCommitError` unless the store can create an object only if it is absent."""
    capabilities = client.call(client.store.probe)
    if not capabilities.conditional_create:
        behaviour = capabilities.observed or "this store cannot create an object only if it is absent"
        raise NoConditionalCommitError(
            f"{client.uri}: {behaviour}. So nothing would keep two saves from overwriting each other, and nothing was "
            "written. Use another store, a newer version of this one's server, or, on Ceph, a bucket without "
            "versioning; or accept that with Options(commit='unconditional')",
            uri=client.uri,
        )


def split_into_batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield `keys` in their order, in batches that one request can delete."""
    for begin in range(0, len(keys), _KEYS_PER_REQUEST):
        yield keys[begin : begin + _KEYS_PER_REQUEST]
