"""What is tried on a store, on objects of its own. A trial says what it saw, or raises `Refusal` or `StoreError`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from cloudckpt.errors import ChecksumRefusedError, ObjectExistsError, ObjectNotFoundError, StoreError
from cloudckpt.options import MIB
from cloudckpt.stores._body import crc32c_of
from cloudckpt.stores._probe import KEY_PREFIX
from cloudckpt.stores.base import Part, Store, UploadedPart

_CONTENT = b"cloudckpt doctor wrote this. Nothing needs this object: delete it.\n"
_OTHER = b"cloudckpt doctor wrote this, too, and it must not be here. Delete it.\n"
_MOST_BYTES = 64 * MIB
_UNCONDITIONAL = (
    "Two saves to one URI at the same time can both report success here, and one of them is lost. Use another store, "
    "or accept that with Options(commit='unconditional')."
)


class Refusal(Exception):  # noqa: N818  # it ends in a finding, not in an error
    """The store answers, and does not do what was asked for."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.found = found
        self.advice = advice


class Scratch:
    """Objects of an examination's own, which `clean_up` removes. Their names are those of probes, which `gc` knows."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.key = self.fresh()
        self._keys: dict[str, None] = {}
        self._uploads: list[tuple[str, str]] = []

    def fresh(self) -> str:
        """A key at which nothing lies."""
        return f"{KEY_PREFIX}{secrets.token_hex(8)}"

    def put(self, key: str, content: bytes, *, if_absent: bool = False, damage: int = 0) -> None:
        """Put it, and remember that it may be there."""
        self._keys[key] = None
        view = memoryview(content)
        self.store.put(key, [view], crc32c=crc32c_of([view]) ^ damage, if_absent=if_absent)

    def begin(self, key: str) -> str:
        """Begin an upload in parts, and remember it."""
        self._keys[key] = None
        upload_id = self.store.create_multipart(key)
        self._uploads.append((key, upload_id))
        return upload_id

    def send(self, key: str, upload_id: str, number: int, offset_bytes: int, content: memoryview) -> UploadedPart:
        """One part."""
        part = Part(number=number, offset_bytes=offset_bytes, size_bytes=len(content))
        return self.store.upload_part(key, upload_id, part, [content], crc32c=crc32c_of([content]))

    def forget_upload(self, key: str, upload_id: str) -> None:
        """It is completed or aborted."""
        self._uploads.remove((key, upload_id))

    def remove(self, keys: list[str]) -> None:
        """Remove objects of ours."""
        self.store.delete(keys)
        for key in keys:
            self._keys.pop(key, None)

    def clean_up(self) -> list[str]:
        """Remove all that is left; the addresses of what could not be."""
        left = [
            f"{self.store.url(key)} (an unfinished upload)"
            for key, upload_id in self._uploads
            if not _is_done(lambda key=key, upload_id=upload_id: self.store.abort_multipart(key, upload_id))  # type: ignore[misc]  # mypy cannot see the defaults
        ]
        # Together if that can be, so that an end by Ctrl-C takes no long while.
        keys = list(self._keys)
        if keys and not _is_done(lambda: self.store.delete(keys)):
            left += [self.store.url(key) for key in keys if not _is_done(lambda key=key: self.store.delete([key]))]  # type: ignore[misc]  # as above
        return left


def _is_done(removal: Callable[[], object]) -> bool:
    try:
        removal()
    except StoreError:
        return False
    return True


def put(scratch: Scratch) -> str:
    """An object is created."""
    scratch.put(scratch.key, _CONTENT)
    return "an object was put"


def get(scratch: Scratch) -> str:
    """And read again."""
    content = scratch.store.read(scratch.key, max_bytes=_MOST_BYTES)
    if content != _CONTENT:
        raise Refusal(f"{len(content)} bytes came back, and not those that were put", "Do not use this store.")
    return "it came back as it was put"


def range_of(scratch: Scratch) -> str:
    """A part of it alone."""
    found = bytearray(9)
    scratch.store.read_into(scratch.key, 10, [memoryview(found)])
    if bytes(found) != _CONTENT[10:19]:
        raise Refusal(
            "other bytes came than were asked for",
            "Loads read ranges, and every load would fail here. Look for a proxy that ignores the header Range.",
        )
    return "ranges are read"


def head(scratch: Scratch) -> str:
    """Its size."""
    size_bytes = scratch.store.head(scratch.key).size_bytes
    if size_bytes != len(_CONTENT):
        raise Refusal(f"it is said to have {size_bytes} bytes, not {len(_CONTENT)}", "Do not use this store.")
    return "sizes and times are told"


def listed(scratch: Scratch) -> str:
    """What was just put is listed, and what was just removed is not."""
    keys = [info.key for info in scratch.store.list(KEY_PREFIX)]
    if scratch.key not in keys:
        raise Refusal(
            "an object that was just put is not listed",
            "A checkpoint that was committed can go unseen for a while, and an overwrite can miss what it follows. Use "
            "a store whose listings are up to date.",
        )
    gone = scratch.fresh()
    scratch.put(gone, _CONTENT)
    scratch.remove([gone])
    if gone in [info.key for info in scratch.store.list(KEY_PREFIX)]:
        raise Refusal(
            "an object that was just removed is still listed",
            "Deleted checkpoints can be seen for a while. Use a store whose listings are up to date.",
        )
    return "listings are up to date"


def condition(scratch: Scratch) -> str:
    """Create-if-absent: once, and not twice."""
    key = scratch.fresh()
    scratch.put(key, _CONTENT, if_absent=True)
    try:
        scratch.put(key, _OTHER, if_absent=True)
    except ObjectExistsError:
        if scratch.store.read(key, max_bytes=_MOST_BYTES) != _CONTENT:
            raise Refusal(
                "a second create-if-absent was refused, and replaced the object all the same", _UNCONDITIONAL
            ) from None
        return "create-if-absent works"
    raise Refusal("a second create-if-absent at one key succeeded, where it had to be refused", _UNCONDITIONAL)


def checksum(scratch: Scratch) -> str:
    """Bytes that do not match their CRC32C."""
    try:
        scratch.put(scratch.fresh(), _CONTENT, damage=1)
    except ChecksumRefusedError:
        return "bytes that do not match their CRC32C are refused"
    raise Refusal(
        "bytes that do not match their CRC32C were taken",
        "What is damaged on its way is found when it is loaded, not when it is saved. Nothing else is lost by it; "
        "verify checkpoints that matter (cloudckpt verify).",
    )


def multipart(scratch: Scratch) -> str:
    """Two parts, the first as small as the store allows, become one object."""
    store = scratch.store
    content = memoryview(bytes(store.limits.min_part_bytes) + _CONTENT)
    key, first = scratch.fresh(), store.limits.min_part_bytes
    upload_id = scratch.begin(key)
    parts = [
        scratch.send(key, upload_id, 1, 0, content[:first]),
        scratch.send(key, upload_id, 2, first, content[first:]),
    ]
    store.complete_multipart(key, upload_id, parts)
    scratch.forget_upload(key, upload_id)
    found = bytearray(len(_CONTENT))
    store.read_into(key, first, [memoryview(found)])
    if bytes(found) != _CONTENT:
        raise Refusal("an object of two parts is not what was sent", "Do not use this store.")
    return "an object of two parts was put together"


def abort(scratch: Scratch) -> str:
    """An upload that is given up, which leaves nothing."""
    key = scratch.fresh()
    upload_id = scratch.begin(key)
    scratch.send(key, upload_id, 1, 0, memoryview(_CONTENT))
    scratch.store.abort_multipart(key, upload_id)
    scratch.forget_upload(key, upload_id)
    return "an upload was given up"


def uploads(scratch: Scratch) -> str:
    """Unfinished uploads are listed."""
    key = scratch.fresh()
    upload_id = scratch.begin(key)
    scratch.send(key, upload_id, 1, 0, memoryview(_CONTENT))
    found = [upload.upload_id for upload in scratch.store.list_uploads(key)]
    scratch.store.abort_multipart(key, upload_id)
    scratch.forget_upload(key, upload_id)
    if upload_id not in found:
        raise Refusal(
            "an unfinished upload is not listed",
            "gc cannot find what killed saves leave. A lifecycle rule that aborts unfinished uploads removes it.",
        )
    return "unfinished uploads are listed"


def delete(scratch: Scratch) -> str:
    """An object that is removed is gone."""
    key = scratch.fresh()
    scratch.put(key, _CONTENT)
    scratch.remove([key])
    try:
        scratch.store.read(key, max_bytes=_MOST_BYTES)
    except ObjectNotFoundError:
        return "an object was removed"
    raise Refusal("an object that was removed is still there", "gc and deletions do nothing here.")


def seconds_of(action: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun
