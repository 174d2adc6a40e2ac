"""Bodies past `http.client`, out and in: the right bytes, in large pieces, and clean connections afterwards."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import random
import signal
import socket
import struct
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
from tests.kit.scripted import Answer, Recorded, ScriptedServer, make_certificate, reply, watch_sockets

from cloudckpt.stores import http_body
from cloudckpt.stores.http_body import BodyEndedError, ResponseBody, ViewsBody, send_all
from cloudckpt.stores.http_clients import CallScope, follow, make_cancellable

MIB = 1 << 20


def pieces_of(body: ViewsBody) -> list[memoryview | bytes]:
    return list(iter(lambda: body.read(16384), b""))


@settings(deadline=None)  # the machine may be busy
@given(
    sizes=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 700_000)), max_size=12),
    stops=st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 4)), max_size=4),
)
def test_reads_what_a_file_of_the_same_bytes_reads(sizes: list[int], stops: list[tuple[int, int]]) -> None:
    """Bytes would be lost, doubled or out of place on their way out, or after a rewind for a second try."""
    content = (bytes(range(251)) * (sum(sizes) // 251 + 1))[: sum(sizes)]
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(content)[start : start + size])
        start += size
    body, oracle = ViewsBody(views), io.BytesIO(content)
    assert len(body) == len(content)
    for target, num_reads in stops:
        assert body.seek(target) == min(target, len(content))
        oracle.seek(min(target, len(content)))
        for _ in range(num_reads):
            assert body.tell() == oracle.tell()
            piece = body.read(8192)
            assert bytes(piece) == oracle.read(len(piece))
    body.seek(0)
    assert b"".join(pieces_of(body)) == content
    assert body.tell() == len(content)
    assert body.read() == b""


def test_large_views_are_handed_out_themselves() -> None:
    """A copy of every byte would double the CPU cost of a save, and add to its memory."""
    source = bytearray(9 * MIB)
    pieces = pieces_of(ViewsBody([memoryview(source)]))
    assert [(len(piece), getattr(piece, "obj", None) is source) for piece in pieces] == [(9 * MIB, True)]


def test_no_view_is_joined_to_another() -> None:
    """Joining a large view would copy it."""
    large = bytearray(MIB)
    views = [memoryview(large), memoryview(b"small"), memoryview(large)]
    copied = [piece for piece in pieces_of(ViewsBody(views)) if getattr(piece, "obj", None) is not large]
    assert [bytes(piece) for piece in copied] == [b"small"]


def test_seeks_as_files_do() -> None:
    """boto3 and urllib3 measure and rewind bodies by seeking."""
    body = ViewsBody([memoryview(b"abc"), memoryview(b"def")])
    assert body.seek(0, io.SEEK_END) == 6
    assert body.seek(-2, io.SEEK_CUR) == 4
    assert bytes(body.read(1)) == b"ef"
    assert body.seek(-99) == 0
    assert body.read() == b"abcdef"
    with pytest.raises(ValueError, match="whence"):
        body.seek(0, 7)


WAIT_S = 30.0
BODY = random.Random(20261125).randbytes(6 * MIB + 77)
BUFFER_BYTES = MIB // 4
"""The size of the sockets' buffers, at which a sender waits for the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A server, a pool of connections to it, and the sockets that sent or received past `http.client`."""

    server: ScriptedServer
    pool: urllib3.PoolManager
    sent_past: list[socket.socket]
    received_past: list[socket.socket]

    def put(self, *views: memoryview, timeout_s: float = WAIT_S) -> urllib3.BaseHTTPResponse:
        body = ViewsBody(views)
        timeout = urllib3.Timeout(connect=timeout_s, read=WAIT_S)
        headers = {"Content-Length": str(len(body))}
        return self.pool.request("PUT", self.server.endpoint_url, body=body, headers=headers, timeout=timeout)

    def ask(self, *, timeout_s: float = WAIT_S) -> tuple[ResponseBody, Any]:
        timeout = urllib3.Timeout(connect=WAIT_S, read=timeout_s)
        response = self.pool.request("GET", self.server.endpoint_url, preload_content=False, timeout=timeout)
        return ResponseBody(response), response


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(params=["http", "https", "elsewhere"])
def serve(
    request: pytest.FixtureRequest, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Line]]:
    sent: list[socket.socket] = []
    received: list[socket.socket] = []

    def noted(connection: socket.socket, option: int, value: Any) -> None:
        if option == socket.SO_SNDTIMEO and any(value):
            sent.append(connection)
        elif (option == socket.SO_RCVTIMEO and any(value)) or (option == socket.SO_RCVLOWAT and value > 1):
            received.append(connection)

    watch_sockets(monkeypatch, noted)
    if request.param == "elsewhere":
        monkeypatch.setattr(http_body, "sys", SimpleNamespace(platform="darwin"))
    with contextlib.ExitStack() as stack:

        def started(*answers: Answer, **settings: Any) -> Line:
            used = certificate if request.param == "https" else None
            server = ScriptedServer(answers or (reply(),), certificate=used, **settings)
            server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            stack.callback(server.close)
            options = [(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)]
            pool = urllib3.PoolManager(retries=False, ca_certs=str(certificate), socket_options=options)
            pool.pool_classes_by_scheme = make_cancellable(pool.pool_classes_by_scheme)
            stack.callback(pool.clear)
            return Line(server=server, pool=pool, sent_past=sent, received_past=received)

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
def test_bodies_arrive_whole_at_the_server(serve: Callable[..., Line], sizes: list[int]) -> None:
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
        assert mode_of(line.sent_past[-1]) == (WAIT_S, False, bytes(16), bytes(16))
    assert len(line.sent_past) == 2


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


