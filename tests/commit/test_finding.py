"""Absence: what has to happen before a checkpoint, or the newest of a root, is told not to be there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from awscrt.checksums import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.commit.actors import data_key_of, fence, manifest_for
from tests.kit.in_memory import Memory, assert_holds, state_of
from tests.kit.options import make_options
from tests.kit.ranks import run_ranks
from tests.kit.wrapped import Call, FaultyStore, Lies, WrappedStore, transient, watching
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt import CheckpointManager, Options
from cloudckpt.commit import entries
from cloudckpt.commit.entries import ALWAYS_READ_BYTES, manifest_key
from cloudckpt.commit.log import list_entries, read_log, resolve
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidManifestError,
    ObjectNotFoundError,
    UnsupportedValueError,
)
from cloudckpt.format.codec import encode
from cloudckpt.io.client import StoreClient
from cloudckpt.manager.steps import Steps
from cloudckpt.stores.base import ObjectInfo, Store
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.uri import parse_location

examples = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def client_of(store: Store) -> StoreClient:
    return StoreClient(store, retries=0, timeout_s=100)


def require(condition: bool) -> None:  # noqa: FBT001
    assert condition


def put(store: Store, key: str, body: bytes) -> None:
    store.put(key, [memoryview(body)], crc32c=crc32c(body))


class Lying(WrappedStore):
    """Lists each entry of a log with another size."""

    def __init__(self, inner: Store, size_bytes: int) -> None:
        super().__init__(inner)
        self._size_bytes = size_bytes

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in self.inner.list(prefix):
            is_entry = info.key.rpartition("/")[2].startswith("manifest")
            yield ObjectInfo(
                key=info.key, size_bytes=self._size_bytes if is_entry else info.size_bytes, modified_at=info.modified_at
            )


# A far store, whose first entry is read beside the listing.


def far_store(*numbers: int) -> FaultyStore:
    """Make a store with these manifests that costs round trips."""
    store = FaultyStore(MemoryStore(uuid.uuid4().hex))
    store.capabilities = dataclasses.replace(store.capabilities, is_near=False)
    for number in numbers:
        put(store, manifest_key(number), encode(manifest_for(f"a{number}")))
    return store


def test_the_first_manifest_of_a_far_store_is_read_beside_the_listing() -> None:
    """If this fails, each load waits for one round trip more."""
    store, is_read = far_store(0), threading.Event()
    store.once_before("read", "manifest.json", is_read.set)
    store.once_before("list", "manifest", lambda: require(is_read.wait(30)))
    assert resolve(client_of(store)).manifest.attempt == "a0"
    assert (store.count("list"), store.count("read")) == (1, 1)


@pytest.mark.parametrize("numbers", [(1,), (0, 1), (0, 2)])
def test_the_first_manifest_is_not_the_current_one_of_an_overwritten_checkpoint(numbers: tuple[int, ...]) -> None:
    """If this fails, a load gets the data that an overwrite has replaced."""
    resolved = resolve(client_of(far_store(*numbers)))
    assert (resolved.number, resolved.manifest.attempt) == (numbers[-1], f"a{numbers[-1]}")


@pytest.mark.parametrize("error", [lambda: transient("read"), lambda: ObjectNotFoundError("", key="", operation="")])
def test_a_first_manifest_that_is_not_had_beside_the_listing_is_read_again(error: Callable[[], Exception]) -> None:
    """If this fails, one wrong answer hides a checkpoint."""
    store = far_store(0)
    store.fail("read", key_part="manifest.json", error=error)
    assert resolve(client_of(store)).manifest.attempt == "a0"


# A path, where one job overwrites a checkpoint while another looks.


class Entry:
    """An entry of a directory that says when it is about to be looked at."""

    def __init__(self, entry: os.DirEntry[str], look: Callable[[str], None]) -> None:
        self._entry, self._look = entry, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def stat(self, **keywords: bool) -> os.stat_result:
        self._look(self._entry.name)
        return self._entry.stat(**keywords)


class Overwritten:
    """A checkpoint on a path that is overwritten whenever one of the chosen files is about to be looked at."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = str(root)
        self.store = LocalStore(f"{root}/step-2")
        self._number, self._num_looks, self._at = 0, 0, frozenset[int]()
        put(self.store, "manifest.json", encode(manifest_for("a0")))
        scan = os.scandir

        @contextlib.contextmanager
        def scanned(path: str) -> Iterator[list[Any]]:
            with scan(path) as entries:
                yield [Entry(entry, self._look) for entry in entries]

        monkeypatch.setattr(os, "scandir", scanned)

    def _look(self, name: str) -> None:
        if name.startswith("manifest"):
            self._num_looks += 1
            if self._num_looks in self._at:
                self._overwrite()

    def _overwrite(self) -> None:
        self._number += 1
        put(self.store, manifest_key(self._number), encode(manifest_for(f"a{self._number}")))
        self.store.delete([manifest_key(self._number - 1)])

    def begin(self, at: frozenset[int]) -> None:
        self._num_looks, self._at = 0, at


