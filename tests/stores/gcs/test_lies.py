"""Servers and proxies that do something else than they were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from awscrt.checksums import crc32c

from cloudckpt import errors
from cloudckpt.stores.base import Part

if TYPE_CHECKING:
    from cloudckpt.stores.gcs import GCSStore

BODY = b"0123456789"
LISTINGS = {
    "list": lambda store: list(store.list()),
    "list_directories": lambda store: list(store.list_directories()),
    "list_uploads": lambda store: list(store.list_uploads()),
    "abort_multipart": lambda store: store.abort_multipart("k", "0123456789abcdef"),
}


def upload(store: GCSStore, key: str) -> None:
    upload_id = store.create_multipart(key)
    part = Part(number=1, offset_bytes=0, size_bytes=len(BODY))
    done = store.upload_part(key, upload_id, part, [memoryview(BODY)], crc32c=crc32c(BODY))
    store.complete_multipart(key, upload_id, [done])


def test_nothing_of_others_is_removed_where_prefixes_are_ignored(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The temporary objects are found by a listing: one of the whole bucket would have all of it removed."""
    gcs = scripted.any_gcs()
    gcs.put("somebody/elses", 1, 0)

    def ignoring(connection: Any, request: Any) -> None:
        request.query.pop("prefix", None)
        gcs(connection, request)

    server = scripted.serve(ignoring)
    upload(server.store(prefix="p"), "k")
    assert {"p/k", "somebody/elses"} <= set(gcs.objects)
    assert "ignores prefixes" in caplog.text
    with pytest.raises(errors.UnsupportedOperationError, match="ignores prefixes"):
        server.store(prefix="p").abort_multipart("other", "0123456789abcdef")
    assert "somebody/elses" in gcs.objects


@pytest.mark.parametrize("operation", LISTINGS)
@pytest.mark.parametrize(
    "content",
    [
        {"items": [1]},
        {"items": [{"size": "1"}]},
        {"items": [{"name": "elsewhere/a", "size": "1", "timeCreated": "2026-01-01T00:00:00Z"}]},
        {"prefixes": [1]},
        {"prefixes": ["elsewhere/"]},
    ],
    ids=str,
)
def test_a_listing_of_something_else_is_an_error_of_the_store(scripted: Any, operation: str, content: Any) -> None:
    """A raw AttributeError would name neither store nor remedy, and a key of another root would be taken for ours."""
    server = scripted.serve(scripted.json({"kind": "storage#objects", **content}))
    with pytest.raises(errors.StoreError):
        LISTINGS[operation](server.store(prefix="p"))


@pytest.mark.parametrize("operation", LISTINGS)
def test_a_listing_without_end_is_noticed(scripted: Any, operation: str) -> None:
    """Opening a checkpoint would hang for ever behind a proxy that ignores page tokens."""
    server = scripted.serve(scripted.json({"kind": "storage#objects", "nextPageToken": "again"}))
    with pytest.raises(errors.UnsupportedOperationError, match="round in circles"):
        LISTINGS[operation](server.store(prefix="p"))
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "call",
    [
        lambda store: list(store.list()),
        lambda store: store.head("k"),
        lambda store: store.delete(["k"]),
        lambda store: store.copy_from(store.url("k"), "k2"),
        lambda store: store.read("k", max_bytes=10),
        lambda store: store.put("k", [memoryview(BODY)], crc32c=crc32c(BODY)),
    ],
    ids=["list", "head", "delete", "copy", "read", "put"],
)
def test_no_request_follows_a_redirection(scripted: Any, status: int, call: Any) -> None:
    """A DELETE becomes a GET on its way: the object would stay, and the call succeed."""
    other = scripted.serve(scripted.any_gcs())
    server = scripted.serve(scripted.reply(status, "", {"Location": f"{other.endpoint_url}/storage/v1/b/bucket/o/k"}))
    with pytest.raises(errors.StoreError, match="sends requests elsewhere"):
        call(server.store())
    assert other.requests == []
