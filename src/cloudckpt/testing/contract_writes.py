"""Clauses about putting, copying and deleting objects, about races, and about refusals."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import TypeVar

import pytest

from cloudckpt.errors import (
    ChecksumRefusedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores.base import Store, UploadedPart
from cloudckpt.testing.contract_base import (
    ODD_KEYS,
    WAIT_S,
    Clauses,
    content,
    crc,
    keys,
    make_bodies,
    make_parts,
    put,
    run_at_once,
    upload_part,
)


class WriteClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`."""

    def test_put_object_is_readable_at_once(self, store: Store) -> None:
        """Without read-after-write a rank cannot check its objects, nor a coordinator its manifest."""
        put(store, "a/b", b"first")
        assert content(store, "a/b") == b"first"
        assert store.head("a/b").size_bytes == 5

    def test_an_overwritten_object_is_one_object(self, store: Store) -> None:
        """A shorter object keeps no tail of a longer one, and a delete uncovers no older version."""
        for body in (b"a long first body", b"short", b"some body"):
            put(store, "a", body)
            assert content(store, "a") == body
            assert [(info.key, info.size_bytes) for info in store.list()] == [("a", len(body))]
        store.delete(["a"])
        assert keys(store) == []
        with pytest.raises(ObjectNotFoundError):
            content(store, "a")

    def test_a_version_changes_with_each_write(self, store: Store) -> None:
        """An import of files that are replaced meanwhile, at the same size within a second, would mix two models."""
        put(store, "a", b"1")
        first = store.head("a")
        assert store.head("a").is_same_write(first)
        assert [info.version for info in store.list()] in ([first.version], [""])
        versions = set()
        for number in range(1000):  # a file system's clock may need some tries to move on
            put(store, "a", b"%d" % (2 + number % 8))
            versions.add(store.head("a").version)
            if versions - {first.version}:
                break
        assert versions - {first.version} or versions == {""}

    def test_a_body_of_thousands_of_views_is_put_in_their_order(self, store: Store) -> None:
        """A layer of many small tensors exceeds the operating system's limit on scattered writes."""
        memory = memoryview(bytes(index % 251 for index in range(5000)))
        views = [memory[200:], memory[:0], *(memory[index : index + 1] for index in range(5000)), memory[10:20]]
        body = b"".join(views)
        store.put("scattered", views, crc32c=crc(body))
        assert content(store, "scattered") == body

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        """A rank without tensors writes an empty object, and readers must find it."""
        store.put("empty", [], crc32c=0)
        assert store.head("empty").size_bytes == 0
        assert content(store, "empty") == b""
        assert keys(store) == ["empty"]

    def test_memory_may_be_reused_after_a_put(self, store: Store) -> None:
        """Staging buffers are filled anew as soon as the call returns: kept views would be stored as later bytes."""
        buffer = bytearray(b"before")
        store.put("kept", [memoryview(buffer)], crc32c=crc(b"before"))
        buffer[:] = b"after!"
        assert content(store, "kept") == b"before"

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys_work_everywhere(self, store: Store, key: str) -> None:
        """A key that is escaped in one call and not in another makes objects that cannot be found or removed."""
        put(store, key, b"body")
        assert content(store, key) == b"body"
        assert store.head(key).key == key
        assert keys(store) == [key]
        assert keys(store, key[:-1]) == [key]
        store.delete([key])
        assert keys(store) == []

    @pytest.mark.parametrize("key", ["", "/absolute", "../out", "a/../../out", "a//b", "a/./b", "a/", "a\0b"])
    def test_keys_that_could_leave_the_root_are_refused(self, store: Store, key: str) -> None:
        """A manifest from a stranger must not make us read or write beyond the checkpoint."""
        with pytest.raises(StoreError):
            put(store, key, b"body")
        with pytest.raises(StoreError):
            content(store, key)

    def test_the_wrong_checksum_is_refused(self, store: Store) -> None:
        """Bytes that changed between checksum and store would be saved as if they were right."""
        self.require_checksums(store)
        put(store, "old", b"old")
        for key in ("old", "new"):
            with pytest.raises(ChecksumRefusedError):
                store.put(key, [memoryview(b"body")], crc32c=crc(b"other"))
        assert keys(store) == ["old"]
        assert content(store, "old") == b"old"

    def test_create_if_absent_refuses_an_existing_object(self, store: Store) -> None:
        """The commit is such a call: without it one job overwrites another's checkpoint."""
        self.require_create(store)
        put(store, "manifest", b"theirs", if_absent=True)
        with pytest.raises(ObjectExistsError) as caught:
            put(store, "manifest", b"ours", if_absent=True)
        assert caught.value.key == store.url("manifest")
        assert content(store, "manifest") == b"theirs"
        store.delete(["manifest"])
        put(store, "manifest", b"two", if_absent=True)
        assert content(store, "manifest") == b"two"

    def test_a_read_after_a_lost_answer_shows_whose_object_it_is(self, store: Store) -> None:
        """If the answer to a commit is lost, a second try is refused, and a read shows whose manifest it is."""
        self.require_create(store)
        put(store, "manifest", b"ours", if_absent=True)
        with pytest.raises(ObjectExistsError):
            put(store, "manifest", b"ours", if_absent=True)
        assert content(store, "manifest") == b"ours"

    def test_one_of_many_threads_creates(self, store: Store) -> None:
        """The worst fault is that two writers both take their commit for successful."""
        self.require_create(store)
        for round_ in range(self.num_racing_rounds):
            key = f"race/{round_}"
            bodies = [f"writer {writer}".encode() * 100 for writer in range(8)]
            results = run_at_once([functools.partial(put, store, key, body, if_absent=True) for body in bodies])
            winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
            # Over a network an answer can be lost or refused, so that the winner does not know that it has won.
            unknown = [b for b, result in zip(bodies, results, strict=True) if isinstance(result, TransientStoreError)]
            expected = (type(None), ObjectExistsError, TransientStoreError)
            assert all(isinstance(result, expected) for result in results), results
            assert len(winners) == 1 or (not winners and unknown), results
            assert content(store, key) in (winners or unknown)

    def test_one_of_two_processes_creates(self, store: Store) -> None:
        """Ranks and jobs are processes, so a lock within one process does not suffice."""
        self.require_create(store)
        if not self.shared_between_processes:
            pytest.skip(f"no other process sees the objects of {store.uri}")
        racing = [f"race/{number}" for number in range(6 * self.num_racing_rounds)]
        bodies = (b"one", b"two")
        first, second = (functools.partial(put, body=body, if_absent=True) for body in bodies)
        outcomes = _race_in_processes(store, first, second, racing)
        for key, outcome in zip(racing, outcomes, strict=True):
            assert sum(error is None for error in outcome) == 1, (key, outcome)
            # S3 may refuse a create as "conflicting", and asks for another try.
            losers = [error for error in outcome if error is not None]
            assert all(isinstance(error, ObjectExistsError | TransientStoreError) for error in losers), (key, outcome)
            assert content(store, key) == bodies[outcome.index(None)]

    def test_a_create_never_replaces_what_was_just_completed(self, store: Store) -> None:
        """An object can be created by a put or by a completion, and the condition must hold against both.

        A completion is unconditional, so it always wins.
        """
        self.require_create(store)
        self.require_multipart(store)
        rounds = [_begin_upload(store, f"race/threads/{number}") for number in range(self.num_racing_rounds)]
        outcomes = [
            run_at_once(
                [functools.partial(_complete, store, uploaded), functools.partial(_create_at_once, store, uploaded)]
            )
            for uploaded in rounds
        ]
        if self.shared_between_processes:
            more = [_begin_upload(store, f"race/processes/{number}") for number in range(self.num_racing_rounds)]
            outcomes += [list(pair) for pair in _race_in_processes(store, _complete, _create_at_once, more)]
            rounds += more
        for uploaded, (completed, created) in zip(rounds, outcomes, strict=True):
            assert completed is None, (uploaded.key, completed)
            # S3 may refuse a create as "conflicting", and asks for another try.
            assert created is None or isinstance(created, ObjectExistsError | TransientStoreError), (
                uploaded.key,
                created,
            )
            assert content(store, uploaded.key) == uploaded.body, uploaded.key

    def test_a_private_store_refuses_another_process(self, store: Store) -> None:
        """A save into memory of another process would report success, and nobody could load it."""
        if not store.capabilities.is_private:
            pytest.skip("other processes see the objects")
        put(store, "a", b"body")
        (errors,) = _race_in_processes(store, _look, _look, ["a"])
        assert all(isinstance(error, UnsupportedOperationError) for error in errors), errors

    def test_a_near_store_makes_no_connection(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """Calls to a near store are made one after the other, so round trips would slow a save down."""
        if not store.capabilities.is_near:
            pytest.skip("the store is reached by a network")
        for connect in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, connect, _refuse_connection)
        put(store, "a/b", b"body")
        assert content(store, "a/b") == b"body"
        assert keys(store) == ["a/b"]
        assert list(store.list_directories()) == ["a"]
        store.delete(["a/b"])

    def test_a_pickled_store_sees_the_same_objects(self, store: Store) -> None:
        """Writers are pickled to the process that saves in the background."""
        put(store, "a", b"body")
        twin: Store = pickle.loads(pickle.dumps(store))
        assert twin.uri == store.uri
        assert content(twin, "a") == b"body"
        assert twin.capabilities == store.capabilities

    def test_a_delete_removes_nothing_but_the_keys_given(self, store: Store) -> None:
        """Neighbours whose names begin alike belong to other checkpoints; a clean-up that is repeated is no error."""
        for key in ("step-1/x", "step-10/x", "step-1x"):
            put(store, key, b"body")
        for _ in range(2):
            store.delete(iter(["step-1/x", "step-1", "never/was"]))
            store.delete([])
            assert keys(store) == ["step-10/x", "step-1x"]
        with pytest.raises(ObjectNotFoundError):
            store.head("step-1/x")

    def test_deletes_keep_their_order(self, store: Store) -> None:
        """A checkpoint's manifest is deleted first: a reader that sees the manifest must be able to read the data."""
        # The keys between them give the watcher time to see a wrong order.
        deleted = ["manifest", *(f"between/{number:02}/x" for number in range(14)), "data/0"]
        for key in deleted:
            put(store, key, b"body")
        is_deleted = threading.Event()
        problems: list[str] = []

        def watch() -> None:
            while not is_deleted.is_set() and not problems:
                if not _exists(store, "data/0") and _exists(store, "manifest"):
                    problems.append("the manifest outlived its data")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            store.delete(iter(deleted))
        finally:
            is_deleted.set()
            watcher.join(WAIT_S)
        assert not problems
        assert keys(store) == []

    def test_a_copy_by_the_service_says_what_it_copied(self, store: Store) -> None:
        """The reported checksum is compared with the saved one; if they agree, the copy is not read again."""
        body = bytes(range(256)) * 33
        put(store, "a/source", body)
        try:
            crc32c = store.copy_from(store.url("a/source"), "b/target")
        except UnsupportedOperationError:
            assert keys(store) == ["a/source"]
            assert store.probe().copies_within == ""
            pytest.skip("the store has no copies by the service from other stores, and refuses the call")
        assert content(store, "b/target") == content(store, "a/source") == body
        # A store that does not verify checksums may report wrong ones; the copy is then read and verified.
        assert crc32c in {None, crc(body)} or not store.probe().verifies_crc32c
        with pytest.raises(ObjectNotFoundError):
            store.copy_from(store.url("missing"), "c/target")
        assert keys(store) == ["a/source", "b/target"]


