"""Servers to talk to: moto's for what a store does, and scripted ones for what goes wrong on the way."""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Iterator

import pytest
from botocore.loaders import create_loader
from tests.kit.scripted import Answer, Recorded, ScriptedServer, Scripting, reply

from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing.servers import S3Server


@pytest.fixture(scope="session", autouse=True)
def _one_loader() -> Iterator[None]:
    """boto3 parses S3's model for each client anew, which takes seven times as long as all the rest of it."""
    loader = create_loader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.session.create_loader", lambda _data_path=None: loader)
        yield


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    name = f"test-{uuid.uuid4().hex}"
    s3_server.create_bucket(name)
    return name


class S3ScriptedServer(ScriptedServer):
    """A scripted server, and stores that lie there."""

    def store(self, *, timeout_s: float = 20.0, prefix: str = "", **storage_options: object) -> S3Store:
        credentials = {"access_key_id": "AKID", "secret_access_key": "SECRETKEY", "region": "eu-west-1"}
        if storage_options.get("anonymous"):
            credentials = {}
        options = {"endpoint_url": self.endpoint_url, **credentials, **storage_options}
        return S3Store("bucket", prefix, storage_options=options, timeout_s=timeout_s, connections=2)


def error_reply(status: int, code: str, message: str = "Because.") -> Answer:
    return reply(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>")


_CREATED = "<InitiateMultipartUploadResult><UploadId>UP</UploadId></InitiateMultipartUploadResult>"
_COMPLETED = "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"
_COPIED = "<{0}><ETag>e</ETag><LastModified>2026-01-01T00:00:00Z</LastModified></{0}>"
_MODIFIED = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": '"e"'}


def any_s3(size_bytes: int = 10) -> Answer:
    """A store that takes everything, and in which every object has `size_bytes` zeros."""

    plain = {
        ("POST", "uploads"): reply(200, _CREATED),
        ("POST", "uploadId"): reply(200, _COMPLETED),
        ("POST", "delete"): reply(200, "<DeleteResult/>"),
        ("GET", "list-type"): reply(200, "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"),
        ("GET", "uploads"): reply(
            200, "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
        ),
        ("GET", "uploadId"): reply(200, "<ListPartsResult><IsTruncated>false</IsTruncated></ListPartsResult>"),
        ("HEAD", ""): reply(200, b"", {**_MODIFIED, "Content-Length": str(size_bytes)}),
        ("DELETE", ""): reply(204),
    }

    def answer(connection: socket.socket, request: Recorded) -> None:
        known = (plain.get((request.method, name)) for name in [*request.query, ""])
        chosen = next((found for found in known if found is not None), None)
        if chosen is None:
            chosen = _taken(request) if request.method == "PUT" else _range_of(request, size_bytes)
        chosen(connection, request)

    return answer


def _taken(request: Recorded) -> Answer:
    if "x-amz-copy-source" not in request.headers:
        return reply(200, b"", {"ETag": '"e"'})
    return reply(200, _COPIED.format("CopyPartResult" if "partNumber" in request.query else "CopyObjectResult"))


def _range_of(request: Recorded, size_bytes: int) -> Answer:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
    if match is None:
        return reply(200, bytes(size_bytes), _MODIFIED)
    begin, end = int(match[1]), min(int(match[2]) + 1, size_bytes)
    if begin >= size_bytes:
        return error_reply(416, "InvalidRange")
    return reply(206, bytes(end - begin), {**_MODIFIED, "Content-Range": f"bytes {begin}-{end - 1}/{size_bytes}"})


class S3Scripting(Scripting):
    """Answers of S3, and servers that give them."""

    server_type = S3ScriptedServer
    error = staticmethod(error_reply)
    any_store = any_s3 = staticmethod(any_s3)


@pytest.fixture
def scripted() -> Iterator[S3Scripting]:
    scripting = S3Scripting()
    yield scripting
    scripting.close()
