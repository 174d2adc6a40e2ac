"""Checks of a store's behaviour, on small objects that each check writes itself.

`probe_bucket` runs two of them, for endpoints that only speak the protocol of S3 or GCS: create-if-absent, on which a
save depends, and checksums. Some servers accept the condition of a put, and overwrite all the same. `cloudckpt doctor`
runs all checks.

A check is a function of a `Scratch`. It returns a sentence about what works, or raises `CheckFailed`, or `StoreError`
if the store could not be asked.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping

from cloudckpt.errors import (
    AccessDeniedError,
    ChecksumRefusedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.options import MIB
from cloudckpt.stores.base import Capabilities, Part, Store, UploadedPart, crc32c_of

_log = logging.getLogger("cloudckpt")

KEY_PREFIX = ".cloudckpt-probe-"
"""Prefix of every key that a check writes. No manifest, no checkpoint and no data object has such a key."""
_TEXT = b"cloudckpt tried out this store. Nothing needs this object: delete it. ("
_CONTENT = _TEXT + b"first)\n"
_OTHER_CONTENT = _TEXT + b"second, which must not exist)\n"
_DAMAGED_CONTENT = _TEXT + b"damaged, which must not exist)\n"
_MAX_READ_BYTES = 64 * MIB
_NUM_REMOVALS = 2
_UNCONDITIONAL = (
    "Two saves to one URI at the same time can both report success, and one of them is lost. Use another store, or "
    "accept that with Options(commit='unconditional')."
)

FOUND: dict[tuple[str, str], Capabilities] = {}
_locks: dict[tuple[str, str], threading.Lock] = {}
_lock = threading.Lock()


def probe_bucket(store: Store, *, endpoint: str, bucket: str, condition: str) -> Capabilities:
    """Try out the bucket at `endpoint`, once per process, with an object under the root of `store`.

    Makes five or six requests and removes the object. Raises `StoreError` if the store does not answer, and keeps no
    result then: after a `TransientStoreError`, a second try takes a new key. `condition` is the condition that the
    store sends for create-if-absent, for the log.
    """
    with _lock:
        lock = _locks.setdefault((endpoint, bucket), threading.Lock())
    with lock:
        found = FOUND.get((endpoint, bucket))
        if found is None:
            found = _try_out(store, place=f"{endpoint} (bucket {bucket!r})", condition=condition)
            FOUND[endpoint, bucket] = found
    return found


def refuse_if_ignored(store: Store, key: str, *, endpoint: str, bucket: str) -> None:
    """Raise `UnsupportedOperationError` for a conditional put if this process saw the bucket ignore conditions."""
    found = FOUND.get((endpoint, bucket))
    if found is not None and not found.conditional_create:
        problem = f"create-if-absent does not work here: {found.observed}. Use another store."
        raise store.error(UnsupportedOperationError, "put", key, problem)


def _try_out(store: Store, *, place: str, condition: str) -> Capabilities:
    lack, verifies_crc32c = "", False
    scratch = Scratch(store)
    try:
        try:
            check_create_if_absent(scratch, scratch.key)
        except CheckFailed as failure:
            lack = failure.observed
        try:
            check_checksum(scratch, scratch.key)
            verifies_crc32c = True
        except CheckFailed:
            pass
        except StoreError as error:  # no save depends on the check of checksums
            _log.info("%s: could not tell if wrong checksums are refused: %s", store.url(scratch.key), error)
    finally:
        for failure_to_remove in scratch.clean_up():
            # The bucket may be one that objects are only ever added to.
            _log.warning("an object of a few bytes that tried out the store stays: %s", failure_to_remove)
    _log.info(
        "%s: create-if-absent (%s) %s; bytes that do not match their CRC32C are %s",
        place,
        condition,
        f"does not work: it {lack}" if lack else "works",
        "refused" if verifies_crc32c else "accepted",
    )
    return Capabilities(
        conditional_create=not lack,
        multipart=True,
        verifies_crc32c=verifies_crc32c,
        observed=f"{place} {lack}" if lack else "",
    )


class CheckFailed(Exception):  # noqa: N818  # it becomes a finding, not an error
    """A check has found a fault that is no `StoreError`.

    Attributes:
        observed: The fault as a clause. The store is its subject, if it has none.
        advice: The consequence, and what to do about it.

    """

    def __init__(self, observed: str, advice: str) -> None:
        super().__init__(observed)
        self.observed = observed
        self.advice = advice


class Scratch:
    """The objects that checks write to one store. `clean_up` removes them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.key = self.new_key()
        self._keys: dict[str, None] = {}
        self._uploads: list[tuple[str, str]] = []

    def new_key(self) -> str:
        """Draw a key that no object has."""
        return f"{KEY_PREFIX}{secrets.token_hex(8)}"

    def put(self, key: str, content: bytes, *, if_absent: bool = False, damage: int = 0) -> None:
        """Put an object. A `damage` other than 0 makes its checksum wrong."""
        view, was_put = memoryview(content), key in self._keys
        self._keys[key] = None
        try:
            self.store.put(key, [view], crc32c=crc32c_of([view]) ^ damage, if_absent=if_absent)
        except (TransientStoreError, ObjectExistsError):
            raise  # it may have arrived all the same, or a proxy has sent it twice
        except StoreError:
            if not was_put:
                del self._keys[key]
            raise

    def begin_upload(self, key: str) -> str:
        """Begin a multipart upload."""
        self._keys[key] = None
        upload_id = self.store.create_multipart(key)
        self._uploads.append((key, upload_id))
        return upload_id

    def send_part(self, key: str, upload_id: str, number: int, offset_bytes: int, content: memoryview) -> UploadedPart:
        """Upload one part."""
        part = Part(number=number, offset_bytes=offset_bytes, size_bytes=len(content))
        return self.store.upload_part(key, upload_id, part, [content], crc32c=crc32c_of([content]))

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort a multipart upload."""
        self.store.abort_multipart(key, upload_id)
        self._uploads.remove((key, upload_id))

    def complete_upload(self, key: str, upload_id: str, parts: list[UploadedPart]) -> None:
        """Complete a multipart upload."""
        self.store.complete_multipart(key, upload_id, parts)
        self._uploads.remove((key, upload_id))

    def remove(self, key: str) -> None:
        """Remove an object."""
        self.store.delete([key])
        self._keys.pop(key, None)

    def clean_up(self) -> list[str]:
        """Remove all objects and uploads. Returns the text of each failure, which names the object."""
        failures = {
            (key, upload_id): try_removal(self.store.abort_multipart, key, upload_id)
            for key, upload_id in self._uploads
        }
        keys = list(self._keys)
        # Together if the store can, so that an end by Ctrl-C is quick.
        if len(keys) > 1 and try_removal(self.store.delete, keys) is None:
            keys = []
        for key in keys:
            for _ in range(_NUM_REMOVALS):
                failures[key, ""] = error = try_removal(self.store.delete, [key])
                if not isinstance(error, TransientStoreError):
                    break
        return [str(error) for error in failures.values() if error is not None]


def try_removal(remove: Callable[..., None], *arguments: object) -> StoreError | None:
    """Call `remove` with `arguments`. Returns the error of the store; None if it succeeded."""
    try:
        remove(*arguments)
    except StoreError as error:
        return error
    return None


def check_put(scratch: Scratch) -> str:
    """Create `scratch.key`, which later checks read."""
    scratch.put(scratch.key, _CONTENT)
    return "an object was put"


def check_read(scratch: Scratch) -> str:
    """Read an object."""
    content = scratch.store.read(scratch.key, max_bytes=_MAX_READ_BYTES)
    if content != _CONTENT:
        raise CheckFailed(f"returned {len(content)} other bytes than were put", "Do not use this store.")
    return "the object was read as it was put"


def check_range_read(scratch: Scratch) -> str:
    """Read a part of an object."""
    received = bytearray(9)
    scratch.store.read_into(scratch.key, 10, [memoryview(received)])
    if bytes(received) != _CONTENT[10:19]:
        raise CheckFailed(
            "returned other bytes than the range that was asked for",
            "Loads read ranges, and every load would fail here. Look for a proxy that ignores the header Range.",
        )
    return "ranges are read"


def check_head(scratch: Scratch) -> str:
    """Ask for an object's size."""
    size_bytes = scratch.store.head(scratch.key).size_bytes
    if size_bytes != len(_CONTENT):
        raise CheckFailed(f"says that an object of {len(_CONTENT)} bytes has {size_bytes}", "Do not use this store.")
    return "sizes and times are returned"


