"""The store against a whole S3 server: moto's, over real HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from awscrt.checksums import crc32c

from cloudckpt import errors
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3 import client as clients

if TYPE_CHECKING:
    from cloudckpt.testing.servers import S3Server

MIB = 1 << 20
ODD_KEYS = [
    "with space",
    "a+b",
    "50%",
    "%2B",
    "ünï/ço dé/検査",
    "q?x=1&y=#z",
    "quote'\"<>&;",
    "tilde~(1)!*@:,$=",
]


def put(store: S3Store, key: str, content: bytes) -> None:
    store.put(key, [memoryview(content)], crc32c=crc32c(content))


@pytest.mark.parametrize("key", ODD_KEYS)
def test_any_key_goes_the_whole_way(store: S3Store, key: str) -> None:
    """A run named by its user would be written under one key and looked for under another."""
    put(store, key, b"content")
    assert store.read(key, max_bytes=10) == b"content"
    assert store.head(key).size_bytes == 7
    assert [found.key for found in store.list()] == [key]
    assert [found.key for found in store.list(key)] == [key]
    assert list(store.list_directories()) == ([key.partition("/")[0]] if "/" in key else [])
    store.copy_from(store.url(key), f"copies/{key}")
    assert store.read(f"copies/{key}", max_bytes=10) == b"content"
    upload_id = store.create_multipart(key)
    assert [found.key for found in store.list_uploads()] == [key]
    store.abort_multipart(key, upload_id)
    store.delete([key, f"copies/{key}"])
    assert list(store.list()) == []


def test_odd_keys_are_deleted_in_batches_too(store: S3Store) -> None:
    """Batches carry keys in XML: one badly escaped would leave its object behind, or remove another."""
    keys = [f"dir/{number} {key.replace('/', '')}" for number, key in enumerate(ODD_KEYS * 3)]
    for key in [*keys, "dir/kept"]:
        put(store, key, b"x")
    store.delete(keys)
    assert [found.key for found in store.list()] == ["dir/kept"]


@pytest.mark.parametrize("prefix", ["", "a", "a/b c", "/a/b/"])
def test_stores_see_what_lies_under_their_root_alone(s3_server: S3Server, bucket: str, prefix: str) -> None:
    """A checkpoint `run-1` would list, and gc remove, what belongs to `run-10`."""
    options = s3_server.storage_options
    store = S3Store(bucket, prefix, storage_options=options, timeout_s=30, connections=1)
    whole = S3Store(bucket, "", storage_options=options, timeout_s=30, connections=1)
    root = prefix.strip("/")
    assert store.uri == f"s3://{bucket}/{root}".rstrip("/")
    put(store, "x/y", b"1")
    put(store, "z", b"1")
    if root:
        put(whole, f"{root}0/other", b"1")
        client = clients.client_cache.client_for(whole._session.client_key, whole._session._environment)
        client.request_for("PutObject")(Bucket=bucket, Key=f"{root}/")  # as consoles mark a directory
    assert sorted(found.key for found in store.list()) == ["x/y", "z"]
    assert [found.key for found in store.list("x")] == ["x/y"]
    assert list(store.list_directories()) == ["x"]
    assert whole.read(f"{root}/z".lstrip("/"), max_bytes=1) == b"1"


def test_a_missing_bucket_is_told_from_a_missing_key(s3_server: S3Server, store: S3Store) -> None:
    """A misspelt bucket would look like an empty one, and a save would go on until its first part."""
    missing = S3Store("no-such-bucket", "", storage_options=s3_server.storage_options, timeout_s=30, connections=1)
    view = [memoryview(bytearray(1))]
    for call in (
        lambda: missing.head("k"),
        lambda: missing.read("k", max_bytes=1),
        lambda: missing.read_into("k", 0, view),
        lambda: list(missing.list()),
        lambda: missing.put("k", view, crc32c=0),
        lambda: missing.create_multipart("k"),
    ):
        with pytest.raises(errors.BucketNotFoundError, match="no-such-bucket"):
            call()
    for call in (
        lambda: store.head("k"),
        lambda: store.read("k", max_bytes=1),
        lambda: store.read_into("k", 0, view),
        lambda: store.copy_from(store.url("k"), "k2"),
    ):
        with pytest.raises(errors.ObjectNotFoundError, match=rf"{store.uri}/k: "):
            call()
