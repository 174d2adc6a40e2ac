"""What goes wrong on the way: each failure ends in time, in one typed error, and leaves clean connections."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
from tests.stores.bodies import BodyTests
from tests.stores.scripted import refuse
from tests.stores.tls import TLSTests

from cloudckpt import errors
from cloudckpt.stores.base import Part
from cloudckpt.stores.s3 import S3Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
CALLS: dict[str, Callable[[S3Store], object]] = {
    "put": lambda store: store.put("k", [memoryview(b"x")], crc32c=0),
    "upload_part": lambda store: store.upload_part(
        "k", "UP", Part(number=1, offset_bytes=0, size_bytes=1), [memoryview(b"x")], crc32c=0
    ),
    "create_multipart": lambda store: store.create_multipart("k"),
    "complete_multipart": lambda store: store.complete_multipart("k", "UP", []),
    "abort_multipart": lambda store: store.abort_multipart("k", "UP"),
    "read_into": lambda store: store.read_into("k", 0, [memoryview(bytearray(4))]),
    "read": lambda store: store.read("k", max_bytes=10),
    "list": lambda store: list(store.list()),
    "list_directories": lambda store: list(store.list_directories()),
    "list_uploads": lambda store: list(store.list_uploads()),
    "delete": lambda store: store.delete(["k"]),
    "head": lambda store: store.head("k"),
}


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_each_call_is_made_once(scripted: Any, operation: str) -> None:
    """Retries of boto3's own would multiply ours, and hide throttling from the code that slows down."""
    server = scripted.serve(scripted.error(503, "SlowDown"))
    error = refuse(lambda: CALLS[operation](server.store()), errors.ThrottledError)
    assert len(server.requests) == 1
    assert error.operation == operation
    assert error.key.startswith("s3://bucket")


class TestBodies(BodyTests):
    """Of answers that carry an object."""


class TestTLS(TLSTests):
    """The storage option `ca_bundle` names the certificates that are trusted."""

    def trust(self, certificate: Path, _monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
        return {"ca_bundle": str(certificate)}


def test_an_early_refusal_of_a_large_body_is_heard(scripted: Any) -> None:
    """A store that refuses before it has read the body would look like a broken network, and be asked again."""

    def refuse_early(connection: socket.socket, request: Any) -> None:
        scripted.error(403, "AccessDenied")(connection, request)
        while connection.recv(MIB):
            pass

    server = scripted.serve(refuse_early, reads_bodies=False)
    body = [memoryview(bytes(8 * MIB))]
    error = refuse(lambda: server.store().put("k", body, crc32c=0), errors.AccessDeniedError)
    assert "s3:PutObject" in str(error)


@pytest.mark.parametrize(
    ("status", "code", "expected", "words"),
    [
        (404, "NoSuchKey", errors.ObjectNotFoundError, "No object exists"),
        (404, "NoSuchBucket", errors.BucketNotFoundError, "does not exist"),
        (403, "AccessDenied", errors.AccessDeniedError, "s3:GetObject"),
        (400, "ExpiredToken", errors.CredentialsError, "expired"),
    ],
)
def test_head_finds_out_what_its_answer_cannot_say(
    scripted: Any, status: int, code: str, expected: type[errors.StoreError], words: str
) -> None:
    """HEAD's answers have no body: a misspelt bucket would look like a missing checkpoint and be saved to."""
    explained = scripted.error(status, code)
    server = scripted.serve(
        lambda connection, request: (scripted.reply(status) if request.method == "HEAD" else explained)(
            connection, request
        )
    )
    error = refuse(lambda: server.store().head("k"), expected)
    assert words in str(error)
    assert server.requests[0].method == "HEAD"
    assert server.requests[-1].headers["range"] == "bytes=0-0"


def test_an_error_in_a_200_answer_is_an_error(scripted: Any) -> None:
    """S3 may answer 200 to a completion and then fail in the body: a missing object would count as written."""
    server = scripted.serve(scripted.error(200, "InternalError"))
    refuse(lambda: CALLS["complete_multipart"](server.store()), errors.TransientStoreError)


def test_a_bucket_in_another_region_gets_the_whole_body(scripted: Any) -> None:
    """boto3 follows S3 to the bucket's region and sends again: a body at its end would be stored as an empty object."""
    moved = "<Error><Code>PermanentRedirect</Code><Message>Elsewhere.</Message></Error>"
    server = scripted.serve(scripted.reply(301, moved, {"x-amz-bucket-region": "us-west-2"}), scripted.any_s3())
    store = server.store()
    store.put("k", [memoryview(b"the whole "), memoryview(b"body")], crc32c=1)
    first, second = server.requests
    assert first.body == second.body == b"the whole body"
    assert "/us-west-2/s3/" in second.headers["authorization"]


def test_a_bucket_in_an_unknown_region_names_the_option(scripted: Any) -> None:
    """boto3 asks such an endpoint (a proxy that wants https, say) until the stack is full."""
    for moved in (scripted.error(301, "PermanentRedirect"), scripted.reply(301, "<html>Moved</html>")):
        server = scripted.serve(moved)
        error = refuse(lambda server=server: CALLS["put"](server.store()), errors.StoreError)
        assert "Set the storage option region" in str(error)
        assert len(server.requests) <= 3
