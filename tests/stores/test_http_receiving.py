"""Bodies that are received past `http.client`: the same bytes, the same errors, and clean connections afterwards."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import random
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.stores.scripted import Answer, Recorded, ScriptedServer

from cloudckpt.stores import http_body
from cloudckpt.stores.http_body import BodyEndedError, ResponseBody
from cloudckpt.stores.http_clients import CallScope

pytestmark = pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")

MIB = 1 << 20
WAIT_S = 30.0
BODY = random.Random(20261121).randbytes(3 * MIB + 77)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A server, a pool of connections to it, and how many bodies came past `http.client`."""

    server: ScriptedServer
    pool: urllib3.PoolManager
    past: list[None]

    def ask(self, *, timeout_s: float = WAIT_S) -> tuple[ResponseBody, Any]:
        timeout = urllib3.Timeout(connect=WAIT_S, read=timeout_s)
        scheme = "https" if isinstance(self.server, TLSServer) else "http"
        url = f"{scheme}://{self.server.endpoint_url.partition('://')[2]}"
        response = self.pool.request("GET", url, preload_content=False, timeout=timeout)
        return ResponseBody(response), response


@dataclass
class TLSServer(ScriptedServer):
    """Shows the certificate in the file `certificate`."""

    certificate: Path = Path()

    def _serve(self, connection: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate)
        connection.settimeout(WAIT_S)
        secured = context.wrap_socket(connection, server_side=True)
        with self._lock:
            self._open.append(secured)
        super()._serve(secured)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server of a test")])
    now = dt.datetime.now(dt.timezone.utc)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("certificate") / "server.pem"
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *form) + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture(params=["http", "tls"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def serve(wire: str, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Line]]:
    past: list[None] = []
    receiving = http_body._waiting_in_the_kernel

    def counted(connection: socket.socket) -> contextlib.AbstractContextManager[None]:
        past.append(None)
        return receiving(connection)

    monkeypatch.setattr(http_body, "_waiting_in_the_kernel", counted)
    with contextlib.ExitStack() as stack:

        def started(*answers: Answer) -> Line:
            server = ScriptedServer(answers) if wire == "http" else TLSServer(answers, certificate=certificate)
            stack.callback(server.close)
            pool = urllib3.PoolManager(retries=False, cert_reqs="CERT_NONE")
            stack.callback(pool.clear)
            return Line(server=server, pool=pool, past=past)

        yield started


def sending(*pieces: bytes, length: int = len(BODY), then: Callable[[socket.socket], object] | None = None) -> Answer:
    """An answer that goes out piece by piece."""

    def answer(connection: socket.socket, _: Recorded) -> None:
        connection.sendall(f"HTTP/1.1 200 X\r\nContent-Length: {length}\r\n\r\n".encode())
        for piece in pieces:
            connection.sendall(piece)
        if then is not None:
            then(connection)

    return answer


def cut(target: bytearray, sizes: list[int]) -> list[memoryview]:
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(target)[start : start + size])
        start += size
    return [*views, memoryview(target)[start:]]


def hang_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # The file that the server reads from keeps it open: this ends it now.
    socket.socket(fileno=connection.detach()).close()


@pytest.mark.parametrize(
    "sizes",
    [[], [1], [0, 5, 0], [100_000] * 20, [997] * 3000, [2 * MIB, 1, MIB]],
    ids=["one", "byte", "empty", "some", "many", "large"],
)
@pytest.mark.parametrize("at_once_bytes", [1000, 8 * MIB])
def test_bodies_arrive_whole_and_connections_are_used_again(
    serve: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, wire: str, sizes: list[int], at_once_bytes: int
) -> None:
    """Bytes would be lost, doubled or out of place; or every range would cost a connection of its own."""
    monkeypatch.setattr(http_body, "_MOST_RECEIVED_BYTES", at_once_bytes)
    line = serve(sending(BODY))
    for _ in range(3):
        target = bytearray(len(BODY))
        reader, _ = line.ask()
        reader.fill(cut(target, sizes))
        assert target == BODY
        assert reader.received_bytes == len(BODY)
        reader.close(reuse=True)
    assert line.server.num_connections == 1
    assert len(line.past) == (3 if wire == "http" else 0)


def test_a_body_in_drips_arrives_whole(serve: Callable[..., Line]) -> None:
    """What the buffer holds and what the socket has would be put together wrongly."""
    edges = [0, 1, 2, 4095, 70_000, 70_001, 2 * MIB, len(BODY)]
    line = serve(sending(*(BODY[begin:end] for begin, end in itertools.pairwise(edges))))
    target = bytearray(len(BODY))
    reader, _ = line.ask()
    reader.fill(cut(target, [3, 8190, 100_000]))
    assert target == BODY
    reader.close(reuse=True)


