"""Base class of the clauses with its hooks, helper functions of the clauses, and the clauses about reads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import TypeVar

import pytest

from cloudckpt.errors import ObjectNotFoundError, ShortObjectError, StoreError, UnsupportedOperationError
from cloudckpt.stores.base import ObjectTooLargeError, Part, Store, UploadedPart, crc32c_of

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
BODY = bytes(range(256)) * 8


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
    """Return the part of the object for each body."""
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


class ReadClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`."""

    @pytest.mark.parametrize(
        ("begin", "end"), [(0, 1), (0, 2048), (1, 2), (255, 257), (2047, 2048), (1000, 1000), (2048, 2048)]
    )
    def test_ranges_are_half_open(self, store: Store, begin: int, end: int) -> None:
        """A range that is off by one byte shifts every weight behind it."""
        put(store, "a", BODY)
        assert read_range(store, "a", begin, end) == BODY[begin:end]

    @pytest.mark.parametrize(("begin", "end"), [(2047, 2049), (2048, 2049), (5000, 5001), (0, 4096)])
    def test_a_range_past_the_end_is_a_short_object(self, store: Store, begin: int, end: int) -> None:
        """A truncated object must never load as weights followed by old content of the memory."""
        put(store, "a", BODY)
        with pytest.raises(ShortObjectError) as caught:
            read_range(store, "a", begin, end)
        assert caught.value.key == store.url("a")

    def test_an_empty_object_has_no_first_byte(self, store: Store) -> None:
        """Servers differ most in their answers to a range of an empty object."""
        put(store, "empty", b"")
        store.read_into("empty", 0, [])
        assert read_range(store, "empty", 0, 0) == b""
        with pytest.raises(ShortObjectError):
            read_range(store, "empty", 0, 1)

    def test_one_read_fills_thousands_of_views_and_nothing_else(self, store: Store) -> None:
        """One response covers many tensors: bytes that are written beside them would damage a neighbour."""
        put(store, "a", BODY)
        memory = bytearray(b"\xee" * (2 * len(BODY)))
        views = [memoryview(memory)[2 * index : 2 * index + 1] for index in range(len(BODY) - 10)]
        store.read_into("a", 3, [*views, memoryview(memory)[5:5], memoryview(memory)[-7:]])
        assert memory[: 2 * len(views) : 2] == BODY[3 : 3 + len(views)]
        assert memory[-7:] == BODY[-7:]
        assert set(memory[1 : 2 * len(views) : 2]) == {0xEE}

    def test_many_threads_read_one_object(self, store: Store) -> None:
        """Long runs are read as parallel ranges; a position shared between threads would mix them."""
        put(store, "a", BODY)
        results = run_at_once([functools.partial(read_range, store, "a", begin, begin + 100) for begin in range(8)])
        assert results == [BODY[begin : begin + 100] for begin in range(8)]

    def test_a_whole_read_is_bounded(self, store: Store) -> None:
        """A manifest of absurd size must be an error before it takes all memory."""
        put(store, "a", BODY)
        assert store.read("a", max_bytes=len(BODY)) == BODY
        with pytest.raises(ObjectTooLargeError):
            store.read("a", max_bytes=len(BODY) - 1)

    @pytest.mark.parametrize(
        "call",
        [
            lambda store: store.head("missing/a"),
            lambda store: store.read("missing/a", max_bytes=10),
            lambda store: store.read_into("missing/a", 0, [memoryview(bytearray(1))]),
        ],
        ids=["head", "read", "read_into"],
    )
    def test_a_missing_object_is_a_typed_error(self, store: Store, call: Callable[[Store], object]) -> None:
        """The error distinguishes a missing checkpoint from a missing object, and its key names the object."""
        put(store, "missin", b"a neighbour")
        with pytest.raises(ObjectNotFoundError) as caught:
            call(store)
        assert caught.value.key == store.url("missing/a")
        assert "missing/a" in str(caught.value)

    def test_a_directory_is_no_object(self, store: Store) -> None:
        """A folder of a file system must not be taken for an empty object."""
        put(store, "folder/a", b"body")
        with pytest.raises(ObjectNotFoundError):
            store.head("folder")
        with pytest.raises(ObjectNotFoundError):
            content(store, "folder")

    def test_the_address_names_the_store(self, store: Store) -> None:
        """Messages give an address that the user can pass on; children are made by joining."""
        assert not store.uri.endswith("/")
        assert store.url("a/b") == f"{store.uri}/a/b"
        assert store.url("") == store.uri

    def test_a_fresh_store_is_empty(self, store: Store) -> None:
        """A look for a checkpoint in an empty store is no error, and writes nothing."""
        assert keys(store) == []
        assert keys(store, "a/b") == []
        assert list(store.list_directories()) == []
        assert list(store.list_uploads()) == []
        store.delete(["a/b"])

    def test_listings_follow_writes_and_deletes_at_once(self, store: Store) -> None:
        """A commit lists the manifests, and must see the one that was written just before."""
        for number in range(3):
            put(store, f"a/{number}", b"x" * number)
            assert {info.key: info.size_bytes for info in store.list("a/")} == {f"a/{n}": n for n in range(number + 1)}
        store.delete(["a/1"])
        assert keys(store) == ["a/0", "a/2"]

    def test_a_prefix_is_a_plain_string(self, store: Store) -> None:
        """``manifest`` must find ``manifest.1.json``, and ``step-1/`` must not find ``step-10/``."""
        everything = ["manifest.1.json", "manifest.json", "step-1/x", "step-1/y/z", "step-10/x"]
        for key in everything:
            put(store, key, b"body")
        assert keys(store) == everything
        assert keys(store, "manifest") == everything[:2]
        assert keys(store, "step-1") == everything[2:]
        assert keys(store, "step-1/") == everything[2:4]
        assert keys(store, "step-1/y/") == ["step-1/y/z"]
        assert keys(store, "step-1/x") == ["step-1/x"]
        assert keys(store, "step-1/x/") == []
        assert keys(store, "absent/") == []

    def test_times_are_aware_and_recent(self, store: Store) -> None:
        """Garbage is chosen by age: with a time in another zone, a running save would be deleted."""
        put(store, "a", b"body")
        for info in [*store.list(), store.head("a")]:
            assert info.modified_at.tzinfo is not None
            assert abs(datetime.now(tz=timezone.utc) - info.modified_at) < timedelta(minutes=30)

    def test_directories_are_first_segments(self, store: Store) -> None:
        """The steps of a run are the first segments; an object at the top is no step."""
        for key in ("step-1/manifest.json", "step-1/data/x", "step-2/deep/er/x", "latest.txt"):
            put(store, key, b"body")
        assert sorted(store.list_directories()) == ["step-1", "step-2"]
        store.delete(["step-2/deep/er/x"])
        assert sorted(store.list_directories()) == ["step-1"]

    def test_more_than_a_page_of_keys(self, store: Store) -> None:
        """A listing or delete that stops after its first thousand leaves or loses checkpoints."""
        names = [f"step-{number:04}" for number in range(self.num_paging_keys)]
        _run_for_each(lambda name: put(store, f"{name}/x", b""), names)
        assert keys(store) == [f"{name}/x" for name in names]
        assert sorted(store.list_directories()) == names
        store.delete(f"{name}/x" for name in names[1:])
        assert keys(store) == ["step-0000/x"]
        assert list(store.list_directories()) == ["step-0000"]

    def test_more_than_a_page_of_uploads(self, store: Store) -> None:
        """Crashed jobs leave thousands of parts, and those that are not listed cost money every month."""
        self.require_multipart(store)
        names = [f"data/{number:04}" for number in range(self.num_paging_keys)]
        body = make_bodies(store, 1)[0]

        def begin(name: str) -> tuple[str, str]:
            upload_id = store.create_multipart(name)
            upload_part(store, name, upload_id, make_parts([body])[0], body)
            return name, upload_id

        ids = dict(_run_for_each(begin, names))
        assert {info.key: info.upload_id for info in store.list_uploads()} == ids
        assert {info.key: info.upload_id for info in store.list_uploads("data/")} == ids
        _run_for_each(lambda name: store.abort_multipart(name, ids[name]), names)
        assert list(store.list_uploads()) == []
        assert keys(store) == []


def _run_for_each(function: Callable[[str], T], names: Iterable[str]) -> list[T]:
    with ThreadPoolExecutor(8) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(function, name) for name in names]]
