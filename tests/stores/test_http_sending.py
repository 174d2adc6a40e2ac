"""Bodies that are sent past `http.client`: the same bytes, the same errors, and clean connections afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kit.scripted import Answer, Recorded, ScriptedServer, reply, watch_sockets
from tests.stores.tls import make_certificate

from cloudckpt.stores import http_body
from cloudckpt.stores.http_body import ViewsBody, send_all
from cloudckpt.stores.http_clients import CallScope, make_cancellable

MIB = 1 << 20
WAIT_S = 30.0
BODY = random.Random(20261125).randbytes(6 * MIB + 77)
ANSWER = reply()
BUFFER_BYTES = MIB // 4
"""Of the sockets, so that a sender waits for the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A server, a pool of connections to it, and the sockets over which pieces were sent past `http.client`."""

    server: ScriptedServer
    pool: urllib3.PoolManager
    past: list[socket.socket]

    def put(self, *views: memoryview, timeout_s: float = WAIT_S) -> urllib3.BaseHTTPResponse:
        body = ViewsBody(views)
        timeout = urllib3.Timeout(connect=timeout_s, read=WAIT_S)
        headers = {"Content-Length": str(len(body))}
        return self.pool.request("PUT", self.server.endpoint_url, body=body, headers=headers, timeout=timeout)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(params=["http", "https", "elsewhere"])
def serve(
    request: pytest.FixtureRequest, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Line]]:
    past: list[socket.socket] = []

    def noted(connection: socket.socket, option: int, value: Any) -> None:
        past.extend([connection] if option == socket.SO_SNDTIMEO and any(value) else [])

    watch_sockets(monkeypatch, noted)
    if request.param == "elsewhere":
        monkeypatch.setattr(http_body, "sys", SimpleNamespace(platform="darwin"))
    with contextlib.ExitStack() as stack:

        def started(answer: Answer = ANSWER, **settings: Any) -> Line:
            used = certificate if request.param == "https" else None
            server = ScriptedServer((answer,), certificate=used, **settings)
            server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            stack.callback(server.close)
            options = [(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)]
            pool = urllib3.PoolManager(retries=False, ca_certs=str(certificate), socket_options=options)
            pool.pool_classes_by_scheme = make_cancellable(pool.pool_classes_by_scheme)
            stack.callback(pool.clear)
            return Line(server=server, pool=pool, past=past)

        yield started


def mode_of(connection: socket.socket) -> tuple[object, ...]:
    kernels = [connection.getsockopt(socket.SOL_SOCKET, name, 16) for name in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO)]
    return (connection.gettimeout(), os.get_blocking(connection.fileno()), *kernels)


def wait_for_end(line: Callable[[], Line], begun: threading.Event) -> Answer:
    """An answer that never comes, to a body that is not read."""

    def answer(_: socket.socket, __: Recorded) -> None:
        begun.set()
        line().server.closing.wait(WAIT_S)

    return answer


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.sampled_from([0, 1, 5000, 262_143, 262_144, 262_145, MIB, 3 * MIB + 1]), max_size=8))
def test_bodies_arrive_whole(serve: Callable[..., Line], sizes: list[int]) -> None:
    """If this fails, bytes are lost, doubled or out of place, or every part costs a connection of its own."""
    line = serve()
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(BODY)[start % MIB :][:size])
        start += size
    for _ in range(2):
        assert line.put(*views).status == 200
    assert [request.body for request in line.server.requests] == [b"".join(views)] * 2
    assert line.server.num_connections == 1


def test_thousands_of_small_views_leave_together(serve: Callable[..., Line]) -> None:
    """If this fails, bytes are lost between two calls of the system, or each small tensor is a packet of its own."""
    line = serve()
    views = [memoryview(BODY)[begin : begin + 1001] for begin in range(0, len(BODY), 1001)]
    assert len(views) > 2 * 1024
    assert line.put(*views).status == 200
    assert line.server.requests[0].body == BODY


def test_a_library_that_sends_a_body_in_one_go_sends_its_bytes() -> None:
    """If this fails, no upload works with urllib3 1, which gives `send` the whole body."""
    (pool,) = make_cancellable({"http": urllib3.HTTPConnectionPool}).values()
    connection = pool.ConnectionCls("127.0.0.1", 1)
    connection.sock, peer = socket.socketpair()
    with connection.sock, peer:
        connection.send([[memoryview(b"some"), memoryview(b" bytes")]])
        assert peer.recv(100) == b"some bytes"


@pytest.mark.parametrize("serve", ["http"], indirect=True)
def test_a_large_piece_is_sent_past_the_library_and_leaves_the_socket_as_it_was(serve: Callable[..., Line]) -> None:
    """A thread would wait for the GIL at each bit that the socket takes, or the next request would wait for ever."""
    line = serve()
    for _ in range(2):
        line.put(memoryview(BODY))
        assert mode_of(line.past[-1]) == (WAIT_S, False, bytes(16), bytes(16))
    assert len(line.past) == 2


def test_a_server_that_stops_reading_is_given_up_in_time(serve: Callable[..., Line]) -> None:
    """A save would hang for ever."""
    line = serve(wait_for_end(lambda: line, threading.Event()), reads_bodies=False)
    start = time.monotonic()
    with pytest.raises(urllib3.exceptions.ProtocolError) as caught:
        line.put(memoryview(BODY), timeout_s=0.4)
    assert isinstance(caught.value.args[1], TimeoutError)
    assert 0.4 <= time.monotonic() - start < 10


def test_a_slow_line_is_no_stall(serve: Callable[..., Line]) -> None:
    """A save over a slow line would never succeed, as each of its tries would time out."""
    pause = threading.Event()
    for timeout_s in (0.6, 6.0):
        line = serve(before_each_mib=functools.partial(pause.wait, timeout_s / 3))
        start = time.monotonic()
        with contextlib.suppress(urllib3.exceptions.ProtocolError):  # it may have been this machine that stalled
            assert line.put(memoryview(BODY), timeout_s=timeout_s).status == 200
            assert time.monotonic() - start > 1.25 * timeout_s
            return
    pytest.fail("timed out")


def test_a_request_that_nobody_needs_is_ended_while_it_is_sent(serve: Callable[..., Line]) -> None:
    """A straggler would go on sending, and its caller would wait for the timeout."""
    begun, scope = threading.Event(), CallScope()
    line = serve(wait_for_end(lambda: line, begun), reads_bodies=False)

    def send() -> None:
        with scope:
            line.put(memoryview(BODY))

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        assert begun.wait(WAIT_S)
        scope.cancel()
        with pytest.raises(urllib3.exceptions.ProtocolError):
            sent.result(WAIT_S / 2)


def test_a_signal_neither_ends_nor_spoils_a_body(serve: Callable[..., Line]) -> None:
    """If this fails, bytes are lost or doubled, or a save fails, in a program that uses signals."""
    seen: list[int] = []
    main = threading.get_ident()
    line = serve(before_each_mib=lambda: signal.pthread_kill(main, signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        assert line.put(memoryview(BODY)).status == 200
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen
    assert line.server.requests[0].body == BODY


@pytest.mark.parametrize("error", [TimeoutError, BrokenPipeError, KeyboardInterrupt])
def test_after_an_error_the_socket_is_left_as_it_was(error: type[BaseException]) -> None:
    """If this fails, a later use of the socket waits for ever, or gives up at once."""
    connection, peer = socket.socketpair()
    with connection, peer:
        connection.settimeout(0.2 if error is TimeoutError else WAIT_S)
        before = mode_of(connection)
        if error is BrokenPipeError:
            peer.close()
        timer = threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
        if error is KeyboardInterrupt:
            timer.start()
        with pytest.raises(error):
            send_all(connection, [memoryview(BODY)])
        assert mode_of(connection) == before
        if error is KeyboardInterrupt:
            timer.join()


@pytest.mark.parametrize("hangs_up", [True, False])
def test_an_answer_before_the_end_of_the_body_is_heard(serve: Callable[..., Line], *, hangs_up: bool) -> None:
    """A store that refuses or asks for slower requests would look like a broken connection."""

    def answer(connection: socket.socket, request: Recorded) -> None:
        reply(503, headers={"Connection": "close"})(connection, request)
        if hangs_up:
            connection.shutdown(socket.SHUT_RDWR)
        else:
            while connection.recv(MIB):
                pass

    assert serve(answer, reads_bodies=False).put(memoryview(BODY)).status == 503
