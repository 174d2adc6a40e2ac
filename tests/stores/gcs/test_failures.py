"""What goes wrong on the way: each failure ends in time, in one typed error, and leaves clean connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from awscrt.checksums import crc32c
from tests.stores.bodies import BodyTests
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
LISTINGS = ("list", "list_directories", "list_uploads", "abort_multipart")


def refuse(call: Callable[[], object], expected: type[errors.StoreError]) -> errors.StoreError:
    with pytest.raises(expected) as caught:
        call()
    assert type(caught.value) is expected
    return caught.value


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


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("read_into", errors.ObjectNotFoundError),
        ("read", errors.ObjectNotFoundError),
        ("head", errors.ObjectNotFoundError),
        ("copy_from", errors.ObjectNotFoundError),
        ("complete_multipart", errors.ObjectNotFoundError),
        ("put", errors.StoreError),
    ],
)
@pytest.mark.parametrize("may_list", [True, False])
def test_a_missing_key_in_a_bucket_that_is_there(
    scripted: Any, operation: str, expected: type[errors.StoreError], *, may_list: bool
) -> None:
    """ "Create the bucket" would be wrong advice, and where listing is denied, a missing key must stay one."""
    listing = scripted.json({"kind": "storage#objects"}) if may_list else scripted.error(403, "forbidden")

    def answer(connection: Any, request: Any) -> None:
        found = listing if request.path.endswith("/b/bucket/o") and request.method == "GET" else missing
        found(connection, request)

    missing = scripted.error(404, "notFound")
    refuse(lambda: CALLS[operation](scripted.serve(answer).store()), expected)


class TestBodies(BodyTests):
    """Of answers that carry an object."""


class TestTLS(TLSTests):
    """The variable REQUESTS_CA_BUNDLE names the certificates that are trusted."""

    def trust(self, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        return {}