DATA = BODY[: 3 * MIB + 77]


BOTH = pytest.mark.parametrize("serve", ["http", "https"], indirect=True)


def sending(*pieces: bytes, length: int = len(DATA), then: Callable[[socket.socket], object] | None = None) -> Answer:
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


@BOTH
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
    monkeypatch.setattr(http_body, "MAX_RECEIVED_BYTES", at_once_bytes)
    monkeypatch.setattr(http_body, "GATHERED_BYTES", at_once_bytes)
    line = serve(sending(DATA))
    for _ in range(3):
        target = bytearray(len(DATA))
        reader, _ = line.ask()
        reader.fill(cut(target, sizes))
        assert target == DATA
        assert reader.received_bytes == len(DATA)
        reader.close(reuse=True)
    assert line.server.num_connections == 1
    assert len(line.received_past) == 3


@BOTH
def test_a_body_in_drips_arrives_whole(serve: Callable[..., Line]) -> None:
    """If this fails, the bytes of the buffer and those of the socket are put together wrongly."""
    edges = [0, 1, 2, 4095, 70_000, 70_001, 2 * MIB, len(DATA)]
    line = serve(sending(*(DATA[begin:end] for begin, end in itertools.pairwise(edges))))
    target = bytearray(len(DATA))
    reader, _ = line.ask()
    reader.fill(cut(target, [3, 8190, 100_000]))
    assert target == DATA
    reader.close(reuse=True)


@BOTH
def test_the_socket_is_left_as_it_was(serve: Callable[..., Line]) -> None:
    """The connection's next request would wait for ever, or give up at once."""
    line = serve(sending(DATA))
    for timeout_s in (WAIT_S, 7.5):
        reader, response = line.ask(timeout_s=timeout_s)
        connection = response._original_response.fp.raw._sock
        kernels = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        reader.fill([memoryview(bytearray(len(DATA)))])
        assert connection.gettimeout() == timeout_s
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == kernels
        assert not os.get_blocking(connection.fileno())
        reader.close(reuse=True)
    assert len(line.received_past) == 2


@pytest.mark.parametrize(("serve", "end"), [("http", hang_up), ("http", reset), ("https", hang_up)], indirect=["serve"])
@pytest.mark.parametrize("sent", [0, 1, 10_000, 2 * MIB + 5])
def test_a_body_that_ends_early_is_seen_as_such(
    serve: Callable[..., Line], sent: int, end: Callable[[socket.socket], None]
) -> None:
    """Weights would have a hole, or the next answer be read off a connection that is out of step."""
    line = serve(sending(DATA[:sent], then=end), sending(DATA))
    target = bytearray(len(DATA))
    reader, response = line.ask()
    with pytest.raises((BodyEndedError, ConnectionResetError)):
        reader.fill(cut(target, [100_000]))
    received = reader.received_bytes
    assert received == sent if end is hang_up else received <= sent
    assert target[:received] == DATA[:received]
    assert target[sent:] == bytes(len(DATA) - sent)
    reader.close(reuse=False)
    assert response._original_response.isclosed()
    reader, _ = line.ask()
    reader.fill([memoryview(target)])
    reader.close(reuse=True)
    assert target == DATA
    assert line.server.num_connections == 2


