"""Directory buckets (S3 Express One Zone): what boto3 sends to them, and the contract under their rules.

The rules are those of Amazon's documentation, in front of moto; none of it is the real service.
"""

from __future__ import annotations

import io
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qs

import pytest
import torch
from botocore.awsrequest import AWSResponse

import cloudckpt
from cloudckpt import errors
from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3 import client as clients
from cloudckpt.testing.contract import StoreContract
from cloudckpt.testing.contract_base import keys, put, upload

BUCKET = "base--use1-az4--x-s3"
HOST = f"https://{BUCKET}.s3express-use1-az4.us-east-1.amazonaws.com"
SESSION = (
    "<CreateSessionResult><Credentials><AccessKeyId>SESSION</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
    "<SessionToken>TOKEN</SessionToken><Expiration>2100-01-01T00:00:00Z</Expiration></Credentials>"
    "</CreateSessionResult>"
)
LISTING = "<ListBucketResult><IsTruncated>{}</IsTruncated>{}</ListBucketResult>"
STARTED = "<Initiated>2026-01-01T00:00:00Z</Initiated>"
UPLOADS = "<ListMultipartUploadsResult><IsTruncated>{}</IsTruncated>{}</ListMultipartUploadsResult>"


class _Raw(io.BytesIO):
    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()


