"""What goes wrong on the way: each failure ends in time, in one typed error, and leaves clean connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from awscrt.checksums import crc32c
from tests.stores.bodies import BodyTests
from tests.stores.scripted import refuse
from tests.stores.tls import TLSTests

from cloudckpt import errors
from cloudckpt.stores.base import Part, UploadedPart
from cloudckpt.stores.gcs import GCSStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

X = [memoryview(b"x")]
CRC = crc32c(b"x")
PART = Part(number=1, offset_bytes=0, size_bytes=1)
DONE = UploadedPart(part=PART, token="0123abcd-7", crc32c=CRC)  # noqa: S106 (a try, and a generation)


def complete(store: GCSStore) -> None:
    store.complete_multipart("k", store.create_multipart("k"), [DONE])


def abort(store: GCSStore) -> None:
    store.abort_multipart("k", store.create_multipart("k"))


CALLS: dict[str, Callable[[GCSStore], object]] = {
    "put": lambda store: store.put("k", X, crc32c=CRC),
    "upload_part": lambda store: store.upload_part("k", store.create_multipart("k"), PART, X, crc32c=CRC),
    "complete_multipart": complete,
    "abort_multipart": abort,
    "read_into": lambda store: store.read_into("k", 0, [memoryview(bytearray(4))]),
    "read": lambda store: store.read("k", max_bytes=10),
    "list": lambda store: list(store.list()),
    "list_directories": lambda store: list(store.list_directories()),
    "list_uploads": lambda store: list(store.list_uploads()),
    "delete": lambda store: store.delete(["k"]),
    "head": lambda store: store.head("k"),
    "copy_from": lambda store: store.copy_from(store.url("k"), "k2"),
}


@pytest.mark.parametrize("operation", sorted(CALLS))
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


class TestBodies(BodyTests):
    """Of answers that carry an object."""


class TestTLS(TLSTests):
    """The variable REQUESTS_CA_BUNDLE names the certificates that are trusted."""

    def trust(self, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        return {}
