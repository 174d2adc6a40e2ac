"""Other file systems, through fsspec."""
# ruff: noqa: FBT002
# (the signatures are those of fsspec)

from __future__ import annotations

import asyncio
import copy
import ftplib
import gc
import http.client
import io
import json
import ssl
import types
import uuid
from datetime import datetime, timezone

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile

from cloudckpt.errors import (
    CredentialsError,
    InvalidOptionError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreTimeoutError,
    TransientStoreError,
    UnsupportedOperationError,
)
from cloudckpt.stores import fsspec_store
from cloudckpt.stores.fsspec_store import FsspecStore, translate
from cloudckpt.testing import StoreContract
from cloudckpt.testing.contract_base import content, crc, keys, put, run_at_once
from cloudckpt.uri import Location


def _open(scheme, authority, path):
    return FsspecStore(Location(scheme=scheme, authority=authority, path=path), storage_options={})


class TestContractOnFiles(StoreContract):
    """Every clause, on fsspec's own access to files, which LocalStore replaces."""

    num_paging_keys = 40

    @pytest.fixture
    def store(self, tmp_path):
        return _open("file", "", f"{tmp_path}/run")


class TestContractOnABufferedFileSystem(StoreContract):
    """Every clause, on an asynchronous object store whose files are uploaded block by block."""

    @pytest.fixture
    def store(self, bucket):
        return bucket


class _Upload(AbstractBufferedFile):
    """An upload as by adlfs: it sends each block, and the final one completes the object, asked to or not."""

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

    @staticmethod
    def _get_kwargs_from_urls(path):
        return {"name": path.split("/")[2]}

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
    fsspec.register_implementation("testbucket", BucketFileSystem, clobber=True)
    name = uuid.uuid4().hex
    yield _open("testbucket", name, "run")
    BucketFileSystem.buckets.pop(name, None)


class TestFailuresInTheMiddle:
    """A write that breaks off leaves nothing, not even once the file object is collected."""

    @pytest.mark.parametrize("existing", [False, True])
    def test_a_buffered_upload_is_not_completed(self, bucket, existing):
        """fsspec's files complete themselves in close() and in their destructor: a truncated object would appear, or
        what lay there before be removed with what this write left.
        """
        if existing:
            put(bucket, "a", b"old")
        good = b"x" * 5000
        with pytest.raises(StoreError, match="network is gone"):
            bucket.put("a", [memoryview(good), memoryview(b"poison" * 1000)], crc32c=crc(good + b"poison" * 1000))
        gc.collect()
        assert keys(bucket) == (["a"] if existing else [])
        assert not existing or content(bucket, "a") == b"old"


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
    """The store declares only capabilities that were shown."""

    def test_only_known_schemes_can_create_if_absent(self, bucket):
        """A protocol that nobody looked at must make a save refuse, instead of losing a race one day."""
        assert not bucket.capabilities.conditional_create
        with pytest.raises(UnsupportedOperationError, match="commit='unconditional'"):
            put(bucket, "a", b"body", if_absent=True)
        assert keys(bucket) == []

    def test_the_condition_is_passed_on(self, monkeypatch, bucket):
        """If this fails, a create-if-absent on Azure overwrites; or is declared by an adlfs that ignores it."""

        async def as_adlfs(self, path, value, overwrite=True, **kwargs):
            assert not kwargs  # adlfs before 2024.12 ignores a mode
            path = self._strip_protocol(path)
            if not overwrite and path in self.objects:
                raise FileExistsError(path)
            self.objects[path] = (bytes(value), datetime.now(tz=timezone.utc))

        monkeypatch.setattr(fsspec_store, "ATOMIC_SCHEMES", ("testbucket",))
        assert not copy.copy(bucket).capabilities.conditional_create
        monkeypatch.setattr(BucketFileSystem, "_pipe_file", as_adlfs)
        store = copy.copy(bucket)
        assert store.capabilities.conditional_create
        put(store, "a", b"one", if_absent=True)
        with pytest.raises(ObjectExistsError):
            put(store, "a", b"two", if_absent=True)
        assert content(store, "a") == b"one"


class TestInstances:
    """File systems hold connections and event loops, which neither forks nor, mostly, threads can share."""

    def test_threads_share_asynchronous_instances_alone(self, bucket, tmp_path):
        """Two threads on one FTP connection read each other's answers."""
        for store, num_instances in ((bucket, 1), (_open("file", "", str(tmp_path)), 4)):
            found = run_at_once([store._get_filesystem] * 4)
            assert len({id(one) for one in found}) == num_instances
        assert store._get_filesystem() is not fsspec.filesystem("file")  # whose listings others cache
        put(store, "a", b"body")
        assert not store._get_filesystem().transaction.files  # which keeps buffers until a transaction ends

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
        filesystem = bucket._get_filesystem()
        root = filesystem._strip_protocol(bucket.uri)
        filesystem.objects[f"{root}/b"] = (b"body", datetime.now(tz=timezone.utc))
        assert keys(bucket) == ["a", "b"]
        assert bucket._get_filesystem().dircache.use_listings_cache is False


