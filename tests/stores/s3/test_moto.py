"""The store against a whole S3 server: moto's, over real HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from awscrt.checksums import crc32c

from cloudckpt import errors
from cloudckpt.stores.s3 import S3Store

if TYPE_CHECKING:
    from cloudckpt.testing.servers import S3Server

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


def test_odd_keys_are_deleted_in_batches_too(store: S3Store) -> None:
    """Batches carry keys in XML: one badly escaped would leave its object behind, or remove another."""
    keys = [f"dir/{number} {key.replace('/', '')}" for number, key in enumerate(ODD_KEYS * 3)]
    for key in [*keys, "dir/kept"]:
        put(store, key, b"x")
    store.delete(keys)
    assert [found.key for found in store.list()] == ["dir/kept"]


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
