"""Rules and actions of the wire, error answers of S3 and GCS, and the parsing of HTTP messages."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from cloudckpt.testing.faulty_store import Draw, without_attempts

Moment: TypeAlias = Literal["request", "answer"]
"""Before the store gets the request, or after it has answered and before the client gets the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Record of one request."""

    method: str
    target: str
    """Path and query as sent."""
    headers: Headers
    """Names are in lower case; headers with credentials are left out."""
    action: Action | None = None
    """Action of a rule; ``None`` if the request was forwarded unchanged."""

    def header(self, name: str) -> str | None:
        """The first value of the header `name`."""
        return next((value for known, value in self.headers if known == name.lower()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The wire answers, and the store does not get the request."""

    status: int
    body: bytes = b""
    headers: Headers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseAnswer:
    """The store answers the whole request; then the connection is reset before the client gets the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """The connection is reset after `after_bytes` of the request's body, always before its end."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAnswer:
    """The connection ends after `after_bytes` of the answer's body, always before its last byte.

    With `reset`, it is reset instead of closed, and the client's system may drop received bytes. An answer without a
    body is lost.
    """

    after_bytes: int = 0
    reset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRequest:
    """The connection stalls after `after_bytes` of the request's body, always before its end."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallAnswer:
    """The connection stalls after `after_bytes` of the answer's body; with ``None``, before the answer's first line."""

    after_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Calls `function` in the connection's thread, and forwards the exchange when it has returned.

    The moment ``"request"`` is before the store gets the request, for example to kill the server. The moment
    ``"answer"`` is after the store has answered completely and before the client gets any of it, for example to kill
    the client between a commit and its confirmation.
    """

    function: Callable[[Seen], None]
    moment: Moment = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Delays the exchange by `delay_s`."""

    delay_s: float
    moment: Moment = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Limits the rates at which the bodies of the exchange are forwarded; ``None``: no limit."""

    request_bytes_per_s: float | None = None
    answer_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSomewhere:
    """The connection breaks at a random place: in the request, before the answer, or in it.

    The `action` of the request's record is the chosen `CutRequest`, `LoseAnswer` or `CutAnswer`.
    """

    longest_answer_bytes: int = 1 << 20
    """An answer is cut within this number of bytes."""


Action: TypeAlias = (
    Reply | LoseAnswer | CutRequest | CutAnswer | StallRequest | StallAnswer | Tell | Delay | Throttle | CutSomewhere
)


def _s3_error(status: int, code: str, message: str) -> Reply:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Reply(status=status, body=body.encode(), headers=(("Content-Type", "application/xml"),))


def _gcs_error(status: int, reason: str, message: str) -> Reply:
    errors = [{"domain": "global", "reason": reason, "message": message}]
    body = json.dumps({"error": {"code": status, "message": message, "errors": errors}})
    return Reply(status=status, body=body.encode(), headers=(("Content-Type", "application/json; charset=UTF-8"),))


# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
S3_SLOW_DOWN = _s3_error(503, "SlowDown", "Please reduce your request rate.")
S3_INTERNAL_ERROR = _s3_error(500, "InternalError", "We encountered an internal error. Please try again.")
S3_ACCESS_DENIED = _s3_error(403, "AccessDenied", "Access Denied")
# https://docs.cloud.google.com/storage/docs/json_api/v1/status-codes
GCS_TOO_MANY_REQUESTS = _gcs_error(429, "rateLimitExceeded", "The rate of requests is too high.")
GCS_UNAVAILABLE = _gcs_error(503, "backendError", "Backend Error")
GCS_FORBIDDEN = _gcs_error(403, "forbidden", "The caller does not have storage access to the object.")


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
    """Head of an HTTP message, raw and parsed."""

    raw: bytes
    words: tuple[str, str, str]
    """Words of the first line: method, target and version, or version, status and reason."""
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
        """Method of a request."""
        return self.words[0]

    @property
    def target(self) -> str:
        """Path and query of a request."""
        return self.words[1]

    @property
    def status(self) -> int:
        """Status of an answer."""
        return int(self.words[1])

    @property
    def expects_continue(self) -> bool:
        """True if the client waits for an interim answer before it sends the body."""
        return (self.header("expect") or "").lower() == "100-continue"

    @property
    def is_chunked(self) -> bool:
        """True if the body has the chunked encoding."""
        return "chunked" in (self.header("transfer-encoding") or "").lower()

    @property
    def length_bytes(self) -> int | None:
        """Length of the body by the header; ``None`` without one."""
        length = self.header("content-length")
        return None if length is None else int(length)

    def has_body_to(self, method: str) -> bool:
        """Return True if a body follows this head of an answer to `method`."""
        return method != "HEAD" and self.status not in _NO_BODY

    def leaves_open(self, request: Head) -> bool:
        """Return True if another request may follow this answer to `request` on the connection."""
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
        """True if received bytes are buffered."""
        return bool(self._buffer)

    def head(self) -> Head | None:
        """Read the head of the next message; ``None`` if the connection ends before it."""
        if not self._buffer and not self._receive():
            return None
        raw = self._until(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        word, target, rest = ([*first.split(" ", 2), "", ""])[:3]
        pairs = (line.partition(":") for line in lines)
        headers = tuple((name.strip().lower(), value.strip()) for name, _, value in pairs)
        return Head(raw=raw, words=(word, target, rest), headers=headers)

    def request_body(self, head: Head) -> Iterator[bytes]:
        """Yield the raw body of a request in pieces."""
        return self._chunks() if head.is_chunked else self._exactly(head.length_bytes or 0)

    def answer_body(self, head: Head, *, method: str) -> Iterator[bytes]:
        """Yield the raw body of an answer to `method` in pieces."""
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
    """Yield the first `most_bytes` of `pieces`, but never the last byte, so that even a short body is incomplete."""
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


_UPLOAD_ID = re.compile(r"(?<=[?&])(uploadId|upload_id)=[^&]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An action, and the requests that it happens to.

    A rule counts every request that it matches. It skips the first `skip` of them, acts on the next `times` (``None``:
    all of them), and ignores the rest. With a `probability` below 1, it acts only on that fraction of them. The choice
    depends on `seed`, the method, the target and the number of earlier requests with both, but not on other requests
    or on the random ids of saves and uploads.
    """

    action: Action
    method: str | None = None
    """``None``: any."""
    path: str = ""
    """A regular expression, searched for in path and query as sent (percent-encoded)."""
    header: str | None = None
    """A header that the request must have, with any value."""
    skip: int = 0
    times: int | None = 1
    probability: float = 1.0
    seed: int = 0

    def matches(self, request: Seen) -> bool:
        """Return True if the rule counts the request."""
        return (
            self.method in (None, request.method)
            and re.search(self.path, request.target) is not None
            and (self.header is None or request.header(self.header) is not None)
        )

    def acts_on(self, num_before: int) -> bool:
        """Return True if the rule acts on a match that follows `num_before` others."""
        return self.skip <= num_before and (self.times is None or num_before < self.skip + self.times)


@dataclass(slots=True, kw_only=True)
class CountedRule:
    rule: Rule
    num_matched: int = 0
    num_alike: Counter[tuple[str, str]] = field(default_factory=Counter)

    def action_on(self, request: Seen) -> Action | None:
        """Count `request`, and return the action on it; ``None`` if the rule is not due."""
        rule = self.rule
        if not rule.matches(request):
            return None
        self.num_matched += 1
        alike = (request.method, _UPLOAD_ID.sub("", without_attempts(request.target)))
        self.num_alike[alike] += 1
        if not rule.acts_on(self.num_matched - 1):
            return None
        draw = Draw(rule.seed, *alike, self.num_alike[alike])
        if draw.fraction("acts") >= rule.probability:
            return None
        return _cut(rule.action, request, draw) if isinstance(rule.action, CutSomewhere) else rule.action


def _cut(action: CutSomewhere, request: Seen, draw: Draw) -> Action:
    kind = draw.below(3, "kind")
    if kind == 0:
        return CutRequest(after_bytes=draw.below(int(request.header("content-length") or 0) + 1, "bytes"))
    if kind == 1:
        return LoseAnswer()
    after_bytes = draw.below(action.longest_answer_bytes, "bytes")
    return CutAnswer(after_bytes=after_bytes, reset=draw.below(2, "reset") == 1)
