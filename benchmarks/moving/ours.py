"""Bare sockets, which are the limit, and cloudckpt's own store."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import awscrt.checksums

from benchmarks.moving.candidate import AUTHORIZATION, OBJECT, TIMEOUT_S, Candidate, Kept, Where, check, range_of
from cloudckpt.stores.base import Part, Store, UploadedPart
from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing.servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

_LARGEST_HEAD_BYTES = 16 * 1024


class Bare(Candidate):
    """Sockets of the standard library and the least of HTTP: what all others are measured by."""

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        self._kept: Kept[socket.socket] = Kept(self._connected, socket.socket.close)
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
            position = len(rest)
            while position < part.nbytes:
                received = connection.line.recv_into(part[position:])
                if received == 0:
                    raise ConnectionError(f"the answer ended after {position} bytes")
                position += received
            connection.ends = ends

    def close(self) -> None:
        self._kept.close()

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
        """What came of the answer's body along with its head; and whether the connection ends with it."""
        received = b""
        while b"\r\n\r\n" not in received:
            piece = connection.recv(4096)
            received += piece
            if not piece or len(received) > _LARGEST_HEAD_BYTES:
                raise ConnectionError(f"no answer, but {received[:100]!r}")
        head, _, rest = received.partition(b"\r\n\r\n")
        check(int(head.split(b" ", 2)[1]), rest)
        return rest, b"connection: close" in head.lower()


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
    return S3Store(where.bucket, "", storage_options=options, timeout_s=TIMEOUT_S, connections=8)
