"""The wire: that it passes everything on, breaks exactly what it is told to, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Iterator
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from cloudckpt.testing.wire import (
    CutAnswer,
    CutRequest,
    LoseAnswer,
    Reply,
    Wire,
    WireRule,
)

_WAIT_S = 30.0
_SHORT_S = 0.4
BODY = bytes(range(256)) * 40


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _WAIT_S
    seen: ClassVar[list[tuple[str, str, str, bytes]]]

    def _handle(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            size = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(size)
            if len(body) < size:
                self.close_connection = True
                return
        self.seen.append((self.command, self.path, self.headers["Host"], body))
        if self.path == "/none":
            self.send_response(204)
            self.end_headers()
        elif self.path == "/chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(BODY), 1000):
                piece = BODY[start : start + 1000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        elif self.path == "/to-the-end":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BODY)
            self.close_connection = True
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(BODY)

    do_GET = do_HEAD = do_PUT = do_DELETE = _handle  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    block_on_close = True
    daemon_threads = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[_Server]:
    handler = type("Handler", (_Handler,), {"seen": []})
    with _Server(("127.0.0.1", 0), handler) as running:
        running.seen = handler.seen
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join(_WAIT_S)


@contextlib.contextmanager
def connected(wire: Wire, *, timeout_s: float = _WAIT_S) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(urlsplit(wire.url).netloc, timeout=timeout_s)
    try:
        yield connection
    finally:
        connection.close()


def ask(
    connection: http.client.HTTPConnection, method: str = "GET", path: str = "/a", body: object = None, **headers: str
) -> tuple[int, bytes]:
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    with connection.getresponse() as answer:
        return answer.status, answer.read()


def test_everything_is_passed_on_untouched(server):
    """A header or byte that changes on the way would break signatures, and the wire would be what is tested."""
    with Wire(server.url) as wire, connected(wire) as connection:
        assert ask(connection, "GET", "/a%20b?c=d%2Fe") == (200, BODY)
        assert ask(connection, "HEAD") == (200, b"")
        assert ask(connection, "PUT", "/put", BODY) == (200, BODY)
        assert ask(connection, "PUT", "/pieces", iter([BODY, b"", BODY])) == (200, BODY)
        assert ask(connection, "DELETE", "/none") == (204, b"")
        assert ask(connection, "GET", "/chunked") == (200, BODY)
        assert ask(connection, "GET", "/to-the-end") == (200, BODY)
        assert ask(connection, "GET", "/after") == (200, BODY)
        host = urlsplit(wire.url).netloc
        bodies = [b"", b"", BODY, BODY + BODY, b"", b"", b"", b""]
        paths = ["/a%20b?c=d%2Fe", "/a", "/put", "/pieces", "/none", "/chunked", "/to-the-end", "/after"]
        methods = ["GET", "HEAD", "PUT", "PUT", "DELETE", "GET", "GET", "GET"]
        assert server.seen == list(zip(methods, paths, [host] * 8, bodies, strict=True))
        assert [(seen.method, seen.target) for seen in wire.requests] == list(zip(methods, paths, strict=True))
        assert wire.num_acted == 0


def test_a_lost_answer_was_given(server):
    """The point of it: the store has done what it was asked, and the client cannot know."""
    with Wire(server.url, WireRule(action=LoseAnswer())) as wire:
        with connected(wire) as connection, pytest.raises(ConnectionResetError):
            ask(connection, "PUT", "/a", BODY)
        assert server.seen[0][3] == BODY
        with connected(wire) as connection:
            assert ask(connection)[0] == 200


@pytest.mark.parametrize("after_bytes", [0, 1, 1000, len(BODY), 10 * len(BODY)])
def test_a_cut_request_never_arrives_whole(server, after_bytes):
    """Were the store to get all of it, it would be a lost answer and no broken upload."""
    cut = WireRule(action=CutRequest(after_bytes=after_bytes))
    broken = (ConnectionResetError, BrokenPipeError)
    with Wire(server.url, cut) as wire, connected(wire) as connection, pytest.raises(broken):
        ask(connection, "PUT", "/a", BODY)
    assert server.seen == []


@pytest.mark.parametrize("path", ["/a", "/to-the-end"])
@pytest.mark.parametrize("after_bytes", [0, 1, 1000, len(BODY) - 1, len(BODY), 10 * len(BODY)])
def test_a_cut_answer_has_so_many_bytes(server, after_bytes, path):
    """What has arrived counts: a client resumes there."""
    with Wire(server.url, WireRule(action=CutAnswer(after_bytes=after_bytes))) as wire, connected(wire) as connection:
        connection.request("GET", path)
        with connection.getresponse() as answer:
            assert answer.status == 200
            try:
                received = answer.read()
            except http.client.IncompleteRead as error:
                received = error.partial
    assert received == BODY[: min(after_bytes, len(BODY) - 1)]


def test_credentials_are_not_logged(server):
    """The log of a test run is often public."""
    with Wire(server.url) as wire, connected(wire) as connection:
        secrets = dict.fromkeys(("Authorization", "X-Amz-Security-Token", "Cookie"), "SECRET")
        ask(connection, X_Other="kept", **secrets)
        assert "SECRET" not in repr(wire.requests)
        assert wire.requests[0].header("X-Other") == "kept"


def test_the_first_rule_that_is_due_acts_and_all_count(server):
    """A fault that hits another request than the one meant would test something else, or nothing."""
    refused = Reply(status=503, body=b"slow down", headers=(("Retry-After", "1"),))
    other = Reply(status=429)
    rules = [
        WireRule(action=refused, method="PUT", path="^/data/", skip=1, times=2),
        WireRule(action=other, method="PUT", path="^/data/", skip=2, times=None),
    ]
    with Wire(server.url, *rules) as wire, connected(wire) as connection:
        asked = [
            ("PUT", "/data/0", 200),
            ("GET", "/data/1", 200),
            ("PUT", "/other/data/1", 200),
            ("PUT", "/data/2", 503),
            ("PUT", "/data/3", 503),
            ("PUT", "/data/4", 429),
        ]
        for method, path, status in asked:
            assert ask(connection, method, path, b"x")[0] == status, path
        assert [seen.action for seen in wire.requests if seen.action] == [refused, refused, other]
        assert [path for _, path, _, _ in server.seen] == ["/data/0", "/data/1", "/other/data/1"]


def test_a_server_is_down_or_unreachable_meanwhile(server):
    """A client must meet a refusal or silence, and find the server afterwards."""
    with Wire(server.url) as wire:
        with connected(wire) as connection:
            assert ask(connection)[0] == 200
            with wire.refusing():
                with connected(wire) as other, pytest.raises(ConnectionRefusedError):
                    ask(other)
                with pytest.raises((ConnectionError, http.client.BadStatusLine)):
                    ask(connection)
        with wire.deaf(), connected(wire, timeout_s=_SHORT_S) as connection, pytest.raises(TimeoutError):
            connection.connect()
        with connected(wire) as connection:
            assert ask(connection)[0] == 200
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wire")]
