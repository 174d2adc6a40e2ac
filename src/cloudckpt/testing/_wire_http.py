"""Where HTTP/1.1 messages begin and end, without touching a byte of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

_RECEIVE_BYTES = 256 * 1024
_LONGEST_HEAD_BYTES = 256 * 1024
_NO_BODY = (204, 304)
_SECRET_HEADERS = (
    "authorization",
    "cookie",
    "proxy-authorization",
    "x-amz-security-token",
    "x-goog-iam-authorization-token",
)

Headers = tuple[tuple[str, str], ...]


class EndedError(Exception):
    """The other side ended the connection in the middle of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first lines of a message: as they came, and what they say."""

    raw: bytes
    words: tuple[str, str, str]
    """The three of the first line: method, target and version, or version, status and reason."""
    headers: Headers
    """Names in lower case."""

    def header(self, name: str) -> str | None:
        """The first value of the header `name`."""
        return next((value for known, value in self.headers if known == name), None)

    @property
    def public_headers(self) -> Headers:
        """The headers without those that hold credentials."""
        return tuple((name, value) for name, value in self.headers if name not in _SECRET_HEADERS)

    @property
    def method(self) -> str:
        """Of a request."""
        return self.words[0]

    @property
    def target(self) -> str:
        """Of a request: path and query."""
        return self.words[1]

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.words[1])

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for an interim answer before it sends the body."""
        return (self.header("expect") or "").lower() == "100-continue"

    @property
    def is_chunked(self) -> bool:
        """Whether the body says itself where it ends."""
        return "chunked" in (self.header("transfer-encoding") or "").lower()

    @property
    def length_bytes(self) -> int | None:
        """What the head says of the body's length, if anything."""
        length = self.header("content-length")
        return None if length is None else int(length)

    def has_body_to(self, method: str) -> bool:
        """Of an answer: whether a body follows, when the request was `method`."""
        return method != "HEAD" and self.status not in _NO_BODY

    def leaves_open(self, request: Head) -> bool:
        """Of an answer: whether another request may follow on the connection."""
        ends_with_connection = self.has_body_to(request.method) and not self.is_chunked and self.length_bytes is None
        return not (ends_with_connection or self._closes(self.words[0]) or request._closes(request.words[2]))

    def _closes(self, version: str) -> bool:
        connection = (self.header("connection") or "").lower()
        return "close" in connection or (version == "HTTP/1.0" and "keep-alive" not in connection)


class Stream:
    """One side of a connection, read message by message."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = bytearray()

    @property
    def holds_bytes(self) -> bool:
        """Whether something has been received that nobody has taken yet."""
        return bool(self._buffer)

    def head(self) -> Head | None:
        """The next message's head; ``None`` where the connection ends before it begins."""
        if not self._buffer and not self._receive():
            return None
        raw = self._until(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        word, target, rest = ([*first.split(" ", 2), "", ""])[:3]
        pairs = (line.partition(":") for line in lines)
        headers = tuple((name.strip().lower(), value.strip()) for name, _, value in pairs)
        return Head(raw=raw, words=(word, target, rest), headers=headers)

    def request_body(self, head: Head) -> Iterator[bytes]:
        """The body of a request, in pieces, framed as it came."""
        return self._chunks() if head.is_chunked else self._exactly(head.length_bytes or 0)

    def answer_body(self, head: Head, *, method: str) -> Iterator[bytes]:
        """The body of an answer to `method`, in pieces, framed as it came."""
        if not head.has_body_to(method):
            return iter(())
        if head.is_chunked:
            return self._chunks()
        return self._to_the_end() if head.length_bytes is None else self._exactly(head.length_bytes)

    def _exactly(self, size_bytes: int) -> Iterator[bytes]:
        while size_bytes:
            if not self._buffer and not self._receive():
                raise EndedError
            piece = self._take(min(size_bytes, len(self._buffer)))
            size_bytes -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while True:
            line = self._until(b"\r\n")
            yield line
            size_bytes = int(line.partition(b";")[0], 16)
            if size_bytes == 0:
                break
            yield from self._exactly(size_bytes + 2)
        while (trailer := self._until(b"\r\n")) != b"\r\n":
            yield trailer
        yield trailer

    def _to_the_end(self) -> Iterator[bytes]:
        while self._buffer or self._receive():
            yield self._take(len(self._buffer))

    def _until(self, mark: bytes) -> bytes:
        while (index := self._buffer.find(mark)) < 0:
            if len(self._buffer) > _LONGEST_HEAD_BYTES or not self._receive():
                raise EndedError
        return self._take(index + len(mark))

    def _take(self, size_bytes: int) -> bytes:
        piece = bytes(memoryview(self._buffer)[:size_bytes])
        del self._buffer[:size_bytes]
        return piece

    def _receive(self) -> bool:
        received = self.socket.recv(_RECEIVE_BYTES)
        self._buffer += received
        return bool(received)


def all_but_the_last_byte(pieces: Iterator[bytes], *, most_bytes: int) -> Iterator[bytes]:
    """The first `most_bytes` of `pieces`, but never all of them: what is meant to break off does, however short."""
    held = b""
    for piece in pieces:
        taken, most_bytes = held[:most_bytes], most_bytes - min(most_bytes, len(held))
        if taken:
            yield taken
        if not most_bytes:
            return
        held = piece
    if taken := held[:-1][:most_bytes]:
        yield taken
