"""What the clauses of the store contract share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cloudckpt.stores._body import crc32c_of
from cloudckpt.stores.base import Part, Store, UploadedPart

WAIT_S = 120.0
"""The longest that a clause waits for anything."""

DOES_NOT_APPLY = "does not apply"
"""The name under which a clause notes, in its test's ``user_properties``, why it asked nothing of the store."""

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
    """CRC32C of `body`."""
    return crc32c_of([memoryview(body)])


def put(store: Store, key: str, body: bytes, *, if_absent: bool = False) -> None:
    """Put `body`, with its right checksum."""
    store.put(key, [memoryview(body)], crc32c=crc(body), if_absent=if_absent)


def content(store: Store, key: str) -> bytes:
    """The whole object."""
    return store.read(key, max_bytes=1 << 30)


def read_range(store: Store, key: str, begin: int, end: int) -> bytes:
    """Bytes ``[begin, end)`` of the object."""
    target = bytearray(end - begin)
    store.read_into(key, begin, [memoryview(target)])
    return bytes(target)


def keys(store: Store, prefix: str = "") -> list[str]:
    """The listed keys, sorted."""
    return sorted(info.key for info in store.list(prefix))


def bodies_of(store: Store, num_parts: int) -> list[bytes]:
    """Bodies for the parts of one upload, all different, as small as the store takes them; the last is smaller."""
    size_bytes = max(store.limits.min_part_bytes, 1024)
    bodies = [bytes([65 + number]) * size_bytes for number in range(num_parts)]
    bodies[-1] = bodies[-1][:1000]
    return bodies


def parts_of(bodies: Sequence[bytes]) -> list[Part]:
    """Where each body lies in the object."""
    offsets = [sum(map(len, bodies[:index])) for index in range(len(bodies))]
    return [
        Part(number=number, offset_bytes=offset, size_bytes=len(body))
        for number, (offset, body) in enumerate(zip(offsets, bodies, strict=True), start=1)
    ]


def upload_part(store: Store, key: str, upload_id: str, part: Part, body: bytes) -> UploadedPart:
    """Upload one part, with its right checksum."""
    return store.upload_part(key, upload_id, part, [memoryview(body)], crc32c=crc(body))


def upload(store: Store, key: str, bodies: Sequence[bytes]) -> None:
    """One whole multipart upload."""
    upload_id = store.create_multipart(key)
    parts = [
        upload_part(store, key, upload_id, part, body) for part, body in zip(parts_of(bodies), bodies, strict=True)
    ]
    store.complete_multipart(key, upload_id, parts)


def at_once(tasks: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Run all tasks in threads of their own that start together; the results, or the errors, in order."""
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], T]) -> T | Exception:
        barrier.wait(WAIT_S)
        try:
            return task()
        except Exception as error:  # noqa: BLE001  # it is the result
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(run, task) for task in tasks]]


def finished_within(most_s: float, tasks: Sequence[Callable[[], object]]) -> list[object]:
    """Run all tasks in threads of their own; the results, the errors, or "not finished", in order.

    Whatever is not finished after `most_s` goes on; its caller has to end what it waits for.
    """
    outcomes: list[object] = ["not finished"] * len(tasks)

    def run(index: int, task: Callable[[], object]) -> None:
        try:
            outcomes[index] = task()
        except Exception as error:  # noqa: BLE001  # it is the result
            outcomes[index] = error

    threads = [
        threading.Thread(target=run, args=(index, task), name="contract", daemon=True)
        for index, task in enumerate(tasks)
    ]
    deadline = time.monotonic() + most_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(outcomes)
