"""Read and extend the log of a checkpoint: its manifests and fences. The entry with the highest number decides."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from awscrt.checksums import crc32c

from cloudckpt.commit.commit_time import note_commit_time_ns
from cloudckpt.commit.fences import MAX_FENCE_BYTES, Fence, decode_fence, encode_fence, is_fence, new_fence
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ChecksumRefusedError,
    CommitUnknownError,
    CredentialsError,
    InvalidManifestError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    UnsupportedFormatError,
    UnsupportedOperationError,
)
from cloudckpt.format.codec import Summary, decode, decode_summary
from cloudckpt.format.model import Manifest
from cloudckpt.io.retry import Retrier
from cloudckpt.stores.base import ObjectInfo, Store

_T = TypeVar("_T")

MANIFEST_PREFIX = "manifest"
TORCH_METADATA_KEY = ".metadata"
MOST_LOOKS = 16
"""The number of looks after which `look_until_stable` gives up."""
MAX_MANIFEST_BYTES = 2**31
_FREE_BYTES = 64 * 1024 * 1024
"""A manifest of so many bytes is read whatever lies beside it."""
_BYTES_PER_BYTE = 8
_BYTES_PER_OBJECT = 128 * 1024 * 1024
"""One byte of a data object's header takes at most eight in a manifest; an object has 100,000 entries."""
_MOST_NAMED = 5
_MOST_LOOKED_AT = 20
_LOAD_AN_OLDER_ONE = "Load an older checkpoint (cloudckpt ls ROOT lists them)"
_BEGINNING = b'{"format":"cloudckpt'
"""The first bytes of every entry that cloudckpt writes, manifest or fence."""
_MANIFEST = re.compile(r"manifest(?:\.([1-9][0-9]{0,17}))?\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a checkpoint's log, as a listing shows it: a manifest or a fence."""

    number: int
    size_bytes: int
    modified_at: datetime

    @property
    def is_fence(self) -> bool:
        """True if the entry is as small as a fence. Only its content tells for certain."""
        return self.size_bytes <= MAX_FENCE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The entries that there are, lowest number first, and what they amount to."""

    entries: tuple[Entry, ...]
    counting: int | None
    """The number of the manifest that counts; None where there is no checkpoint. It may have vanished."""

    @property
    def top(self) -> int:
        """The highest number there is; -1 where there is none."""
        return self.entries[-1].number if self.entries else -1

    @property
    def counting_entry(self) -> Entry | None:
        """The entry of the manifest that counts; None where there is none, or it was not listed."""
        return next((entry for entry in self.entries if entry.number == self.counting), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A manifest that counts, and its number: 0 for the first save, n for the n-th overwrite."""

    number: int
    manifest: Manifest


def manifest_key(number: int) -> str:
    """The key of the commit of the `number`-th overwrite; 0 is the first save."""
    return f"manifest.{number}.json" if number else "manifest.json"


def manifest_number(key: str) -> int | None:
    """The reverse of `manifest_key`; None for a key that is no manifest's."""
    match = _MANIFEST.fullmatch(key)
    return int(match.group(1) or 0) if match else None


def parse_entry(key: str, info: ObjectInfo) -> Entry | None:
    """The entry at `key`, seen from the checkpoint; None for a key that is no entry's."""
    number = manifest_number(key)
    if number is None:
        return None
    return Entry(number=number, size_bytes=info.size_bytes, modified_at=info.modified_at)


def look_until_stable(look: Callable[[], tuple[_T, Hashable]], *, changing: Callable[[], CheckpointChangedError]) -> _T:
    """Return the result of `look` once nothing is missing in it, or the same is missing twice in a row.

    `look` returns a result and what it misses, which is falsy where that is nothing. One look takes its time. A job can
    meanwhile commit what was not listed yet and remove what was, and a directory that changes is not read atomically.
    So absence is believed from two equal looks alone. Raises what `changing` makes where no two looks agree.
    """
    before: Hashable = None
    for _ in range(MOST_LOOKS):
        found, missing = look()
        if not missing or missing == before:
            return found
        before = missing
    raise changing()


def list_folders(store: Store, retrier: Retrier) -> list[str]:
    """Return the names of the folders directly in `store`, as two listings in a row have them."""

    def look() -> tuple[list[str], Hashable]:
        names = sorted(retrier.collect(store.list_directories))
        return names, ("folders", *names)

    return look_until_stable(look, changing=lambda: _changing(store))


def list_entries(store: Store, retrier: Retrier) -> tuple[Entry, ...]:
    """All entries there are, lowest first. Two listings in a row are empty where it returns none."""

    def look() -> tuple[tuple[Entry, ...], Hashable]:
        entries = _listed(store, retrier, "")
        return entries, None if entries else ("no entry",)

    return look_until_stable(look, changing=lambda: _changing(store))


def _listed(store: Store, retrier: Retrier, prefix: str) -> tuple[Entry, ...]:
    infos = retrier.collect(store.list, prefix + MANIFEST_PREFIX)
    found = (parse_entry(info.key.removeprefix(prefix), info) for info in infos)
    return tuple(sorted((entry for entry in found if entry is not None), key=lambda entry: entry.number))


def read_log(
    store: Store, retrier: Retrier, *, prefix: str = "", is_confirmed: bool = True, is_lenient: bool = False
) -> Log:
    """Return the log and what counts in it. Only what looks like a fence is opened; raises what the decoders raise.

    `prefix` is that of the checkpoint's keys in `store`. That nothing counts is believed from two equal looks alone;
    without `is_confirmed` from one, for a caller that looks again itself, or creates only what is absent. With
    `is_lenient` the highest manifest below a fence that cannot be read counts. If there is none, the fence counts: it
    may be a manifest that was cut, and opening it tells what is wrong. Raises `CheckpointChangedError` where fences
    vanish again and again between the listing and the read.
    """

    def look() -> tuple[_Look, Hashable]:
        found = _look(store, retrier, prefix=prefix, opens=False, is_lenient=is_lenient)
        is_none = found.log.counting is None and is_confirmed
        return found, found.log if is_none or found.has_vanished else None

    found = look_until_stable(look, changing=lambda: _changing(store, prefix))
    if found.has_vanished and not is_lenient:
        raise _changing(store, prefix)
    return _without_fence(found.log) if found.has_vanished else found.log


def read_counting(store: Store, retrier: Retrier) -> tuple[Log, Manifest | None]:
    """Return the log, and the manifest that counts in it; None where two looks in a row find none.

    A manifest that a fence keeps is none if it is not listed: it was removed by other means than cloudckpt's. Raises
    what the decoders raise, and `CheckpointChangedError` if it is listed and not found. A manifest that vanishes
    between being listed and being read has been superseded or removed, so the listing is made once more.
    """

    def look() -> tuple[_Look, Hashable]:
        found = _look(store, retrier, prefix="", opens=True, is_lenient=False)
        return found, None if found.manifest is not None else found.log

    found = look_until_stable(look, changing=lambda: _changing(store))
    if found.manifest is None and found.log.counting_entry is not None:
        raise _changing(store)
    return found.log, found.manifest


def resolve(store: Store, retrier: Retrier) -> Resolved:
    """Return the manifest that counts.

    Raises `CheckpointNotFoundError` if there is none, and what `read_counting` raises.
    """
    log, manifest = read_counting(store, retrier)
    if log.counting is None:
        raise _not_found(store, retrier, was_fenced=bool(log.entries))
    if manifest is None:
        raise CheckpointNotFoundError(
            f"the checkpoint at {store.uri} is gone: {manifest_key(log.counting)} was removed by other means than "
            f"cloudckpt's. {_LOAD_AN_OLDER_ONE}",
            uri=store.uri,
        )
    return Resolved(number=log.counting, manifest=manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    log: Log
    manifest: Manifest | None = None
    """The manifest that counts, where it was read."""
    has_vanished: bool = False
    """An entry that was listed was not there when it was read."""


def _look(store: Store, retrier: Retrier, *, prefix: str, opens: bool, is_lenient: bool) -> _Look:
    """One look at a log; with `opens` at the manifest that counts, too.

    A size in a listing may be wrong, so that what is read says whether an entry is a fence.
    """
    entries = _listed(store, retrier, prefix)
    if not entries:
        return _Look(log=Log(entries=(), counting=None))
    top = entries[-1]
    if not opens and not top.is_fence:
        return _Look(log=Log(entries=entries, counting=top.number))
    try:
        found = read_entry(store, top.number, retrier, prefix=prefix)
    except (InvalidManifestError, UnsupportedFormatError):
        if not is_lenient:
            raise
        return _Look(log=_without_fence(Log(entries=entries, counting=top.number)))
    if not isinstance(found, Fence):
        return _Look(log=Log(entries=entries, counting=top.number), manifest=found, has_vanished=found is None)
    log = Log(entries=entries, counting=found.keeps)
    if found.keeps is None or not opens:
        return _Look(log=log)
    kept = read_entry(store, found.keeps, retrier, prefix=prefix)
    manifest = None if isinstance(kept, Fence) else kept
    return _Look(log=log, manifest=manifest, has_vanished=manifest is None)


def _without_fence(log: Log) -> Log:
    """Return the log as it counts if its highest entry, which looks like a fence, cannot be read."""
    below = [entry.number for entry in log.entries if not entry.is_fence]
    return Log(entries=log.entries, counting=max(below, default=log.top))


def read_entry(store: Store, number: int, retrier: Retrier, *, prefix: str = "") -> Manifest | Fence | None:
    """The entry with that number, or None where there is none (any more). Raises what the decoders raise.

    Damage is believed only where several reads in a row find it: it may have come about on the way.
    """
    return retrier.confirm(lambda: _read_once(store, number, retrier, prefix), InvalidManifestError)


def _read_once(store: Store, number: int, retrier: Retrier, prefix: str) -> Manifest | Fence | None:
    try:
        document = read_document(store, number, retrier, prefix=prefix)
    except ObjectNotFoundError:
        return None
    uri = store.url(prefix + manifest_key(number))
    if is_fence(document):
        return decode_fence(document, number=number, uri=uri)
    manifest = decode(document, uri=uri)
    note_commit_time_ns(manifest.committed_at_ns, url=uri)
    return manifest


def read_document(store: Store, number: int, retrier: Retrier, *, prefix: str = "") -> bytes:
    """The bytes of the entry with that number.

    One that is larger than a manifest can be is refused before it is read: raises `InvalidManifestError`. Raises
    `ObjectNotFoundError` where there is none.
    """
    key = prefix + manifest_key(number)
    try:
        return retrier.call(store.read, key, max_bytes=_FREE_BYTES)
    except StoreError as error:
        # Stores have no class of their own for what is too large.
        if type(error) is not StoreError:
            raise
        size_bytes = retrier.call(store.head, key).size_bytes
        if size_bytes <= _FREE_BYTES:
            raise
    data = retrier.collect(store.list, f"{prefix}data/")
    max_bytes = max_manifest_bytes(info.size_bytes for info in data)
    if size_bytes > max_bytes:
        raise InvalidManifestError(
            f"{store.url(key)} has {size_bytes} bytes, and a manifest of the {len(data)} data objects beside it has at "
            f"most {max_bytes}. It is damaged, or no manifest, and was not read. Load another checkpoint",
            uri=store.url(key),
        )
    return retrier.call(store.read, key, max_bytes=max_bytes)


def max_manifest_bytes(object_sizes_bytes: Iterable[int]) -> int:
    """The size of the largest manifest of data objects of these sizes, which a reader takes memory for."""
    of_objects = (min(_BYTES_PER_BYTE * size_bytes, _BYTES_PER_OBJECT) for size_bytes in object_sizes_bytes)
    return min(_FREE_BYTES + sum(of_objects), MAX_MANIFEST_BYTES)


def read_manifest(store: Store, number: int, retrier: Retrier) -> Manifest | None:
    """The manifest with that number, or None where there is none (any more). Raises what `decode` raises.

    A fence is none: the number was freed meanwhile, and a gc that did not know it has put it there.
    """
    found = read_entry(store, number, retrier)
    return None if isinstance(found, Fence) else found


def check_ours(store: Store, entries: Iterable[Entry], retrier: Retrier) -> None:
    """Raises `InvalidManifestError` for an entry that another program wrote, by how it begins."""
    for entry in entries:
        key = manifest_key(entry.number)
        beginning = bytearray(min(entry.size_bytes, len(_BEGINNING)))
        try:
            if beginning:
                retrier.call(store.read_into, key, 0, [memoryview(beginning)])
        except ObjectNotFoundError:
            continue
        if not _BEGINNING.startswith(beginning):
            raise InvalidManifestError(
                f"{store.url(key)} is no cloudckpt checkpoint's: another program wrote it, and no data of a checkpoint "
                "lies beside it. Nothing was written or deleted",
                uri=store.uri,
            )


def holds_torch_checkpoint(store: Store, retrier: Retrier, *, is_confirmed: bool = True) -> bool:
    """Return whether a ``.metadata`` of torch's own writers lies there.

    `is_confirmed` is that of `read_log`.
    """

    def look() -> bool:
        return any(info.key == TORCH_METADATA_KEY for info in store.list(TORCH_METADATA_KEY))

    return retrier.call(look) or (is_confirmed and retrier.call(look))


def holds_rank_checkpoints(store: Store, retrier: Retrier) -> bool:
    """Return True if rank 0 has a checkpoint of its own below `store`, as ``use_collectives=False`` once saved it."""
    return read_log(store, retrier, prefix="rank-0/", is_confirmed=False, is_lenient=True).counting is not None


def _not_found(store: Store, retrier: Retrier, *, was_fenced: bool) -> CheckpointNotFoundError:
    has_data = retrier.call(lambda: next(iter(store.list("data/")), None)) is not None
    if has_data:
        left = "what a deletion or a failed save has left" if was_fenced else "of an unfinished or failed save"
        hint = f"the data there is {left}. {_LOAD_AN_OLDER_ONE}"
    elif was_fenced:
        hint = f"it was deleted, or gc removed a failed save. {_LOAD_AN_OLDER_ONE}"
    elif retrier.call(lambda: next(iter(store.list("rank-0/manifest")), None)) is not None:
        uri = f"{store.uri.rstrip('/')}/rank-0"
        hint = f"each rank has a checkpoint of its own there. Load it by its own URI with no_dist=True, as {uri}"
    elif holds_torch_checkpoint(store, retrier):
        hint = "this is a checkpoint of torch's own writer: convert it with `cloudckpt import --format dcp`"
    else:
        try:
            folders = list_kept_folders(store, retrier)
            is_empty = retrier.call(lambda: next(iter(store.list()), None) is None)
        except StoreError:  # it is a hint, so no failure counts
            hint = "check the URI"
        else:
            hint = _describe_content(store.uri, folders, is_empty=is_empty)
    return CheckpointNotFoundError(f"no checkpoint is committed at {store.uri}: {hint}", uri=store.uri)


def _describe_content(uri: str, folders: Sequence[str], *, is_empty: bool) -> str:
    if folders:
        return f"it has the {describe_folders(folders)}. Name the checkpoint itself: `cloudckpt ls {uri}` lists them"
    if is_empty:
        return "the location is empty. Check the URI, or list the checkpoints with `cloudckpt ls ROOT`"
    return (
        "the location holds other files, or the remains of deleted checkpoints. Check the URI. "
        "`cloudckpt import` makes a checkpoint of files, and `cloudckpt export` writes files to any store"
    )


def list_kept_folders(store: Store, retrier: Retrier) -> list[str]:
    """List folders for `describe_folders`: the last ones by name, without those that hold only the fence of a deletion.

    A run deletes its old checkpoints, so the last names lead to what it has kept.
    """
    kept: list[str] = []
    names = sorted(retrier.collect(store.list_directories), key=_split_numbers, reverse=True)
    for name in names[:_MOST_LOOKED_AT]:
        log = read_log(store, retrier, prefix=f"{name}/", is_confirmed=False, is_lenient=True)
        if log.counting is not None or not log.entries:
            kept.append(name)
        if len(kept) > _MOST_NAMED:
            break
    return kept


def _split_numbers(name: str) -> list[str | int]:
    """Return a key of names by which ``step-9`` comes before ``step-10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def describe_folders(folders: Sequence[str]) -> str:
    """The first few of at least one, in words."""
    more = " and more" if len(folders) > _MOST_NAMED else ""
    return f"{'folder' if len(folders) == 1 else 'folders'} {', '.join(sorted(folders[:_MOST_NAMED]))}{more}"


def _changing(store: Store, prefix: str = "") -> CheckpointChangedError:
    uri = store.url(prefix.rstrip("/"))
    return CheckpointChangedError(
        f"{uri} is being overwritten again and again, or its store lists an entry that it does not find: the "
        "current checkpoint is unknown. Try again",
        uri=uri,
    )


# Errors that say that the object was not written. Any other may have come after it was, unless it says that it did not.
_REFUSALS = (
    AccessDeniedError,
    BucketNotFoundError,
    ChecksumRefusedError,
    CredentialsError,
    ObjectExistsError,
    UnsupportedOperationError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOutcome:
    """The outcome of a put, over all its attempts."""

    error: StoreError | None
    """The error of the last attempt; None if it succeeded."""
    may_have_arrived: bool
    """Some try ended in a way that does not tell. A refusal says nothing of the tries before it."""

    @property
    def is_taken(self) -> bool:
        """True if the key is taken, perhaps by an earlier attempt of this put."""
        return isinstance(self.error, ObjectExistsError)

    @property
    def is_refused(self) -> bool:
        """Every try ended with an answer that nothing was written. It need not be true: a proxy may have given it."""
        return self.error is not None and not (self.is_taken or self.may_have_arrived)


def put_entry(store: Store, number: int, document: bytes, *, conditional: bool, retrier: Retrier) -> PutOutcome:
    """Put `document` as the entry with that number; where `conditional`, only if there is none."""
    key, views, checksum = manifest_key(number), [memoryview(document)], crc32c(document)
    may_have_arrived = False

    def put() -> None:
        nonlocal may_have_arrived
        try:
            store.put(key, views, crc32c=checksum, if_absent=conditional)
        except _REFUSALS:
            raise
        except StoreError as error:
            may_have_arrived = may_have_arrived or not error.had_no_effect
            raise
        except Exception:  # of a `wrap_store`, say: nobody knows what it has done before
            may_have_arrived = True
            raise

    try:
        # On a path, a deletion of the checkpoint takes the hidden file of a put under way for an unfinished upload.
        retrier.confirm(lambda: retrier.call(put), ObjectNotFoundError)
    except StoreError as error:
        return PutOutcome(error=error, may_have_arrived=may_have_arrived)
    return PutOutcome(error=None, may_have_arrived=False)


def put_fence(store: Store, number: int, *, keeps: int | None, conditional: bool, retrier: Retrier) -> bool:
    """Put a fence at `number`. Returns False if another entry has that number, which only `conditional` finds out.

    Raises a `StoreError` if the store refused, and `CommitUnknownError` if it cannot be known: the fence may be there,
    or still appear.
    """
    fence = new_fence(keeps=keeps)
    outcome = put_entry(store, number, encode_fence(fence), conditional=conditional, retrier=retrier)
    if outcome.error is None:
        return True
    try:
        found = read_entry(store, number, retrier) or read_entry(store, number, retrier)
    except StoreError as error:
        raise _unknown(store, number, error) from error
    except CheckpointError:
        found = None
    if isinstance(found, Fence) and found.id == fence.id:
        return True
    if outcome.is_refused:
        raise outcome.error
    if not outcome.is_taken:
        raise _unknown(store, number, outcome.error) from outcome.error
    return False


def _unknown(store: Store, number: int, error: StoreError) -> CommitUnknownError:
    return CommitUnknownError(
        f"{store.url(manifest_key(number))} was sent, but whether it arrived could not be found out: "
        f"{str(error).rstrip('.')}. No data was removed there. Try again when the store answers",
        uri=store.uri,
    )


_LARGE_BYTES = 32 * 1024 * 1024


class SummaryReader:
    """For several threads, which read small manifests at once, and large ones one after the other.

    With `check`, of manifests that say nothing that contradicts itself in any place.
    """

    def __init__(self, retrier: Retrier, *, check: bool = False) -> None:
        self._retrier, self._check = retrier, check
        self._one_large = threading.Lock()

    def read(self, store: Store, entry: Entry) -> Summary | None:
        """Return the summary of a manifest; None if it has vanished. Raises as `decode_summary`."""
        # Large ones are read one after the other: many would take gigabytes together.
        with self._one_large if entry.size_bytes > _LARGE_BYTES else contextlib.nullcontext():
            try:
                return self._retrier.confirm(lambda: self._read(store, entry.number), InvalidManifestError)
            except ObjectNotFoundError:
                return None

    def _read(self, store: Store, number: int) -> Summary | None:
        document, key = read_document(store, number, self._retrier), manifest_key(number)
        if is_fence(document) and len(document) <= MAX_FENCE_BYTES:
            decode_fence(document, number=number, uri=store.url(key))  # one that cannot be read is damage
            return None
        if self._check:
            decode(document, uri=store.url(key))
        return decode_summary(document, uri=store.url(key))