def _foreign(name, module, base="Exception", **members):
    """Return an error of a package that need not be installed."""
    parent = type(base, (Exception,), {"__module__": module})
    return type(name, (parent,), {"__module__": module, **members})("x")


def test_options_that_a_file_system_refuses_are_an_error_of_the_user(bucket, monkeypatch):
    """If this fails, a user of Azure without an account reads an internal error (exit code 70), or a secret."""

    def as_adlfs(self, account_key=None, **kwargs):
        raise ValueError(f"Must provide either a connection_string or account_name with credentials!! {account_key}")

    monkeypatch.setattr(BucketFileSystem, "__init__", as_adlfs)
    store = FsspecStore(bucket._location, storage_options={"account_key": "c2VjcmV0a2V5"})
    with pytest.raises(InvalidOptionError, match=r"account_name with credentials.*--storage-option NAME") as caught:
        keys(store)
    assert "c2VjcmV0a2V5" not in str(caught.value)


class TestErrors:
    """Every backend has its own exceptions; callers know ours alone."""

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (FileNotFoundError("x"), ObjectNotFoundError),
            (FileExistsError("x"), ObjectExistsError),
            (ConnectionResetError("x"), TransientStoreError),
            (TimeoutError("x"), StoreTimeoutError),
            (asyncio.TimeoutError(), StoreTimeoutError),
            (NotImplementedError("x"), UnsupportedOperationError),
            (OSError(28, "No space left on device"), StoreError),
            (OSError(24, "Too many open files"), TransientStoreError),
            (OSError(23, "Too many open files in system"), TransientStoreError),
            (http.client.IncompleteRead(b""), TransientStoreError),
            (json.JSONDecodeError("no JSON", "<html>", 0), TransientStoreError),
            (ssl.SSLError(1, "bad record mac"), TransientStoreError),
            (ValueError("x"), StoreError),
            (_foreign("RefreshError", "google.auth.exceptions", "GoogleAuthError"), CredentialsError),
            (_foreign("HttpResponseError", "azure.core.exceptions", status_code=409), TransientStoreError),
            (_foreign("ResourceExistsError", "azure.core.exceptions", status_code=409), ObjectExistsError),
        ],
    )
    def test_classes_and_numbers_are_translated(self, error, kind):
        """If this fails, an error that another try can cure is not retried, or one that it cannot cure is."""
        assert type(translate(error, key="k", operation="read", options={})) is kind

    @pytest.mark.parametrize(
        ("cause", "kind"),
        [
            (StopIteration(), ObjectNotFoundError),
            (ftplib.error_perm("550 no such file"), ObjectNotFoundError),  # noqa: S321  # an error alone
            (ConnectionResetError("x"), TransientStoreError),
            (asyncio.TimeoutError(), StoreTimeoutError),
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
            call(copy.copy(bucket))

    @pytest.mark.parametrize("size_bytes", [0, 3, 9])
    def test_a_read_that_ends_early_is_not_a_short_object(self, bucket, monkeypatch, size_bytes):
        """A connection that breaks would be a damaged checkpoint, or half a manifest a whole one."""
        put(bucket, "a", b"0123456789")
        read = BucketFileSystem._cat_file

        async def cut(self, path, start=None, end=None, **kwargs):
            return (await read(self, path, start, end, **kwargs))[:size_bytes]

        monkeypatch.setattr(BucketFileSystem, "_cat_file", cut)
        with pytest.raises(TransientStoreError, match="ended at byte"):
            copy.copy(bucket).read("a", max_bytes=100)
        with pytest.raises(TransientStoreError, match="ended at byte"):
            copy.copy(bucket).read_into("a", 0, [memoryview(bytearray(10))])

    def test_a_failed_look_removes_nothing(self):
        """If this fails, the clean-up after a failed write removes an older object if the look for it failed."""
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

    def test_secrets_of_the_options_are_blotted_out(self):
        """Clients put their connection strings into messages, and messages travel to every rank."""
        options = {"password": "hunter2", "client_kwargs": {"access_token": "hunter2b"}, "host": "hosthost"}
        options["key_filename"] = "/home/me/keys/id_ed25519"
        error = Exception("login hunter2 / hunter2b to hosthost with /home/me/keys/id_ed25519 failed")
        found = translate(error, key="k", operation="put", options=options)
        assert "hunter2" not in str(found)
        assert "hosthost with /home/me/keys/id_ed25519 failed" in str(found)


def test_large_objects_are_streamed(bucket, monkeypatch):
    """A shard of gigabytes must not be joined into one copy on its way."""
    sizes: list[int] = []
    real = _Upload.write

    def write(self, data):
        sizes.append(len(data))
        return real(self, data)

    monkeypatch.setattr(_Upload, "write", write)
    body = bytes(range(256)) * (40 << 12)
    bucket.put("a", [memoryview(body)[:3000], memoryview(body)[3000:]], crc32c=crc(body))
    assert max(sizes) == 16 << 20
    assert content(bucket, "a") == body
