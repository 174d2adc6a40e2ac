"""Sizes, checksums and slices of bodies (sequences of memory views), and checks of keys and parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from awscrt.checksums import crc32c as _crc32c

from cloudckpt.errors import ChecksumRefusedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudckpt.stores.base import Store, UploadedPart, Views


def num_bytes(views: Views) -> int:
    """Return the total size of `views`."""
    return sum(view.nbytes for view in views)


def crc32c_of(views: Views, previous: int = 0) -> int:
    """Return the CRC32C of the bytes of `views`, one after the other, continuing from `previous`."""
    for view in views:
        previous = _crc32c(view, previous)  # type: ignore[arg-type]  # awscrt takes any buffer
    return previous


def batches(views: Views, *, max_bytes: int, max_views: int) -> Iterator[list[memoryview]]:
    """Yield the same bytes in order, in groups of at most `max_bytes` and `max_views`, without empty views."""
    group: list[memoryview] = []
    room_bytes = max_bytes
    for view in views:
        offset_bytes = 0
        while offset_bytes < view.nbytes:
            piece = view[offset_bytes : offset_bytes + room_bytes]
            group.append(piece)
            offset_bytes += piece.nbytes
            room_bytes -= piece.nbytes
            if room_bytes == 0 or len(group) == max_views:
                yield group
                group, room_bytes = [], max_bytes
    if group:
        yield group


def without_first(views: Views, num_bytes_done: int) -> list[memoryview]:
    """Return the rest of `views` after the first `num_bytes_done` bytes."""
    left: list[memoryview] = []
    for view in views:
        if num_bytes_done >= view.nbytes:
            num_bytes_done -= view.nbytes
        else:
            left.append(view[num_bytes_done:])
            num_bytes_done = 0
    return left


def check_key(store: Store, key: str, operation: str) -> None:
    """Raise `StoreError` for a key that is empty, absolute, or could lead out of the root."""
    segments = key.split("/")
    if "" in segments or "." in segments or ".." in segments or "\0" in key:
        raise StoreError(
            f"{key!r} is not a key under {store.uri}: keys have no empty, '.' or '..' segments and no NUL.",
            key=f"{store.uri}/{key}",
            operation=operation,
        )


def check_crc32c(store: Store, key: str, operation: str, *, expected: int, actual: int) -> None:
    """Raise `ChecksumRefusedError` unless the two agree."""
    if expected != actual:
        raise ChecksumRefusedError(
            f"{store.url(key)}: the bytes to write have the CRC32C {actual:08x}, not the {expected:08x} that came with "
            f"them. They changed in memory (a tensor modified during its save?); nothing was written.",
            key=store.url(key),
            operation=operation,
        )


def in_order(store: Store, key: str, parts: list[UploadedPart]) -> list[UploadedPart]:
    """Sort `parts` by number. Raises `StoreError` unless the numbers are 1, 2, … and no byte is missing."""
    ordered = sorted(parts, key=lambda uploaded: uploaded.part.number)
    end_bytes = 0
    for number, uploaded in enumerate(ordered, start=1):
        if uploaded.part.number != number or uploaded.part.offset_bytes != end_bytes:
            raise StoreError(
                f"{store.url(key)}: the parts of the upload do not follow each other (at part {uploaded.part.number}, "
                f"byte {uploaded.part.offset_bytes}, where part {number} should begin at byte {end_bytes}). "
                f"Nothing was completed.",
                key=store.url(key),
                operation="complete_multipart",
            )
        end_bytes += uploaded.part.size_bytes
    return ordered
