"""Failures on the wire, and wrong answers of servers: each call ends in time, with one typed error."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c
from tests.kit.scripted import CALLS, refuse
from tests.stores.http_contract import BodyTests, TLSTests

from cloudckpt import errors
from cloudckpt.cli._console import exit_code_of
from cloudckpt.io.client import StoreClient
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3.errors import WrongRegionError

MIB = 1 << 20


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_each_call_is_made_once(scripted: Any, operation: str) -> None:
    """Retries of boto3's own would multiply ours, and hide throttling from the code that slows down."""
    server = scripted.serve(scripted.error(503, "SlowDown"))
    error = refuse(lambda: CALLS[operation](server.store()), errors.ThrottledError)
    assert len(server.requests) == 1
    assert error.operation == operation
    assert error.key.startswith("s3://bucket")


class TestBodies(BodyTests):
    """The bodies of answers that carry an object."""


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
def test_a_failed_head_asks_by_get_for_the_reason(
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


@pytest.mark.parametrize("status", [301, 307])
def test_a_bucket_in_an_unknown_region_names_the_option(scripted: Any, status: int) -> None:
    """boto3 asks such an endpoint (a proxy that wants https, say) until the stack is full."""
    for moved in (scripted.error(status, "PermanentRedirect"), scripted.reply(status, "<html>Moved</html>")):
        server = scripted.serve(moved)
        error = refuse(lambda server=server: CALLS["put"](server.store()), WrongRegionError)
        assert "Set the storage option region" in str(error)
        assert len(server.requests) <= 3
        assert exit_code_of(error) == 2
        assert isinstance(pickle.loads(pickle.dumps(error)), errors.InvalidOptionError)  # our own


LOCATION = '<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/">us-west-2</LocationConstraint>'
ELSEWHERE = "<Error><Code>{code}</Code>{more}</Error>"


@pytest.mark.parametrize("operation", ["put", "head", "list", "read"])
@pytest.mark.parametrize(
    ("status", "where"),
    [
        (301, "<Region>us-west-2</Region>"),
        (301, "<Endpoint>bucket.s3.us-west-2.amazonaws.com</Endpoint>"),
        (307, "<Endpoint>bucket.s3-us-west-2.amazonaws.com</Endpoint>"),
        (301, "by HeadBucket"),
        (307, "by GetBucketLocation"),
        (400, "by GetBucketLocation"),
        (400, "<Message>The region 'eu-west-1' is wrong; expecting 'us-west-2'</Message>"),
        (403, "<Region>us-west-2</Region>"),
    ],
)
def test_a_bucket_in_another_region_is_found(scripted: Any, operation: str, status: int, where: str) -> None:
    """If this fails, a job ends because its bucket is elsewhere, although the store says where when it is asked."""
    code = {301: "PermanentRedirect", 307: "TemporaryRedirect", 400: "AuthorizationHeaderMalformed"}.get(status, "Own")
    more = "" if where.startswith("by ") else where
    s3, moved = scripted.any_s3(), scripted.reply(status, ELSEWHERE.format(code=code, more=more))
    headed = scripted.reply(status, "", {"x-amz-bucket-region": "us-west-2"} if where == "by HeadBucket" else {})

    def answer(connection: socket.socket, request: Any) -> None:
        if "/us-west-2/s3/" in request.headers["authorization"]:
            s3(connection, request)
        elif "location" in request.query:
            refused = scripted.error(403, "AccessDenied")
            (scripted.reply(200, LOCATION) if where == "by GetBucketLocation" else refused)(connection, request)
        else:
            (headed if request.path == "/bucket" and request.method == "HEAD" else moved)(connection, request)

    server = scripted.serve(answer)
    store = server.store()
    CALLS[operation](store)
    num_requests = len(server.requests)
    CALLS[operation](store)
    assert len(server.requests) == num_requests + 1  # it is remembered


@pytest.mark.parametrize("code", ["AuthorizationHeaderMalformed", "InvalidRegion", "InvalidRegionName"])
def test_a_region_that_the_store_does_not_know_is_an_error_of_configuration(scripted: Any, code: str) -> None:
    """If this fails, a misspelt region ends a command with the code of a bug, without the store's regions."""
    more = "<Message>The region name 'eu-west-1' is not valid. Must be one of: weur, auto.</Message>"
    server = scripted.serve(scripted.reply(400, ELSEWHERE.format(code=code, more=more)))
    error = refuse(lambda: CALLS["list"](server.store()), WrongRegionError)
    assert "Must be one of: weur, auto. No region is named, and the request was sent to 'eu-west-1'." in str(error)
    assert exit_code_of(error) == 2


def test_many_requests_that_are_redirected_together_all_arrive(scripted: Any) -> None:
    """If this fails, the first of them to learn the region makes the others believe that they were sent there."""
    barrier, s3 = threading.Barrier(4, timeout=30), scripted.any_s3()
    knows_region = threading.Event()
    moved = scripted.reply(307, ELSEWHERE.format(code="TemporaryRedirect", more=""))

    def answer(connection: socket.socket, request: Any) -> None:
        if "location" in request.query:
            scripted.reply(200, LOCATION)(connection, request)
        elif "/us-west-2/s3/" in request.headers["authorization"]:
            knows_region.set()
            s3(connection, request)
        else:
            if request.method != "HEAD" and barrier.wait() > 0:  # the last ones hear of it when one knows the region
                knows_region.wait(30)
            moved(connection, request)

    store = scripted.serve(answer).store()
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(CALLS["put"], store) for _ in range(4)]:
            future.result(30)


