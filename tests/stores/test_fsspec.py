"""Other file systems, through fsspec."""
# ruff: noqa: FBT002
# (the signatures are those of fsspec)

from __future__ import annotations

import asyncio
import contextlib
import ftplib
import functools
import gc
import http.client
import io
import json
import pickle
import ssl
import threading
import types
import uuid
from datetime import datetime, timedelta, timezone

import fsspec
import pytest
import urllib3.exceptions
from botocore.exceptions import ClientError
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from cloudckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    MissingDependencyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ShortObjectError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores import fsspec_store
from cloudckpt.stores.fsspec_backends import CLASS_TABLE, STATUS_TABLE, Create, Instances, Source, backend_of, translate
from cloudckpt.stores.fsspec_store import FsspecStore, _modified_at
from cloudckpt.testing import StoreContract
from cloudckpt.testing.contract_base import content, crc, keys, put, run_at_once


class TestContractOnMemory(StoreContract):
    """Every clause, on fsspec's memory."""

    @pytest.fixture
    def store(self):
        return FsspecStore("memory", f"memory://{uuid.uuid4().hex}/run")


class TestContractOnFiles(StoreContract):
    """Every clause, on fsspec's own access to files, which LocalStore replaces."""

    num_paging_keys = 40

    @pytest.fixture
    def store(self, tmp_path):
        return FsspecStore(fsspec.filesystem("file"), f"{tmp_path}/run")


class TestContractOnABufferedFileSystem(StoreContract):
    """Every clause, on an asynchronous object store whose files are uploaded block by block."""

    @pytest.fixture
    def store(self, bucket):
        return bucket


class _Upload(AbstractBufferedFile):
    """As adlfs does: blocks go up one by one, and the final one completes the object, whether asked to or not."""

    def _initiate_upload(self):
        self.blocks = []

    def _upload_chunk(self, final=False):
        block = self.buffer.getvalue()
        if b"poison" in block:
            raise OSError(5, "the network is gone")
        self.blocks.append(block)
        if final:
            self.fs.objects[self.path] = (b"".join(self.blocks), datetime.now(tz=timezone.utc))
        return True


class BucketFileSystem(AsyncFileSystem):
    """A small object store: no directories of its own, one dictionary per name, shared by all instances."""

    protocol = "testbucket"
    buckets: dict[str, dict[str, tuple[bytes, datetime]]] = {}  # noqa: RUF012  # fsspec's own memory does the same

    def __init__(self, name, **kwargs):
        super().__init__(**kwargs)
        self.objects = self.buckets.setdefault(name, {})

    async def _info(self, path, **kwargs):
        path = self._strip_protocol(path)
        if path in self.objects:
            body, time = self.objects[path]
            return {"name": path, "size": len(body), "type": "file", "LastModified": time}
        if any(key.startswith(f"{path}/") for key in list(self.objects)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        names = {
            f"{path}/{key[len(path) + 1 :].split('/')[0]}" for key in list(self.objects) if key.startswith(f"{path}/")
        }
        if not names:
            raise FileNotFoundError(path)
        return [await self._info(name) for name in sorted(names)]

    async def _cat_file(self, path, start=None, end=None, **kwargs):
        await asyncio.sleep(0)
        try:
            return self.objects[self._strip_protocol(path)][0][start:end]
        except KeyError:
            raise FileNotFoundError(path) from None

    async def _rm_file(self, path, **kwargs):
        if self.objects.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)

    async def _cp_file(self, path1, path2, **kwargs):
        self.objects[self._strip_protocol(path2)] = self.objects[self._strip_protocol(path1)]

    def _open(self, path, mode="rb", block_size=None, autocommit=True, cache_options=None, **kwargs):
        return _Upload(self, path, mode, block_size=block_size or 100, autocommit=autocommit)


@pytest.fixture
def bucket():
    name = uuid.uuid4().hex
    yield FsspecStore(BucketFileSystem(name), f"testbucket://{name}/run")
    BucketFileSystem.buckets.pop(name, None)


def renewed(store):
    """The same store with instances of its own: fsspec keeps an instance's methods as they were when it was made."""
    return pickle.loads(pickle.dumps(store))


