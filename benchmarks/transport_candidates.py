"""The ways of moving bytes that `benchmarks.transport` compares: each the least that does it, but for cloudckpt's."""

from __future__ import annotations

import io
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import awscrt.checksums

from cloudckpt.stores.base import Part
from cloudckpt.stores.s3 import S3Store

MIB = 1024 * 1024
_WAIT_S = 60.0


class Candidate:
    """One way to move parts of one object, `bench/object`, to and from an endpoint."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def up(self, number: int, part: memoryview) -> None:
        """Put `part` at a key of its own."""
        raise NotImplementedError

    def down(self, number: int, part: memoryview) -> None:
        """Fill `part` from the object."""
        raise NotImplementedError


class Wire:
    """Where the server is, and how it is spoken to."""

    def __init__(self, *, port: int, certificate: Path | None) -> None:
        self.port = port
        self.certificate = certificate
        self.url = f"{'https' if certificate else 'http'}://localhost:{port}"

    def connect(self) -> socket.socket:
        plain = socket.create_connection(("localhost", self.port), timeout=_WAIT_S)
        if self.certificate is None:
            return plain
        context = ssl.create_default_context(cafile=str(self.certificate))
        return context.wrap_socket(plain, server_hostname="localhost")


class Bare(Candidate):
    """Sockets of the standard library and the least of HTTP: what all others are measured by."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self._local = threading.local()

    def up(self, number: int, part: memoryview) -> None:
        connection = self._connection()
        head = f"PUT /bench/part-{number} HTTP/1.1\r\nHost: s3\r\nContent-Length: {part.nbytes}\r\n\r\n"
        connection.sendall(head.encode())
        connection.sendall(part)
        self._head(connection)

    def down(self, number: int, part: memoryview) -> None:
        connection = self._connection()
        start = number * part.nbytes
        head = f"GET /bench/object HTTP/1.1\r\nHost: s3\r\nRange: bytes={start}-{start + part.nbytes - 1}\r\n\r\n"
        connection.sendall(head.encode())
        rest = self._head(connection)
        part[: len(rest)] = rest
        position = len(rest)
        while position < part.nbytes:
            position += connection.recv_into(part[position:], part.nbytes - position)

    def _connection(self) -> socket.socket:
        if not hasattr(self._local, "connection"):
            self._local.connection = self.wire.connect()
        return self._local.connection

    def _head(self, connection: socket.socket) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        return head.partition(b"\r\n\r\n")[2]


class Cloudckpt(Candidate):
    """`S3Store`, with its checksums, as saves and loads use it."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        options = {"endpoint_url": wire.url, "region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}
        if wire.certificate is not None:
            options["ca_bundle"] = str(wire.certificate)
        self._store = S3Store("bench", "", storage_options=options, timeout_s=_WAIT_S, connections=8)
        self._upload_id = self._store.create_multipart("uploaded")

    def up(self, number: int, part: memoryview) -> None:
        where = Part(number=number + 1, offset_bytes=number * part.nbytes, size_bytes=part.nbytes)
        crc32c = awscrt.checksums.crc32c(part)
        self._store.upload_part("uploaded", self._upload_id, where, [part], crc32c=crc32c)

    def down(self, number: int, part: memoryview) -> None:
        self._store.read_into("object", number * part.nbytes, [part])
        awscrt.checksums.crc32c(part)


class Obstore(Candidate):
    """obstore, with its checks of certificates off: it takes no bundle. Sends no CRC32C."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        import obstore.store  # noqa: PLC0415 (may be absent)

        self._obstore = obstore
        self._store = obstore.store.S3Store(
            "bench",
            endpoint=wire.url,
            access_key_id="a",
            secret_access_key="b",  # noqa: S106 (any will do)
            region="us-east-1",
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={"http1_only": True, "allow_http": True, "allow_invalid_certificates": True},
        )

    def up(self, number: int, part: memoryview) -> None:
        self._obstore.put(self._store, f"part-{number}", part.toreadonly(), use_multipart=False)

    def down(self, number: int, part: memoryview) -> None:
        start = number * part.nbytes
        answer = self._obstore.get(self._store, "object", options={"range": (start, start + part.nbytes)})
        position = 0
        for piece in answer.stream(min_chunk_size=MIB):
            part[position : position + len(piece)] = memoryview(piece)
            position += len(piece)


