"""Directory buckets (S3 Express One Zone): what boto3 sends to them, and the contract under their rules.

The rules are those of Amazon's documentation, in front of moto; none of it is the real service.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

from botocore.awsrequest import AWSResponse

from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing.contract_base import keys, put

BUCKET = "base--use1-az4--x-s3"
HOST = f"https://{BUCKET}.s3express-use1-az4.us-east-1.amazonaws.com"
SESSION = (
    "<CreateSessionResult><Credentials><AccessKeyId>SESSION</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
    "<SessionToken>TOKEN</SessionToken><Expiration>2100-01-01T00:00:00Z</Expiration></Credentials>"
    "</CreateSessionResult>"
)
LISTING = "<ListBucketResult><IsTruncated>{}</IsTruncated>{}</ListBucketResult>"


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
        session = store.session
        client = session.client()
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