class TestFailuresInTheMiddle:
    """A write that breaks off leaves nothing, not even once the file object is collected."""

    def test_a_buffered_upload_is_not_completed(self, bucket):
        """fsspec's files complete themselves in close() and in their destructor: a truncated object would appear."""
        good = b"x" * 5000
        with pytest.raises(StoreError, match="network is gone"):
            bucket.put("a", [memoryview(good), memoryview(b"poison" * 1000)], crc32c=crc(good + b"poison" * 1000))
        gc.collect()
        assert keys(bucket) == []

    def test_a_failing_view_completes_nothing(self, bucket, monkeypatch):
        """Whatever fails between two blocks, a signal among it, is a failure of the whole object."""

        def interrupted(self, data):
            self.flush()
            raise KeyboardInterrupt

        monkeypatch.setattr(_Upload, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put(bucket, "a", b"body")
        gc.collect()
        assert keys(bucket) == []

    def test_an_older_object_survives_a_failed_overwrite(self, bucket):
        """Cleaning up must remove what this write left, not what lay there before."""
        put(bucket, "a", b"old")
        with pytest.raises(StoreError):
            put(bucket, "a", b"poison" * 1000)
        assert content(bucket, "a") == b"old"

    def test_what_was_visible_already_is_removed(self, bucket, monkeypatch):
        """Some file systems show a file while it is written; after a failure it must not stay."""
        real = _Upload._upload_chunk

        def publishing(self, final=False):
            self.fs.objects[self.path] = (b"half", datetime.now(tz=timezone.utc))
            return real(self, final)

        monkeypatch.setattr(_Upload, "_upload_chunk", publishing)
        with pytest.raises(StoreError, match="network is gone"):
            put(bucket, "a", b"poison" * 1000)
        assert keys(bucket) == []

    @pytest.mark.parametrize("existing", [False, True])
    def test_a_full_disk_leaves_no_half_file(self, tmp_path, monkeypatch, existing):
        """The same on files, where fsspec writes to a temporary file and moves it."""
        store = FsspecStore("file", f"{tmp_path}/run")
        if existing:
            put(store, "data/a", b"old")
        written: list[int] = []
        real_open = LocalFileSystem._open

        def open_(self, path, mode="rb", **kwargs):
            file = real_open(self, path, mode, **kwargs)
            if "w" in mode:
                file.f = _Full(file.f, written)
            return file

        monkeypatch.setattr(LocalFileSystem, "_open", open_)
        monkeypatch.setattr(fsspec_store, "_CHUNK_BYTES", 10)
        with pytest.raises(StoreError, match="No space left"):
            put(store, "data/a", b"x" * 100)
        gc.collect()
        assert written == [10, 10]
        assert keys(store) == (["data/a"] if existing else [])
        assert not existing or content(store, "data/a") == b"old"

    def test_memory_never_shows_a_half_object(self, monkeypatch):
        """fsspec's memory publishes a file as soon as it is opened, so objects must go in whole."""
        store = FsspecStore("memory", f"memory://{uuid.uuid4().hex}/run")
        opened: list[str] = []
        real = MemoryFileSystem._open

        def open_(self, path, mode="rb", **kwargs):
            if mode != "rb" and not kwargs.get("data"):
                opened.append(path)
            return real(self, path, mode, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, "_open", open_)
        put(store, "a", b"x" * 1000)
        put(store, "b", b"x" * 1000, if_absent=True)
        assert opened == []

    def test_no_files_pile_up_in_the_transaction(self, tmp_path):
        """fsspec keeps each file that is opened without autocommit, buffers and all, until a transaction ends."""
        store = FsspecStore("file", f"{tmp_path}/run")
        for number in range(3):
            put(store, f"a/{number}", b"body")
        assert not store._instances.get().transaction.files


class _Full(io.RawIOBase):
    def __init__(self, inner, written):
        self._inner, self._written = inner, written

    def write(self, data):
        if len(self._written) == 2:
            raise OSError(28, "No space left on device")
        self._written.append(len(data))
        return self._inner.write(data)

    def close(self):
        self._inner.close()
        super().close()


class TestCapabilities:
    """What is declared is what was shown, or nothing."""

    def test_only_the_table_can_create_if_absent(self, bucket, tmp_path):
        """A protocol that nobody looked at must make a save refuse, instead of losing a race one day."""
        assert FsspecStore("memory", "memory://x").capabilities.conditional_create
        assert not bucket.capabilities.conditional_create
        assert not FsspecStore("file", str(tmp_path)).capabilities.conditional_create
        with pytest.raises(UnsupportedOperationError, match="commit='unconditional'"):
            put(bucket, "a", b"body", if_absent=True)
        assert keys(bucket) == []

    def test_a_version_that_lacks_the_condition_loses_the_capability(self):
        """An adlfs that ignores what it does not know would make it an unconditional put."""

        class Old(AsyncFileSystem):
            protocol = ("abfs", "az")

            async def _pipe_file(self, path, value, **kwargs):
                """Takes and ignores anything."""

        class New(Old):
            async def _pipe_file(self, path, value, overwrite=True, **kwargs):
                """Knows the condition."""

        assert backend_of(Old).create is Create.NO
        assert backend_of(New).create is Create.OVERWRITE

    def test_the_condition_is_passed_on(self, monkeypatch, bucket):
        """Where the file system has the condition, the call must use it, and in its own words."""

        async def as_adlfs(self, path, value, overwrite=True, **kwargs):
            assert not kwargs  # adlfs before 2024.12 ignores a mode
            path = self._strip_protocol(path)
            if not overwrite and path in self.objects:
                raise FileExistsError(path)
            self.objects[path] = (bytes(value), datetime.now(tz=timezone.utc))

        monkeypatch.setattr(BucketFileSystem, "_pipe_file", as_adlfs)
        monkeypatch.setattr(BucketFileSystem, "protocol", ("abfs", "testbucket"))
        store = FsspecStore(BucketFileSystem(bucket.uri.split("/")[2]), bucket.uri)
        assert store.capabilities.conditional_create
        put(store, "a", b"one", if_absent=True)
        with pytest.raises(ObjectExistsError):
            put(store, "a", b"two", if_absent=True)
        assert content(store, "a") == b"one"

    def test_nothing_lies_below_an_object(self, bucket, monkeypatch):
        """adlfs's find() gives a list where the folder is an object, whatever it was asked for."""

        async def find(self, path, **kwargs):
            return [path]

        put(bucket, "a", b"body")
        monkeypatch.setattr(BucketFileSystem, "_find", find)
        assert keys(bucket, "a/") == []


class TestInstances:
    """File systems hold connections and event loops, which neither forks nor, mostly, threads can share."""

    def test_threads_share_asynchronous_instances_alone(self):
        """Two threads on one FTP connection read each other's answers."""
        for kind, args, shared in ((BucketFileSystem, ("x",), True), (MemoryFileSystem, (), False)):
            instances = Instances(Source(kind=kind, args=args))
            ids = run_at_once([lambda instances=instances: instances.get()] * 4)
            assert len({id(one) for one in ids}) == (1 if shared else 4)

    def test_nothing_is_shared_with_other_users_of_fsspec(self):
        """fsspec caches instances and their listings process-wide; a stale listing hides a commit."""
        mine = FsspecStore("memory", "memory://x")._instances.get()
        assert mine is not fsspec.filesystem("memory")

    def test_listings_are_never_stale(self, bucket, monkeypatch):
        """Another process writes without this instance's knowledge; some file systems cache regardless of settings."""
        cached: dict[str, list] = {}
        real = BucketFileSystem._ls

        async def caching(self, path, detail=True, **kwargs):
            if path not in cached:
                cached[path] = await real(self, path, detail, **kwargs)
            return cached[path]

        monkeypatch.setattr(BucketFileSystem, "_ls", caching)
        monkeypatch.setattr(BucketFileSystem, "invalidate_cache", lambda self, path=None: cached.clear())
        put(bucket, "a", b"body")
        assert keys(bucket) == ["a"]
        filesystem = bucket._instances.get()
        root = filesystem._strip_protocol(bucket.uri)
        filesystem.objects[f"{root}/b"] = (b"body", datetime.now(tz=timezone.utc))
        assert keys(bucket) == ["a", "b"]
        assert bucket._instances.get().dircache.use_listings_cache is False

    def test_what_is_imported_late_is_missed_all_the_same(self):
        """hdfs:// is known without pyarrow; who lacks it would be told of a failed listing, with nothing to install."""

        class Late(MemoryFileSystem):
            protocol = ("late", "later")

            def __init__(self, **options):
                raise ModuleNotFoundError("No module named 'arrow'")

        with pytest.raises(MissingDependencyError, match=r"late:// needs a package that is not installed: .*'arrow'"):
            Instances(Source(kind=Late)).get()

    def test_stores_are_pickled_without_their_connections(self, bucket):
        """The process that saves in the background makes its own."""
        put(bucket, "a", b"body")
        twin = pickle.loads(pickle.dumps(bucket))
        assert content(twin, "a") == b"body"
        assert twin._instances.get() is not bucket._instances.get()


class TestErrors:
    """Every backend has its own exceptions; callers know ours alone."""

    @pytest.mark.parametrize("attribute", ["status", "status_code", "code"])
    def test_http_statuses_are_translated(self, attribute):
        """gcsfs, aiohttp and azure each name the number differently."""
        for status, kind in STATUS_TABLE.items():
            for value in (status, str(status)):
                error = Exception("refused")
                setattr(error, attribute, value)
                found = translate(error, key="gs://b/a", operation="put", options={})
                assert type(found) is kind
                assert found.key == "gs://b/a"

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (FileNotFoundError("x"), ObjectNotFoundError),
            (FileExistsError("x"), ObjectExistsError),
            (PermissionError("x"), AccessDeniedError),
            (ConnectionResetError("x"), TransientStoreError),
            (TimeoutError("x"), StoreTimeoutError),
            (asyncio.TimeoutError(), StoreTimeoutError),
            (NotImplementedError("x"), UnsupportedOperationError),
            (OSError(28, "No space left on device"), StoreError),
            (OSError(113, "No route to host"), TransientStoreError),
            (OSError("the answer ended early"), TransientStoreError),
            (http.client.IncompleteRead(b""), TransientStoreError),
            (json.JSONDecodeError("no JSON", "<html>", 0), TransientStoreError),
            (ssl.SSLError(1, "bad record mac"), TransientStoreError),
            (urllib3.exceptions.ProtocolError("x"), TransientStoreError),
            (ValueError("x"), StoreError),
        ],
    )
    def test_classes_and_numbers_are_translated(self, error, kind):
        """What is worth another try is told from what is not."""
        assert type(translate(error, key="k", operation="read", options={})) is kind

    @pytest.mark.parametrize(
        ("cause", "kind"),
        [
            (KeyError("x"), ObjectNotFoundError),
            (StopIteration(), ObjectNotFoundError),
            (FileNotFoundError(2, "x"), ObjectNotFoundError),
            (ftplib.error_perm("550 no such file"), ObjectNotFoundError),  # noqa: S321  # an error alone
            (ClientError({"ResponseMetadata": {"HTTPStatusCode": 404}}, "HeadObject"), ObjectNotFoundError),
            (ClientError({"ResponseMetadata": {"HTTPStatusCode": 500}}, "HeadObject"), TransientStoreError),
            (ftplib.error_temp("421 closing"), TransientStoreError),  # noqa: S321
            (ConnectionResetError("x"), TransientStoreError),
            (asyncio.TimeoutError(), StoreTimeoutError),
            (PermissionError("x"), AccessDeniedError),
            (ValueError("no size"), StoreError),
        ],
        ids=repr,
    )
    def test_a_missing_file_that_another_error_made_is_that_error(self, cause, kind):
        """fsspec's HTTP and other file systems say FileNotFoundError whatever failed: a checkpoint would be missing
        because a connection broke.
        """
        error = FileNotFoundError("k")
        error.__cause__ = cause
        assert type(translate(error, key="k", operation="read", options={})) is kind

    @pytest.mark.parametrize("call", [keys, lambda store: list(store.list_directories())], ids=["list", "directories"])
    @pytest.mark.parametrize("fails", ["run", "run/d", "run/d/e"])
    def test_a_directory_that_cannot_be_listed_is_not_empty(self, bucket, monkeypatch, call, fails):
        """fsspec's own find and walk leave it out without a word: what lies in it would count as missing."""
        put(bucket, "d/e/a", b"x")
        whole = call(bucket)
        listing = BucketFileSystem._ls

        async def broken(self, path, detail=True, **kwargs):
            if str(path).endswith(f"/{fails}"):
                raise FileNotFoundError(path) from ConnectionResetError("reset")
            return await listing(self, path, detail=detail, **kwargs)

        assert whole
        monkeypatch.setattr(BucketFileSystem, "_ls", broken)
        with pytest.raises(TransientStoreError):
            call(renewed(bucket))

    @pytest.mark.parametrize("size_bytes", [0, 3, 9])
    def test_a_read_that_ends_early_is_not_a_short_object(self, bucket, monkeypatch, size_bytes):
        """A connection that breaks would be a damaged checkpoint, or half a manifest a whole one."""
        put(bucket, "a", b"0123456789")
        read = BucketFileSystem._cat_file

        async def cut(self, path, start=None, end=None, **kwargs):
            return (await read(self, path, start, end, **kwargs))[:size_bytes]

        monkeypatch.setattr(BucketFileSystem, "_cat_file", cut)
        with pytest.raises(TransientStoreError, match="ended at byte"):
            renewed(bucket).read("a", max_bytes=100)
        with pytest.raises(TransientStoreError, match="ended at byte"):
            renewed(bucket).read_into("a", 0, [memoryview(bytearray(10))])

    def test_a_failed_look_removes_nothing(self):
        """What a failed write has left is removed: an older object too, if the look for it could fail unseen."""
        removed = []

        def broken(_path):
            raise ConnectionResetError("reset")

        filesystem = types.SimpleNamespace(
            info=broken,
            exists=lambda _path: False,  # as fsspec's own says then
            open=lambda *_, **__: _Full(io.BytesIO(), []),
            transaction=types.SimpleNamespace(files=[]),
            rm_file=removed.append,
        )
        with pytest.raises(OSError, match="reset"):
            fsspec_store._stream(filesystem, "a", [memoryview(b"new")])
        assert removed == []

    def test_classes_are_found_by_name_and_inheritance(self):
        """The table names classes of packages that need not be installed."""
        base = type("GoogleAuthError", (Exception,), {"__module__": "google.auth.exceptions"})
        derived = type("RefreshError", (base,), {"__module__": "google.auth.exceptions"})
        assert type(translate(derived("x"), key="k", operation="read", options={})) is CredentialsError
        assert all(issubclass(kind, StoreError) for kind in CLASS_TABLE.values())

    def test_what_exists_already_is_told_from_what_passes(self):
        """Azure answers 409 to both; a commit that was refused would be tried again until its time is up."""
        exists = type("ResourceExistsError", (Exception,), {"__module__": "azure.core.exceptions", "status_code": 409})
        assert type(translate(exists("x"), key="k", operation="put", options={})) is ObjectExistsError
        other = type("HttpResponseError", (Exception,), {"__module__": "azure.core.exceptions", "status_code": 409})
        assert type(translate(other("x"), key="k", operation="put", options={})) is TransientStoreError

    def test_throttling_is_told_from_failing(self):
        """Retrying faster after a 429 makes it worse."""
        error = Exception("slow down")
        error.code = 429
        assert isinstance(translate(error, key="k", operation="put", options={}), ThrottledError)

    def test_secrets_of_the_options_are_blotted_out(self):
        """Clients put their connection strings into messages, and messages travel to every rank."""
        options = {"password": "hunter2", "client_kwargs": {"access_token": "hunter2b"}, "host": "hosthost"}
        error = Exception("login hunter2 / hunter2b to hosthost failed")
        found = translate(error, key="k", operation="put", options=options)
        assert "hunter2" not in str(found)
        assert "hosthost" in str(found)

    def test_only_our_errors_leave_the_store(self, bucket, monkeypatch):
        """A bare KeyError out of a backend would neither be retried nor name the object."""

        async def broken(self, path, **kwargs):
            raise KeyError("size")

        monkeypatch.setattr(BucketFileSystem, "_info", broken)
        with pytest.raises(StoreError) as caught:
            bucket.head("a")
        assert caught.value.key == bucket.url("a")
        assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"mtime": 0.0}, datetime.fromtimestamp(0, tz=timezone.utc)),
        ({"LastModified": datetime(2026, 1, 2, tzinfo=timezone.utc)}, datetime(2026, 1, 2, tzinfo=timezone.utc)),
        ({"last_modified": datetime(2026, 1, 2)}, datetime(2026, 1, 2, tzinfo=timezone.utc)),  # noqa: DTZ001
        ({"updated": "2026-01-02T03:04:05.678Z"}, datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=timezone.utc)),
        (
            {"mtime": None, "created": datetime(2026, 1, 2, tzinfo=timezone.utc)},
            datetime(2026, 1, 2, tzinfo=timezone.utc),
        ),
    ],
)
def test_times_are_read_in_every_spelling(info, expected):
    """Garbage is told by its age, under whichever name a file system gives it."""
    assert _modified_at(info) == expected


