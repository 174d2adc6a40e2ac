"""The store against a whole S3 server: moto's, over real HTTP."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest
from awscrt.checksums import crc32c

from cloudckpt import errors
from cloudckpt.stores.base import Part
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
    store.copy(key, f"copies/{key}")
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


def test_a_multipart_upload_of_several_views_comes_back(store: S3Store) -> None:
    """Parts or views out of order would be found only when a checkpoint is loaded."""
    content = os.urandom(5 * MIB) + os.urandom(5 * MIB) + b"the rest"
    upload_id = store.create_multipart("big")
    uploaded = []
    for number, (begin, end) in enumerate([(0, 5 * MIB), (5 * MIB, 10 * MIB), (10 * MIB, len(content))], start=1):
        view = memoryview(content)[begin:end]
        part = Part(number=number, offset_bytes=begin, size_bytes=end - begin)
        uploaded.append(store.upload_part("big", upload_id, part, [view[:3], view[3:]], crc32c=crc32c(view)))
    with pytest.raises(errors.ObjectNotFoundError):
        store.head("big")
    store.complete_multipart("big", upload_id, list(reversed(uploaded)))
    assert store.head("big").size_bytes == len(content)
    target = bytearray(6 * MIB)
    view = memoryview(target)
    store.read_into("big", 4 * MIB, [view[:1], view[1 : 3 * MIB], view[3 * MIB :]])
    assert target == content[4 * MIB : 10 * MIB]


def test_parts_with_a_gap_are_not_completed(store: S3Store) -> None:
    """A part that was never uploaded would leave an object that is whole in S3's eyes."""
    upload_id = store.create_multipart("gap")
    part = Part(number=2, offset_bytes=5 * MIB, size_bytes=1)
    uploaded = store.upload_part("gap", upload_id, part, [memoryview(b"x")], crc32c=crc32c(b"x"))
    with pytest.raises(errors.StoreError, match="do not follow"):
        store.complete_multipart("gap", upload_id, [uploaded])


def test_the_second_of_two_creators_is_refused(store: S3Store) -> None:
    """G2: the first save's manifest would be replaced."""
    store.put("manifest.json", [memoryview(b"first")], crc32c=crc32c(b"first"), if_absent=True)
    with pytest.raises(errors.ObjectExistsError):
        store.put("manifest.json", [memoryview(b"second")], crc32c=crc32c(b"second"), if_absent=True)
    assert store.read("manifest.json", max_bytes=10) == b"first"
    put(store, "manifest.json", b"third")
    assert store.read("manifest.json", max_bytes=10) == b"third"


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
        client = clients.client_for(whole._session._key, whole._session._environment)
        client.call("PutObject", Bucket=bucket, Key=f"{root}/")  # as consoles mark a directory
    assert sorted(found.key for found in store.list()) == ["x/y", "z"]
    assert [found.key for found in store.list("x")] == ["x/y"]
    assert list(store.list_directories()) == ["x"]
    assert whole.read(f"{root}/z".lstrip("/"), max_bytes=1) == b"1"


def test_times_are_aware(store: S3Store) -> None:
    """gc compares ages: a naive time would raise, or be off by the time zone."""
    put(store, "k", b"1")
    store.create_multipart("u")
    now = datetime.now(timezone.utc)
    (listed,) = store.list()
    (_,) = store.list_uploads()
    for seen in (listed.modified_at, store.head("k").modified_at):
        assert abs(now - seen) < timedelta(hours=1)


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
        lambda: store.copy("k", "k2"),
    ):
        with pytest.raises(errors.ObjectNotFoundError, match=rf"{store.uri}/k: "):
            call()


def test_keys_that_lead_out_of_the_root_are_refused(store: S3Store) -> None:
    """§7: a manifest from a bucket could name an object of another run."""
    for key in ("../other", "a/../../b", "/absolute", "", "a//b"):
        with pytest.raises(errors.StoreError, match="not a key"):
            store.read(key, max_bytes=1)
        with pytest.raises(errors.StoreError, match="not a key"):
            store.delete([key])
