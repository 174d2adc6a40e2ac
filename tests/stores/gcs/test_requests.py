"""The requests on the wire: each option is in all requests that it belongs to, and no request costs time in vain."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from awscrt.checksums import crc32c

from cloudckpt import errors
from cloudckpt.stores.base import Part, UploadedPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from cloudckpt.stores.gcs import GCSStore

BODY = b"0123456789"
PART = Part(number=1, offset_bytes=0, size_bytes=10)
VIEWS = [memoryview(BODY)[:4], memoryview(BODY)[4:]]
CRC = crc32c(BODY)
UPLOAD = "0123456789abcdef"
TRY = "0123abcd"
KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"


def one_part(store: GCSStore) -> None:
    upload_id = store.create_multipart("k")
    done = store.upload_part("k", upload_id, PART, VIEWS, crc32c=CRC)
    store.complete_multipart("k", upload_id, [done])


CALLS: dict[str, tuple[Callable[[GCSStore], object], list[str]]] = {
    "put": (lambda store: store.put("k", VIEWS, crc32c=CRC), ["POST"]),
    "multipart": (one_part, ["POST", "POST", "GET", "DELETE"]),
    "abort": (lambda store: store.abort_multipart("k", UPLOAD), ["GET"]),
    "read_into": (lambda store: store.read_into("k", 0, [memoryview(bytearray(10))]), ["GET"]),
    "read": (lambda store: store.read("k", max_bytes=10), ["GET"]),
    "head": (lambda store: store.head("k"), ["GET"]),
    "list": (lambda store: list(store.list()), ["GET"]),
    "list_directories": (lambda store: list(store.list_directories()), ["GET"]),
    "list_uploads": (lambda store: list(store.list_uploads()), ["GET"]),
    "delete": (lambda store: store.delete(["k"]), ["DELETE"]),
    "copy": (lambda store: store.copy_from(store.url("k"), "k2"), ["POST"]),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_user_project_is_on_every_request(scripted: Any, name: str) -> None:
    """A bucket whose requester pays refuses whatever lacks it."""
    server = scripted.serve(scripted.any_gcs())
    CALLS[name][0](server.store(user_project="payer"))
    assert [request.query.get("userProject") for request in server.requests] == ["payer"] * len(server.requests)


def test_the_kms_key_and_the_storage_class_are_on_what_writes(scripted: Any) -> None:
    """Objects would be written under another key than the policy wants; parts in a cold class would be charged for a
    month each, and compose wants all sources to be of one class.
    """
    server = scripted.serve(scripted.any_gcs())
    store = server.store(kms_key_name=KEY, storage_class="NEARLINE")
    CALLS["put"][0](store)
    one_part(store)
    store.copy_from(store.url("k"), "k2")
    put, part, compose, *_, copy = server.requests
    assert put.query["kmsKeyName"] == part.query["kmsKeyName"] == copy.query["destinationKmsKeyName"] == KEY
    assert scripted.inserted(put)[0]["storageClass"] == "NEARLINE"
    assert scripted.inserted(part)[0]["storageClass"] == "STANDARD"
    destination = json.loads(compose.body)["destination"]
    assert (destination["kmsKeyName"], destination["storageClass"]) == (KEY, "NEARLINE")
    assert json.loads(copy.body)["storageClass"] == "NEARLINE"


def test_bodies_go_out_whole_and_with_their_checksum(scripted: Any) -> None:
    """Without the CRC32C among the metadata GCS checks nothing; a chunked body would need its own framing."""
    server = scripted.serve(scripted.any_gcs())
    server.store(prefix="a b").put("c+d/e%f", VIEWS, crc32c=CRC)
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/upload/storage/v1/b/bucket/o")
    assert request.query["uploadType"] == "multipart"
    metadata, content = scripted.inserted(request)
    assert content == BODY
    assert metadata == {
        "name": "a b/c+d/e%f",
        "crc32c": scripted.encoded(CRC),
        "contentType": "application/octet-stream",
    }
    assert request.headers["content-length"] == str(len(request.body))
    assert "transfer-encoding" not in request.headers
    assert request.headers["user-agent"].startswith("cloudckpt/")


def test_create_if_absent_is_a_condition_of_the_store(scripted: Any) -> None:
    """Two writers could both commit; and a plain put must not carry the condition."""
    server = scripted.serve(scripted.any_gcs())
    store = server.store()
    store.put("k", VIEWS, crc32c=CRC, if_absent=True)
    store.put("k", VIEWS, crc32c=CRC)
    assert server.requests[0].query["ifGenerationMatch"] == "0"
    assert "ifGenerationMatch" not in server.requests[1].query


@pytest.mark.parametrize(("num_parts", "num_composes"), [(1, 1), (32, 1), (33, 3), (1024, 33), (1025, 36)])
def test_parts_are_composed_in_a_tree(scripted: Any, num_parts: int, num_composes: int) -> None:
    """GCS takes 32 sources a call: the 33rd part would be refused, or lost. And exactly the generations that were
    acknowledged are composed: a part that a zombie sends late must not get into the object.
    """
    gcs = scripted.any_gcs()
    server = scripted.serve(gcs)
    store, parts, value = server.store(), [], 0
    upload_id = store.create_multipart("k")
    for number in range(1, num_parts + 1):
        name, body = f"k.~{upload_id}-0-{number:05}-{TRY}.~part", b"%05d" % number
        answer = gcs.put(name, 5, crc32c(body))
        part = Part(number=number, offset_bytes=5 * (number - 1), size_bytes=5)
        parts.append(UploadedPart(part=part, token=f"{TRY}-{answer['generation']}", crc32c=crc32c(body)))
        value = crc32c(body, value)
    store.complete_multipart("k", upload_id, parts)
    composes = [request for request in server.requests if request.path.endswith("/compose")]
    assert len(composes) == num_composes
    assert gcs.objects == {"k": (gcs.generation, 5 * num_parts, value)}
    sources = [source for compose in composes for source in json.loads(compose.body)["sourceObjects"]]
    assert {source["name"]: source["generation"] for source in sources if "-0-" in source["name"]} == {
        f"k.~{upload_id}-0-{part.part.number:05}-{TRY}.~part": int(part.token.removeprefix(f"{TRY}-")) for part in parts
    }
    assert all("generation" in source for source in sources)
    assert composes[-1].path == "/storage/v1/b/bucket/o/k/compose"


def test_uploads_are_known_by_the_names_of_their_parts(scripted: Any) -> None:
    """gc opens a store at the run's root, whose writer had one at the checkpoint; and the oldest part tells the age."""
    gcs = scripted.any_gcs()
    for name in (
        f"p/s/a.~{UPLOAD}-1-00001-{TRY}.~part",
        f"p/s/a.~{UPLOAD}-0-00002-{TRY}.~part",
        "p/s/b.~nothing.~part",
        "p/s/c",
    ):
        gcs.put(name, 1, 0)
    server = scripted.serve(gcs)
    for prefix, key in (("p", "s/a"), ("p/s", "a"), ("", "p/s/a")):
        (found,) = server.store(prefix=prefix).list_uploads()
        assert (found.key, found.upload_id) == (key, UPLOAD)
        assert found.started_at.isoformat() == "2026-01-01T00:00:00+00:00"
    assert list(server.store(prefix="p").list_uploads("s/b")) == []
    assert list(server.store(prefix="p").list_uploads("s/a.~")) == []
    assert [info.key for info in server.store(prefix="p").list("s/")] == ["s/b.~nothing.~part", "s/c"]


