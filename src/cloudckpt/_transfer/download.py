"""Byte ranges from a store into memory, resumed where they break off, verified tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloudckpt._trace.recorder import now_ns
from cloudckpt._transfer.checksum import tile_crc32cs
from cloudckpt._transfer.retry import Retrier
from cloudckpt.errors import CorruptCheckpointError, InterruptedReadError, ShortObjectError
from cloudckpt.stores._body import num_bytes
from cloudckpt.stores.base import Store, Views


def fetch(store: Store, retrier: Retrier, *, key: str, begin: int, views: Views) -> None:
    """Fill `views` with the object's bytes from `begin` on, resuming a body that breaks off at the byte reached."""
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

    retrier.call(attempt, made_progress=lambda: progressed)


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

    `holding` names what a range of the object's bytes holds, for the error. Tiles that do not match are read once
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
    """Fetch whole tiles; the index and actual CRC32C of each that is not what is expected, read twice."""
    fetch(store, retrier, key=key, begin=begin, views=views)
    begun_ns = now_ns()
    values = tile_crc32cs(views, tile_bytes)
    retrier.recorder.span("checksum", begun_ns, key=key)
    retrier.recorder.spent("stage", begun_ns)
    still_bad: dict[int, int] = {}
    for first, last in _runs(_differing(values, expected_crc32cs)):
        low, high = first * tile_bytes, last * tile_bytes
        again = _first(_skip(views, low), high - low)
        fetch(store, retrier, key=key, begin=begin + low, views=again)
        actual = tile_crc32cs(again, tile_bytes)
        still_bad |= {first + index: actual[index] for index in _differing(actual, expected_crc32cs[first:last])}
    return still_bad


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
