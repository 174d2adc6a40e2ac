"""The wire: that it passes everything on, and breaks the exchanges that its rules name."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Iterator
from typing import ClassVar
from urllib.parse import urlsplit

import pytest
from tests.wire import (
    CutAnswer,
    Reply,
    Wire,
    WireRule,
)

_WAIT_S = 30.0
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
def connected(wire: Wire) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(urlsplit(wire.url).netloc, timeout=_WAIT_S)
    try:
        yield connection
    finally:
        connection.close()


def ask(
    connection: http.client.HTTPConnection, method: str = "GET", path: str = "/a", body: object = None
) -> tuple[int, bytes]:
    connection.request(method, path, body)
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


@pytest.mark.parametrize("after_bytes", [0, 1000, len(BODY) - 1, 10 * len(BODY)])
def test_a_cut_answer_without_a_length_has_so_many_bytes(server, after_bytes):
    """A client resumes behind the bytes that arrived. The contract of the stores has answers with a length."""
    with Wire(server.url, WireRule(action=CutAnswer(after_bytes=after_bytes))) as wire, connected(wire) as connection:
        assert ask(connection, "GET", "/to-the-end") == (200, BODY[: min(after_bytes, len(BODY) - 1)])


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
