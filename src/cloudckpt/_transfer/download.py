"""Byte ranges from a store into memory, resumed where they break off, verified tile by tile.

This module decides what is believed of a data object. That it is missing, ends too early or has wrong bytes is first
only what one answer says, which may be the answer of something else on the way. It is believed once three looks have
said so, and in each look a read and the object's HEAD agree. A store that contradicts itself is a
`TransientStoreError`, and is tried again as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from cloudckpt._trace.recorder import now_ns
from cloudckpt._transfer.checksum import tile_crc32cs
from cloudckpt._transfer.retry import NUM_LOOKS, Retrier
from cloudckpt.errors import (
    CorruptCheckpointError,
    InterruptedReadError,
    ObjectNotFoundError,
    ShortObjectError,
    TransientStoreError,
)
from cloudckpt.stores._body import num_bytes
from cloudckpt.stores.base import Store, Views

_Answer: TypeAlias = Literal["absent", "short", "there"]
"""What a store says of the bytes up to one of them: there is no object, it ends before, or it has them."""


class _WrongBytesError(Exception):
    """Some tiles do not have the checksums that were saved."""


class _OtherSizeError(Exception):
    """The object has another size than was expected."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"it has {size_bytes} bytes")
        self.size_bytes = size_bytes


def fetch(store: Store, retrier: Retrier, *, key: str, begin: int, views: Views) -> None:
    """Fill `views` with the object's bytes from `begin` on, resuming a body that breaks off at the byte reached.

    `ObjectNotFoundError` and `ShortObjectError` are raised only where they are believed.
    """
    remaining = list(views)
    position = begin
    progressed = False

    def attempt() -> None:
        nonlocal position, progressed
        progressed = False
        try:
            store.read_into(key, position, remaining)
        except InterruptedReadError as error:
            if error.received_bytes > 0:
                progressed = True
                position += error.received_bytes
                remaining[:] = _skip(remaining, error.received_bytes)
            raise
        except ObjectNotFoundError:
            _compare(store, key, begin + num_bytes(views), by_read="absent")
            raise
        except ShortObjectError:
            _compare(store, key, begin + num_bytes(views), by_read="short")
            raise

    retrier.confirmed(
        lambda: retrier.call(attempt, made_progress=lambda: progressed), (ObjectNotFoundError, ShortObjectError)
    )


def measure(store: Store, retrier: Retrier, *, key: str, size_bytes: int) -> int:
    """The size of the object at `key`. `ObjectNotFoundError`, or another size than `size_bytes`, only where believed.

    Where all is as expected, that is one HEAD.
    """

    def attempt() -> int:
        try:
            found_bytes = store.head(key).size_bytes
        except ObjectNotFoundError:
            _compare(store, key, max(size_bytes, 1), by_head="absent")
            raise
        if found_bytes != size_bytes:
            is_short = found_bytes < size_bytes
            _compare(store, key, size_bytes + (not is_short), by_head="short" if is_short else "there")
        return found_bytes

    def look() -> int:
        found_bytes = retrier.call(attempt)
        if found_bytes != size_bytes:
            raise _OtherSizeError(found_bytes)
        return found_bytes

    try:
        return retrier.confirmed(look, (ObjectNotFoundError, _OtherSizeError))
    except _OtherSizeError as error:
        return error.size_bytes


def _compare(
    store: Store, key: str, end: int, *, by_read: _Answer | None = None, by_head: _Answer | None = None
) -> None:
    """Ask for the answer that is not given, about the first `end` bytes; raise `TransientStoreError` if they differ."""
    by_read = by_read or _read_answer(store, key, end)
    by_head = by_head or _head_answer(store, key, end)
    if by_read == by_head:
        return
    words = {
        "absent": "that no object exists",
        "short": f"that the object ends before byte {end}",
        "there": f"that the object has {end} bytes or more",
    }
    raise TransientStoreError(
        f"{store.url(key)}: the store contradicts itself. A read says {words[by_read]}, and a HEAD says "
        f"{words[by_head]}. Try again; if it stays so, look for a proxy or a load balancer that answers for the store",
        key=store.url(key),
        operation="read_into",
    )