def test_a_reader_beside_an_overwriter_of_a_path_always_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, ``readdir`` that misses the old manifest and the new one makes a reader say that there is none."""
    monkeypatch.setattr("os.fsync", lambda file: None)  # saves time, and nothing dies here
    overwritten = Overwritten(tmp_path, monkeypatch)
    uri, store = f"{tmp_path}/step-2", overwritten.store
    steps = Steps(parse_location(str(tmp_path)), Options())

    @settings(examples, max_examples=15)
    @given(st.frozensets(st.integers(1, 8), max_size=6))
    def find(at: frozenset[int]) -> None:
        looks: list[Callable[[], object]] = [
            lambda: resolve(client_of(store)).manifest,
            lambda: read_log(client_of(store)).current_number is not None,
            lambda: list_entries(client_of(store)),
            lambda: cloudckpt.latest(tmp_path),
            lambda: steps.find_committed(with_metadata=True),
            lambda: [one for one in cloudckpt.list_checkpoints(tmp_path, all=True) if one.state == "committed"],
            lambda: cloudckpt.describe(uri),
        ]
        for number, look in enumerate(looks):
            overwritten.begin(at)
            assert look(), (number, at)

    find()


# A root under which a job commits its next step and removes the one before.


def test_a_checkpoint_that_is_there_costs_one_listing_and_absence_two() -> None:
    """If this fails, each load pays for looks that it does not need, or absence is believed from one look."""
    store = FaultyStore(MemoryStore(f"costs-{os.urandom(8).hex()}"))
    with pytest.raises(CheckpointNotFoundError):
        resolve(client_of(store))
    assert [call.key for call in store.calls if call.operation == "list"][:2] == ["manifest", "manifest"]
    put(store.inner, "manifest.json", encode(manifest_for("a")))
    store.calls.clear()
    resolve(client_of(store))
    assert [call.operation for call in store.calls] == ["list", "read"]


def test_listed_manifest_that_reads_as_missing_raises() -> None:
    """If this fails, a gateway that answers each read with 404 makes a job start afresh."""
    store = FaultyStore(MemoryStore(f"listed-{os.urandom(8).hex()}"))
    put(store.inner, "manifest.json", encode(manifest_for("a")))
    store.fail("read", error=lambda: ObjectNotFoundError("no", key="manifest.json", operation="read"), times=99)
    with pytest.raises(CheckpointChangedError, match="lists an entry that it does not find"):
        resolve(client_of(store))


LOOKS: dict[str, tuple[str, Callable[[Memory, Options], object]]] = {
    "list_checkpoints(all=True)": (
        "step-2$",
        lambda memory, options: [
            one.name for one in cloudckpt.list_checkpoints(memory.root, options=options, all=True)
        ][-3:],
    ),
    "delete": (
        "step-1/",
        lambda memory, options: (cloudckpt.delete(memory.uri("step-1"), options=options), memory.data_keys("step-1")),
    ),
    "gc": ("step-", lambda memory, options: cloudckpt.gc(memory.root, quiet=True, options=options).is_nothing_there),
    "save beside torch's": (
        ".metadata",
        lambda memory, options: cloudckpt.save(state_of(), memory.uri("torch"), no_dist=True, options=options),
    ),
    "unconditional save": (
        "step-1/manifest",
        lambda memory, options: cloudckpt.save(state_of(), memory.uri("step-1"), no_dist=True, options=options),
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_entry_missing_from_one_listing_is_found(memory: Memory, name: str) -> None:
    """If this fails, one listing that lacks an entry makes a call leave a checkpoint out, or replace it."""
    pattern, look = LOOKS[name]

    def made(wrap: Any) -> object:
        for step in ("step-1", "step-2"):
            with contextlib.suppress(CheckpointExistsError):
                cloudckpt.save(state_of(), memory.uri(step), no_dist=True)
        put(memory.at("torch").inner, ".metadata", b"torch's")
        commit = "unconditional" if "unconditional" in name else "conditional"
        try:
            return look(memory, make_options(wrap_store=wrap, commit=commit))
        except CheckpointExistsError as error:
            return str(error)

    honest, lies = made(lambda inner: inner), Lies(pattern, "list", "list_directories")
    assert made(lies) == honest
    assert lies.num_told == 1


# Sizes that a listing gets wrong.

LOGS: dict[str, dict[str, bytes]] = {
    "one": {"manifest.json": encode(manifest_for("a"))},
    "overwritten": {"manifest.json": encode(manifest_for("a")), "manifest.1.json": encode(manifest_for("b"))},
    "kept": {"manifest.json": encode(manifest_for("a")), "manifest.1.json": fence(keeps=0)},
    "deleted": {"manifest.json": encode(manifest_for("a")), "manifest.1.json": fence(keeps=None)},
}


@pytest.mark.parametrize("size_bytes", [0, 1, 128, 129, 1 << 40])
@pytest.mark.parametrize("name", LOGS)
def test_a_wrong_size_in_a_listing_changes_nothing(name: str, size_bytes: int) -> None:
    """If this fails, a listing that says 0 bytes makes a checkpoint look deleted, or a deleted one look whole."""
    store = MemoryStore(f"lying-{os.urandom(8).hex()}")
    for key, body in LOGS[name].items():
        put(store, key, body)

    def found(at: Store) -> object:
        try:
            return resolve(client_of(at))
        except CheckpointNotFoundError as error:
            return type(error), str(error)

    assert found(Lying(store, size_bytes)) == found(store)
    if size_bytes <= 128:
        assert read_log(client_of(Lying(store, size_bytes))).current_number == read_log(client_of(store)).current_number


def flip(body: bytes, at: int) -> bytes:
    return bytes([*body[:at], body[at] ^ 1, *body[at + 1 :]])


UNREADABLE = {
    "damaged": flip(fence(keeps=0), 40),
    "damaged at its beginning": flip(fence(keeps=0), 12),
    "of a newer format": fence(keeps=0).replace(b'"version":[1,0]', b'"version":[2,0]'),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_unreadable_fence_hides_no_checkpoint(memory: Memory, kind: str) -> None:
    """If this fails, one flipped bit beside the newest checkpoint makes a job start afresh, or hang."""
    for name in ("step-1", "step-2"):
        cloudckpt.save(state_of(1.0), memory.uri(name), no_dist=True)
    put(memory.at("step-2").inner, manifest_key(1), UNREADABLE[kind])
    newest = cloudckpt.latest(memory.root)
    assert newest is not None
    assert newest.name == "step-2"
    assert [info.name for info in cloudckpt.list_checkpoints(memory.root)] == ["step-1", "step-2"]
    with CheckpointManager(memory.root, async_=False) as manager:
        found = manager.latest()
    assert found is not None
    assert found.step == 2


def test_a_step_whose_fence_cannot_be_found_hides_no_other(memory: Memory) -> None:
    """If this fails, one entry that is listed and not found keeps a job from all of its steps."""
    for name in ("step-1", "step-2"):
        cloudckpt.save(state_of(1.0), memory.uri(name), no_dist=True)
    put(memory.at("step-2").inner, manifest_key(1), fence(keeps=0))
    lost = FaultyStore(memory.at("step-2").inner)
    lost.fail("read", error=lambda: ObjectNotFoundError("no", key="manifest.1.json", operation="read"), times=99)
    assert read_log(client_of(lost), is_lenient=True).current_number == 0


# Manifests that no reader takes memory for.


@pytest.mark.parametrize("size_bytes", [2**31 - 1, 2**31 + 1])
def test_oversized_manifest_is_skipped_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """If this fails, a sparse file costs each reader gigabytes, or keeps a job from every step there is."""
    cloudckpt.save(state_of(1.0), tmp_path / "step-1")
    (tmp_path / "step-2").mkdir()
    with (tmp_path / "step-2" / "manifest.json").open("wb") as file:
        file.truncate(size_bytes)
    read = LocalStore.read

    def bounded(store: LocalStore, key: str, *, max_bytes: int) -> bytes:
        assert max_bytes <= ALWAYS_READ_BYTES, "memory is taken for it"
        return read(store, key, max_bytes=max_bytes)

    monkeypatch.setattr(LocalStore, "read", bounded)
    with pytest.raises(InvalidManifestError, match="was not read"):
        cloudckpt.load(state_of(), tmp_path / "step-2")
    state = state_of(-1.0)
    assert [one.is_gone for one in cloudckpt.load_latest(state, tmp_path).skipped] == [False]
    assert_holds(state, 1.0)
    with CheckpointManager(tmp_path, no_dist=True) as manager:
        restored = manager.restore(state_of())
        assert restored is not None
        assert restored.step == 1
        assert [info.step for info in manager.steps()] == [1, 2]
    assert {one.name: one.state for one in cloudckpt.list_checkpoints(tmp_path, all=True)} == {
        "step-1": "committed",
        "step-2": "damaged",
    }
    cloudckpt.gc(tmp_path, older_than=0, dry_run=False)
    assert cloudckpt.load(state_of(), tmp_path / "step-1")


def test_a_manifest_is_as_large_as_its_data_objects_justify(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the manifest of a large model is refused, or that of a few bytes is not bounded by them."""
    store = FaultyStore(MemoryStore(f"bounds-{os.urandom(8).hex()}"))
    document = encode(manifest_for("a"))
    put(store.inner, "manifest.json", document)
    monkeypatch.setattr(entries, "ALWAYS_READ_BYTES", len(document) // 2)
    with pytest.raises(InvalidManifestError, match=r"of the 0 data objects beside it has at most"):
        resolve(client_of(store))
    put(store.inner, data_key_of("a"), bytes(len(document)))
    assert resolve(client_of(store)).manifest.attempt == "a"


def test_no_manifest_is_committed_that_readers_refuse(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a save succeeds that nobody can load."""
    monkeypatch.setattr(entries, "ALWAYS_READ_BYTES", 100)
    monkeypatch.setattr(entries, "MANIFEST_BYTES_PER_DATA_BYTE", 0)
    with pytest.raises(UnsupportedValueError, match="Nothing was committed"):
        cloudckpt.save(state_of(1.0), memory.uri())
    assert memory.all_keys() == []


# Errors that nobody foresaw.


class UnportableError(Exception):
    """Does not come back from a pickle."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__("unportable")


UNFORESEEN: dict[str, Callable[[], Exception]] = {
    "OSError": lambda: OSError("anything at all"),
    "UnportableError": lambda: UnportableError(1, 2),
    "MemoryError": lambda: MemoryError("anything at all"),
}


def restored(root: str, options: Options) -> object:
    with CheckpointManager(root, no_dist=True, options=options) as manager:
        return manager.restore(state_of())


def dcp_load(uri: str, options: Options) -> object:
    reader = cloudckpt.ObjectStoreReader(uri, options=options)
    return dcp.load(state_of(), storage_reader=reader, no_dist=True)


READERS: dict[str, Callable[[str, Options], object]] = {
    "load": lambda root, options: cloudckpt.load(state_of(), f"{root}/step-1", options=options),
    "dcp.load": lambda root, options: dcp_load(f"{root}/step-1", options),
    "load_latest": lambda root, options: cloudckpt.load_latest(state_of(), root, options=options),
    "restore": restored,
    "latest": lambda root, options: cloudckpt.latest(root, options=options),
    "list_checkpoints(all=True)": lambda root, options: cloudckpt.list_checkpoints(root, options=options, all=True),
    "verify": lambda root, options: cloudckpt.verify(f"{root}/step-1", options=options),
    "describe": lambda root, options: cloudckpt.describe(f"{root}/step-1", options=options),
    "copy": lambda root, options: cloudckpt.copy(f"{root}/step-1", f"{root}/copy", options=options),
    "save": lambda root, options: cloudckpt.save(state_of(2.0), f"{root}/step-1", options=options),
    "delete": lambda root, options: cloudckpt.delete(f"{root}/step-1", options=options),
}


@pytest.mark.parametrize("kind", ["OSError", "UnportableError"])
@pytest.mark.parametrize("operation", ["list", "list_directories", "read"])
@pytest.mark.parametrize("name", READERS)
def test_unexpected_errors_keep_their_class(memory: Memory, name: str, operation: str, kind: str) -> None:
    """If this fails, an error that nobody foresaw reads as "nothing lies there", and a job starts afresh."""
    cloudckpt.save(state_of(1.0), memory.uri("step-1"))
    num_raised = 0

    def find_error(call: Call) -> Exception | None:
        nonlocal num_raised
        num_raised += call.operation == operation
        return UNFORESEEN[kind]() if call.operation == operation else None

    options = make_options(wrap_store=lambda store: FaultyStore(store, find_error=find_error))
    try:
        READERS[name](memory.root, options)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # it is judged below
        if not num_raised:  # it makes no such call
            return
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
        for cause in causes:
            assert kind in f"{type(cause).__name__}: {cause}"
            assert not isinstance(cause, (CheckpointNotFoundError, AssertionError))
    else:
        assert not num_raised
        return
    if name == "delete":  # which may have done its work before
        return
    state = state_of(-1.0)
    cloudckpt.load(state, memory.uri("step-1"))
    assert_holds(state, 1.0)


def test_torchs_own_load_hears_why_there_is_none(memory: Memory) -> None:
    """If this fails, ``dcp.load`` of a URI with a typing error ends in ``AssertionError: metadata is None``."""
    with pytest.raises(CheckpointException) as caught:
        dcp_load(memory.uri(), Options())
    ((cause, _),) = caught.value.failures.values()
    assert isinstance(cause, CheckpointNotFoundError)


@pytest.mark.parametrize("operation", ["put", "list"])
@pytest.mark.parametrize("kind", ["OSError", "MemoryError"])
def test_a_commit_with_an_unexpected_error_keeps_its_data(memory: Memory, operation: str, kind: str) -> None:
    """If this fails, a save removes the data of its own commit, and leaves a checkpoint that is damaged."""
    has_committed = False

    def fail_after_the_commit(call: Call) -> None:
        nonlocal has_committed
        has_committed |= call.operation == "put" and call.key == "manifest.json"
        if has_committed and operation == call.operation:
            raise UNFORESEEN[kind]()  # noqa: RSE102  # it makes one

    with contextlib.suppress(cloudckpt.CommitUnknownError):  # but where the manifest can be read back
        cloudckpt.save(
            state_of(1.0), memory.uri(), options=make_options(wrap_store=watching(after=fail_after_the_commit))
        )
    assert has_committed
    state = state_of(-1.0)
    cloudckpt.load(state, memory.uri())
    assert_holds(state, 1.0)


def load_what_rank_0_cannot_find(uri: str, kind: str) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    options = Options()
    if dist.get_rank() == 0:
        options = make_options(
            wrap_store=lambda store: FaultyStore(
                store, find_error=lambda call: UNFORESEEN[kind]() if call.key == "manifest" else None
            )
        )
    with pytest.raises(CheckpointException) as caught:
        cloudckpt.load(state_of(), uri, options=options)
    assert sorted(caught.value.failures) == [0, 1]
    for cause, _ in caught.value.failures.values():
        assert kind in f"{type(cause).__name__}: {cause}"
        pickle.loads(pickle.dumps(cause))


@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["MemoryError", "UnportableError"])
@pytest.mark.slow
def test_rank_0_finding_nothing_fails_all_ranks_alike(tmp_path: Path, kind: str) -> None:
    """If this fails, each rank looks for its own checkpoint, and says that there is none."""
    cloudckpt.save(state_of(1.0), tmp_path / "checkpoint")
    run_ranks(load_what_rank_0_cannot_find, str(tmp_path / "checkpoint"), kind, world_size=2)
