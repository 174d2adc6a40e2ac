"""Clauses about reading objects and listing them."""

from __future__ import annotations

import contextlib
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
    capture_outcome,
    content,
    crc,
    keys,
    make_bodies,
    make_parts,
    put,
    read_range,
    run_at_once,
    upload,
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

    def test_one_read_fills_several_views_and_nothing_else(self, store: Store) -> None:
        """One response covers several tensors: bytes that land beside them would damage a neighbour."""
        put(store, "a", BODY)
        memory = bytearray(b"\xee" * 64)
        whole = memoryview(memory)
        store.read_into("a", 3, [whole[40:50], whole[5:5], whole[10:11], whole[20:25]])
        expected = bytearray(b"\xee" * 64)
        expected[40:50], expected[10:11], expected[20:25] = BODY[3:13], BODY[13:14], BODY[14:19]
        assert memory == expected

    def test_one_read_fills_thousands_of_views(self, store: Store) -> None:
        """Reading a column of a matrix scatters one response over its rows, beyond any limit on scattered reads."""
        put(store, "a", BODY)
        memory = bytearray(2 * len(BODY))
        store.read_into("a", 0, [memoryview(memory)[2 * index : 2 * index + 1] for index in range(len(BODY))])
        assert memory[::2] == BODY
        assert not any(memory[1::2])

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
        """Where keys are files, a folder must not be taken for an empty object."""
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


_LONGEST_NAME_BYTES = 255
"""Longest file name on common file systems."""


class KeyClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`."""

    def test_the_longest_key_works_everywhere(self, store: Store) -> None:
        """A store may add to keys for parts or temporary files, but the longest key must still work."""
        longest = self._longest_key(store)
        for key in (longest, f"{longest[:-1]}m"):
            put(store, key, b"body")
            assert content(store, key) == b"body"
            assert read_range(store, key, 1, 3) == b"od"
            assert store.head(key).key == key
            assert keys(store, key) == [key]
            store.delete([key])
            with pytest.raises(ObjectNotFoundError):
                store.head(key)
        if self.has_no_multipart(store):
            return
        bodies = make_bodies(store, 2)
        upload(store, longest, bodies)
        assert content(store, longest) == b"".join(bodies)
        upload_id = store.create_multipart(longest)
        upload_part(store, longest, upload_id, make_parts(bodies)[0], bodies[0])
        assert [(info.key, info.upload_id) for info in store.list_uploads()] == [(longest, upload_id)]
        store.abort_multipart(longest, upload_id)
        assert keys(store) == [longest]

    def test_a_key_that_is_too_long_is_a_typed_error(self, store: Store) -> None:
        """Names come from users, and the error has to name the key."""
        key = "far-too-long/" + "n" * 20_000
        for call in (lambda: put(store, key, b"body"), lambda: content(store, key), lambda: store.head(key)):
            outcome = capture_outcome(call)
            assert not isinstance(outcome, StoreError) or outcome.key == store.url(key)

    def test_more_than_a_page_of_keys(self, store: Store) -> None:
        """A listing or delete that stops after its first thousand leaves or loses checkpoints."""
        names = [f"step-{number:04}" for number in range(self.num_paging_keys)]
        _run_for_each(lambda name: put(store, f"{name}/x", b""), names)
        assert keys(store) == [f"{name}/x" for name in names]
        assert sorted(store.list_directories()) == names
        store.delete(f"{name}/x" for name in names[1:])
        assert keys(store) == ["step-0000/x"]
        assert list(store.list_directories()) == ["step-0000"]

    def test_more_than_a_page_of_siblings(self, store: Store) -> None:
        """Some stores delete in batches, and the last batch must be deleted too."""
        names = [f"data/{number:04}" for number in range(self.num_paging_keys)]
        _run_for_each(lambda name: put(store, name, b""), names)
        assert keys(store, "data/") == names
        store.delete(names[:-1])
        assert keys(store, "data/") == names[-1:]
        store.delete(names)
        assert keys(store, "data/") == []

    def test_more_than_a_page_of_uploads(self, store: Store) -> None:
        """Crashed jobs leave thousands of parts, and those that are not listed cost money every month."""
        if self.has_no_multipart(store):
            return
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

    def _longest_key(self, store: Store) -> str:
        _, separator, behind = store.uri.partition("://")
        root = f"{behind.partition('/')[2]}/".lstrip("/") if separator else f"{store.uri}/"
        room_bytes = self.longest_key_bytes - len(root.encode())
        names = []
        while room_bytes > 0:
            size_bytes = min(room_bytes, _LONGEST_NAME_BYTES)
            size_bytes -= room_bytes - size_bytes == 1  # nothing may end in a slash
            names.append(_make_name(size_bytes))
            room_bytes -= size_bytes + 1
        return "/".join(names)


def _make_name(size_bytes: int) -> str:
    odd = "ü日"
    odd_bytes = len(odd.encode())
    return odd + "n" * (size_bytes - odd_bytes) if size_bytes >= odd_bytes else "n" * size_bytes


def _run_for_each(function: Callable[[str], T], names: Iterable[str]) -> list[T]:
    with ThreadPoolExecutor(8) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(function, name) for name in names]]


_BODY = bytes(range(1, 241))


def _odd_views(memory: bytearray) -> dict[str, memoryview]:
    whole = memoryview(memory)
    return {
        "every second byte": whole[::2],
        "backwards": whole[::-1],
        "integers": whole.cast("I"),
        "two dimensions": whole.cast("B", [len(memory) // 8, 8]),
    }


_ODD = list(_odd_views(bytearray(16)))


class ViewClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract` about memory that the protocol does not allow."""

    @pytest.mark.parametrize("shape", _ODD)
    def test_odd_memory_is_put_right_or_not_at_all(self, store: Store, shape: str) -> None:
        """A tensor's memory taken for contiguous that is not would be saved as other numbers."""
        view = _odd_views(bytearray(_BODY))[shape]
        try:
            store.put("a", [view], crc32c=crc(view.tobytes()))
        except Exception:  # noqa: BLE001  # the protocol does not define the class
            assert keys(store) == []
        else:
            assert content(store, "a") == view.tobytes()

    @pytest.mark.parametrize("shape", _ODD)
    def test_odd_memory_is_filled_right_or_not_at_all(self, store: Store, shape: str) -> None:
        """A tensor's memory taken for contiguous that is not would be loaded as other numbers."""
        put(store, "a", _BODY)
        memory = bytearray(b"\xee" * len(_BODY))
        view = _odd_views(memory)[shape]
        is_filled = False
        with contextlib.suppress(Exception):  # the protocol does not define the class
            store.read_into("a", 0, [view])
            is_filled = True
        assert not is_filled or view.tobytes() == _BODY[: view.nbytes]
        outside = memory[1::2] if shape == "every second byte" else b""
        assert not outside.strip(b"\xee")

    def test_memory_that_cannot_be_written_stays_as_it_is(self, store: Store) -> None:
        """Immutable bytes are shared all over a program."""
        put(store, "a", _BODY)
        target = bytes(len(_BODY))
        with pytest.raises(Exception):  # noqa: B017, PT011  # the protocol does not define the class
            store.read_into("a", 0, [memoryview(target)])
        assert target == bytes(len(_BODY))

    def test_memory_of_parts_may_be_reused(self, store: Store) -> None:
        """Parts are sent from a ring of buffers that is filled anew as soon as the call returns."""
        if self.has_no_multipart(store):
            return
        bodies = make_bodies(store, 2)
        buffer = bytearray(bodies[0])
        upload_id = store.create_multipart("a")
        uploaded = []
        for part, body in zip(make_parts(bodies), bodies, strict=True):
            buffer[: len(body)] = body
            view = memoryview(buffer)[: len(body)]
            uploaded.append(store.upload_part("a", upload_id, part, [view], crc32c=crc(body)))
        buffer[:] = bytes(len(buffer))
        store.complete_multipart("a", upload_id, uploaded)
        assert content(store, "a") == b"".join(bodies)
