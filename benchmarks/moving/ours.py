"""Bare sockets, which are the limit, and cloudckpt's own store."""

from __future__ import annotations

import contextlib
import operator
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import cast

import awscrt.checksums

from benchmarks.moving.candidate import AUTHORIZATION, OBJECT, TIMEOUT_S, Candidate, Kept, Where, check, range_of
from cloudckpt.stores.base import Part, Store, UploadedPart
from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing.servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

_LARGEST_HEAD_BYTES = 16 * 1024
_GATHERED_BYTES = 512 * 1024
_LARGEST_RECORD_BYTES = 32 * 1024
_BIO_BYTES = 256 * 1024


class Bare(Candidate):
    """Sockets of the standard library and the least of HTTP: what all others are measured by."""

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        self._kept: Kept[socket.socket] = Kept(self._connected, operator.methodcaller("close"))
        self._tls = ssl.create_default_context(cafile=str(where.ca_bundle)) if where.ca_bundle else None

    def up(self, number: int, part: memoryview) -> None:
        with self._kept.one() as connection:
            self._ask(connection.line, "PUT", self.key_of(number), f"Content-Length: {part.nbytes}")
            connection.line.sendall(part)
            _, connection.ends = self._head(connection.line)

    def down(self, number: int, part: memoryview) -> None:
        with self._kept.one() as connection:
            self._ask(connection.line, "GET", OBJECT, f"Range: {range_of(number, part)}")
            rest, ends = self._head(connection.line)
            part[: len(rest)] = rest
            self._fill(connection.line, part[len(rest) :])
            connection.ends = ends

    def close(self) -> None:
        self._kept.close()

    def _fill(self, connection: socket.socket, body: memoryview) -> None:
        position = 0
        while position < body.nbytes:
            received = connection.recv_into(body[position:])
            if received == 0:
                raise ConnectionError(f"the answer ended {body.nbytes - position} bytes early")
            position += received

    def _connected(self) -> socket.socket:
        plain = socket.create_connection((self.where.host, self.where.port), timeout=TIMEOUT_S)
        return self._tls.wrap_socket(plain, server_hostname=self.where.host) if self._tls else plain

    def _ask(self, connection: socket.socket, method: str, key: str, field: str) -> None:
        head = (
            f"{method} /{self.where.bucket}/{key} HTTP/1.1\r\nHost: {self.where.host}:{self.where.port}\r\n"
            f"Authorization: {AUTHORIZATION}\r\n{field}\r\n\r\n"
        )
        connection.sendall(head.encode())

    def _head(self, connection: socket.socket) -> tuple[bytes, bool]:
        """Return the bytes of the body that came with the head, and True if the connection ends with it."""
        received = b""
        while b"\r\n\r\n" not in received:
            piece = connection.recv(4096)
            received += piece
            if not piece or len(received) > _LARGEST_HEAD_BYTES:
                raise ConnectionError(f"no answer, but {received[:100]!r}")
        head, _, rest = received.partition(b"\r\n\r\n")
        check(int(head.split(b" ", 2)[1]), rest)
        return rest, b"connection: close" in head.lower()


class Gathering(Bare):
    """Bare sockets again; a thread wakes for half a MiB, instead of for each record of TLS."""

    def _fill(self, connection: socket.socket, body: memoryview) -> None:
        gathered_bytes = body.nbytes - _GATHERED_BYTES - _LARGEST_RECORD_BYTES  # TLS may hold a record back
        if gathered_bytes > 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _GATHERED_BYTES)
            super()._fill(connection, body[:gathered_bytes])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        super()._fill(connection, body[max(gathered_bytes, 0) :])


class MemoryBIO(Bare):
    """TLS apart from its socket: bytes are received and sent 256 KiB at a time. Over HTTP bare sockets again."""

    def _connected(self) -> socket.socket:
        plain = socket.create_connection((self.where.host, self.where.port), timeout=TIMEOUT_S)
        return cast("socket.socket", _TLSOverBuffers(plain, self._tls, self.where.host)) if self._tls else plain


class _TLSOverBuffers:
    """The methods of a socket that the candidates use."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._buffer = memoryview(bytearray(_BIO_BYTES))
        self.close = plain.close
        self._call(self._session.do_handshake)

    def sendall(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        for begin in range(0, view.nbytes, _BIO_BYTES):
            self._call(self._session.write, view[begin : begin + _BIO_BYTES])

    def recv(self, most_bytes: int) -> bytes:
        return cast("bytes", self._call(self._session.read, most_bytes))

    def recv_into(self, view: memoryview) -> int:
        return cast("int", self._call(self._session.read, view.nbytes, view))

    def _call(self, operation: Callable[..., object], *arguments: object) -> object:
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                result = operation(*arguments)
                self._flush()
                return result
            self._flush()
            received = self._plain.recv_into(self._buffer)
            if received == 0:
                raise ConnectionError("the connection ended")
            self._incoming.write(self._buffer[:received])

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._plain.sendall(self._outgoing.read())


class Cloudckpt(Candidate):
    """`S3Store`, with its checksums, as saves and loads use it."""

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        self._store = store_at(where)
        self._uploaded: dict[int, UploadedPart] = {}
        self._upload_id = self._store.create_multipart("uploaded")

    def up(self, number: int, part: memoryview) -> None:
        position = Part(number=number + 1, offset_bytes=number * part.nbytes, size_bytes=part.nbytes)
        crc32c = awscrt.checksums.crc32c(part)
        self._uploaded[number] = self._store.upload_part("uploaded", self._upload_id, position, [part], crc32c=crc32c)

    def down(self, number: int, part: memoryview) -> None:
        self._store.read_into(OBJECT, number * part.nbytes, [part])
        awscrt.checksums.crc32c(part)

    def sent(self, store: Store, num_parts: int, part_bytes: int) -> Iterator[bytes]:
        parts = [self._uploaded[number] for number in range(num_parts)]
        self._store.complete_multipart("uploaded", self._upload_id, parts)
        self._upload_id = self._store.create_multipart("uploaded")
        content = memoryview(bytearray(part_bytes))
        for number in range(num_parts):
            store.read_into("uploaded", number * part_bytes, [content])
            yield bytes(content)

    def close(self) -> None:
        self._store.abort_multipart("uploaded", self._upload_id)


def store_at(where: Where) -> S3Store:
    """A store of cloudckpt's there."""
    options = {
        "endpoint_url": where.endpoint_url,
        "region": REGION,
        "access_key_id": ACCESS_KEY_ID,
        "secret_access_key": SECRET_ACCESS_KEY,
    }
    if where.ca_bundle is not None:
        options["ca_bundle"] = str(where.ca_bundle)
    return S3Store(where.bucket, "", storage_options=options, timeout_s=TIMEOUT_S, connections=where.connections)
