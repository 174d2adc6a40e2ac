"""A server whose answers a test gives, request by request, for failures of the network."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from awscrt.checksums import crc32c
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cloudckpt.errors import StoreError
from cloudckpt.stores.base import Part, UploadedPart

SOCKET_TIMEOUT_S = 30.0
_BODY, _CRC = [memoryview(b"x")], crc32c(b"x")
_PART = Part(number=1, offset_bytes=0, size_bytes=1)
_DONE = UploadedPart(part=_PART, token="0123abcd-7", crc32c=_CRC)  # noqa: S106  # an ETag, or a try and a generation


def _upload_id() -> str:
    """An id that both services could have given, and that no call has aborted."""
    return uuid.uuid4().hex[:16]


CALLS: dict[str, Callable[[Any], object]] = {
    "put": lambda store: store.put("k", _BODY, crc32c=_CRC),
    "create_multipart": lambda store: store.create_multipart("k"),
    "upload_part": lambda store: store.upload_part("k", _upload_id(), _PART, _BODY, crc32c=_CRC),
    "complete_multipart": lambda store: store.complete_multipart("k", _upload_id(), [_DONE]),
    "abort_multipart": lambda store: store.abort_multipart("k", _upload_id()),
    "read_into": lambda store: store.read_into("k", 0, [memoryview(bytearray(4))]),
    "read": lambda store: store.read("k", max_bytes=10),
    "list": lambda store: list(store.list()),
    "list_directories": lambda store: list(store.list_directories()),
    "list_uploads": lambda store: list(store.list_uploads()),
    "delete": lambda store: store.delete(["k"]),
    "head": lambda store: store.head("k"),
    "copy_from": lambda store: store.copy_from(store.url("k"), "k2"),
}
"""One call of each operation, on any store over HTTP."""


@dataclass
class Recorded:
    """One request, as it came over the wire."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    head: bytes
    """All before the body, as it was sent."""
    body: bytes


Answer = Callable[[socket.socket, Recorded], None]


@dataclass
class ScriptedServer:
    """Answers the n-th request by the n-th of `answers`, and all further ones by the last."""

    answers: tuple[Answer, ...]
    reads_bodies: bool = True
    keeps_bodies: bool = True
    before_each_mib: Callable[[], object] = lambda: None
    """Called before a MiB of a body is read."""
    certificate: Path | None = None
    """File with a private key and a certificate; None for connections without TLS."""
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
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"

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
            thread.join(SOCKET_TIMEOUT_S)

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
        connection.settimeout(SOCKET_TIMEOUT_S)
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            try:
                connection = context.wrap_socket(connection, server_side=True)
            except OSError:
                return  # the client does not trust the certificate
            with self._lock:
                self._open.append(connection)
        with connection, connection.makefile("rb") as reader, contextlib.suppress(OSError):
            while not self.closing.is_set() and (request := self._read(reader)) is not None:
                with self._lock:
                    self.requests.append(request)
                    answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
                answer(connection, request)

    def _read(self, reader: BufferedReader) -> Recorded | None:
        lines = list(takewhile(bytes.strip, reader))
        first = lines[0].decode("latin-1").split() if lines else []
        if len(first) != 3:
            return None
        headers = {}
        for line in lines[1:]:
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        size_bytes = int(headers.get("content-length", 0)) if self.reads_bodies else 0
        body, buffer = bytearray(), bytearray(min(size_bytes, 1 << 20))
        while size_bytes:
            self.before_each_mib()
            count = reader.readinto(memoryview(buffer)[: min(size_bytes, len(buffer))])
            if not count:
                return None
            size_bytes -= count
            body += buffer[:count] if self.keeps_bodies else b""
        method, target, _ = first
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return Recorded(method, unquote(parts.path), query, headers, b"".join([*lines, b"\r\n"]), bytes(body))


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


def hang_up(connection: socket.socket, _: Recorded) -> None:
    """End the connection without an answer."""
    connection.shutdown(socket.SHUT_RDWR)


class Scripting:
    """Tests of failures are written in this; each store's directory adds its server and its answers."""

    server_type: ClassVar[type[Any]]
    reply = staticmethod(reply)
    hang_up = staticmethod(hang_up)

    def __init__(self) -> None:
        self._servers: list[ScriptedServer] = []

    def serve(self, *answers: Answer, **settings: Any) -> Any:
        server = self.server_type(answers, **settings)
        self._servers.append(server)
        return server

    def close(self) -> None:
        for server in self._servers:
            server.close()


def refuse(call: Callable[[], object], expected: type[StoreError]) -> StoreError:
    """Make `call`, which must raise exactly `expected`, and return the error."""
    with pytest.raises(expected) as caught:
        call()
    assert type(caught.value) is expected
    return caught.value


def watch_sockets(monkeypatch: pytest.MonkeyPatch, noted: Callable[[socket.socket, int, Any], object]) -> None:
    """Call `noted` after each option that is set on a socket: they tell how bytes are sent and received."""
    real = socket.socket.setsockopt

    def setsockopt(connection: socket.socket, level: int, option: int, value: Any) -> None:
        real(connection, level, option, value)
        if level == socket.SOL_SOCKET:
            noted(connection, option, value)

    monkeypatch.setattr(socket.socket, "setsockopt", setsockopt)


def make_certificate(directory: Path) -> Path:
    """Write a private key and a self-signed certificate for 127.0.0.1 into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server of a test")])
    now = dt.datetime.now(dt.timezone.utc)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = directory / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *form) + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path
