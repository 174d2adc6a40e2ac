"""Going on from what an earlier attempt left: only what is missing is sent, and nothing is taken for what it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.io.conftest import FakeClock
from tests.io.test_upload import LIMITS, PART_BYTES, TILE_BYTES, Bytes, data_of, session_of
from tests.kit.oracles import slow_crc32c
from tests.kit.wrapped import FaultyStore, permanent, transient

from cloudckpt.errors import ObjectNotFoundError, StoreError
from cloudckpt.format.model import ObjectRef
from cloudckpt.io.client import StoreClient
from cloudckpt.io.leftovers import find_leftovers
from cloudckpt.stores.base import Part, UploadedPart, crc32c_of
from cloudckpt.stores.memory import MemoryStore

OLD, NEW = "data/x/0-", "data/y/0-"
NUM_PARTS = 5
DATA = data_of(NUM_PARTS * PART_BYTES - 3)
PARTS = [
    Part(number=number, offset_bytes=begin, size_bytes=min(PART_BYTES, len(DATA) - begin))
    for number, begin in enumerate(range(0, len(DATA), PART_BYTES), start=1)
]


class KnownBytes(Bytes):
    """A body whose tiles have known checksums, as a copy's."""

    @property
    def known_crc32cs(self) -> list[int]:
        begins = range(0, self.size_bytes, TILE_BYTES)
        return [slow_crc32c(self.data[begin : begin + TILE_BYTES]) for begin in begins]


@pytest.fixture
def store(request: pytest.FixtureRequest, clock: FakeClock) -> FaultyStore:
    return FaultyStore(MemoryStore(f"resume-{request.node.nodeid.replace('/', '-')}", limits=LIMITS))


def resumed(store: FaultyStore, data: bytes = DATA, *, name: str = "0") -> tuple[ObjectRef, int]:
    """One object sent by a later attempt that looks at the earlier one's: its receipt, and what was not sent of it.

    Whatever became of it, what the receipt names is there, and is `data`.
    """
    store.calls.clear()
    leftovers = {
        leftover.key.removeprefix(OLD): leftover
        for leftover in find_leftovers(StoreClient(store, retries=3, timeout_s=100), OLD)
    }
    with session_of(store, connections=2, resumable=True) as session:
        session.submit(NEW + name, KnownBytes(data), [leftovers[name]] if name in leftovers else [])
        session.tasks.join()
        (receipt,) = session.receipts()
        num_reused_bytes = session.num_reused_bytes
    assert store.inner.read(receipt.key, max_bytes=1000) == data
    assert receipt.size_bytes == len(data)
    tiles = [data[begin : begin + TILE_BYTES] for begin in range(0, len(data), TILE_BYTES)]
    assert list(receipt.tile_crc32cs) == [slow_crc32c(tile) for tile in tiles]
    assert store.count("abort_multipart") == store.count("delete") == 0
    return receipt, num_reused_bytes


def put(store: FaultyStore, key: str, data: bytes) -> None:
    store.inner.put(key, [memoryview(data)], crc32c=crc32c_of([memoryview(data)]))


def send(store: FaultyStore, upload_id: str, numbers: list[int], data: bytes = DATA) -> list[UploadedPart]:
    """Return what the earlier attempt, dead or not, sends."""
    sent = []
    for part in (PARTS[number - 1] for number in numbers):
        view = memoryview(data)[part.offset_bytes : part.offset_bytes + part.size_bytes]
        sent.append(store.inner.upload_part(OLD + "0", upload_id, part, [view], crc32c=crc32c_of([view])))
    return sent


def begun(store: FaultyStore, numbers: list[int], data: bytes = DATA) -> str:
    """An upload of the earlier attempt with those parts."""
    upload_id = store.inner.create_multipart(OLD + "0")
    send(store, upload_id, numbers, data)
    return upload_id


def changed(*positions: int) -> bytes:
    """`DATA`, with another byte at each of `positions`."""
    data = bytearray(DATA)
    for position in positions:
        data[position] ^= 1
    return bytes(data)


