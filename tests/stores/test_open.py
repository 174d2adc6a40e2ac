"""From a location to its store."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import uuid

import fsspec
import pytest

from cloudckpt import Options
from cloudckpt.errors import InvalidOptionError, MissingDependencyError, UnsupportedOperationError
from cloudckpt.stores import open_store
from cloudckpt.stores.fsspec_store import FsspecStore
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.stores.local import LocalStore
from cloudckpt.stores.memory import MemoryStore
from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing import StoreContract
from cloudckpt.testing.contract_base import content, keys, put
from cloudckpt.uri import parse_location


@pytest.mark.parametrize(
    ("location", "kind", "uri"),
    [
        ("s3://bucket/run/", S3Store, "s3://bucket/run"),
        ("gs://bucket/run/", GCSStore, "gs://bucket/run"),
        ("gcs://bucket/run", GCSStore, "gs://bucket/run"),
        ("memory://name/run", MemoryStore, "memory://name/run"),
        ("file:///data/run", LocalStore, "/data/run"),
        ("/data/run/", LocalStore, "/data/run"),
        ("ftp://host/run", FsspecStore, "ftp://host/run"),
    ],
)
def test_each_scheme_has_its_store(location, kind, uri):
    """And the store's address is the location's own, in its one spelling."""
    for given in (location, parse_location(location)):
        store = open_store(given, Options())
        assert type(store) is kind
        assert store.uri == uri


def test_a_missing_package_is_named(monkeypatch):
    """az:// goes through adlfs; the user learns which package to install, not which import failed."""

    def missing(protocol):
        raise ImportError("Please install adlfs to access Azure Blob Storage")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(MissingDependencyError, match=r"az:// needs a package that is not installed.*adlfs"):
        open_store("az://container/run", Options())


@pytest.mark.parametrize("location", ["/data/run", "memory://name/run"])
def test_options_that_would_be_ignored_are_refused(location):
    """An endpoint given together with a path is a mistake, which shows when the checkpoint is looked for on S3."""
    with pytest.raises(InvalidOptionError, match="endpoint_url, region"):
        open_store(location, Options(storage_options={"region": "x", "endpoint_url": "y"}))


@pytest.mark.parametrize(
    ("location", "absent"),
    [
        ("/data/run", ["boto3", "botocore", "s3fs", "google.cloud.storage"]),
        ("memory://name/x", ["boto3", "botocore", "google.auth"]),
        ("gs://bucket/run", ["boto3", "google.cloud.storage", "gcsfs"]),  # before its first call
    ],
)
def test_clients_are_imported_only_for_their_stores(location, absent):
    """Importing boto3 alone takes longer than saving a small model to a path."""
    code = (
        "import sys; from cloudckpt import Options; from cloudckpt.stores import open_store; "
        f"open_store({location!r}, Options()); print([m for m in {absent!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


class TestContract(StoreContract):
    """Every clause, against the store that the others are compared with."""

    @pytest.fixture
    def store(self):
        return MemoryStore(uuid.uuid4().hex, "run/step-1")


@pytest.fixture
def name():
    return uuid.uuid4().hex


def test_stores_of_one_name_share_their_objects(name):
    """A reader opened by URI must see what a writer opened by URI saved; other names must not."""
    put(MemoryStore(name, "run"), "step-1/a", b"body")
    assert content(MemoryStore(name, "run/step-1"), "a") == b"body"
    assert keys(MemoryStore(name)) == ["run/step-1/a"]
    assert keys(MemoryStore(f"{name}-other")) == []
    assert keys(MemoryStore(name, "ru")) == []


def test_another_process_is_refused(name, monkeypatch):
    """A background process or forked rank that saves into its own memory would report success and save nothing."""
    store = MemoryStore(name, "run")
    put(store, "a", b"body")
    pickled = pickle.dumps(store)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(UnsupportedOperationError, match="another store"):
        put(pickle.loads(pickled), "b", b"body")
    with pytest.raises(UnsupportedOperationError, match="work that spans processes"):
        put(store, "b", b"body")
    with pytest.raises(UnsupportedOperationError):
        keys(store)