class Wire:
    """Stands where the network begins: takes each request that boto3 has signed, and answers it."""

    def __init__(self, answer: Callable[[Any], str]) -> None:
        self.requests: list[Any] = []
        self._answer = answer

    def __call__(self, request: Any, **_: Any) -> AWSResponse:
        self.requests.append(request)
        body = (SESSION if request.url.endswith("?session") else self._answer(request)).encode()
        # With what HeadObject has to give about the source of a copy.
        headers = {"Content-Length": str(len(body)), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": "e"}
        return AWSResponse(request.url, 200, headers, _Raw(body))

    def attached(self, bucket: str = BUCKET, **options: Any) -> S3Store:
        credentials = {"access_key_id": "OWN", "secret_access_key": "hush", "region": "us-east-1"}
        store = S3Store(bucket, "run/one", storage_options={**credentials, **options}, timeout_s=20, connections=2)
        session = store._session
        client = clients.client_cache.client_for(session.client_key, session._environment)
        client.boto3_client.meta.events.register("before-send.s3", self)
        return store


def signed_by(request: Any) -> str:
    match = re.search(rb"Credential=(\w+)/\d+/([\w-]+)/(\w+)/", request.headers["Authorization"])
    assert match
    return b" ".join(match.groups()).decode()


def test_requests_go_to_the_zone_with_one_session() -> None:
    """Signed as for any other bucket, every request would be refused; a session for each would double the time."""
    listing = LISTING.format("false", "")
    wire = Wire(lambda request: listing if "list-type" in request.url else "<DeleteResult/>")
    store = wire.attached()
    put(store, "a", b"body", if_absent=True)
    assert keys(store) == []
    store.delete([f"b/{number}" for number in range(20)])
    session, created, listed, deleted = wire.requests
    assert session.url == f"{HOST}/?session"
    assert signed_by(session) == "OWN us-east-1 s3express"
    assert created.url == f"{HOST}/run/one/a"
    assert created.headers["If-None-Match"] == b"*"
    assert created.headers["x-amz-checksum-crc32c"]
    assert listed.url.startswith(f"{HOST}/?list-type=2&")
    for request in (created, listed, deleted):
        assert signed_by(request) == "SESSION us-east-1 s3express"
        assert request.headers["x-amz-s3session-token"] == b"TOKEN"
    # DeleteObjects needs a checksum or Content-MD5 here.
    assert any(name.lower().startswith("x-amz-checksum-") for name in deleted.headers)
    assert store.probe() == store.capabilities
    assert len(wire.requests) == 4


def test_other_buckets_have_no_sessions() -> None:
    """Each process would make a request more, and be denied."""
    wire = Wire(lambda _request: "")
    put(wire.attached("bucket"), "a", b"body")
    (request,) = wire.requests
    assert request.url == "https://bucket.s3.amazonaws.com/run/one/a"
    assert signed_by(request) == "OWN us-east-1 s3"


def test_finding_manifests_lists_no_data() -> None:
    """Only whole directories can be listed: each look for a manifest would page through all data objects."""

    def answer(request: Any) -> str:
        query = {name: values[0] for name, values in parse_qs(request.url.partition("?")[2]).items()}
        item = "<Contents><Key>{}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        if query["prefix"] == "run/one/":
            found = [item.format(f"run/one/{name}") for name in ("notes", "manifest.json")]
            found += [
                f"<CommonPrefixes><Prefix>run/one/{name}/</Prefix></CommonPrefixes>" for name in ("data", "rank-0")
            ]
            return LISTING.format("false", "".join(found))
        return LISTING.format("false", item.format(query["prefix"] + "manifest.json"))

    wire = Wire(answer)
    store = wire.attached()
    assert keys(store, "manifest") == ["manifest.json"]
    assert len(wire.requests) == 2  # one of them for the session
    assert keys(store, "rank-") == ["rank-0/manifest.json"]
    assert len(wire.requests) == 4
    assert all("prefix=run%2Fone%2F" in request.url for request in wire.requests[1:])


def test_listings_of_uploads_go_on_by_the_key_marker_alone() -> None:
    """gc would stop after the first page: directory buckets give no NextUploadIdMarker, and take none."""
    upload = (
        "<Upload><Key>run/one/{0}</Key><UploadId>{0}</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated></Upload>"
    )
    pages = iter(
        [
            UPLOADS.format("true", "<NextKeyMarker>opaque</NextKeyMarker>" + upload.format("data-a")),
            UPLOADS.format("false", upload.format("data-b") + upload.format("other")),
        ]
    )
    wire = Wire(lambda _request: next(pages))
    assert [found.key for found in wire.attached().list_uploads("data")] == ["data-a", "data-b"]
    _, first, second = (parse_qs(request.url.partition("?")[2]) for request in wire.requests)
    assert first["prefix"] == second["prefix"] == ["run/one/"]
    assert second["key-marker"] == ["opaque"]
    assert "upload-id-marker" not in second


def test_a_denial_names_the_right_to_a_session() -> None:
    """Whoever grants s3:PutObject on a directory bucket grants nothing."""
    body = _Raw(b"<Error><Code>AccessDenied</Code><Message>No.</Message></Error>")
    wire = Wire(lambda _request: "")
    store = wire.attached()
    session = store._session
    events = clients.client_cache.client_for(session.client_key, session._environment).boto3_client.meta.events
    events.unregister("before-send.s3", wire)
    events.register("before-send.s3", lambda request, **_: AWSResponse(request.url, 403, {}, body))
    with pytest.raises(errors.AccessDeniedError, match="s3express:CreateSession"):
        put(store, "a", b"body")


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"tags": {"a": "b"}}, "tags"),
        ({"storage_class": "STANDARD_IA"}, "storage_class"),
        ({"sse": "aws:kms:dsse"}, "sse='aws:kms:dsse'"),
        ({"sse_customer_key": b"k" * 32}, "sse_customer_key"),
        ({"request_payer": True}, "request_payer"),
        ({"anonymous": True}, "anonymous"),
        ({"path_style": True}, "path_style"),
        ({"endpoint_url": "https://s3.us-east-1.amazonaws.com"}, "endpoint_url"),
    ],
)
@pytest.mark.parametrize("bucket", [BUCKET, "point--use1-az4--xa-s3"])
def test_options_that_cannot_work_are_refused_at_once(bucket: str, option: dict[str, Any], named: str) -> None:
    """The service would refuse each request, after the model has been prepared for saving, and in its own words."""
    with pytest.raises(errors.InvalidOptionError, match=rf"directory bucket .*: {re.escape(named)}"):
        S3Store(bucket, "run", storage_options=option, timeout_s=20, connections=1)
    S3Store("bucket", "run", storage_options=option, timeout_s=20, connections=1)


def test_all_problems_are_named_together() -> None:
    """Users would mend one option per attempt."""
    options = {"tags": {"a": "b"}, "storage_class": "STANDARD"}
    with pytest.raises(errors.InvalidOptionError, match=r"storage_class: .*; tags: "):
        S3Store(BUCKET, "run", storage_options=options, timeout_s=20, connections=1)


@pytest.mark.parametrize(
    "option",
    [{"storage_class": "EXPRESS_ONEZONE"}, {"storage_class": "ONEZONE_IA"}, {"sse": "AES256"}, {"kms_key_id": "k"}],
)
def test_options_that_work_are_taken(option: dict[str, Any]) -> None:
    """A bucket with a key of its own could not be used."""
    S3Store(BUCKET, "run", storage_options=option, timeout_s=20, connections=1)


