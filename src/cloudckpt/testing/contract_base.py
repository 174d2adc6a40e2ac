"""Base class of the clauses, with the hooks that describe a store, and helper functions of the clauses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from cloudckpt.errors import StoreError, UnsupportedOperationError
from cloudckpt.stores.base import Part, Store, UploadedPart, crc32c_of


class Clauses:
    """Hooks and helpers of `cloudckpt.testing.StoreContract`."""

    shared_between_processes = False
    num_racing_rounds = 5
    num_paging_keys = 1005
    """More than one page of a listing or of a batched delete. A page has 1,000 entries on common servers."""

    def require_create(self, store: Store) -> None:
        """Skip the clause if the store has no create-if-absent, after a check that it refuses the call.

        A store that ignores the condition and writes would break the commit.
        """
        if store.probe().conditional_create:
            return
        with pytest.raises(UnsupportedOperationError):
            put(store, "a", b"body", if_absent=True)
        assert keys(store) == []
        pytest.skip("the store has no create-if-absent, and refuses the call")

    def require_multipart(self, store: Store) -> None:
        """Skip the clause if the store has no multipart uploads, after a check that it refuses the call."""
        if store.capabilities.multipart:
            return
        with pytest.raises(UnsupportedOperationError):
            store.create_multipart("a")
        store.abort_multipart("a", "an upload that never was")
        assert list(store.list_uploads()) == []
        pytest.skip("the store has no multipart uploads, and refuses the call")

    def require_checksums(self, store: Store) -> None:
        """Skip the clause if the store does not verify the checksums of uploads."""
        if not store.probe().verifies_crc32c:
            pytest.skip("the store does not verify checksums")


WAIT_S = 120.0
"""Timeout of every wait in a clause."""

ODD_KEYS = (
    "with space/a b",
    "plus+and&amp/c+d=e",
    "percent%41/100%",
    "hash#and?mark",
    "quote'\"/back\\slash",
    "ünïcode/日本語/🙂",
    "e\u0301 decomposed",
    "star*[x]{y}/~tilde!$^",
    "..dots/...x/.hidden",
    "colon:and@at,semi;pipe|<tag>",
)

T = TypeVar("T")


def crc(body: bytes) -> int:
    """Compute the CRC32C of `body`."""
    return crc32c_of([memoryview(body)])


def put(store: Store, key: str, body: bytes, *, if_absent: bool = False) -> None:
    """Put `body` with its correct checksum."""
    store.put(key, [memoryview(body)], crc32c=crc(body), if_absent=if_absent)


def content(store: Store, key: str) -> bytes:
    """Read the whole object."""
    return store.read(key, max_bytes=1 << 30)


def read_range(store: Store, key: str, begin: int, end: int) -> bytes:
    """Read the bytes ``[begin, end)`` of the object."""
    target = bytearray(end - begin)
    store.read_into(key, begin, [memoryview(target)])
    return bytes(target)


def keys(store: Store, prefix: str = "") -> list[str]:
    """List the keys, sorted."""
    return sorted(info.key for info in store.list(prefix))


def make_bodies(store: Store, num_parts: int) -> list[bytes]:
    """Make different bodies for the parts of an upload, of the store's minimum size; the last is smaller."""
    size_bytes = max(store.limits.min_part_bytes, 1024)
    bodies = [bytes([65 + number]) * size_bytes for number in range(num_parts)]
    bodies[-1] = bodies[-1][:1000]
    return bodies


def make_parts(bodies: Sequence[bytes]) -> list[Part]:
    """Describe the part of the object that each body is."""
    offsets = [sum(map(len, bodies[:index])) for index in range(len(bodies))]
    return [
        Part(number=number, offset_bytes=offset, size_bytes=len(body))
        for number, (offset, body) in enumerate(zip(offsets, bodies, strict=True), start=1)
    ]


def upload_part(store: Store, key: str, upload_id: str, part: Part, body: bytes) -> UploadedPart:
    """Upload one part with its correct checksum."""
    return store.upload_part(key, upload_id, part, [memoryview(body)], crc32c=crc(body))


def upload_parts(store: Store, key: str, upload_id: str, bodies: Sequence[bytes]) -> list[UploadedPart]:
    """Upload every part, in order."""
    return [
        upload_part(store, key, upload_id, part, body) for part, body in zip(make_parts(bodies), bodies, strict=True)
    ]


def upload(store: Store, key: str, bodies: Sequence[bytes]) -> None:
    """Run a whole multipart upload."""
    upload_id = store.create_multipart(key)
    store.complete_multipart(key, upload_id, upload_parts(store, key, upload_id, bodies))


def run_at_once(tasks: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Run each task in its own thread, all starting together; return the results or errors in order."""
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], T]) -> T | Exception:
        barrier.wait(WAIT_S)
        try:
            return task()
        except Exception as error:  # noqa: BLE001  # the caller examines it
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(run, task) for task in tasks]]


def capture_outcome(call: Callable[[], object]) -> object:
    """Return the result of `call`, or the `StoreError` that it raises; other errors propagate."""
    try:
        return call()
    except StoreError as error:
        return error