def test_no_object_may_be_called_like_a_part(scripted: Any) -> None:
    """It would be invisible, and swept with the upload that it seems to belong to."""
    server = scripted.serve(scripted.any_gcs())
    store, key = server.store(), f"k.~{UPLOAD}-0-00001-{TRY}.~part"
    for call in (
        lambda: store.put(key, VIEWS, crc32c=CRC),
        lambda: store.read(key, max_bytes=1),
        lambda: store.create_multipart(key),
    ):
        with pytest.raises(errors.StoreError, match="temporary object"):
            call()
    assert server.requests == []


def test_listings_go_on_over_pages(scripted: Any) -> None:
    """Everything behind the first 1,000 keys would be invisible to gc and latest."""

    def page(name: str, **more: str) -> Any:
        item = {"name": f"p/{name}", "size": "1", "timeCreated": "2026-01-01T00:00:00.000Z"}
        return scripted.json({"kind": "storage#objects", "items": [item], **more})

    first, last = page("x1", nextPageToken="T=1"), page("x2+")
    server = scripted.serve(first, last)
    assert [found.key for found in server.store(prefix="p").list("x")] == ["x1", "x2+"]
    assert server.requests[0].query["prefix"] == "p/x"
    assert server.requests[1].query["pageToken"] == "T=1"