@BOTH
@pytest.mark.parametrize("sent", [0, 100, MIB, 2 * MIB + 5])
def test_a_body_that_stalls_is_given_up_in_time(serve: Callable[..., Line], sent: int) -> None:
    """A load would hang for ever, or start the range anew instead of going on where it stopped."""
    line = serve(sending(DATA[:sent], then=lambda _: line.server.closing.wait(WAIT_S)))
    target = bytearray(len(DATA))
    reader, response = line.ask(timeout_s=0.4)
    connection = response._original_response.fp.raw._sock
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        reader.fill(cut(target, [100_000]))
    assert 0.4 <= time.monotonic() - start < 10
    assert reader.received_bytes == sent
    assert target[: reader.received_bytes] == DATA[: reader.received_bytes]
    assert connection.gettimeout() == 0.4
    reader.close(reuse=False)


@pytest.mark.parametrize("serve", ["https"], indirect=True)
@pytest.mark.parametrize(("sent", "share_of_timeout"), [(1000, 0.25), (len(DATA) - 1000, 1000)], ids=["slow", "end"])
def test_a_receive_waits_for_no_more_bytes_than_the_body_has(
    serve: Callable[..., Line], monkeypatch: pytest.MonkeyPatch, sent: int, share_of_timeout: float
) -> None:
    """A load over a slow line would time out though bytes come, and each body's end wait for more than there is."""
    takes_any = threading.Event()

    def noted(_: socket.socket, option: int, value: Any) -> None:
        if (option, value) == (socket.SO_RCVLOWAT, 1):
            takes_any.set()

    def send_rest(connection: socket.socket) -> None:
        takes_any.wait(WAIT_S)
        connection.sendall(DATA[sent:])

    watch_sockets(monkeypatch, noted)
    monkeypatch.setattr(http_body, "SHARE_OF_TIMEOUT", share_of_timeout)
    target = bytearray(len(DATA))
    reader, _ = serve(sending(DATA[:sent], then=send_rest)).ask(timeout_s=2.0)
    reader.fill([memoryview(target)])
    assert target == DATA
    reader.close(reuse=True)


@BOTH
@pytest.mark.parametrize("reuse", [False, True])
def test_bytes_after_a_response_body_close_the_connection(serve: Callable[..., Line], *, reuse: bool) -> None:
    """A server's stray bytes would be taken for the object's, or read as the beginning of the next answer."""
    line = serve(sending(DATA + b"stray"), sending(DATA))
    for _ in range(2):
        target = bytearray(len(DATA) + 5)
        reader, _ = line.ask()
        if reuse:
            reader.fill([memoryview(target)[:-5]])
        else:
            with pytest.raises(BodyEndedError):
                reader.fill([memoryview(target)])
        reader.close(reuse=reuse)
        assert target == DATA + bytes(5)
    assert line.server.num_connections == 2


@BOTH
def test_unknown_response_is_read_through_its_own_interface(
    serve: Callable[..., Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunked body, a newer Python or another kind of socket would cost loads, where it may cost speed alone."""
    chunked = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(DATA) + DATA + b"\r\n0\r\n\r\n"
    line = serve(lambda connection, _: connection.sendall(chunked), sending(DATA[:1000], length=1000), sending(DATA))
    for size_bytes in (len(DATA), 1000):
        target = bytearray(size_bytes)
        reader, _ = line.ask()
        reader.fill([memoryview(target)])
        assert target == DATA[:size_bytes]
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
            target = bytearray(len(DATA))
            reader.fill([memoryview(target)])
            assert target == DATA
            reader.close(reuse=True)
    assert line.server.num_connections == 1
    assert line.received_past == []


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