def test_the_socket_is_left_as_it_was(serve: Callable[..., Line], wire: str) -> None:
    """The connection's next request would wait for ever, or give up at once."""
    line = serve(sending(BODY))
    for timeout_s in (WAIT_S, 7.5):
        reader, response = line.ask(timeout_s=timeout_s)
        connection = response._original_response.fp.raw._sock
        kernels = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        reader.fill([memoryview(bytearray(len(BODY)))])
        assert connection.gettimeout() == timeout_s
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == kernels
        assert not os.get_blocking(connection.fileno())
        reader.close(reuse=True)
    assert len(line.past) == (2 if wire == "http" else 0)


@pytest.mark.parametrize(
    ("wire", "end"),
    [("http", hang_up), ("http", reset), ("tls", hang_up)],
    ids=["http-closed", "http-reset", "tls-closed"],
    indirect=["wire"],
)
@pytest.mark.parametrize("sent", [0, 1, 10_000, 2 * MIB + 5])
def test_a_body_that_ends_early_is_seen_as_such(
    serve: Callable[..., Line], sent: int, end: Callable[[socket.socket], None]
) -> None:
    """Weights would have a hole, or the next answer be read off a connection that is out of step."""
    line = serve(sending(BODY[:sent], then=end), sending(BODY))
    target = bytearray(len(BODY))
    reader, response = line.ask()
    with pytest.raises((BodyEndedError, ConnectionResetError)):
        reader.fill(cut(target, [100_000]))
    received = reader.received_bytes
    assert received == sent if end is hang_up else received <= sent
    assert target[:received] == BODY[:received]
    assert target[sent:] == bytes(len(BODY) - sent)
    reader.close(reuse=False)
    assert response._original_response.isclosed()
    reader, _ = line.ask()
    reader.fill([memoryview(target)])
    reader.close(reuse=True)
    assert target == BODY
    assert line.server.num_connections == 2


@pytest.mark.parametrize("sent", [0, 100, MIB, 2 * MIB + 5])
def test_a_body_that_stalls_is_given_up_in_time(serve: Callable[..., Line], wire: str, sent: int) -> None:
    """A load would hang for ever, or start the range anew instead of going on where it stopped."""
    line = serve(sending(BODY[:sent], then=lambda _: line.server.closing.wait(WAIT_S)))
    target = bytearray(len(BODY))
    reader, response = line.ask(timeout_s=0.4)
    connection = response._original_response.fp.raw._sock
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        reader.fill(cut(target, [100_000]))
    assert 0.4 <= time.monotonic() - start < 10
    # Through `http.client`, a piece that is not complete is received again.
    assert reader.received_bytes == sent if wire == "http" else sent - MIB <= reader.received_bytes <= sent
    assert target[: reader.received_bytes] == BODY[: reader.received_bytes]
    assert connection.gettimeout() == 0.4
    reader.close(reuse=False)


def test_a_slow_line_is_no_stalled_one(serve: Callable[..., Line]) -> None:
    """A line of a few MB/s would never bring a large piece within the timeout: the load would fail on it for good."""
    num_pieces = 8

    def trickle(connection: socket.socket) -> None:
        for index in range(num_pieces):
            line.server.closing.wait(timeout_s * 0.2)
            connection.sendall(BODY[index * 1000 : (index + 1) * 1000])
            sent_s.append(time.monotonic())
        connection.sendall(BODY[num_pieces * 1000 :])

    for timeout_s in (1.5, 15.0):
        line = serve(sending(then=trickle))
        target, sent_s = bytearray(len(BODY)), [time.monotonic()]
        reader, _ = line.ask(timeout_s=timeout_s)
        try:
            reader.fill([memoryview(target)])
            break
        except TimeoutError:
            ended_s = [*sent_s, time.monotonic()]
            if max(later - earlier for earlier, later in itertools.pairwise(ended_s)) < 0.9 * timeout_s:
                raise  # it was the line that was slow, and not this machine
    assert target == BODY
    reader.close(reuse=True)


