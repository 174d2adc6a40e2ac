"""Failures on the wire, and wrong answers of servers: each call ends in time, with one typed error."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from awscrt.checksums import crc32c
from tests.kit.scripted import CALLS, refuse
from tests.kit.wire import GCS_APPENDABLE_ONLY, Reply, Wire, WireRule
from tests.stores.http_contract import BodyTests, TLSTests

import cloudckpt
from cloudckpt import AdvancedOptions, Options, errors
from cloudckpt.doctor import examine
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Part, UploadedPart

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cloudckpt.stores.gcs import GCSStore
    from cloudckpt.testing.servers import GCSServer


X = [memoryview(b"x")]
CRC = crc32c(b"x")
PART = Part(number=1, offset_bytes=0, size_bytes=1)
DONE = UploadedPart(part=PART, token="0123abcd-7", crc32c=CRC)  # noqa: S106 (a try, and a generation)


def complete(store: GCSStore) -> None:
    store.complete_multipart("k", store.create_multipart("k"), [DONE])


@pytest.mark.parametrize("operation", sorted(CALLS.keys() - {"create_multipart"}))  # which makes none
@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [
        (429, "rateLimitExceeded", errors.ThrottledError),
        (503, "backendError", errors.TransientStoreError),
        (403, "forbidden", errors.AccessDeniedError),
    ],
)
def test_each_call_is_made_once(
    scripted: Any, operation: str, status: int, reason: str, expected: type[errors.StoreError]
) -> None:
    """Retries of the library's own would multiply ours, and hide throttling from the code that slows down."""
    server = scripted.serve(scripted.error(status, reason))
    error = refuse(lambda: CALLS[operation](server.store()), expected)
    looks = operation == "complete_multipart" and issubclass(expected, errors.TransientStoreError)
    assert len(server.requests) == (2 if looks else 1)  # is the object there already?
    assert error.operation == operation
    assert error.key.startswith("gs://bucket")


@pytest.mark.parametrize("operation", ["read_into", "read", "head", "copy_from", "complete_multipart", "put"])
@pytest.mark.parametrize("listing", ["empty", "denied", "missing"])
def test_a_missing_bucket_is_told_from_a_missing_key(scripted: Any, operation: str, listing: str) -> None:
    """GCS says 404 to both: a misspelt bucket would look like a missing checkpoint, or "create the bucket" be the
    advice; and where listing is denied, a missing key must stay one.
    """
    missing = scripted.error(404, "notFound")
    listings = {"empty": scripted.json({"kind": "storage#objects"}), "denied": scripted.error(403, "forbidden")}

    def answer(connection: Any, request: Any) -> None:
        is_listing = request.path.endswith("/b/bucket/o") and request.method == "GET"
        (listings.get(listing, missing) if is_listing else missing)(connection, request)

    of_a_key = errors.StoreError if operation == "put" else errors.ObjectNotFoundError
    expected = errors.BucketNotFoundError if listing == "missing" else of_a_key
    refuse(lambda: CALLS[operation](scripted.serve(answer).store()), expected)


