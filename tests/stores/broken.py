"""Answers of a real server, cut at every byte: what a call makes of each, for S3 and for GCS."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from awscrt.checksums import crc32c
from tests.kit.scripted import SOCKET_TIMEOUT_S, Recorded, ScriptedServer
from tests.kit.wire import Stream

from cloudckpt.errors import StoreError, TransientStoreError
from cloudckpt.stores.base import Part

Outcome = tuple[str, object]
BODY = b"0123456789"
VIEWS = [memoryview(BODY)]
CRC = crc32c(BODY)
PART = Part(number=1, offset_bytes=0, size_bytes=10)
EVERY = 41
"""The short form of a test breaks every so-many-th byte of an answer, and all bytes around its structure."""


def _read_into(store: Any, key: str, offset_bytes: int = 2) -> bytes:
    target = bytearray(4)
    store.read_into(key, offset_bytes, [memoryview(target)])
    return bytes(target)


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "put": lambda store, _: store.put("new", VIEWS, crc32c=CRC),
    "put what exists": lambda store, _: store.put("k", VIEWS, crc32c=CRC, if_absent=True),
    "list_uploads": lambda store, _: list(store.list_uploads()),
    "read_into": lambda store, _: _read_into(store, "k"),
    "read_into short": lambda store, _: _read_into(store, "k", 8),
    "read_into beyond": lambda store, _: _read_into(store, "k", 50),
    "read_into missing": lambda store, _: _read_into(store, "nope"),
    "read": lambda store, _: store.read("k", max_bytes=100),
    "read missing": lambda store, _: store.read("nope", max_bytes=100),
    "head": lambda store, _: store.head("k"),
    "head missing": lambda store, _: store.head("nope"),
    "list": lambda store, _: list(store.list()),
    "list of nothing": lambda store, _: list(store.list("nope/")),
    "list_directories": lambda store, _: list(store.list_directories()),
    "copy": lambda store, _: store.copy_from(store.url("k"), "copied"),
    "copy missing": lambda store, _: store.copy_from(store.url("nope"), "copied"),
    "delete": lambda store, _: store.delete(["gone"]),
}
"""Calls on every store over HTTP, in which `k` is an object; the second argument is of use to other calls."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, as it came over the wire."""

    method: str
    head: bytes
    body: bytes

    @property
    def raw(self) -> bytes:
        return self.head + self.body

    def framed(self, framing: str) -> Answer:
        """The same answer with its body in chunks, or up to the end of the connection."""
        if not self.body or framing == "length":
            return self
        lines = [line for line in self.head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
        head = b"\r\n".join(lines)
        if framing == "close":
            return Answer(method=self.method, head=head, body=self.body)
        head = head.removesuffix(b"\r\n\r\n") + b"\r\nTransfer-Encoding: chunked\r\nTrailer: x-t\r\n\r\n"
        step = max(len(self.body) // 3, 1)
        pieces = [self.body[begin : begin + step] for begin in range(0, len(self.body), step)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        return Answer(method=self.method, head=head, body=chunks + b"0\r\nx-t: 1\r\n\r\n")


@dataclass
class Tape:
    """A server on loopback. It records what another one answers, and then plays it back, as `script` says."""

    target_url: str
    recorded: list[Answer] = field(default_factory=list)
    script: list[bytes] | None = None
    """The answers to send, each on a connection of its own, which ends after it."""
    instead: bytes | None = None
    """The answer that is sent first if `script` is empty."""
    is_lasting: bool = False
    """`instead` is sent again and again."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.server = ScriptedServer((self._answer,))

    def _answer(self, connection: socket.socket, request: Recorded) -> None:
        with self._lock:
            if self.script is not None:
                played = self.script.pop(0) if self.script else b""
            else:
                played, self.instead = self.instead, self.instead if self.is_lasting else None
        connection.sendall(self._fetched(request) if played is None else played)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):  # until the client has closed it too: nothing of the answer is reset away
            pass

    def _fetched(self, request: Recorded) -> bytes:
        parts = urlsplit(self.target_url)
        with socket.create_connection((parts.hostname or "", parts.port or 80), SOCKET_TIMEOUT_S) as target:
            target.sendall(request.head + request.body)
            stream = Stream(target)
            head = stream.head()
            assert head is not None
            content = b"".join(stream.answer_body(head, method=request.method))
            if head.is_chunked:
                content = _joined(content)
            lines = [line for line in head.raw.split(b"\r\n") if not line.lower().startswith(_FRAMING)]
            if request.method != "HEAD" and head.status != 204:
                lines.insert(1, b"Content-Length: %d" % len(content))
            elif length := head.header("content-length"):
                lines.insert(1, b"Content-Length: " + length.encode())
            answer = Answer(
                method=request.method, head=b"\r\n".join([*lines[:-2], b"Connection: close", b"", b""]), body=content
            )
        with self._lock:
            self.recorded.append(answer)
        return answer.raw


_FRAMING = (b"transfer-encoding", b"content-length", b"connection", b"keep-alive")


def _joined(chunks: bytes) -> bytes:
    content = b""
    while True:
        size, _, chunks = chunks.partition(b"\r\n")
        if not int(size, 16):
            return content
        content, chunks = content + chunks[: int(size, 16)], chunks[int(size, 16) + 2 :]


def outcome(call: Callable[[], object]) -> Outcome:
    """Return what a call gave or raised. What is no `StoreError` is not caught."""
    try:
        return "gave", call()
    except StoreError as error:
        return "raised", type(error)


def breaks(answer: Answer, *, every: int) -> Iterator[tuple[str, bytes]]:
    """`answer` cut before a byte; each cut has a name."""
    raw = answer.raw
    for at in range(len(raw)):
        is_edge = any(raw[max(at - near, 0) : at + 1].endswith((b"\r\n", b"\r", b":")) for near in (0, 1)) and at < 1200
        if at % every == 0 or is_edge or at + 2 >= len(raw):
            yield f"cut at {at}", raw[:at]


def check_broken(tape: Tape, call: Callable[[], object], framings: Iterable[str], *, every: int) -> int:
    """Make `call` once for real, and once for each break of each of its answers; how many there were.

    Each gives what the whole answer gives, or `TransientStoreError`: it is tried again.
    """
    tape.recorded, tape.script = [], None
    whole = outcome(call)
    recorded = tape.recorded
    if not any(answer.body for answer in recorded):
        framings = ["length"]
    return sum(
        _check_framed(tape, call, whole, [one.framed(framing) for one in recorded], every) for framing in framings
    )


def _check_framed(tape: Tape, call: Callable[[], object], whole: Outcome, answers: list[Answer], every: int) -> int:
    tape.script = [answer.raw for answer in answers]
    again = outcome(call)
    assert again == whole or (again[0] == "raised" and issubclass(again[1], TransientStoreError)), (whole, again)  # type: ignore[arg-type]
    num_breaks, wrong = 0, []
    for number, answer in enumerate(answers):
        for name, broken in breaks(answer, every=every):
            num_breaks += 1
            tape.script = [*(before.raw for before in answers[:number]), broken]
            got: Any = outcome(call)
            if got != whole and not (got[0] == "raised" and issubclass(got[1], TransientStoreError)):
                wrong.append((number, name, got, broken[-60:]))
    assert wrong == [], f"{len(wrong)} of {num_breaks}; the whole answer: {whole}"
    return num_breaks


_PAGE = b"<!doctype html><html><head><title>Sign in</title></head><body>Welcome</body></html>"
_WEB = b'Content-Type: text/html\r\nETag: "page"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n'
_PLAIN = b"Content-Type: text/plain\r\n"


def _foreign(status: int, headers: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, headers, len(body), body)


FOREIGN: dict[str, bytes] = {
    **{f"{status} empty": _foreign(status, b"", b"") for status in (102, 200, 202, 204, 206, 400, 404, 410, 412, 416)},
    **{
        f"{status} page": _foreign(status, _WEB, _PAGE) for status in (200, 203, 206, 400, 401, 403, 404, 409, 412, 416)
    },
    **{f"{status} words": _foreign(status, _PLAIN, b"no upstream") for status in (404, 412, 416, 500, 502, 503)},
    "200 a page of XML": _foreign(200, b"Content-Type: application/xml\r\n", b"<html><Contents/></html>"),
    "200 another's JSON": _foreign(200, b"Content-Type: application/json\r\n", b'{"status": "ok", "items": []}'),
    "404 another's JSON": _foreign(404, b"Content-Type: application/json\r\n", b'{"message": "no Route matched"}'),
}
"""Answers of proxies, load balancers, web servers and gateways for APIs."""


def check_foreign(tape: Tape, call: Callable[[], object], *, may_succeed: tuple[str, ...]) -> None:
    """Let `call` meet each foreign answer: once, as the first that it gets, and as the only one that it ever gets.

    Each gives what the store's own answer gives, or `TransientStoreError`; with nothing but foreign answers always
    that, but for those that `may_succeed`.
    """
    whole = outcome(call)
    wrong = []
    for name, answer in FOREIGN.items():
        for is_lasting in (False, True):
            tape.instead, tape.is_lasting = answer, is_lasting
            got: Any = outcome(call)
            is_transient = got[0] == "raised" and issubclass(got[1], TransientStoreError)
            if not is_transient and (got != whole or (is_lasting and name not in may_succeed)):
                wrong.append((name, is_lasting, got))
    assert wrong == [], f"{len(wrong)}; the whole answer: {whole}"


class BrokenAnswerTests:
    """A subclass says which calls are made, and has the store's server in the fixture `http_server`.

    Its fixture `taped` is the arguments of each call.
    """

    calls: ClassVar[dict[str, Callable[[Any, Any], object]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("name", self.calls)

    @pytest.fixture
    def tape(self, http_server: Any) -> Iterator[Tape]:
        tape = Tape(http_server.endpoint_url)
        yield tape
        tape.server.close()

    def test_a_broken_answer_is_tried_again(self, tape: Tape, taped: tuple[Any, Any], name: str) -> None:
        """If this fails, a connection that breaks ends a save or a load, for a wrong reason; or half an answer is taken
        for a whole one: nothing is there, a part has another ETag, an object is shorter than it is.
        """
        assert check_broken(tape, lambda: self.calls[name](*taped), ["chunks"], every=EVERY) > 10

    @pytest.mark.faults
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a body whose head botocore refuses
    def test_every_broken_answer_is_tried_again(self, tape: Tape, taped: tuple[Any, Any], name: str) -> None:
        """If this fails, it does for a byte, or a framing, that the short form of the test leaves out."""
        assert check_broken(tape, lambda: self.calls[name](*taped), ["length", "chunks", "close"], every=1) > 100

    def test_answer_that_is_not_the_stores_is_not_believed(self, tape: Tape, taped: tuple[Any, Any], name: str) -> None:
        """If this fails, a web page or a load balancer's 404 says that a checkpoint is missing, damaged or written."""
        removes = name.startswith(("delete", "abort"))
        may_succeed = ("200 empty", "204 empty") if removes else ()
        check_foreign(tape, lambda: self.calls[name](*taped), may_succeed=may_succeed)