def test_another_thread_can_end_it(serve: Callable[..., Line]) -> None:
    """A straggler whose bytes are there by another way would hold its connection until the timeout."""
    sent = threading.Event()

    def stall(_: socket.socket) -> None:
        sent.set()
        line.server.closing.wait(WAIT_S)

    line = serve(sending(BODY[:MIB], then=stall))
    reader, response = line.ask()
    outcome: list[object] = []

    def fill() -> None:
        try:
            reader.fill([memoryview(bytearray(len(BODY)))])
        except (BodyEndedError, OSError) as error:
            outcome.append(error)

    with CallScope() as scope:
        scope.follow(response._original_response.fp.raw._sock)
        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        assert sent.wait(WAIT_S)
        start = time.monotonic()
        scope.cancel()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert time.monotonic() - start < WAIT_S / 4
    assert isinstance(outcome[0], BodyEndedError | ConnectionError)
    reader.close(reuse=False)


@pytest.mark.parametrize("is_whole", [True, False])
def test_signals_do_not_lengthen_the_wait(
    serve: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, *, is_whole: bool
) -> None:
    """A program with a timer's signals would wait for a dead store for ever, or lose bytes to them."""
    monkeypatch.setattr(http_body, "_MOST_RECEIVED_BYTES", 100_000)
    end = None if is_whole else (lambda _: line.server.closing.wait(WAIT_S))
    line = serve(sending(*([BODY] if is_whole else [BODY[: 2 * MIB]]), then=end))
    target = bytearray(len(BODY))
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    done = threading.Event()
    receiver = threading.get_ident()

    def disturb() -> None:
        while not done.wait(0.005):
            signal.pthread_kill(receiver, signal.SIGUSR1)

    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    try:
        reader, _ = line.ask(timeout_s=0.5)
        start = time.monotonic()
        with contextlib.nullcontext() if is_whole else pytest.raises(TimeoutError):
            reader.fill([memoryview(target)])
        assert time.monotonic() - start < 10
    finally:
        done.set()
        disturber.join(WAIT_S)
        signal.signal(signal.SIGUSR1, before)
    assert reader.received_bytes == (len(BODY) if is_whole else 2 * MIB)
    reader.close(reuse=is_whole)
    assert target[: reader.received_bytes] == BODY[: reader.received_bytes]


def test_what_comes_after_a_body_is_nobodys(serve: Callable[..., Line]) -> None:
    """A server's stray bytes would be taken for the object's, or read as the beginning of the next answer."""
    line = serve(sending(BODY + b"stray"), sending(BODY))
    for _ in range(2):
        target = bytearray(len(BODY) + 5)
        reader, _ = line.ask()
        with pytest.raises(BodyEndedError):
            reader.fill([memoryview(target)])
        reader.close(reuse=False)
        assert target == BODY + bytes(5)
    assert line.server.num_connections == 2


def test_a_body_longer_or_shorter_than_the_views_is_told_from_one_that_fits(serve: Callable[..., Line]) -> None:
    """The rest of one body would be read as the next answer, or a wait for more than was promised last for ever."""
    line = serve(sending(BODY))
    reader, _ = line.ask()
    target = bytearray(2 * MIB)
    reader.fill([memoryview(target)])
    assert target == BODY[: 2 * MIB]
    reader.close(reuse=True)
    reader, _ = line.ask()
    target = bytearray(len(BODY) + 1)
    with pytest.raises(BodyEndedError):
        reader.fill([memoryview(target)])
    assert reader.received_bytes == len(BODY)
    reader.close(reuse=True)
    reader, _ = line.ask()
    assert line.server.num_connections == 2


def test_what_is_not_known_is_read_through_the_response(
    serve: Callable[..., Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunked body, a newer Python or another kind of socket would cost loads, where it may cost speed alone."""
    chunked = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    line = serve(
        lambda connection, _: connection.sendall(chunked),
        sending(BODY[:1000], length=1000),
        sending(BODY),
    )
    for size_bytes in (len(BODY), 1000):
        target = bytearray(size_bytes)
        reader, _ = line.ask()
        reader.fill([memoryview(target)])
        assert target == BODY[:size_bytes]
        reader.close(reuse=True)
    for place, other in (
        ("cloudckpt.stores.http_body.sys.platform", "darwin"),
        ("socket.SocketIO", type("Other", (socket.SocketIO,), {})),
        # Named so by gevent.
        ("socket.socket.recvmsg_into", lambda *_: None),
    ):
        with monkeypatch.context() as patch:
            reader, _ = line.ask()
            patch.setattr(place, other)
            target = bytearray(len(BODY))
            reader.fill([memoryview(target)])
            assert target == BODY
            reader.close(reuse=True)
    assert line.server.num_connections == 1
    assert line.past == []
