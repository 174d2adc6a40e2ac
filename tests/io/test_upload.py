"""Uploads over a faulty store: whole, or nothing at all, and always an end."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.io.conftest import FakeClock
from tests.kit.oracles import slow_crc32c
from tests.kit.wrapped import Call, FaultyStore, WrappedStore, watching

from cloudckpt.errors import (
    AccessDeniedError,
    ChecksumRefusedError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from cloudckpt.format.model import ObjectRef
from cloudckpt.io.client import StoreClient
from cloudckpt.io.hedging import ConcurrencyLimit, Hedger
from cloudckpt.io.upload import UploadSession
from cloudckpt.stores.base import Limits, Store, Views, combine_tile_crc32cs, compute_tile_crc32cs, crc32c_of, num_bytes
from cloudckpt.stores.memory import MemoryStore

TILE_BYTES = 8
PART_BYTES = 32
LIMITS = Limits(min_part_bytes=1, max_part_bytes=1000, max_parts=100, max_put_bytes=1000)


class Bytes:
    """A body in memory, given out in two views, which remembers what was opened and closed."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.opened: list[int] = []
        self.closed: list[int] = []

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    @contextlib.contextmanager
    def open(self, begin: int, end: int) -> Iterator[Views]:
        self.opened.append(begin)
        middle = (begin + end) // 2
        try:
            yield [memoryview(self.data)[begin:middle], memoryview(self.data)[middle:end]]
        finally:
            self.closed.append(begin)


def data_of(size_bytes: int) -> bytes:
    return bytes(index * 31 % 251 for index in range(size_bytes))


@pytest.fixture
def store(request: pytest.FixtureRequest, clock: FakeClock) -> FaultyStore:
    return FaultyStore(MemoryStore(f"upload-{request.node.nodeid.replace('/', '-')}", limits=LIMITS))


def hedger_of(connections: int) -> Hedger:
    return Hedger(ConcurrencyLimit(connections), budget_bytes=0)


def session_of(
    store: Store,
    *,
    connections: int = 3,
    retries: int = 3,
    resumable: bool = False,
    on_part: Callable[[str, int], None] = lambda key, num_bytes: None,
) -> UploadSession:
    return UploadSession(
        StoreClient(store, retries=retries, timeout_s=100, hedger=hedger_of(connections)),
        part_bytes=PART_BYTES,
        tile_bytes=TILE_BYTES,
        resumable=resumable,
        daemon=False,
        on_part=on_part,
        on_completing=lambda key: None,
        on_object=lambda key, num_bytes: None,
    )


def upload(store: Store, bodies: dict[str, Bytes], *, in_memory: bool = False, **settings: int) -> list[ObjectRef]:
    with session_of(store, **settings) as session:
        for key, body in bodies.items():
            session.submit(key, body, in_memory=in_memory)
        session.tasks.join()
        return session.receipts()


def assert_nothing_left(store: FaultyStore) -> None:
    assert list(store.inner.list()) == []
    assert list(store.inner.list_uploads()) == []


SIZES_BYTES = [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 10 * PART_BYTES, 10 * PART_BYTES + 5]


def test_objects_arrive_as_they_are_and_receipts_say_so(store: FaultyStore) -> None:
    """If this fails, what lies in the store is not what was saved, or not what the manifest will say of it."""
    bodies = {f"data/{size_bytes}": Bytes(data_of(size_bytes)) for size_bytes in SIZES_BYTES}
    receipts = upload(store, bodies)
    assert [receipt.key for receipt in receipts] == list(bodies)
    for receipt in receipts:
        data = bodies[receipt.key].data
        assert store.inner.read(receipt.key, max_bytes=1000) == data
        assert receipt.size_bytes == len(data)
        tiles = [data[begin : begin + TILE_BYTES] for begin in range(0, len(data), TILE_BYTES)]
        assert list(receipt.tile_crc32cs) == [slow_crc32c(tile) for tile in tiles]
    assert list(store.inner.list_uploads()) == []
    assert all(sorted(body.opened) == sorted(body.closed) for body in bodies.values())


