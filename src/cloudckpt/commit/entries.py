"""The entries of a checkpoint's log, manifests and fences: their keys, and how to read and put them."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import msgspec
from awscrt.checksums import crc32c

from cloudckpt._clock import LATEST_COMMIT_TIME_NS, datetime_of, note_commit_time_ns, ns_of
from cloudckpt._version import __version__
from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CheckpointError,
    ChecksumRefusedError,
    CommitUnknownError,
    CredentialsError,
    InvalidManifestError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    UnsupportedFormatError,
    UnsupportedOperationError,
)
from cloudckpt.format.codec import UNDECODABLE, Summary, add_checksum, decode, decode_summary, find_checksums
from cloudckpt.format.model import Manifest
from cloudckpt.io.client import StoreClient
from cloudckpt.stores.base import ObjectInfo, ObjectTooLargeError

MANIFEST_PREFIX = "manifest"
MAX_MANIFEST_BYTES = 2**31
ALWAYS_READ_BYTES = 64 * 1024 * 1024
"""A manifest of at most this size is read, however little data its location has."""
MANIFEST_BYTES_PER_DATA_BYTE = 8
"""The most bytes of a manifest for one byte of a data object's header."""
_MAX_MANIFEST_BYTES_PER_OBJECT = 128 * 1024 * 1024
"""The most bytes of a manifest for one data object, which has at most 100,000 entries."""
_LARGE_BYTES = 32 * 1024 * 1024
_HEAD_BYTES = 256
_BEGINNING = b'{"format":"cloudckpt'
"""The first bytes of every entry that cloudckpt writes, manifest or fence."""
_MANIFEST = re.compile(r"manifest(?:\.([1-9][0-9]{0,17}))?\.json")
# The order of these members is that of `Manifest`.
_HEAD = re.compile(
    rb'\{"format":"cloudckpt","version":\[[12],[0-9]+\],"attempt":"[^"\\]*","created_at":"[^"\\]*",'
    rb'"committed_at_ns":([0-9]{1,19}),'
)
_MAX_VANISHED = 2
# Errors that say that the object was not written. After any other error, the object may exist, unless the error denies
# it.
_NOT_WRITTEN_ERRORS = (
    AccessDeniedError,
    BucketNotFoundError,
    ChecksumRefusedError,
    CredentialsError,
    ObjectExistsError,
    UnsupportedOperationError,
)
MAX_FENCE_BYTES = 128
"""The largest size of a fence. Every manifest is larger. The content decides, since a listed size may be wrong."""
_FENCE_FORMAT = "cloudckpt-fence"
_FENCE_MAJOR = 1
_FENCE_BEGINNING = b'{"format":"%s"' % _FENCE_FORMAT.encode()
_FENCE_ID = re.compile(r"[0-9a-f]{12}")
_TRY_AGAIN = "No data was removed there. Try again when the store answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One entry of a checkpoint's log, as a listing shows it: a manifest or a fence."""

    number: int
    size_bytes: int
    modified_at: datetime

    @property
    def has_fence_size(self) -> bool:
        """True if the entry is as small as a fence. Only its content says for certain if it is one."""
        return self.size_bytes <= MAX_FENCE_BYTES


def manifest_key(number: int) -> str:
    """Return the key of the entry with this number. Entries are manifests and fences; 0 is the first one."""
    return f"manifest.{number}.json" if number else "manifest.json"


def manifest_number(key: str) -> int | None:
    """Return the number of the entry with this key; None for the key of another object."""
    match = _MANIFEST.fullmatch(key)
    return int(match.group(1) or 0) if match else None


def parse_entry(key: str, info: ObjectInfo) -> LogEntry | None:
    """Return the entry at `key`, relative to the checkpoint; None for the key of another object."""
    number = manifest_number(key)
    if number is None:
        return None
    return LogEntry(number=number, size_bytes=info.size_bytes, modified_at=info.modified_at)


def read_entry(client: StoreClient, number: int, *, prefix: str = "") -> Manifest | Fence | None:
    """Return the entry with that number, or None if it does not exist. Absence and damage are confirmed.

    Raises the errors of `decode` and `decode_fence`.
    """
    return client.confirm(lambda: _read_entry_once(client, number, prefix), errors=InvalidManifestError)


def _read_entry_once(client: StoreClient, number: int, prefix: str) -> Manifest | Fence | None:
    document = read_document(client, number, prefix=prefix)
    return None if document is None else _decode_entry(client, number, document, prefix)