def _read_answer(store: Store, key: str, end: int) -> _Answer:
    try:
        store.read_into(key, end - 1, [memoryview(bytearray(1))])
    except ObjectNotFoundError:
        return "absent"
    except ShortObjectError:
        return "short"
    return "there"


def _head_answer(store: Store, key: str, end: int) -> _Answer:
    try:
        return "short" if store.head(key).size_bytes < end else "there"
    except ObjectNotFoundError:
        return "absent"


def fetch_verified(
    store: Store,
    retrier: Retrier,
    *,
    key: str,
    begin: int,
    views: Views,
    tile_bytes: int,
    expected_crc32cs: Sequence[int],
    holding: Callable[[int, int], str],
) -> None:
    """Like `fetch`, for whole tiles, whose checksums must be `expected_crc32cs`.

    `holding` names what a range of the object's bytes holds, for the error. Tiles that do not match are read twice
    more, since bytes can also be damaged on their way; then it is a `CorruptCheckpointError`, as is an object that is
    too short.
    """
    try:
        bad = fetch_checked(
            store,
            retrier,
            key=key,
            begin=begin,
            views=views,
            tile_bytes=tile_bytes,
            expected_crc32cs=expected_crc32cs,
        )
    except ShortObjectError as error:
        raise CorruptCheckpointError(
            f"{store.url(key)} is shorter than when it was saved, so "
            f"{holding(begin, begin + num_bytes(views))} cannot be loaded: {error}",
            uri=store.uri,
        ) from error
    if bad:
        index, actual = next(iter(bad.items()))
        low = begin + index * tile_bytes
        high = min(low + tile_bytes, begin + num_bytes(views))
        raise CorruptCheckpointError(
            f"{store.url(key)} is damaged: bytes [{low}, {high}) have CRC32C {actual:08x}, but "
            f"{expected_crc32cs[index]:08x} was saved. They hold {holding(low, high)}. Load an older checkpoint",
            uri=store.uri,
        )


def fetch_checked(
    store: Store,
    retrier: Retrier,
    *,
    key: str,
    begin: int,
    views: Views,
    tile_bytes: int,
    expected_crc32cs: Sequence[int],
) -> dict[int, int]:
    """Fetch whole tiles; the index and actual CRC32C of each that is not what is expected in three reads."""
    fetch(store, retrier, key=key, begin=begin, views=views)
    begun_ns = now_ns()
    values = tile_crc32cs(views, tile_bytes)
    retrier.recorder.span("checksum", begun_ns, key=key)
    retrier.recorder.spent("stage", begun_ns)
    bad = {index: values[index] for index in _differing(values, expected_crc32cs)}

    def look() -> None:
        nonlocal bad
        still_bad: dict[int, int] = {}
        for first, last in _runs(list(bad)):
            low, high = first * tile_bytes, last * tile_bytes
            again = _first(_skip(views, low), high - low)
            fetch(store, retrier, key=key, begin=begin + low, views=again)
            actual = tile_crc32cs(again, tile_bytes)
            still_bad |= {first + index: actual[index] for index in _differing(actual, expected_crc32cs[first:last])}
        bad = still_bad
        if bad:
            retrier.call(lambda: _compare(store, key, begin + num_bytes(views), by_read="there"))
            raise _WrongBytesError(f"{store.url(key)}: {len(bad)} tiles have other checksums than were saved")

    if bad:
        try:
            retrier.confirmed(look, _WrongBytesError, num_looks=NUM_LOOKS - 1)
        except _WrongBytesError:
            return bad
    return {}


def _differing(actual: Sequence[int], expected: Sequence[int]) -> list[int]:
    return [index for index, value in enumerate(actual) if value != expected[index]]


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Rising indices as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def _first(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    found: list[memoryview] = []
    for view in views:
        if num_bytes <= 0:
            break
        found.append(view[:num_bytes])
        num_bytes -= len(view)
    return found


def _skip(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for view in views:
        if num_bytes >= len(view):
            num_bytes -= len(view)
        else:
            rest.append(view[num_bytes:] if num_bytes else view)
            num_bytes = 0
    return rest