def _refusal(environ: dict[str, Any]) -> str | None:
    """Which of the documented rules the request breaks."""
    query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    listing = "list-type" in query or ("uploads" in query and environ["REQUEST_METHOD"] == "GET")
    prefix = query.get("prefix", [""])[0]
    if listing and prefix and not prefix.endswith("/"):
        return "the prefix does not end in /"
    if query.get("delimiter", ["/"]) != ["/"]:
        return "the delimiter is not /"
    if {"start-after", "upload-id-marker"} & set(query):
        return "a parameter is not supported"
    if "HTTP_X_AMZ_TAGGING" in environ or "HTTP_X_AMZ_REQUEST_PAYER" in environ:
        return "a header is not supported"
    session = "HTTP_X_AMZ_S3SESSION_TOKEN" in environ
    if session == ("HTTP_X_AMZ_COPY_SOURCE" in environ):
        return "wants a session, or must not have one"
    return None


def _directory_bucket(moto: Any, start_response: Any, environ: dict[str, Any]) -> Any:
    """moto as a directory bucket: its rules, its sessions, and no order in its listings."""
    creates_bucket = environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].count("/") == 1
    if "--x-s3" not in environ["PATH_INFO"] or creates_bucket:
        return moto(environ, start_response)
    if environ["QUERY_STRING"] == "session":
        start_response("200 OK", [("Content-Type", "application/xml")])
        return [SESSION.encode()]
    refusal = _refusal(environ)
    if refusal is not None:
        start_response("400 Bad Request", [("Content-Type", "application/xml")])
        return [f"<Error><Code>InvalidRequest</Code><Message>{refusal}</Message></Error>".encode()]
    if environ["REQUEST_METHOD"] != "GET" or not environ["QUERY_STRING"].startswith(("list-type=2", "uploads")):
        return moto(environ, start_response)
    # As large as before, because the headers are on their way.
    body = b"".join(moto(environ, start_response)).decode()
    now = f"<Initiated>{datetime.now(tz=timezone.utc):%Y-%m-%dT%H:%M:%S}.000Z<"  # moto has it that all began in 2010
    body = re.sub(r"<Initiated>[^<]+<", now, body)
    items = re.findall("<Contents>.*?</Contents>", body, re.DOTALL)
    return [re.sub("<Contents>.*</Contents>", lambda _: "".join(reversed(items)), body, flags=re.DOTALL).encode()]


def test_checkpoints_are_saved_found_and_replaced(gateway_of: Any) -> None:
    """What lies between the calls, such as looking for manifests at the bucket's root, would break a rule."""
    gateway = gateway_of(_directory_bucket)
    bucket = f"c{uuid.uuid4().hex[:20]}--use1-az4--x-s3"
    gateway.client.create_bucket(Bucket=bucket)
    options = cloudckpt.Options(storage_options=gateway.storage_options)
    loaded = {"weight": torch.zeros(4)}
    for uri in (f"s3://{bucket}/run/step-1", f"s3://{bucket}"):
        cloudckpt.save({"weight": torch.ones(4)}, uri, options=options)
        cloudckpt.save({"weight": torch.full((4,), 2.0)}, uri, overwrite=True, options=options)
        with pytest.raises(cloudckpt.CheckpointExistsError):
            cloudckpt.save({"weight": torch.ones(4)}, uri, options=options)
        cloudckpt.load(loaded, uri, options=options)
        assert torch.equal(loaded["weight"], torch.full((4,), 2.0))
    assert [found.name for found in cloudckpt.list_checkpoints(f"s3://{bucket}/run", options=options)] == ["step-1"]


class TestDirectoryBucketOnMoto(StoreContract):
    """The contract, where every request that the documentation forbids is refused."""

    shared_between_processes = False  # as on moto, of which this is one
    num_paging_keys = 40
    num_racing_rounds = 0  # moto holds no lock between the check and the write

    @pytest.fixture
    def store(self, gateway_of: Any) -> S3Store:
        gateway = gateway_of(_directory_bucket)
        bucket = f"c{uuid.uuid4().hex[:20]}--use1-az4--x-s3"
        gateway.client.create_bucket(Bucket=bucket)
        return S3Store(bucket, "a root/x", storage_options=gateway.storage_options, timeout_s=60, connections=8)

    def test_the_rules_are_enforced(self, store: S3Store, gateway_of: Any) -> None:
        """The clauses above would hold of any store, and show nothing about this one."""
        upload(store, "data/x", [b"body"])
        with pytest.raises(errors.StoreError, match="does not end in /"):
            store._session.call("list", "ListObjectsV2", None, Prefix="a root/x/dat")
        with pytest.raises(errors.StoreError, match="not supported"):
            store._session.call("put", "PutObject", "k", Tagging="a=b")
        assert keys(store, "dat") == ["data/x"]
