"""Read byte ranges of a data object into memory. Resume a read where it breaks off, and verify each tile.

A proxy may have given an answer that an object is missing, ends too early or has wrong bytes. So three looks confirm it
(`cloudckpt.io.client.Confirmation`), in each of which a read and a HEAD of the object agree. If read and HEAD
contradict each other, the functions here raise `TransientStoreError`, which is retried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from cloudckpt.errors import (
    InterruptedReadError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    TransientStoreError,
)
from cloudckpt.io.boxes import join_ranges
from cloudckpt.io.client import Confirmation, Retries, StoreClient
from cloudckpt.stores.base import Store, Views, batches, compute_tile_crc32cs, num_bytes, skip_bytes
from cloudckpt.telemetry.timeline import now_ns

_Answer: TypeAlias = Literal["absent", "short", "there"]
"""The store's answer about the bytes before an offset: no object, an object that ends earlier, or all bytes."""


class _OtherSizeError(Exception):
    """The object is missing, or has another size than was expected."""

    def __init__(self, size_bytes: int | None) -> None:
        super().__init__("it is missing" if size_bytes is None else f"it has {size_bytes} bytes")
        self.size_bytes = size_bytes


class _WrongBytesError(Exception):
    """Some tiles do not have the checksums that were saved."""


def download_range(client: StoreClient, *, key: str, begin: int, views: Views) -> None:
    """Fill `views` with the object's bytes from `begin` on. Resume a body that breaks off at the byte reached.

    Raises `ObjectNotFoundError` and `ShortObjectError` only once they are confirmed.
    """
    remaining, position, end = list(views), begin, begin + num_bytes(views)
    store = client.store
    confirmation = Confirmation(client)
    retries = Retries(client)
    while True:
        unconfirmed: StoreError | None = None
        with retries:
            try:
                return client.hedger.read_into(store, key, position, remaining)
            except InterruptedReadError as error:
                position += error.received_bytes
                remaining = skip_bytes(remaining, error.received_bytes)
                raise
            except (ObjectNotFoundError, ShortObjectError) as error:
                _check_read_agrees_with_head(
                    store, key, end, by_read="absent" if isinstance(error, ObjectNotFoundError) else "short"
                )
                unconfirmed = error
        if unconfirmed is None:  # a failure that may pass
            continue
        try:
            if confirmation.confirm_or_wait(type(unconfirmed).__name__, unconfirmed):
                raise unconfirmed
        finally:
            del unconfirmed  # its traceback holds this frame, and so the views
        retries.renew()


def find_size(client: StoreClient, *, key: str, size_bytes: int) -> int | None:
    """Return the size of the object at `key`, or None. Absence, or another size than `size_bytes`, is confirmed first.

    Makes one HEAD if the object has `size_bytes`.
    """
    store = client.store

    def attempt() -> int | None:
        try:
            found_bytes = store.head(key).size_bytes
        except ObjectNotFoundError:
            _check_read_agrees_with_head(store, key, max(size_bytes, 1), by_head="absent")
            return None
        if found_bytes != size_bytes:
            is_short = found_bytes < size_bytes
            by_head: _Answer = "short" if is_short else "there"
            _check_read_agrees_with_head(store, key, size_bytes + (not is_short), by_head=by_head)
        return found_bytes

    def look() -> int:
        found_bytes = client.call(attempt)
        if found_bytes != size_bytes:
            raise _OtherSizeError(found_bytes)
        return found_bytes

    try:
        return client.confirm(look, errors=_OtherSizeError)
    except _OtherSizeError as error:
        return error.size_bytes


def _check_read_agrees_with_head(
    store: Store, key: str, end: int, *, by_read: _Answer | None = None, by_head: _Answer | None = None
) -> None:
    """Raise `TransientStoreError` if a read and a HEAD of the first `end` bytes contradict each other.

    Given the answer of one of the two, make the other request.
    """
    by_read = by_read or _read_answer(store, key, end)
    by_head = by_head or _head_answer(store, key, end)
    if by_read == by_head:
        return
    words = {
        "absent": "that no object exists",
        "short": f"that the object ends before byte {end}",
        "there": f"that the object has {end} bytes or more",
    }
    problem = (
        f"the store contradicts itself. A read says {words[by_read]}, and a HEAD says {words[by_head]}. Try again; if "
        "it stays so, look for a proxy or a load balancer that answers for the store"
    )
    raise store.error(TransientStoreError, "read_into", key, problem)


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
    except ShortObjectError:
        return "short"


def find_wrong_tiles(
    client: StoreClient,
    *,
    key: str,
    begin: int,
    views: Views,
    tile_bytes: int,
    expected_crc32cs: Sequence[int],
) -> dict[int, int]:
    """Return index and actual CRC32C of each fetched tile that is wrong. `views` hold whole tiles.

    A tile that does not match is read twice more, into the same views: its bytes may have been damaged on their way.
    """
    begun_ns = now_ns()
    values = compute_tile_crc32cs(views, tile_bytes)
    client.recorder.span("checksum", begun_ns, key=key)
    client.recorder.add_time_since("stage", begun_ns)
    wrong = {index: values[index] for index in _find_differences(values, expected_crc32cs)}
    confirmation = Confirmation(client)
    while wrong:
        client.call(_check_read_agrees_with_head, client.store, key, begin + num_bytes(views), by_read="there")
        error = _WrongBytesError(f"{client.url(key)}: {len(wrong)} tiles have other checksums than were saved")
        if confirmation.confirm_or_wait("wrong", error):
            break
        still_wrong: dict[int, int] = {}
        for first, last in join_ranges((index, index + 1) for index in wrong):
            low, high = first * tile_bytes, last * tile_bytes
            views_of_run = next(batches(skip_bytes(views, low), max_bytes=high - low, max_views=len(views)))
            download_range(client, key=key, begin=begin + low, views=views_of_run)
            actual = compute_tile_crc32cs(views_of_run, tile_bytes)
            still_wrong |= {
                first + index: actual[index] for index in _find_differences(actual, expected_crc32cs[first:last])
            }
        wrong = still_wrong
    return wrong


def _find_differences(actual: Sequence[int], expected: Sequence[int]) -> list[int]:
    return [index for index, value in enumerate(actual) if value != expected[index]]