def check_listing(scratch: Scratch) -> str:
    """List an object right after it was put, and right after it was removed."""
    if not _is_listed(scratch, scratch.key):
        raise CheckFailed(
            "does not list an object that was just put",
            "A checkpoint that was committed can go unseen for a while, and an overwrite can miss what it follows. Use "
            "a store whose listings are up to date.",
        )
    removed = scratch.new_key()
    scratch.put(removed, _CONTENT)
    try:
        scratch.remove(removed)
    except AccessDeniedError:  # the check of deletions says so
        return "an object was listed as soon as it was put"
    if _is_listed(scratch, removed):
        raise CheckFailed(
            "still lists an object that was just removed",
            "Deleted checkpoints can be seen for a while. Use a store whose listings are up to date.",
        )
    return "listings are up to date"


def _is_listed(scratch: Scratch, key: str) -> bool:
    return any(info.key == key for info in scratch.store.list(KEY_PREFIX))


def check_create_if_absent(scratch: Scratch, key: str = "") -> str:
    """Put two objects at one key, each only if absent. The second must be refused and must change nothing."""
    key = key or scratch.new_key()
    try:
        scratch.put(key, _CONTENT, if_absent=True)
    except ObjectExistsError:
        # A proxy sent the request twice; or the store refuses every such put.
        problem = (
            "the store says that an object exists at this key, which was drawn at random for this request. Try again; "
            "if it persists, the store cannot create-if-absent: use another one, or Options(commit='unconditional')."
        )
        raise scratch.store.error(TransientStoreError, "probe", key, problem) from None
    except StoreError as error:
        if not _may_mean_the_condition(error):
            raise
        scratch.put(key, _CONTENT)  # raises if the store refused something else than the condition
        raise CheckFailed(f"refuses the condition: {error}", _UNCONDITIONAL) from None
    try:
        scratch.put(key, _OTHER_CONTENT, if_absent=True)
    except ObjectExistsError:
        _check_that_refusal_changed_nothing(scratch, key)
        return "create-if-absent works"
    except StoreError as error:
        if not _may_mean_the_condition(error):
            raise
        raise CheckFailed(f"does not say that an object exists already: {error}", _UNCONDITIONAL) from None
    raise CheckFailed(
        "ignores the condition: a second create-if-absent at one key succeeded, where 412 was due", _UNCONDITIONAL
    )