def test_a_region_that_does_not_help_is_named_in_an_error_of_configuration(scripted: Any) -> None:
    """If this fails, a wrong endpoint is asked without end, or blamed on the region, which is the bucket's."""
    server = scripted.serve(
        scripted.reply(301, ELSEWHERE.format(code="PermanentRedirect", more="<Region>us-west-2</Region>"))
    )
    error = refuse(lambda: CALLS["put"](server.store()), WrongRegionError)
    assert "the bucket is in region 'us-west-2'" in str(error)
    assert "Check endpoint_url" in str(error)
    assert "another region" not in str(error)
    assert exit_code_of(error) == 2
    assert len(server.requests) <= 6


@pytest.mark.parametrize("operation", ["put", "head", "list", "read"])
@pytest.mark.parametrize("status", [301, 307])
def test_a_redirection_without_a_body_is_tried_again(scripted: Any, operation: str, status: int) -> None:
    """If this fails, a load balancer that redirects for a moment ends the save, with an error of an XML parser."""
    server = scripted.serve(scripted.reply(status, ""))
    error = refuse(lambda: CALLS[operation](server.store()), errors.TransientStoreError)
    assert f"status {status}" in str(error)
    assert "Is there a proxy or a load balancer in between?" in str(error)


PAGE = "<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{content}</ListBucketResult>"
OBJECT = "<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"


def test_a_key_outside_the_root_is_an_error(scripted: Any) -> None:
    """Its beginning would be cut off, and the rest taken for a key of ours: removing it could hit another object."""
    listing = PAGE.format(truncated="false", content=OBJECT.format(key="elsewhere/a"))
    with pytest.raises(errors.UnsupportedOperationError, match="ignores prefixes"):
        list(scripted.serve(scripted.reply(200, listing)).store(prefix="p").list())


def test_a_listing_without_end_is_noticed(scripted: Any) -> None:
    """Opening a checkpoint would hang for ever behind a proxy that ignores page tokens."""
    token = "<NextContinuationToken>again</NextContinuationToken>"  # noqa: S105  # of a listing
    server = scripted.serve(scripted.reply(200, PAGE.format(truncated="true", content=token)))
    with pytest.raises(errors.UnsupportedOperationError, match="repeats its pages"):
        list(server.store(prefix="p").list())
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<Prefix>q/</Prefix>", "another Prefix"),
        ("<Prefix/>", "another Prefix"),
        ("<Prefix>p/</Prefix><KeyCount>2</KeyCount>" + OBJECT.format(key="p/a"), "has 1"),
        ("<Contents><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>", "lacks"),
        ("<Contents><Key>p/a</Key><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>", "lacks"),
        ("<Contents><Key>p/a</Key><Size>1</Size></Contents>", "lacks"),
    ],
)
def test_a_listing_that_was_not_asked_for_is_not_believed(scripted: Any, content: str, words: str) -> None:
    """If this fails, a cache that ignores queries answers with another listing: checkpoints are missing, or a KeyError
    names neither store nor remedy.
    """
    server = scripted.serve(scripted.reply(200, PAGE.format(truncated="false", content=content)))
    with pytest.raises(errors.TransientStoreError, match=f"not asked for: .*{words}|cannot be|is not S3's"):
        list(server.store(prefix="p").list())


@pytest.mark.parametrize("echo", ["p/a b+%20/", "p/a%20b%2B%2520/", "p/a+b%2B%2520/"], ids=["rgw", "moto", "rclone"])
def test_a_listing_that_was_asked_for_is_believed_however_it_is_spelled(scripted: Any, echo: str) -> None:
    """If this fails, a bucket on Ceph or rclone cannot be listed where a key has a space or a percent sign."""
    content = f"<Prefix>{echo}</Prefix><EncodingType>url</EncodingType><KeyCount>0</KeyCount>"
    server = scripted.serve(scripted.reply(200, PAGE.format(truncated="false", content=content)))
    assert list(server.store(prefix="p").list("a b+%20/")) == []


def test_a_limit_of_open_files_makes_fewer_connections(s3_server: Any, bucket: str) -> None:
    """If this fails, a save ends under `ulimit -n` that two connections could make, and blames the network."""
    options = {**s3_server.storage_options, "endpoint_url": s3_server.endpoint_url}
    store = S3Store(bucket, "", storage_options=options, timeout_s=20, connections=8)
    store.put("warm", [memoryview(b"x")], crc32c=crc32c(b"x"))
    body, client, before = (
        bytes(4 * MIB),
        StoreClient(store, retries=0, timeout_s=20),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    checksum, barrier = crc32c(body), threading.Barrier(8, timeout=30)

    def put(number: int) -> None:
        barrier.wait()
        client.call(store.put, f"k{number}", [memoryview(body)], crc32c=checksum)

    held: list[int] = []
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(file.name) for file in Path("/proc/self/fd").iterdir()) + 4, before[1])
    )
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(2):
            os.close(held.pop())
        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(put, number) for number in range(8)]:
                future.result(60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in held:
            os.close(file)
    assert len(list(store.list("k"))) == 8
    assert client.num_retries > 0
