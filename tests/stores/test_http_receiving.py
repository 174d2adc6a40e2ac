"""Bodies that are received past `http.client`: the same bytes, the same errors, and clean connections afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3
from tests.kit.scripted import Answer, Recorded, ScriptedServer, watch_sockets
from tests.stores.tls import make_certificate

from cloudckpt.stores import http_body
from cloudckpt.stores.http_body import BodyEndedError, ResponseBody
from cloudckpt.stores.http_clients import CallScope, follow

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
        response = self.pool.request("GET", self.server.endpoint_url, preload_content=False, timeout=timeout)
        return ResponseBody(response), response


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(params=["http", "https"])
def serve(
    request: pytest.FixtureRequest, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Line]]:
    past: list[None] = []

    def noted(_: socket.socket, option: int, value: Any) -> None:
        is_past = (option == socket.SO_RCVTIMEO and any(value)) or (option == socket.SO_RCVLOWAT and value > 1)
        past.extend([None] if is_past else [])

    watch_sockets(monkeypatch, noted)
    with contextlib.ExitStack() as stack:

        def started(*answers: Answer) -> Line:
            server = ScriptedServer(answers, certificate=certificate if request.param == "https" else None)
            stack.callback(server.close)
            pool = urllib3.PoolManager(retries=False, ca_certs=str(certificate))
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
    serve: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, sizes: list[int], at_once_bytes: int
) -> None:
    """Bytes would be lost, doubled or out of place; or every range would cost a connection of its own."""
    monkeypatch.setattr(http_body, "MOST_RECEIVED_BYTES", at_once_bytes)
    monkeypatch.setattr(http_body, "GATHERED_BYTES", at_once_bytes)
    line = serve(sending(BODY))
    for _ in range(3):
        target = bytearray(len(BODY))
        reader, _ = line.ask()
        reader.fill(cut(target, sizes))
        assert target == BODY
        assert reader.received_bytes == len(BODY)
        reader.close(reuse=True)
    assert line.server.num_connections == 1
    assert len(line.past) == 3


def test_a_body_in_drips_arrives_whole(serve: Callable[..., Line]) -> None:
    """What the buffer holds and what the socket has would be put together wrongly."""
    edges = [0, 1, 2, 4095, 70_000, 70_001, 2 * MIB, len(BODY)]
    line = serve(sending(*(BODY[begin:end] for begin, end in itertools.pairwise(edges))))
    target = bytearray(len(BODY))
    reader, _ = line.ask()
    reader.fill(cut(target, [3, 8190, 100_000]))
    assert target == BODY
    reader.close(reuse=True)


def test_the_socket_is_left_as_it_was(serve: Callable[..., Line]) -> None:
    """The connection's next request would wait for ever, or give up at once."""
    line = serve(sending(BODY))
    for timeout_s in (WAIT_S, 7.5):
        reader, response = line.ask(timeout_s=timeout_s)
        connection = response._original_response.fp.raw._sock
        kernels = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        reader.fill([memoryview(bytearray(len(BODY)))])
        assert connection.gettimeout() == timeout_s
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == kernels
        assert not os.get_blocking(connection.fileno())
        reader.close(reuse=True)
    assert len(line.past) == 2


@pytest.mark.parametrize(("serve", "end"), [("http", hang_up), ("http", reset), ("https", hang_up)], indirect=["serve"])
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
def test_a_body_that_stalls_is_given_up_in_time(serve: Callable[..., Line], sent: int) -> None:
    """A load would hang for ever, or start the range anew instead of going on where it stopped."""
    line = serve(sending(BODY[:sent], then=lambda _: line.server.closing.wait(WAIT_S)))
    target = bytearray(len(BODY))
    reader, response = line.ask(timeout_s=0.4)
    connection = response._original_response.fp.raw._sock
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        reader.fill(cut(target, [100_000]))
    assert 0.4 <= time.monotonic() - start < 10
    assert reader.received_bytes == sent
    assert target[: reader.received_bytes] == BODY[: reader.received_bytes]
    assert connection.gettimeout() == 0.4
    reader.close(reuse=False)


@pytest.mark.parametrize("serve", ["https"], indirect=True)
@pytest.mark.parametrize(("sent", "share_of_timeout"), [(1000, 0.25), (len(BODY) - 1000, 1000)], ids=["slow", "end"])
def test_more_is_not_awaited_than_comes(
    serve: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, sent: int, share_of_timeout: float
) -> None:
    """A load over a slow line would time out though bytes come, and each body's end wait for more than there is."""
    takes_any = threading.Event()

    def noted(_: socket.socket, option: int, value: Any) -> None:
        if (option, value) == (socket.SO_RCVLOWAT, 1):
            takes_any.set()

    def send_rest(connection: socket.socket) -> None:
        takes_any.wait(WAIT_S)
        connection.sendall(BODY[sent:])

    watch_sockets(monkeypatch, noted)
    monkeypatch.setattr(http_body, "SHARE_OF_TIMEOUT", share_of_timeout)
    target = bytearray(len(BODY))
    reader, _ = serve(sending(BODY[:sent], then=send_rest)).ask(timeout_s=2.0)
    reader.fill([memoryview(target)])
    assert target == BODY
    reader.close(reuse=True)


@pytest.mark.parametrize("reuse", [False, True])
def test_bytes_after_a_response_body_close_the_connection(serve: Callable[..., Line], *, reuse: bool) -> None:
    """A server's stray bytes would be taken for the object's, or read as the beginning of the next answer."""
    line = serve(sending(BODY + b"stray"), sending(BODY))
    for _ in range(2):
        target = bytearray(len(BODY) + 5)
        reader, _ = line.ask()
        if reuse:
            reader.fill([memoryview(target)[:-5]])
        else:
            with pytest.raises(BodyEndedError):
                reader.fill([memoryview(target)])
        reader.close(reuse=reuse)
        assert target == BODY + bytes(5)
    assert line.server.num_connections == 2


def test_unknown_response_is_read_through_its_own_interface(
    serve: Callable[..., Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunked body, a newer Python or another kind of socket would cost loads, where it may cost speed alone."""
    chunked = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    line = serve(lambda connection, _: connection.sendall(chunked), sending(BODY[:1000], length=1000), sending(BODY))
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


def test_the_connection_in_use_is_ended_and_no_other() -> None:
    """If this fails, a straggler goes on, or somebody else's request breaks because a connection was used before."""
    before, peer_of_before = socket.socketpair()
    now, peer_of_now = socket.socketpair()
    with before, now, peer_of_before, peer_of_now, CallScope() as scope:
        follow(before)
        follow(now)
        scope.cancel()
        assert now.recv(1) == b""
        peer_of_before.sendall(b"x")
        assert before.recv(1) == b"x"
        with pytest.raises(ConnectionAbortedError):
            follow(before)


def test_connection_without_a_plain_socket_is_not_shut_down() -> None:
    """If this fails, a request through a proxy that speaks TLS fails because it is slow."""
    with CallScope() as scope:
        follow(object())  # type: ignore[arg-type]  # what urllib3 has there
        assert not scope.is_cancellable
        scope.cancel()
