"""What each way of moving bytes costs: CPU seconds per GB of uploads and ranged downloads, over HTTP and over TLS.

Starts fasts3 (see README.md) and, before it, haproxy as TLS terminator with a certificate of its own. The candidates
move the same parts from as many threads, in turns; the time is that of this process, without the servers'. Candidates
that are not installed are left out.

    python benchmarks/transport.py --fasts3-binary PATH [--wire tls] [--verb down] [--repetitions 5]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import io
import os
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import awscrt.checksums

from cloudckpt.stores.base import Part
from cloudckpt.stores.s3 import S3Store

MIB = 1024 * 1024
_ALWAYS = ("bare", "cloudckpt")
_START_S = 10.0
_WAIT_S = 60.0
# An OpenSSL that is tried out by this variable is for the client alone.
_SERVERS_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
_CONFIGURATION = """
global
  nbthread 2
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend tls
  bind 127.0.0.1:{tls_port} ssl crt {certificate} alpn http/1.1 ciphersuites {cipher}
  default_backend s3
backend s3
  server s3 127.0.0.1:{http_port}
"""

Move = Callable[[int, memoryview], None]
"""Moves the part with a number; called from many threads at once."""


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


def main() -> None:
    """Print one table for each wire and verb."""
    arguments = _arguments()
    installed = {name: CANDIDATES[name] for name in arguments.candidates if name in _ALWAYS or _is_installed(name)}
    content = memoryview(bytearray(os.urandom(MIB) * arguments.total_mib))
    target = memoryview(bytearray(content))  # touched, as the tensors of a load are
    print(f"{ssl.OPENSSL_VERSION}; Python {sys.version.split()[0]}; {arguments.cipher}; {arguments.threads} threads")
    with _servers(arguments.fasts3_binary, arguments.cipher) as wires:
        for wire_name in arguments.wire:
            wire = wires[wire_name]
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", wires["http"].port)) as connection:
                connection.request("PUT", "/bench/object", body=content)
                connection.getresponse().read()
            candidates = {name: make(wire) for name, make in installed.items()}
            for verb in arguments.verb:
                memory = content if verb == "up" else target
                samples = _turns(candidates, verb, memory, arguments, content)
                _print_table(wire_name, verb, samples)


def _turns(
    candidates: dict[str, Candidate], verb: str, memory: memoryview, arguments: argparse.Namespace, content: memoryview
) -> dict[str, list[tuple[float, float, float]]]:
    samples: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for repetition in range(arguments.repetitions + 1):  # the first warms up
        for name, candidate in candidates.items():
            if verb == "down":
                memory[:] = bytes(memory.nbytes)
            move = candidate.up if verb == "up" else candidate.down
            sample = _measured(move, memory, arguments.part_mib * MIB, arguments.threads)
            if memory != content:
                raise RuntimeError(f"{name} moved other bytes")
            if repetition:
                samples[name].append(sample)
    return samples


def _measured(move: Move, memory: memoryview, part_bytes: int, num_threads: int) -> tuple[float, float, float]:
    """User seconds, system seconds and wall seconds per GB."""
    numbers = iter(range(memory.nbytes // part_bytes))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for number in numbers:
                move(number, memory[number * part_bytes : (number + 1) * part_bytes])
        except BaseException as error:  # noqa: BLE001 (raised below)
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    before, begun_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_SELF)
    if failures:
        raise failures[0]
    gb = memory.nbytes / 1e9
    return (after.ru_utime - before.ru_utime) / gb, (after.ru_stime - before.ru_stime) / gb, wall_s / gb


def _print_table(wire_name: str, verb: str, samples: dict[str, list[tuple[float, float, float]]]) -> None:
    print(f"\n{wire_name}, {verb}: medians of {len(next(iter(samples.values())))} (range)")
    print("| candidate | CPU s/GB | user | system | GB/s |\n|---|---|---|---|---|")
    for name, rows in samples.items():
        cpu = [user_s + system_s for user_s, system_s, _ in rows]
        user_s, system_s, wall_s = (statistics.median(column) for column in zip(*rows, strict=True))
        cells = f"{statistics.median(cpu):.2f} ({min(cpu):.2f}-{max(cpu):.2f}) | {user_s:.2f} | {system_s:.2f}"
        print(f"| {name} | {cells} | {1 / wall_s:.2f} |", flush=True)


@contextlib.contextmanager
def _servers(binary: Path, cipher: str) -> Iterator[dict[str, Wire]]:
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificate = scratch / "certificate.pem"
        key = scratch / "certificate.pem.key"  # where haproxy looks for it
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        make = [
            "openssl",
            "req",
            "-x509",
            *curve,
            "-nodes",
            "-keyout",
            key,
            "-out",
            certificate,
            "-days",
            "2",
            *subject,
        ]
        subprocess.run(make, check=True, stderr=subprocess.DEVNULL, env=_SERVERS_ENVIRONMENT)
        http_port, tls_port = _free_port(), _free_port()
        configuration = scratch / "haproxy.cfg"
        ports = {"http_port": http_port, "tls_port": tls_port}
        configuration.write_text(_CONFIGURATION.format(**ports, certificate=certificate, cipher=cipher))
        for command in ([binary, str(http_port)], ["haproxy", "-db", "-f", configuration]):
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_SERVERS_ENVIRONMENT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        for port in (http_port, tls_port):
            _await(port)
        yield {
            "http": Wire(port=http_port, certificate=None),
            "tls": Wire(port=tls_port, certificate=certificate),
        }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _await(port: int) -> None:
    end_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:  # noqa: PERF203 (it waits anyway)
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)
        else:
            return


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasts3-binary", type=Path, required=True)
    parser.add_argument("--wire", nargs="+", choices=("http", "tls"), default=["http", "tls"])
    parser.add_argument("--verb", nargs="+", choices=("up", "down"), default=["up", "down"])
    parser.add_argument("--candidates", nargs="+", choices=sorted(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--cipher", default="TLS_AES_128_GCM_SHA256", help="what the terminator offers")
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--part-mib", type=int, default=32)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