class _OneWriter(WrappedStore):
    """A store in which one thread at a time writes to an object. The first parts of two objects wait for each other."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.capabilities = dataclasses.replace(inner.capabilities, parallel_parts=False)
        self.both_have_begun = threading.Barrier(2)
        self.overlapping: list[str] = []
        self._writing: set[str] = set()
        self._begun: set[str] = set()

    def around(self, call: Call, action: Callable[[], Any]) -> Any:
        if call.operation != "upload_part":
            return action()
        if call.key in self._writing:
            self.overlapping.append(call.key)
        self._writing.add(call.key)
        if call.key not in self._begun:
            self._begun.add(call.key)
            self.both_have_begun.wait(60)
        try:
            return action()
        finally:
            self._writing.discard(call.key)


def test_an_object_with_one_writer_has_one_thread(store: FaultyStore) -> None:
    """If this fails, all threads of a save to a path wait for the lock of one file."""
    one_writer = _OneWriter(store)
    bodies = {f"data/{number}": Bytes(data_of(5 * PART_BYTES)) for number in range(2)}
    receipts = upload(one_writer, bodies, in_memory=True)
    assert [receipt.key for receipt in receipts] == list(bodies)
    assert not one_writer.overlapping


def test_parts_of_a_copy_are_fetched_at_the_same_time(store: FaultyStore) -> None:
    """If this fails, a copy to a path reads its source one request after the other."""
    one_writer = _OneWriter(store)
    one_writer.both_have_begun = threading.Barrier(1)
    two_are_open = threading.Barrier(2)

    class Fetched(Bytes):
        @contextlib.contextmanager
        def open(self, begin: int, end: int) -> Iterator[Views]:
            two_are_open.wait(60)
            with super().open(begin, end) as views:
                yield views

    body = Fetched(data_of(2 * PART_BYTES))
    upload(one_writer, {"data/0": body})
    assert sorted(body.opened) == [0, PART_BYTES]


def test_checksums_stay_with_their_tiles_where_parts_overtake_each_other(store: FaultyStore) -> None:
    """If this fails, the manifest has the right checksums at the wrong tiles as soon as two parts change places."""
    second_is_there = threading.Event()

    class Overtaken(Bytes):
        @contextlib.contextmanager
        def open(self, begin: int, end: int) -> Iterator[Views]:
            with super().open(begin, end) as views:
                assert begin or second_is_there.wait(60)
                yield views

    data = data_of(2 * PART_BYTES)
    session = session_of(store, on_part=lambda _key, _num_bytes: second_is_there.set())
    with session:
        session.submit("data/a", Overtaken(data))
        session.tasks.join()
        (receipt,) = session.receipts()
    tiles = [data[begin : begin + TILE_BYTES] for begin in range(0, len(data), TILE_BYTES)]
    assert list(receipt.tile_crc32cs) == [slow_crc32c(tile) for tile in tiles]


@pytest.mark.parametrize("kind", [TransientStoreError, ThrottledError, ChecksumRefusedError])
@pytest.mark.parametrize("operation", ["put", "create_multipart", "upload_part", "complete_multipart", "head"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_upload_survives_transient_failures(
    store: FaultyStore, operation: str, kind: type[StoreError], after: object
) -> None:
    """If this fails, one lost packet or lost answer anywhere fails a save."""
    store.fail(operation, error=lambda: kind("no", key="k", operation=operation), times=2, after=bool(after))
    bodies = {"data/a": Bytes(data_of(5 * PART_BYTES)), "data/b": Bytes(data_of(7))}
    upload(store, bodies)
    assert {key: store.inner.read(key, max_bytes=1000) for key in bodies} == {k: b.data for k, b in bodies.items()}


@pytest.mark.parametrize("operation", ["put", "create_multipart", "upload_part", "complete_multipart", "head"])
@pytest.mark.parametrize("skip", [0, 1])
def test_permanently_failed_upload_leaves_nothing(store: FaultyStore, operation: str, skip: int) -> None:
    """If this fails, a failed save leaves objects or unfinished uploads that are paid for, or hides its cause."""
    denied = AccessDeniedError("s3:PutObject is missing", key="k", operation=operation)
    store.fail(operation, error=lambda: denied, skip=skip, times=100)
    bodies = {f"data/{number}": Bytes(data_of(number * 20)) for number in range(9)}
    with pytest.raises(AccessDeniedError) as caught:
        upload(store, bodies)
    assert caught.value is denied
    assert_nothing_left(store)
    assert all(sorted(body.opened) == sorted(body.closed) for body in bodies.values())


def test_a_completion_that_shows_another_size_is_no_success(store: FaultyStore) -> None:
    """If this fails, a store that lost a part makes a checkpoint that cannot be loaded."""

    def lose_the_end(call: Call) -> None:
        body = memoryview(store.inner.read(call.key, max_bytes=2**30)[:-1])
        store.inner.put(call.key, [body], crc32c=crc32c_of([body]))

    losing = watching("complete_multipart", after=lose_the_end)(store)
    with pytest.raises(ShortObjectError, match=r"data/a: the object has 159 bytes after 160 were uploaded"):
        upload(losing, {"data/a": Bytes(data_of(5 * PART_BYTES))})
    assert_nothing_left(store)


def test_an_upload_that_vanished_is_not_taken_for_a_completed_one(store: FaultyStore) -> None:
    """If this fails, an upload that somebody aborted counts as stored."""
    gone = ObjectNotFoundError("no such upload", key="k", operation="complete_multipart")
    store.fail("complete_multipart", error=lambda: gone)
    with pytest.raises(ObjectNotFoundError):
        upload(store, {"data/a": Bytes(data_of(5 * PART_BYTES))})
    assert_nothing_left(store)


def test_a_failure_after_the_last_submission_is_raised_at_the_end(store: FaultyStore) -> None:
    """If this fails, a save succeeds without its last object (G3): no later submission would raise its failure."""
    is_submitted = threading.Event()

    class LateBroken(Bytes):
        @contextlib.contextmanager
        def open(self, begin: int, end: int) -> Iterator[Views]:
            assert is_submitted.wait(60)
            raise RuntimeError("CUDA error")
            yield []

    def save() -> None:
        with session_of(store) as session:
            session.submit("data/a", Bytes(data_of(7)))
            session.submit("data/b", LateBroken(data_of(7)))
            is_submitted.set()
            session.tasks.join()
            session.receipts()

    with pytest.raises(RuntimeError, match="CUDA error"):
        save()
    assert_nothing_left(store)


@pytest.mark.parametrize("error", [ValueError("the planner failed"), KeyboardInterrupt()])
def test_an_error_between_two_objects_removes_the_first(store: FaultyStore, error: BaseException) -> None:
    """If this fails, an interrupted save leaves whole objects behind, or completes uploads on its way out (G5)."""

    def save() -> None:
        with session_of(store) as session:
            session.submit("data/a", Bytes(data_of(7)))
            session.submit("data/b", Bytes(data_of(5 * PART_BYTES)))
            raise error

    with pytest.raises(type(error)):
        save()
    assert_nothing_left(store)


RFC_3720_VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
]


@st.composite
def views_of(draw: st.DrawFn) -> list[memoryview]:
    return [memoryview(draw(st.binary(max_size=40))) for _ in range(draw(st.integers(0, 6)))]


@pytest.mark.parametrize(("data", "expected"), RFC_3720_VECTORS)
def test_vectors_of_the_rfc(data: bytes, expected: int) -> None:
    """If this fails, what we call CRC32C is something else, and stores refuse every upload."""
    assert slow_crc32c(data) == expected
    assert crc32c_of([memoryview(data)]) == expected
    assert compute_tile_crc32cs([memoryview(data)], len(data)) == [expected]


@given(views_of(), st.integers(1, 50))
def test_tiles_are_cut_across_views(views: list[memoryview], tile_bytes: int) -> None:
    """If this fails, checksums depend on how tensors lie in memory, and good data is refused when loaded."""
    data = b"".join(views)
    expected = [slow_crc32c(data[begin : begin + tile_bytes]) for begin in range(0, len(data), tile_bytes)]
    assert compute_tile_crc32cs(views, tile_bytes) == expected
    assert combine_tile_crc32cs(expected, tile_bytes=tile_bytes, size_bytes=len(data)) == slow_crc32c(data)
    assert crc32c_of(views) == slow_crc32c(data)
    assert num_bytes(views) == len(data)
