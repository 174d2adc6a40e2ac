"""Other engines, each the least that moves bytes with it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

from benchmarks.moving.candidate import AUTHORIZATION, MIB, OBJECT, TIMEOUT_S, Candidate, Kept, Where, check, range_of
from cloudckpt.testing.servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY


class Obstore(Candidate):
    """obstore, with its checks of certificates off: it takes no bundle. Sends no CRC32C."""

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        import obstore.store  # noqa: PLC0415 (may be absent)

        self._obstore = obstore
        self._store = obstore.store.S3Store(
            where.bucket,
            endpoint=where.endpoint_url,
            access_key_id=ACCESS_KEY_ID,
            secret_access_key=SECRET_ACCESS_KEY,
            region=REGION,
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={
                "http1_only": True,
                "allow_http": True,
                "allow_invalid_certificates": True,
                "timeout": f"{TIMEOUT_S:.0f}s",
            },
        )

    def up(self, number: int, part: memoryview) -> None:
        self._obstore.put(self._store, self.key_of(number), part.toreadonly(), use_multipart=False)

    def down(self, number: int, part: memoryview) -> None:
        start = number * part.nbytes
        answer = self._obstore.get(self._store, OBJECT, options={"range": (start, start + part.nbytes)})
        position = 0
        for piece in answer.stream(min_chunk_size=MIB):
            part[position : position + len(piece)] = memoryview(piece)
            position += len(piece)


class Pyreqwest(Candidate):
    """reqwest under pyreqwest, with its checks of certificates off. The least of HTTP, no checksums."""

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        from pyreqwest.client import SyncClientBuilder  # noqa: PLC0415 (may be absent)

        builder = SyncClientBuilder().default_headers({"Authorization": AUTHORIZATION})
        builder = builder.danger_accept_invalid_certs(enable=True).http1_only()
        self._client = builder.error_for_status(enable=True).timeout(timedelta(seconds=TIMEOUT_S)).build()
        self._url = f"{where.endpoint_url}/{where.bucket}"

    def up(self, number: int, part: memoryview) -> None:
        self._client.put(f"{self._url}/{self.key_of(number)}").body_bytes(part).build().send().text()

    def down(self, number: int, part: memoryview) -> None:
        request = self._client.get(f"{self._url}/{OBJECT}").header("Range", range_of(number, part))
        with request.build_streamed() as answer:
            position = 0
            while position < part.nbytes:
                piece = answer.body_reader.read(MIB)
                if not piece:
                    raise ConnectionError(f"the answer ended after {position} bytes")
                part[position : position + len(piece)] = memoryview(piece)
                position += len(piece)

    def close(self) -> None:
        self._client.close()


class Pycurl(Candidate):
    """libcurl, which hands bodies over in callbacks of 16 KiB, with its checks of certificates off. No checksums."""

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        import pycurl  # noqa: PLC0415 (may be absent)

        self._pycurl = pycurl
        self._kept = Kept(pycurl.Curl, pycurl.Curl.close)
        self._fields = [f"Authorization: {AUTHORIZATION}"]

    def up(self, number: int, part: memoryview) -> None:
        start = 0

        def next_piece(most_bytes: int) -> bytes:
            nonlocal start
            piece = part[start : start + most_bytes]
            start += piece.nbytes
            return bytes(piece)

        with self._handle(self.key_of(number)) as curl:
            curl.setopt(self._pycurl.UPLOAD, 1)
            curl.setopt(self._pycurl.INFILESIZE_LARGE, part.nbytes)
            curl.setopt(280, MIB)  # CURLOPT_UPLOAD_BUFFERSIZE, which pycurl does not name
            curl.setopt(self._pycurl.HTTPHEADER, ["Expect:", *self._fields])
            curl.setopt(self._pycurl.READFUNCTION, next_piece)
            curl.setopt(self._pycurl.WRITEFUNCTION, len)
            curl.perform()

    def down(self, number: int, part: memoryview) -> None:
        position = 0

        def take(piece: bytes) -> None:
            nonlocal position
            part[position : position + len(piece)] = piece
            position += len(piece)

        with self._handle(OBJECT) as curl:
            curl.setopt(self._pycurl.HTTPHEADER, self._fields)
            curl.setopt(self._pycurl.RANGE, range_of(number, part).removeprefix("bytes="))
            curl.setopt(self._pycurl.BUFFERSIZE, MIB // 2)
            curl.setopt(self._pycurl.WRITEFUNCTION, take)
            curl.perform()

    def close(self) -> None:
        self._kept.close()

    @contextlib.contextmanager
    def _handle(self, key: str) -> Iterator[Any]:
        with self._kept.one() as connection:
            curl = connection.line
            curl.reset()  # of its options; its connection stays
            curl.setopt(self._pycurl.URL, f"{self.where.endpoint_url}/{self.where.bucket}/{key}")
            curl.setopt(self._pycurl.HTTP_VERSION, self._pycurl.CURL_HTTP_VERSION_1_1)
            curl.setopt(self._pycurl.FAILONERROR, 1)
            curl.setopt(self._pycurl.TIMEOUT, int(TIMEOUT_S))
            curl.setopt(self._pycurl.NOSIGNAL, 1)  # its timeouts would otherwise need the main thread
            curl.setopt(self._pycurl.SSL_VERIFYPEER, 0)
            curl.setopt(self._pycurl.SSL_VERIFYHOST, 0)
            yield curl
            connection.ends = False  # libcurl sees to that itself


class Awscrt(Candidate):
    """awscrt's HTTP client, which a Python body feeds and a callback empties. No checksums."""

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        import awscrt.http  # noqa: PLC0415 (slow to import)
        import awscrt.io  # noqa: PLC0415

        self._http = awscrt.http
        loops = awscrt.io.EventLoopGroup(2)
        self._bootstrap = awscrt.io.ClientBootstrap(loops, awscrt.io.DefaultHostResolver(loops))
        options = awscrt.io.TlsContextOptions()
        options.verify_peer = False
        self._tls = awscrt.io.ClientTlsContext(options)
        self._kept = Kept(self._connected, lambda connection: wait([connection.close()], TIMEOUT_S))  # however it ended

    def up(self, number: int, part: memoryview) -> None:
        self._ask("PUT", self.key_of(number), ("content-length", str(part.nbytes)), body=io.BytesIO(part))

    def down(self, number: int, part: memoryview) -> None:
        position = 0

        def take(chunk: bytes, **_: Any) -> None:
            nonlocal position
            part[position : position + len(chunk)] = chunk
            position += len(chunk)

        self._ask("GET", OBJECT, ("range", range_of(number, part)), on_body=take)

    def close(self) -> None:
        self._kept.close()

    def _connected(self) -> Any:
        tls = self._tls.new_connection_options() if self.where.ca_bundle else None
        if tls is not None:
            tls.set_server_name(self.where.host)
        new = self._http.HttpClientConnection.new
        return new(self.where.host, self.where.port, self._bootstrap, tls_connection_options=tls).result(TIMEOUT_S)

    def _ask(self, method: str, key: str, field: tuple[str, str], *, body: Any = None, on_body: Any = None) -> None:
        host = f"{self.where.host}:{self.where.port}"
        headers = self._http.HttpHeaders([("host", host), ("authorization", AUTHORIZATION), field])
        request = self._http.HttpRequest(method, f"/{self.where.bucket}/{key}", headers, body)
        ends = False

        def on_head(headers: list[tuple[str, str]], **_: Any) -> None:
            nonlocal ends
            ends = ("connection", "close") in {(name.lower(), value.lower()) for name, value in headers}

        with self._kept.one() as connection:
            stream = connection.line.request(request, on_head, on_body)
            stream.activate()
            check(stream.completion_future.result(TIMEOUT_S))
            connection.ends = ends
