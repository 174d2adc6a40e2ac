"""What goes wrong on the way: each failure ends in time, in one typed error, and leaves clean connections."""

from __future__ import annotations

import re
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from awscrt.checksums import crc32c
from tests.stores.bodies import BodyTests

from cloudckpt import errors
from cloudckpt.stores.base import Part, UploadedPart
from cloudckpt.stores.gcs import GCSStore
from cloudckpt.testing.servers import reserved_port

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
SILENCE_S = 30.0
"""Of a server that never answers: far longer than a client takes, on a busy machine, to give it up."""
X = [memoryview(b"x")]
CRC = crc32c(b"x")
PART = Part(number=1, offset_bytes=0, size_bytes=1)
UPLOAD = "00000000000000aa"
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
    assert len(server.requests) == 1
    assert error.operation == operation
    assert error.key.startswith("gs://bucket")


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_an_endpoint_that_never_answers_is_given_up_in_time(scripted: Any, operation: str) -> None:
    """A save would hang for ever on a dead store."""
    server = scripted.serve(lambda _connection, _request: server.closing.wait(SILENCE_S))
    start = time.monotonic()
    error = refuse(lambda: CALLS[operation](server.store(timeout_s=0.3)), errors.StoreTimeoutError)
    assert time.monotonic() - start < SILENCE_S / 2
    assert len(server.requests) <= 1  # a busy machine may not have come to it
    assert "timeout_s" in str(error)


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_an_endpoint_that_is_not_there_is_told(operation: str) -> None:
    """The first mistake of anyone who sets up a server is its address."""
    with reserved_port() as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "anonymous": True}
        store = GCSStore("bucket", "", storage_options=options, timeout_s=5, connections=1)
        error = refuse(lambda: CALLS[operation](store), errors.TransientStoreError)
    assert f"http://127.0.0.1:{port}" in str(error)
    assert "Connection refused" in str(error)


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_a_server_that_hangs_up_is_tried_again_by_others(scripted: Any, operation: str) -> None:
    """A load balancer that drops a connection would end the save."""
    server = scripted.serve(scripted.hang_up)
    error = refuse(lambda: CALLS[operation](server.store()), errors.TransientStoreError)
    assert "closed the connection" in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_a_missing_bucket_is_told_from_a_missing_key(scripted: Any, operation: str) -> None:
    """GCS says 404 to both: a misspelt bucket would look like a missing checkpoint."""
    server = scripted.serve(scripted.error(404, "notFound"))
    if operation == "delete":
        CALLS[operation](server.store())  # there is nothing, as asked for
        return
    error = refuse(lambda: CALLS[operation](server.store()), errors.BucketNotFoundError)
    assert "'bucket'" in str(error)
    assert len(server.requests) == (1 if operation in LISTINGS else 2)


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


def test_a_page_to_log_in_at_is_no_range(scripted: Any) -> None:
    """A proxy's redirection would be followed, and its page taken for an object."""
    server = scripted.serve(scripted.reply(302, b"", {"Location": "/elsewhere"}))
    target = bytearray(10)
    refuse(lambda: server.store().read_into("k", 10, [memoryview(target)]), errors.StoreError)
    assert target == bytes(10)


def test_connections_are_used_again(scripted: Any) -> None:
    """A handshake for each of a million ranges would cost more than the ranges."""
    server = scripted.serve(scripted.any_gcs(size_bytes=4))
    store = server.store()
    for operation in ("read_into", "read", "put", "head", "upload_part", "list", "delete", "copy_from"):
        CALLS[operation](store)
    for reason in ("notFound", "forbidden"):
        server.answers = (scripted.error(403, reason),)
        refuse(lambda: CALLS["read_into"](store), errors.AccessDeniedError)
    assert server.num_connections == 1


def test_an_error_of_any_size_is_read_in_bounds(scripted: Any) -> None:
    """A proxy's endless page would fill the memory of a job that only wanted to try again."""
    server = scripted.serve(scripted.reply(502, b"<html>" + b"x" * 8 * MIB), scripted.any_gcs(size_bytes=4))
    store = server.store()
    error = refuse(lambda: CALLS["put"](store), errors.TransientStoreError)
    assert len(str(error)) < 1000
    CALLS["read_into"](store)


def test_an_upload_that_the_store_does_not_take_is_given_up_in_time(scripted: Any) -> None:
    """A peer that stops reading would hold the save for ever."""
    server = scripted.serve(lambda _connection, _request: server.closing.wait(SILENCE_S), reads_bodies=False)
    start = time.monotonic()
    body = [memoryview(bytes(64 * MIB))]
    store = server.store(timeout_s=0.5)
    refuse(lambda: store.put("k", body, crc32c=0), errors.StoreTimeoutError)
    assert time.monotonic() - start < SILENCE_S / 2


def test_an_early_refusal_of_a_large_body_is_heard(scripted: Any) -> None:
    """A store that refuses before it has read the body would look like a broken network, and be asked again."""

    def refuse_early(connection: socket.socket, request: Any) -> None:
        scripted.error(403, "forbidden")(connection, request)
        while connection.recv(MIB):
            pass

    server = scripted.serve(refuse_early, reads_bodies=False)
    body = [memoryview(bytes(8 * MIB))]
    error = refuse(lambda: server.store().put("k", body, crc32c=0), errors.AccessDeniedError)
    assert "storage.objects.create" in str(error)


def test_create_if_absent_tells_its_refusals_apart(scripted: Any) -> None:
    """A conflict in passing would be taken for a lost race, or a lost race be tried again."""
    server = scripted.serve(
        scripted.error(412, "conditionNotMet"),
        scripted.error(429, "rateLimitExceeded"),
        scripted.error(412, "orgPolicyConstraintFailed"),
    )
    store = server.store()
    refuse(lambda: store.put("k", X, crc32c=CRC, if_absent=True), errors.ObjectExistsError)
    refuse(lambda: store.put("k", X, crc32c=CRC, if_absent=True), errors.ThrottledError)
    refuse(lambda: store.put("k", X, crc32c=CRC, if_absent=True), errors.AccessDeniedError)


@pytest.mark.parametrize(
    "answer", ["<html><p>Welcome</p></html>", "{}", '{"kind": "books#volumes"}', '{"generation": "x"}', "[]"]
)
def test_an_answer_that_is_not_gcss_is_not_taken_for_one(scripted: Any, answer: str) -> None:
    """A web page at the wrong port would read as "no checkpoints": training would start from scratch."""
    server = scripted.serve(scripted.reply(200, answer))
    for operation in ("list", "list_directories", "list_uploads", "put", "upload_part", "complete_multipart", "head"):
        error = refuse(lambda operation=operation: CALLS[operation](server.store()), errors.TransientStoreError)
        assert "endpoint_url" in str(error)


def test_names_that_do_not_resolve_are_told() -> None:
    """A misspelt host would be reported in the words of the socket library."""
    options = {"endpoint_url": "https://no-such-host.invalid", "anonymous": True}
    store = GCSStore("bucket", "", storage_options=options, timeout_s=5, connections=1)
    error = refuse(lambda: store.head("k"), errors.TransientStoreError)
    assert re.search(r"no-such-host\.invalid", str(error))