class Pyreqwest(Candidate):
    """reqwest under pyreqwest, with its checks of certificates off. The least of HTTP, no checksums."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        from pyreqwest.client import SyncClientBuilder  # noqa: PLC0415 (may be absent)

        self._client = SyncClientBuilder().danger_accept_invalid_certs(enable=True).http1_only().build()

    def up(self, number: int, part: memoryview) -> None:
        self._client.put(f"{self.wire.url}/bench/part-{number}").body_bytes(part).build().send().text()

    def down(self, number: int, part: memoryview) -> None:
        start = number * part.nbytes
        request = self._client.get(f"{self.wire.url}/bench/object")
        request = request.header("Range", f"bytes={start}-{start + part.nbytes - 1}")
        with request.build_streamed() as answer:
            position = 0
            while position < part.nbytes:
                piece = answer.body_reader.read(MIB)
                part[position : position + len(piece)] = memoryview(piece)
                position += len(piece)


class Pycurl(Candidate):
    """libcurl, which hands bodies over in callbacks of 16 KiB, with its checks of certificates off. No checksums."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        import pycurl  # noqa: PLC0415 (may be absent)

        self._pycurl = pycurl
        self._local = threading.local()

    def up(self, number: int, part: memoryview) -> None:
        curl = self._handle(f"part-{number}")
        start = 0

        def next_piece(most_bytes: int) -> bytes:
            nonlocal start
            piece = part[start : start + most_bytes]
            start += piece.nbytes
            return bytes(piece)

        curl.setopt(self._pycurl.UPLOAD, 1)
        curl.setopt(self._pycurl.INFILESIZE_LARGE, part.nbytes)
        curl.setopt(280, MIB)  # CURLOPT_UPLOAD_BUFFERSIZE, which pycurl does not name
        curl.setopt(self._pycurl.HTTPHEADER, ["Expect:"])
        curl.setopt(self._pycurl.READFUNCTION, next_piece)
        curl.setopt(self._pycurl.WRITEFUNCTION, len)
        curl.perform()

    def down(self, number: int, part: memoryview) -> None:
        curl = self._handle("object")
        start = number * part.nbytes
        position = 0

        def take(piece: bytes) -> None:
            nonlocal position
            part[position : position + len(piece)] = piece
            position += len(piece)

        curl.setopt(self._pycurl.RANGE, f"{start}-{start + part.nbytes - 1}")
        curl.setopt(self._pycurl.BUFFERSIZE, MIB // 2)
        curl.setopt(self._pycurl.WRITEFUNCTION, take)
        curl.perform()

    def _handle(self, key: str) -> Any:
        if not hasattr(self._local, "curl"):
            self._local.curl = self._pycurl.Curl()
        curl = self._local.curl
        curl.reset()  # of its options; its connection stays
        curl.setopt(self._pycurl.URL, f"{self.wire.url}/bench/{key}")
        curl.setopt(self._pycurl.HTTP_VERSION, self._pycurl.CURL_HTTP_VERSION_1_1)
        curl.setopt(self._pycurl.SSL_VERIFYPEER, 0)
        curl.setopt(self._pycurl.SSL_VERIFYHOST, 0)
        return curl


class Awscrt(Candidate):
    """awscrt's HTTP client, which a Python body feeds and a callback empties. No checksums."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        import awscrt.http  # noqa: PLC0415 (slow to import)
        import awscrt.io  # noqa: PLC0415

        self._http = awscrt.http
        loops = awscrt.io.EventLoopGroup(2)
        self._bootstrap = awscrt.io.ClientBootstrap(loops, awscrt.io.DefaultHostResolver(loops))
        options = awscrt.io.TlsContextOptions()
        options.verify_peer = False
        self._tls = awscrt.io.ClientTlsContext(options)
        self._local = threading.local()

    def up(self, number: int, part: memoryview) -> None:
        self._ask("PUT", f"/bench/part-{number}", ("content-length", str(part.nbytes)), body=io.BytesIO(part))

    def down(self, number: int, part: memoryview) -> None:
        start = number * part.nbytes
        position = 0

        def take(chunk: bytes, **_: Any) -> None:
            nonlocal position
            part[position : position + len(chunk)] = chunk
            position += len(chunk)

        self._ask("GET", "/bench/object", ("range", f"bytes={start}-{start + part.nbytes - 1}"), on_body=take)

    def _ask(self, method: str, path: str, header: tuple[str, str], *, body: Any = None, on_body: Any = None) -> None:
        if not hasattr(self._local, "connection"):
            tls = self._tls.new_connection_options() if self.wire.certificate else None
            if tls is not None:
                tls.set_server_name("localhost")
            new = self._http.HttpClientConnection.new
            pending = new("localhost", self.wire.port, self._bootstrap, tls_connection_options=tls)
            self._local.connection = pending.result(_WAIT_S)
        headers = self._http.HttpHeaders([("host", "s3"), header])
        request = self._http.HttpRequest(method, path, headers, body)
        stream = self._local.connection.request(request, on_body=on_body)
        stream.activate()
        stream.completion_future.result(_WAIT_S)


CANDIDATES: dict[str, type[Candidate]] = {
    "bare": Bare,
    "cloudckpt": Cloudckpt,
    "obstore": Obstore,
    "pyreqwest": Pyreqwest,
    "pycurl": Pycurl,
    "awscrt": Awscrt,
}