def test_an_object_of_unknown_age_is_young():
    """What might be in the middle of being written must not be swept."""
    assert datetime.now(tz=timezone.utc) - _modified_at({"modified": "yesterday"}) < timedelta(minutes=1)


def test_creating_in_memory_is_safe_between_stores(monkeypatch):
    """Two stores at one place share fsspec's memory, so they must share the lock as well."""
    root = f"memory://{uuid.uuid4().hex}"
    stores = [FsspecStore("memory", root) for _ in range(2)]
    both_have_looked = threading.Barrier(2)
    real = MemoryFileSystem.exists

    def exists(self, path, **kwargs):
        found = real(self, path, **kwargs)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_looked.wait(0.5)  # only ever reached by both where nothing keeps them apart
        return found

    monkeypatch.setattr(MemoryFileSystem, "exists", exists)
    results = run_at_once([functools.partial(put, store, "a", b"x", if_absent=True) for store in stores])
    assert results.count(None) == 1


def test_a_missing_bucket_is_said_in_words(bucket, monkeypatch):
    """Writing does not look for an object, so “not found” can only mean what should hold it."""

    def open_(self, path, mode="rb", **kwargs):
        raise FileNotFoundError(path)

    monkeypatch.setattr(BucketFileSystem, "_open", open_)
    with pytest.raises(BucketNotFoundError, match="Create it, or correct its name"):
        put(bucket, "a", b"body")


