"""Servers to talk to: moto's for what a store does, and scripted ones for what goes wrong on the way."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from botocore.loaders import create_loader

from cloudckpt.stores.s3 import S3Store
from cloudckpt.stores.s3 import client as clients
from cloudckpt.testing.servers import S3Server, clean_environment, moto_server

_SOCKET_TIMEOUT_S = 30.0


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def _one_loader() -> Iterator[None]:
    """boto3 parses S3's model for each client anew, which takes seven times as long as all the rest of it."""
    loader = create_loader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.session.create_loader", lambda _data_path=None: loader)
        yield


@pytest.fixture(autouse=True)
def _no_ambient_aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The developer's own AWS configuration must not decide what a test sees."""
    clean = clean_environment()
    for name in set(os.environ) - set(clean):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.setenv(name, clean[name])
    yield
    for client in clients._clients.values():
        client.boto3_client.close()
    clients._clients.clear()


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    name = f"test-{uuid.uuid4().hex}"
    s3_server.create_bucket(name)
    return name


@pytest.fixture
def store(s3_server: S3Server, bucket: str) -> S3Store:
    options = s3_server.storage_options
    return S3Store(bucket, "runs/one", storage_options=options, timeout_s=30, connections=4)


@dataclass
class Recorded:
    """One request, as it came over the wire."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


Answer = Callable[[socket.socket, Recorded], None]


@dataclass
class ScriptedServer:
    """Answers the n-th request by the n-th of `answers`, and all further ones by the last."""

    answers: tuple[Answer, ...]
    reads_bodies: bool = True
    keeps_bodies: bool = True
    requests: list[Recorded] = field(default_factory=list)
    num_connections: int = 0
    closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def store(self, *, timeout_s: float = 20.0, prefix: str = "", **storage_options: object) -> S3Store:
        credentials = {"access_key_id": "AKID", "secret_access_key": "SECRETKEY", "region": "eu-west-1"}
        if storage_options.get("anonymous"):
            credentials = {}
        options = {"endpoint_url": self.endpoint_url, **credentials, **storage_options}
        return S3Store("bucket", prefix, storage_options=options, timeout_s=timeout_s, connections=2)

    def close(self) -> None:
        self.closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_SOCKET_TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                self.num_connections += 1
                self._open.append(connection)
                self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_SOCKET_TIMEOUT_S)
        with connection, connection.makefile("rb") as reader, contextlib.suppress(OSError):
            while not self.closing.is_set() and (request := self._read(reader)) is not None:
                with self._lock:
                    self.requests.append(request)
                    answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
                answer(connection, request)

    def _read(self, reader: BufferedReader) -> Recorded | None:
        first = reader.readline().decode("latin-1").split()
        if len(first) != 3:
            return None
        headers = {}
        while line := reader.readline().decode("latin-1").strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        size_bytes = int(headers.get("content-length", 0)) if self.reads_bodies else 0
        body, buffer = bytearray(), bytearray(min(size_bytes, 1 << 20))
        while size_bytes:
            count = reader.readinto(memoryview(buffer)[: min(size_bytes, len(buffer))])
            if not count:
                return None
            size_bytes -= count
            body += buffer[:count] if self.keeps_bodies else b""
        method, target, _ = first
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return Recorded(method, unquote(parts.path), query, headers, bytes(body))


def reply(
    status: int = 200, body: bytes | str = b"", headers: dict[str, str] | None = None, *, length: int | None = None
) -> Answer:
    """An answer; with `length`, one that promises another length than it has, and then ends the connection."""
    content = body.encode() if isinstance(body, str) else body

    def answer(connection: socket.socket, request: Recorded) -> None:
        fields = {"Content-Length": str(len(content) if length is None else length), **(headers or {})}
        head = f"HTTP/1.1 {status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        connection.sendall(head.encode() + b"\r\n" + (b"" if request.method == "HEAD" else content))
        if length is not None:
            connection.shutdown(socket.SHUT_RDWR)

    return answer


def error_reply(status: int, code: str, message: str = "Because.") -> Answer:
    return reply(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>")


def hang_up(connection: socket.socket, _: Recorded) -> None:
    """End the connection without an answer."""
    connection.shutdown(socket.SHUT_RDWR)


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


@dataclass
class Scripting:
    """What tests of failures are written in."""

    servers: list[ScriptedServer] = field(default_factory=list)
    reply = staticmethod(reply)
    error = staticmethod(error_reply)
    hang_up = staticmethod(hang_up)
    any_s3 = staticmethod(any_s3)

    def serve(self, *answers: Answer, reads_bodies: bool = True, keeps_bodies: bool = True) -> ScriptedServer:
        server = ScriptedServer(answers, reads_bodies=reads_bodies, keeps_bodies=keeps_bodies)
        self.servers.append(server)
        return server


@pytest.fixture
def scripted() -> Iterator[Scripting]:
    scripting = Scripting()
    yield scripting
    for server in scripting.servers:
        server.close()
