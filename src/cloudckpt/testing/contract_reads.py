"""Clauses about reading objects and listing them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest

from cloudckpt.errors import ObjectNotFoundError, ShortObjectError, StoreError
from cloudckpt.stores.base import Store
from cloudckpt.testing.contract_base import (
    WAIT_S,
    Clauses,
    T,
    content,
    keys,
    make_bodies,
    make_parts,
    put,
    read_range,
    run_at_once,
    upload_part,
)

BODY = bytes(range(256)) * 8


class ReadClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`."""

    @pytest.mark.parametrize(
        ("begin", "end"), [(0, 1), (0, 2048), (1, 2), (255, 257), (2047, 2048), (1000, 1000), (2048, 2048)]
    )
    def test_ranges_are_half_open(self, store: Store, begin: int, end: int) -> None:
        """One byte off in a range shifts every weight behind it."""
        put(store, "a", BODY)
        assert read_range(store, "a", begin, end) == BODY[begin:end]

    @pytest.mark.parametrize(("begin", "end"), [(2047, 2049), (2048, 2049), (5000, 5001), (0, 4096)])
    def test_a_range_past_the_end_is_a_short_object(self, store: Store, begin: int, end: int) -> None:
        """A truncated object must never load as weights followed by what was in memory before."""
        put(store, "a", BODY)
        with pytest.raises(ShortObjectError) as caught:
            read_range(store, "a", begin, end)
        assert caught.value.key == store.url("a")

    def test_an_empty_object_has_no_first_byte(self, store: Store) -> None:
        """The range that no object has is the one that servers answer most differently."""
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
        with pytest.raises(StoreError):
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
        """Looking for a checkpoint where nothing ever was is no error, and writes nothing."""
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