def try_to_read_first(client: StoreClient, *, prefix: str = "") -> Manifest | Fence | None:
    """Return entry 0 by a single read. None says nothing: the entry may be absent, damaged or large."""
    try:
        document = client.call(client.store.read, prefix + manifest_key(0), max_bytes=ALWAYS_READ_BYTES)
        return _decode_entry(client, 0, document, prefix)
    except (StoreError, CheckpointError):
        return None


def _decode_entry(client: StoreClient, number: int, document: bytes, prefix: str) -> Manifest | Fence:
    uri = client.url(prefix + manifest_key(number))
    if is_fence(document):
        return decode_fence(document, number=number, uri=uri)
    manifest = decode(document, uri=uri)
    note_commit_time_ns(manifest.committed_at_ns, url=uri)
    return manifest


def read_document(client: StoreClient, number: int, *, prefix: str = "") -> bytes | None:
    """Return the bytes of the entry with that number, or None if there is none.

    Raises `InvalidManifestError` for an entry larger than any manifest of the data there, before reading it.
    """
    key = prefix + manifest_key(number)
    try:
        return client.read(key, max_bytes=ALWAYS_READ_BYTES)
    except ObjectTooLargeError:
        info = client.head(key)
        if info is None or info.size_bytes <= ALWAYS_READ_BYTES:
            raise
    data = client.list(f"{prefix}data/")
    max_bytes = max_manifest_bytes(info.size_bytes for info in data)
    if info.size_bytes > max_bytes:
        raise InvalidManifestError(
            f"{client.url(key)} has {info.size_bytes} bytes, and a manifest of the {len(data)} data objects beside it "
            f"has at most {max_bytes}. It is damaged, or no manifest, and was not read. Load another checkpoint",
            uri=client.url(key),
        )
    return client.read(key, max_bytes=max_bytes)


def max_manifest_bytes(object_sizes_bytes: Iterable[int]) -> int:
    """Return the size of the largest manifest that readers accept for data objects of these sizes."""
    total_bytes = ALWAYS_READ_BYTES
    for size_bytes in object_sizes_bytes:
        total_bytes += min(MANIFEST_BYTES_PER_DATA_BYTE * size_bytes, _MAX_MANIFEST_BYTES_PER_OBJECT)
    return min(total_bytes, MAX_MANIFEST_BYTES)


def read_manifest(client: StoreClient, number: int, *, prefix: str = "") -> Manifest | None:
    """Return the manifest with that number, or None if it does not exist. Raises the errors of `read_entry`.

    Also returns None for a fence: the number was freed meanwhile, and a gc has put its fence there.
    """
    entry = read_entry(client, number, prefix=prefix)
    return None if isinstance(entry, Fence) else entry