@pytest.mark.parametrize("data", [data_of(1), data_of(PART_BYTES), DATA], ids=["one byte", "one part", "parts"])
def test_an_object_that_is_there_is_not_sent(store: FaultyStore, data: bytes) -> None:
    """If this fails, a copy that is resumed sends everything again."""
    put(store, OLD + "0", data)
    receipt, num_reused_bytes = resumed(store, data)
    assert receipt.key == OLD + "0"
    assert num_reused_bytes == len(data)
    assert store.num_bytes("put") == store.num_bytes("upload_part") == 0
    assert not list(store.inner.list(NEW))


@pytest.mark.parametrize("position", [0, PART_BYTES, len(DATA) // 2, len(DATA) - 1])
def test_an_object_that_differs_in_one_bit_is_not_taken(store: FaultyStore, position: int) -> None:
    """If this fails, a checkpoint holds weights of an earlier step."""
    put(store, OLD + "0", changed(position))
    receipt, num_reused_bytes = resumed(store)
    assert (receipt.key, num_reused_bytes) == (NEW + "0", 0)
    assert store.inner.read(OLD + "0", max_bytes=1000) == changed(position)


@pytest.mark.parametrize("numbers", [[1], [3], [1, 2, 3, 4], [5, 2], [1, 2, 3, 4, 5]], ids=str)
def test_resumed_upload_sends_only_the_missing_parts(store: FaultyStore, numbers: list[int]) -> None:
    """If this fails, what was sent of a large object before the kill is sent again."""
    begun(store, numbers)
    receipt, num_reused_bytes = resumed(store)
    held_bytes = sum(PARTS[number - 1].size_bytes for number in numbers)
    assert receipt.key == OLD + "0"
    assert num_reused_bytes == held_bytes
    assert store.num_bytes("upload_part") == len(DATA) - held_bytes
    assert store.count("create_multipart") == 0
    assert list(store.inner.list_uploads()) == []


def test_parts_that_have_changed_are_sent_again(store: FaultyStore) -> None:
    """If this fails, an object holds parts of two states."""
    begun(store, [1, 2, 3, 5], changed(PART_BYTES + 7, len(DATA) - 1))
    receipt, num_reused_bytes = resumed(store)
    assert receipt.key == OLD + "0"
    assert num_reused_bytes == 2 * PART_BYTES
    assert store.count("upload_part") == 3  # numbers 2, 4 and 5


def test_neither_of_two_uploads_to_one_key_is_resumed(store: FaultyStore) -> None:
    """If this fails, one is completed here and the other there, and the last one stays."""
    begun(store, [1, 2])
    begun(store, [1, 2, 3])
    assert resumed(store)[0].key == NEW + "0"
    assert len(list(store.inner.list_uploads(OLD))) == 2


# Somebody else is alive


@pytest.mark.parametrize("theirs", [DATA, changed(2 * PART_BYTES)], ids=["same", "other"])
def test_an_upload_that_another_process_completes_first_is_compared(store: FaultyStore, theirs: bytes) -> None:
    """If this fails, an object that a dead job's rank completed with its own bytes is taken for this copy's."""
    upload_id = begun(store, [1, 2])

    def complete() -> None:
        tokens = send(store, upload_id, [1, 2, 3, 4, 5], theirs)
        store.inner.complete_multipart(OLD + "0", upload_id, tokens)

    store.once_before("complete_multipart", OLD, complete)
    receipt, num_reused_bytes = resumed(store)
    is_same = theirs == DATA
    assert receipt.key == (OLD if is_same else NEW) + "0"
    assert num_reused_bytes == (2 * PART_BYTES if is_same else 0)
    assert store.inner.read(OLD + "0", max_bytes=1000) == theirs


@pytest.mark.parametrize("number", [1, 3])
def test_a_part_that_another_replaces_does_not_get_into_the_object(store: FaultyStore, number: int) -> None:
    """If this fails, a rank that was thought dead mixes its bytes into a new checkpoint."""
    upload_id = begun(store, [1, 2])
    theirs = changed((number - 1) * PART_BYTES)
    store.once_before("complete_multipart", OLD, lambda: send(store, upload_id, [number], theirs))
    receipt, num_reused_bytes = resumed(store)
    assert (receipt.key, num_reused_bytes) == (NEW + "0", 0)


@pytest.mark.parametrize("theirs", [DATA, changed(2 * PART_BYTES)], ids=["same", "other"])
def test_overtaken_writer_fails(store: FaultyStore, theirs: bytes) -> None:
    """If this fails, a rank that was thought dead takes the newer copy's object for its own: were its job to commit
    first, its checkpoint could not be loaded.
    """

    def taken_over() -> None:
        (upload,) = store.inner.list_uploads(OLD)
        tokens = send(store, upload.upload_id, [1, 2, 3, 4, 5], theirs)
        store.inner.complete_multipart(OLD + "0", upload.upload_id, tokens)

    store.once_before("complete_multipart", OLD, taken_over)
    with session_of(store, connections=2, resumable=True) as session:
        session.submit(OLD + "0", KnownBytes(DATA))
        if theirs == DATA:
            session.tasks.join()
            assert session.receipts()[0].key == OLD + "0"
            return
        session.tasks.join()
        with pytest.raises(ObjectNotFoundError):
            session.receipts()
    assert store.inner.read(OLD + "0", max_bytes=1000) == theirs


# Faults


@pytest.mark.parametrize("error", [permanent, transient], ids=["for good", "for long"])
@pytest.mark.parametrize(
    "operation", ["list", "list_uploads", "list_parts", "read_into", "upload_part", "complete_multipart", "head"]
)
def test_upload_that_cannot_be_resumed_is_sent_whole(
    store: FaultyStore, operation: str, error: Callable[[str], StoreError]
) -> None:
    """If this fails, who may not list or read cannot copy any more once a copy was killed."""
    begun(store, [1, 2])
    tries = 4 if error is transient else 1
    key_part = "" if operation.startswith("list") else OLD
    # Calls that share what fails, such as parts that go up side by side, have never enough of it.
    is_shared = key_part or operation == "list_parts"
    store.fail(operation, key_part=key_part, error=lambda: error(operation), times=100 if is_shared else tries)
    receipt, num_reused_bytes = resumed(store)
    assert (receipt.key, num_reused_bytes) == (NEW + "0", 0)


def test_a_session_that_fails_leaves_what_it_sent(store: FaultyStore) -> None:
    """If this fails, there is nothing to go on from; or what another copy has named already is removed."""
    store.fail("upload_part", skip=3, error=lambda: permanent("upload_part"))

    def fail() -> None:
        with session_of(store, connections=2, resumable=True) as session:
            session.submit(OLD + "1", KnownBytes(data_of(5)))
            session.submit(OLD + "0", KnownBytes(DATA))
            session.tasks.join()
            session.receipts()

    with pytest.raises(StoreError):
        fail()
    assert store.count("abort_multipart") == store.count("delete") == 0
    (upload,) = store.inner.list_uploads()
    assert len(list(store.inner.list_parts(OLD + "0", upload.upload_id))) >= 3
    receipt, num_reused_bytes = resumed(store)
    assert receipt.key == OLD + "0"
    assert num_reused_bytes >= 3 * TILE_BYTES
    assert resumed(store, data_of(5), name="1") == (
        ObjectRef(key=OLD + "1", size_bytes=5, tile_bytes=TILE_BYTES, tile_crc32cs=(slow_crc32c(data_of(5)),)),
        5,
    )


def test_an_upload_beside_an_object_of_other_bytes_is_left_alone(store: FaultyStore) -> None:
    """If this fails, the upload replaces what another copy may have named."""
    put(store, OLD + "0", changed(0))
    begun(store, [1, 2])
    assert resumed(store)[0].key == NEW + "0"
    assert store.inner.read(OLD + "0", max_bytes=1000) == changed(0)
