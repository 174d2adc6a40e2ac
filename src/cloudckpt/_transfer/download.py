"""Byte ranges from a store into memory, resumed where they break off, verified tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    `holding` names what a range of the object's bytes holds, for the error. A mismatch is read once more, since bytes
    can also be damaged on their way; then it is a `CorruptCheckpointError`, as is an object that is too short.
    """
    for is_last in (False, True):
        try:
            fetch(store, retrier, key=key, begin=begin, views=views)
        except ShortObjectError as error:
            raise CorruptCheckpointError(
                f"{store.url(key)} is shorter than when it was saved, so "
                f"{holding(begin, begin + num_bytes(views))} cannot be loaded: {error}",
                uri=store.uri,
            ) from error
        actual = tile_crc32cs(views, tile_bytes)
        if actual == list(expected_crc32cs):
            return
        if is_last:
            bad = next(i for i, value in enumerate(actual) if value != expected_crc32cs[i])
            low = begin + bad * tile_bytes
            high = min(low + tile_bytes, begin + num_bytes(views))
            raise CorruptCheckpointError(
                f"{store.url(key)} is damaged: bytes [{low}, {high}) have CRC32C {actual[bad]:08x}, but "
                f"{expected_crc32cs[bad]:08x} was saved. They hold {holding(low, high)}. Load an older checkpoint",
                uri=store.uri,
            )


def _skip(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for view in views:
        if num_bytes >= len(view):
            num_bytes -= len(view)
        else:
            rest.append(view[num_bytes:] if num_bytes else view)
            num_bytes = 0
    return rest