def test_large_objects_are_streamed(bucket, monkeypatch):
    """A shard of gigabytes must not be joined into one copy on its way."""
    monkeypatch.setattr(fsspec_store, "_CHUNK_BYTES", 1000)
    sizes: list[int] = []
    real = _Upload.write

    def write(self, data):
        sizes.append(len(data))
        return real(self, data)

    monkeypatch.setattr(_Upload, "write", write)
    body = bytes(range(256)) * 20
    bucket.put("a", [memoryview(body)[:3000], memoryview(body)[3000:]], crc32c=crc(body))
    assert max(sizes) == 1000
    assert content(bucket, "a") == body


def test_reading_nothing_still_looks(bucket):
    """An empty range of a missing or shorter object is as wrong as any other."""
    put(bucket, "a", b"body")
    bucket.read_into("a", 4, [])
    with pytest.raises(ShortObjectError):
        bucket.read_into("a", 5, [])
    with pytest.raises(ObjectNotFoundError):
        bucket.read_into("b", 0, [])


def test_threads_are_not_left_behind(bucket):
    """Each call must not start an event loop of its own."""
    put(bucket, "a", b"body")
    before = set(threading.enumerate())
    for _ in range(10):
        content(bucket, "a")
    assert set(threading.enumerate()) <= before