def refuse_foreign_entries(client: StoreClient, entries: Iterable[LogEntry]) -> None:
    """Raise `InvalidManifestError` for an entry that another program wrote, by its first bytes."""
    for entry in entries:
        key = manifest_key(entry.number)
        beginning = bytearray(min(entry.size_bytes, len(_BEGINNING)))
        try:
            if beginning:
                client.call(client.store.read_into, key, 0, [memoryview(beginning)])
        except ObjectNotFoundError:
            continue
        if not _BEGINNING.startswith(beginning):
            raise InvalidManifestError(
                f"{client.url(key)} is no cloudckpt checkpoint's: another program wrote it, and no data of a "
                "checkpoint is beside it. Nothing was written or deleted",
                uri=client.uri,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOutcome:
    """The outcome of a put, over all its attempts."""

    error: StoreError | None
    """The error of the last attempt; None if it succeeded."""
    may_have_arrived: bool
    """True if the outcome of some attempt is unknown. A later refusal does not settle it."""

    @property
    def is_taken(self) -> bool:
        """True if the key is taken, perhaps by an earlier attempt of this put."""
        return isinstance(self.error, ObjectExistsError)

    @property
    def is_refused(self) -> bool:
        """True if each attempt was refused. The refusal may be wrong, since a proxy can have answered."""
        return self.error is not None and not (self.is_taken or self.may_have_arrived)


def put_entry(client: StoreClient, number: int, document: bytes, *, conditional: bool) -> PutOutcome:
    """Put `document` as the entry with that number; with `conditional`, only if no entry has it."""
    key, views, checksum = manifest_key(number), [memoryview(document)], crc32c(document)
    may_have_arrived = False

    def put() -> None:
        nonlocal may_have_arrived
        try:
            client.store.put(key, views, crc32c=checksum, if_absent=conditional)
        except _NOT_WRITTEN_ERRORS:
            raise
        except StoreError as error:
            may_have_arrived = may_have_arrived or not error.had_no_effect
            raise
        except Exception:  # such as an error of a `wrap_store`, which may have written before
            may_have_arrived = True
            raise

    try:
        # On a file system, a concurrent delete mistakes this put's temporary file for an unfinished upload.
        client.confirm(lambda: client.call(put), errors=ObjectNotFoundError)
    except StoreError as error:
        return PutOutcome(error=error, may_have_arrived=may_have_arrived)
    return PutOutcome(error=None, may_have_arrived=False)


def put_fence(client: StoreClient, number: int, *, keeps: int | None, conditional: bool) -> bool:
    """Put a fence at `number`. Returns False if another entry has that number, which only `conditional` finds out.

    Raises a `StoreError` if the store refused, and `CommitUnknownError` if the outcome is unknown: the fence may exist,
    or still appear.
    """
    fence = new_fence(keeps=keeps)
    outcome = put_entry(client, number, encode_fence(fence), conditional=conditional)
    if outcome.error is None:
        return True
    try:
        entry = read_entry(client, number)
    except StoreError as error:
        raise unknown_error(client, number, error, advice=_TRY_AGAIN) from error
    except CheckpointError:
        entry = None
    if isinstance(entry, Fence) and entry.id == fence.id:
        return True
    if outcome.is_refused:
        raise outcome.error
    if not outcome.is_taken:
        raise unknown_error(client, number, outcome.error, advice=_TRY_AGAIN) from outcome.error
    return False


def unknown_error(client: StoreClient, number: int, why: object, *, advice: str) -> CommitUnknownError:
    """Return the error about an entry that was sent, and may have arrived."""
    return CommitUnknownError(
        f"{client.url(manifest_key(number))} was sent, and the store did not confirm it: {why}. {advice}",
        uri=client.uri,
    )


class SummaryReader:
    """Reads the summaries of manifests, for several threads: small manifests at once, large ones one after the other.

    With `check`, `read` also validates each whole manifest.
    """

    def __init__(self, *, check: bool = False) -> None:
        self._check = check
        self._large_lock = threading.Lock()

    def read(self, client: StoreClient, entry: LogEntry) -> Summary | None:
        """Return the summary of a manifest; None if it has vanished. Raises as `decode_summary`."""
        # Many large manifests would take gigabytes together.
        with self._large_lock if entry.size_bytes > _LARGE_BYTES else contextlib.nullcontext():
            return client.confirm(lambda: self._read(client, entry.number), errors=InvalidManifestError)

    def _read(self, client: StoreClient, number: int) -> Summary | None:
        document, key = read_document(client, number), manifest_key(number)
        if document is None:
            return None
        if is_fence(document) and len(document) <= MAX_FENCE_BYTES:
            decode_fence(document, number=number, uri=client.url(key))  # raises if the fence is damaged
            return None
        if self._check:
            decode(document, uri=client.url(key))
        return decode_summary(document, uri=client.url(key))


class CommitTimes:
    """Reads the times of commits, and remembers them. For several threads."""

    def __init__(self) -> None:
        self._time_by_version: dict[tuple[str, datetime, int], datetime] = {}
        self._num_vanished: Counter[str] = Counter()

    def read(self, client: StoreClient, key: str, entry: LogEntry) -> datetime | None:
        """Return when the manifest at `key` was committed; None if it has vanished, so that the caller looks again.

        Makes one small read. Returns the store's own time for a manifest without a time, with a damaged head, or that
        is listed twice and not found. Returns None for a fence that a listing gave a wrong size. Raises `StoreError` if
        the store refuses the read.
        """
        url = client.url(key)
        version = (url, entry.modified_at, entry.size_bytes)
        committed_at = self._time_by_version.get(version)
        if committed_at is not None:
            return committed_at
        try:
            head = client.confirm(
                lambda: _read_head(client, key, entry.size_bytes),
                errors=(ObjectNotFoundError, _NoHeadError),
            )
        except _NoHeadError:
            # `read_log` has opened an entry of a fence's size. If that entry is current, it cannot be read.
            if not entry.has_fence_size and _is_fence(client, key):
                return None
            head = None
        except ObjectNotFoundError:
            self._num_vanished[url] += 1  # a count that is lost to another thread costs one more look
            if self._num_vanished[url] < _MAX_VANISHED:
                return None
            head = None
        committed_at_ns = None if head is None else _parse_commit_time_ns(head)
        committed_at = entry.modified_at if committed_at_ns is None else datetime_of(committed_at_ns)
        note_commit_time_ns(ns_of(committed_at), url=url)
        if head is not None:
            self._time_by_version[version] = committed_at
        return committed_at


def _parse_commit_time_ns(head: bytes) -> int | None:
    """Return the time in the first bytes of a manifest; None if there is none, or it exceeds the latest time."""
    match = _HEAD.match(head)
    return int(match[1]) if match is not None and int(match[1]) <= LATEST_COMMIT_TIME_NS else None


class _NoHeadError(Exception):
    """The object does not begin as a manifest does, or ends too early."""


def _read_head(client: StoreClient, key: str, size_bytes: int) -> bytes:
    """Return the beginning of a manifest. Raises `_NoHeadError`, and `StoreError`."""
    head = bytearray(min(size_bytes, _HEAD_BYTES))
    try:
        client.call(client.store.read_into, key, 0, [memoryview(head)])
    except ShortObjectError as error:
        raise _NoHeadError from error
    if not head.startswith(_BEGINNING + b'",'):
        raise _NoHeadError
    return bytes(head)


def _is_fence(client: StoreClient, key: str) -> bool:
    try:
        document = client.read(key, max_bytes=MAX_FENCE_BYTES)
    except ObjectTooLargeError:
        return False
    return document is not None and is_fence(document)


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that names the current manifest."""

    format: str
    version: tuple[int, int]
    id: str
    keeps: int | None
    """The number of the manifest that stays current; None if the checkpoint was deleted, or never existed."""


class _FenceHead(msgspec.Struct):
    version: tuple[int, int]


# Made on import, by one thread: two threads that use a type of msgspec for the first time can crash the process.
_FENCE_DECODER = msgspec.json.Decoder(Fence)
_HEAD_DECODER = msgspec.json.Decoder(_FenceHead)


def new_fence(*, keeps: int | None) -> Fence:
    """Return a fence with a new id, by which its writer recognises it."""
    return Fence(format=_FENCE_FORMAT, version=(_FENCE_MAJOR, 0), id=secrets.token_hex(6), keeps=keeps)


def encode_fence(fence: Fence) -> bytes:
    """Return the document: compact JSON whose last member is the CRC32C of all bytes before it."""
    return add_checksum(msgspec.json.encode(fence))


def is_fence(document: bytes) -> bool:
    """Return True if the document begins as a fence does. `decode_fence` checks that it is whole."""
    return document.startswith(_FENCE_BEGINNING)


def decode_fence(document: bytes, *, number: int, uri: str) -> Fence:
    """Return the fence in `document`, which is the entry with that number.

    Raises `InvalidManifestError` if it is damaged, and `UnsupportedFormatError` for a newer major version.
    """
    checksums = find_checksums(document)
    if checksums is None or len(document) > MAX_FENCE_BYTES:
        raise _invalid_fence_error(uri, f"its {len(document)} bytes do not end in a checksum, or are too many")
    recorded, actual = checksums
    if recorded != actual:
        raise _invalid_fence_error(uri, f"its checksum is {actual:08x}, but it was written as {recorded:08x}")
    try:
        major = _HEAD_DECODER.decode(document).version[0]
        if major > _FENCE_MAJOR:
            raise UnsupportedFormatError(
                f"{uri} was written in version {major} of the format of fences; this cloudckpt, {__version__}, reads "
                f"up to {_FENCE_MAJOR}.x. Upgrade cloudckpt to load the checkpoint",
                uri=uri,
            )
        fence = _FENCE_DECODER.decode(document)
    except UNDECODABLE as error:
        raise _invalid_fence_error(uri, str(error)) from error
    if fence.version < (1, 0) or fence.version[1] < 0 or not _FENCE_ID.fullmatch(fence.id):
        raise _invalid_fence_error(uri, f"it has the version {fence.version} and the id {fence.id!r}")
    if fence.keeps is not None and not 0 <= fence.keeps < number:
        raise _invalid_fence_error(uri, f"it keeps the number {fence.keeps}, which does not come before its own")
    return fence


def _invalid_fence_error(uri: str, why: str) -> InvalidManifestError:
    return InvalidManifestError(
        f"{uri} is a damaged fence: {why}. The current checkpoint is unknown: load another one, or restore "
        "the object from a backup",
        uri=uri,
    )