@pytest.fixture
def zonal(gcs_server: GCSServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """A wire that answers as a zonal bucket of Google's does. Without a probe before the first save, as there."""
    monkeypatch.setattr("cloudckpt.stores.gcs.store.is_googles", lambda _: True)
    layout = {"kind": "storage#storageLayout", "bucket": bucket, "location": "US-EAST4", "locationType": "zone"}
    rules = [
        WireRule(action=GCS_APPENDABLE_ONLY, method="POST", times=None),
        WireRule(action=Reply(status=200, body=json.dumps(layout).encode()), path="/storageLayout", times=None),
    ]
    with Wire(gcs_server.endpoint_url, *rules) as wire:
        yield wire


def test_the_first_save_to_a_zonal_bucket_says_what_to_use(zonal: Wire, bucket: str) -> None:
    """If this fails, a user of Rapid storage is sent to check options and keys, which are right."""
    options = cloudckpt.Options(storage_options={"endpoint_url": zonal.url, "anonymous": True})
    with pytest.raises(errors.StoreError, match=r"requires appendable objects.*is zonal.*Use a bucket in a region"):
        cloudckpt.save({"weight": torch.ones(3)}, f"gs://{bucket}/run/step-1", options=options, no_dist=True)
    zonal.clear()
    with pytest.raises(errors.CheckpointNotFoundError):
        cloudckpt.load({"weight": torch.ones(3)}, f"gs://{bucket}/run/step-1", options=options, no_dist=True)


def test_the_doctor_finds_a_zonal_bucket(zonal: Wire, bucket: str) -> None:
    """If this fails, a bucket that takes no save is only found out about by the first save."""
    options = cloudckpt.Options(storage_options={"endpoint_url": zonal.url, "anonymous": True})
    report = examine(f"gs://{bucket}/run", options=options)
    assert not report.is_healthy
    assert (report["put"].outcome, report["location type"].outcome) == ("failed", "failed")
    assert "Use a bucket in a region" in report["location type"].advice
    assert report.service is not None
    assert "zonal" in report.service["service"]
    assert "parts: no compose (https://" in str(report)


def test_a_copy_out_of_a_zonal_bucket_is_read_and_written(zonal: Wire, bucket: str) -> None:
    """If this fails, checkpoints cannot be copied out of a zonal bucket: the service rewrites nothing there."""
    store = open_store(
        f"gs://{bucket}/run", cloudckpt.Options(storage_options={"endpoint_url": zonal.url, "anonymous": True})
    )
    refuse(lambda: store.copy_from(store.url("k"), "k2"), errors.UnsupportedOperationError)


class TestBodies(BodyTests):
    """The bodies of answers that carry an object."""


class TestTLS(TLSTests):
    """The variable REQUESTS_CA_BUNDLE names the certificates that are trusted."""

    def trust(self, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        return {}


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
    with pytest.raises(errors.UnsupportedOperationError, match="repeats its pages"):
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


UPLOAD = "00000000000000aa"


# What was stored, and what was meant to be.


def stored(scripted: Any, *, generation: int = 7, size: int = 1, value: int = CRC) -> Any:
    described = {"generation": str(generation), "size": str(size), "crc32c": scripted.encoded(value)}
    return scripted.json({"kind": "storage#object", "name": "k", **described})


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("damage", [{"value": 1}, {"size": 2}])
def test_damaged_upload_alone_is_removed(scripted: Any, damage: dict[str, int], *, if_absent: bool) -> None:
    """Damaged bytes would lie there as if they were right; but another writer's object at the key is not ours."""
    server = scripted.serve(stored(scripted, **damage), scripted.reply(204))
    error = refuse(lambda: server.store().put("k", X, crc32c=CRC, if_absent=if_absent), errors.ChecksumRefusedError)
    assert "removed again" in str(error)
    _, removal = server.requests
    assert (removal.method, removal.path) == ("DELETE", "/storage/v1/b/bucket/o/k")
    assert removal.query["ifGenerationMatch"] == "7"


# Completions and aborts that are repeated, or come too late.


def test_a_bucket_that_refuses_to_remove_parts_gets_objects_without_parts(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a retention policy, or without the right to delete, no object larger than a part could be saved; or each
    save would leave its parts for ever, and warn for each object.
    """
    gcs = scripted.any_gcs()

    def keep_all(connection: Any, request: Any) -> None:
        denied = scripted.error(403, "retentionPolicyNotMet")
        (denied if request.method == "DELETE" else gcs)(connection, request)

    server = scripted.serve(keep_all)
    store = server.store()
    for key in ("k1", "k2"):
        upload_id = store.create_multipart(key)
        done = store.upload_part(key, upload_id, PART, X, crc32c=CRC)
        store.complete_multipart(key, upload_id, [done])
        assert key in gcs.objects
    assert "gs://bucket/k1 is complete, but its parts stay" in caplog.text
    assert store.capabilities.multipart, "within a save nothing changes"
    later = server.store()
    assert not later.capabilities.multipart
    assert not pickle.loads(pickle.dumps(later)).capabilities.multipart
    assert caplog.text.count("its parts stay") == 1
    advanced = AdvancedOptions(wrap_store=lambda _: later, part_bytes=1 << 20)
    options = Options(commit="unconditional", advanced=advanced)
    names = set(gcs.objects)
    cloudckpt.save({"w": torch.ones(1 << 20)}, "gs://bucket/run", no_dist=True, options=options)
    assert not [name for name in set(gcs.objects) - names if name.endswith("~part")]
    assert caplog.text.count("its parts stay") == 1


def test_an_upload_whose_parts_are_gone_is_not_completed_by_another_object(scripted: Any) -> None:
    """An older object at the key would be taken for the one that was to be composed."""
    gcs = scripted.any_gcs()
    gcs.put("k", 1, CRC + 1)
    gcs.put("k2", 2, CRC)
    store = scripted.serve(gcs).store()
    refuse(lambda: complete(store), errors.ObjectNotFoundError)
    assert set(gcs.objects) == {"k", "k2"}


def test_a_try_that_was_given_up_and_arrives_late_does_no_harm(scripted: Any) -> None:
    """Its answer took too long, the part was sent again, and then the first request was carried out after all: if it
    replaced what the second one wrote, the upload could not be completed, and a save of hours would fail.
    """
    gcs, held = scripted.any_gcs(), []

    def hold_the_first(connection: Any, request: Any) -> None:
        if request.path.startswith("/upload/") and not held:
            held.append(request)
            scripted.hang_up(connection, request)
        else:
            gcs(connection, request)

    store = scripted.serve(hold_the_first).store()
    upload_id = store.create_multipart("k")
    refuse(lambda: store.upload_part("k", upload_id, PART, X, crc32c=CRC), errors.TransientStoreError)
    done = store.upload_part("k", upload_id, PART, X, crc32c=CRC)
    gcs._answer(held[0])
    assert len(gcs.objects) == 2
    store.complete_multipart("k", upload_id, [done])
    assert set(gcs.objects) == {"k"}


def test_an_abort_removes_what_was_composed_on_the_way(scripted: Any) -> None:
    """It is as large as the object itself."""
    gcs = scripted.any_gcs()
    for name in (
        f"k.~{UPLOAD}-1-00001-0123abcd.~part",
        f"k.~{UPLOAD}-0-00001-0123abcd.~part",
        "k.~00000000000000ab-0-00001-0123abcd.~part",
        "k",
    ):
        gcs.put(name, 1, CRC)
    scripted.serve(gcs).store().abort_multipart("k", UPLOAD)
    assert set(gcs.objects) == {"k.~00000000000000ab-0-00001-0123abcd.~part", "k"}