def _look(store: Store, key: str) -> None:
    store.head(key)


def _refuse_connection(*_: object) -> None:
    raise AssertionError("a store that is near has opened a connection")


def _exists(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except ObjectNotFoundError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uploaded:
    key: str
    upload_id: str
    part: UploadedPart
    body: bytes


def _begin_upload(store: Store, key: str) -> _Uploaded:
    body = make_bodies(store, 1)[0]
    upload_id = store.create_multipart(key)
    part = upload_part(store, key, upload_id, make_parts([body])[0], body)
    return _Uploaded(key=key, upload_id=upload_id, part=part, body=body)


def _create_at_once(store: Store, uploaded: _Uploaded) -> None:
    put(store, uploaded.key, b"created", if_absent=True)


def _complete(store: Store, uploaded: _Uploaded) -> None:
    try:
        store.complete_multipart(uploaded.key, uploaded.upload_id, [uploaded.part])
    except TransientStoreError:  # a busy store may refuse once
        store.complete_multipart(uploaded.key, uploaded.upload_id, [uploaded.part])


_Round = TypeVar("_Round")

_barrier: Barrier | None = None


def _race_in_processes(
    store: Store,
    first: Callable[[Store, _Round], None],
    second: Callable[[Store, _Round], None],
    rounds: Sequence[_Round],
) -> list[tuple[StoreError | None, StoreError | None]]:
    """Run `first` in one process and `second` in another, together for each of `rounds`; return their errors in order.

    Functions and rounds must be picklable.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    with ProcessPoolExecutor(2, mp_context=context, initializer=_keep_barrier, initargs=(barrier,)) as pool:
        futures = [pool.submit(_run, pickle.dumps(store), function, rounds) for function in (first, second)]
        outcomes = [future.result(WAIT_S) for future in futures]
    return list(zip(*outcomes, strict=True))


def _keep_barrier(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603  # a barrier cannot be pickled into a task, only inherited
    _barrier = barrier


def _run(
    pickled_store: bytes, function: Callable[[Store, _Round], None], rounds: Sequence[_Round]
) -> list[StoreError | None]:
    if _barrier is None:
        raise RuntimeError("the pool's initializer did not run")
    store: Store = pickle.loads(pickled_store)
    outcomes: list[StoreError | None] = []
    try:
        for round_ in rounds:
            _barrier.wait(WAIT_S)
            try:
                function(store, round_)
            except StoreError as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
    except BaseException:
        _barrier.abort()  # the other process need not wait
        raise
    return outcomes