def _check_that_refusal_changed_nothing(scratch: Scratch, key: str) -> None:
    try:
        content = scratch.store.read(key, max_bytes=_MAX_READ_BYTES)
    except AccessDeniedError:
        _log.info("%s: could not check that a refused put changes nothing: reading is denied", scratch.store.url(key))
    except ObjectNotFoundError:
        raise CheckFailed(
            "says that it created an object, and does not find it right afterwards", _UNCONDITIONAL
        ) from None
    else:
        if content != _CONTENT:
            raise CheckFailed(
                "says that an object exists already (412), and overwrites it all the same", _UNCONDITIONAL
            )


def _may_mean_the_condition(error: StoreError) -> bool:
    """Return True if the condition can be the reason: a network, permission or bucket error has a class of its own."""
    return type(error) in (StoreError, UnsupportedOperationError)


def check_checksum(scratch: Scratch, key: str = "") -> str:
    """Put bytes that do not match their CRC32C."""
    try:
        scratch.put(key or scratch.new_key(), _DAMAGED_CONTENT, damage=1)
    except ChecksumRefusedError:
        return "bytes that do not match their CRC32C are refused"
    raise CheckFailed(
        "accepts bytes that do not match their CRC32C",
        "Damage on the way is found when a checkpoint is loaded, not when it is saved. Verify checkpoints that matter "
        "(cloudckpt verify).",
    )


def check_multipart(scratch: Scratch) -> str:
    """Upload an object in two parts, the first as small as the store allows."""
    store = scratch.store
    content = memoryview(bytes(store.limits.min_part_bytes) + _CONTENT)
    key, first_bytes = scratch.new_key(), store.limits.min_part_bytes
    upload_id = scratch.begin_upload(key)
    parts = [
        scratch.send_part(key, upload_id, 1, 0, content[:first_bytes]),
        scratch.send_part(key, upload_id, 2, first_bytes, content[first_bytes:]),
    ]
    scratch.complete_upload(key, upload_id, parts)
    received = bytearray(len(_CONTENT))
    store.read_into(key, first_bytes, [memoryview(received)])
    if bytes(received) != _CONTENT:
        raise CheckFailed("made an object of two parts that is not what was sent", "Do not use this store.")
    return "an object was uploaded in two parts"


def check_abort(scratch: Scratch) -> str:
    """Abort a multipart upload that has a part."""
    key = scratch.new_key()
    upload_id = scratch.begin_upload(key)
    scratch.send_part(key, upload_id, 1, 0, memoryview(_CONTENT))
    scratch.abort_upload(key, upload_id)
    return "an upload was aborted"


def check_upload_listing(scratch: Scratch) -> str:
    """List an unfinished multipart upload."""
    key = scratch.new_key()
    upload_id = scratch.begin_upload(key)
    scratch.send_part(key, upload_id, 1, 0, memoryview(_CONTENT))
    listed = [upload.upload_id for upload in scratch.store.list_uploads(key)]
    scratch.abort_upload(key, upload_id)
    if upload_id not in listed:
        raise CheckFailed(
            "does not list an unfinished upload",
            "gc cannot find what killed saves leave. A lifecycle rule that aborts unfinished uploads removes it.",
        )
    return "unfinished uploads are listed"


def check_delete(scratch: Scratch) -> str:
    """Remove an object."""
    key = scratch.new_key()
    scratch.put(key, _CONTENT)
    scratch.remove(key)
    try:
        scratch.store.read(key, max_bytes=_MAX_READ_BYTES)
    except ObjectNotFoundError:
        return "an object was removed"
    raise CheckFailed("still has an object that was removed", "gc and deletions have no effect here.")


CHECKS: Mapping[str, Callable[[Scratch], str]] = {
    "put": check_put,
    "get": check_read,
    "range reads": check_range_read,
    "head": check_head,
    "delete": check_delete,
    "listings": check_listing,
    "create-if-absent": check_create_if_absent,
    "checksums": check_checksum,
    "parts": check_multipart,
    "abort": check_abort,
    "unfinished uploads": check_upload_listing,
}
"""The checks by name, in an order in which they can run."""
