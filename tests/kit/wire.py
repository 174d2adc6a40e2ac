"""A proxy on the loopback interface that breaks or slows down HTTP exchanges by rule.

It forwards every byte to the store's endpoint unchanged, including the Host header, so that signatures remain valid.
Rules choose requests by counting them or by random numbers with a seed; only delays depend on time. It supports
HTTP/1.1 without TLS, and only servers that accept any host name.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from typing_extensions import Self

from cloudckpt.testing.faults import draw, without_attempts

_WAIT_S = 30.0
_HOST = "127.0.0.1"
_RECEIVE_BYTES = 256 * 1024
_THROTTLED_BYTES = 16 * 1024
"""Size of the pieces that are forwarded at a limited rate."""
_MAX_ANSWER_BYTES = 256 * 1024
"""A cut at a random place in an answer is within this number of bytes."""
Headers: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Record of one request."""

    method: str
    target: str
    """Path and query as sent."""
    action: Action | None = None
    """Action of a rule; ``None`` if the request was forwarded unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The wire answers, and the store does not get the request."""

    status: int
    body: bytes = b""
    headers: Headers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """The connection is reset after `after_bytes` of the request's body, always before its end.

    With `stalls`, it remains open, and nothing more is forwarded.
    """

    after_bytes: int = 0
    stalls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAnswer:
    """The connection ends after `after_bytes` of the answer's body, always before its last byte.

    With ``None``, it ends before the answer's first line. The store has carried out the whole request. With `reset`,
    the connection is reset instead of closed, and the client's system may drop received bytes; with `stalls`, it
    remains open.
    """

    after_bytes: int | None = None
    reset: bool = False
    stalls: bool = False


LOSE_ANSWER = CutAnswer(reset=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCallback:
    """Calls `function` in the connection's thread, after the store has answered and before the client gets any of it.

    For example, it kills the client between a commit and its confirmation.
    """

    function: Callable[[Seen], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Delays the request by `delay_s`, and limits the rate at which each body of the exchange is forwarded."""

    bytes_per_s: float
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSomewhere:
    """The connection breaks at a random place: in the request, before the answer, or in it.

    The `action` of the request's record is the chosen `CutRequest` or `CutAnswer`.
    """


Action: TypeAlias = Reply | CutRequest | CutAnswer | WireCallback | Throttle | CutSomewhere


def _s3_error(status: int, code: str, message: str) -> Reply:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Reply(status=status, body=body.encode(), headers=(("Content-Type", "application/xml"),))


def _gcs_error(status: int, reason: str, message: str) -> Reply:
    errors = [{"domain": "global", "reason": reason, "message": message}]
    body = json.dumps({"error": {"code": status, "message": message, "errors": errors}})
    return Reply(status=status, body=body.encode(), headers=(("Content-Type", "application/json; charset=UTF-8"),))


# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
S3_SLOW_DOWN = _s3_error(503, "SlowDown", "Please reduce your request rate.")
S3_ACCESS_DENIED = _s3_error(403, "AccessDenied", "Access Denied")
# https://docs.cloud.google.com/storage/docs/json_api/v1/status-codes
GCS_TOO_MANY_REQUESTS = _gcs_error(429, "rateLimitExceeded", "The rate of requests is too high.")
# Seen in reports of users; no document quotes it.
GCS_APPENDABLE_ONLY = _gcs_error(400, "invalid", "This bucket requires appendable objects.")
GCS_FORBIDDEN = _gcs_error(403, "forbidden", "The caller does not have storage access to the object.")
GCS_RETAINED = _gcs_error(
    403,
    "retentionPolicyNotMet",
    "Object is subject to bucket's retention policy and cannot be deleted until 2036-01-01.",
)
"""The refusal to delete an object in a bucket with a retention policy (https://cloud.google.com/storage/docs/bucket-lock)."""


_UPLOAD_ID = re.compile(r"(?<=[?&])(uploadId|upload_id)=[^&]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRule:
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
    skip: int = 0
    times: int | None = 1
    probability: float = 1.0
    seed: int = 0


class _CountedRule:
    """A rule, and the requests that it has counted."""

    def __init__(self, rule: WireRule) -> None:
        self._rule = rule
        self._num_matched = 0
        self._num_alike: Counter[tuple[str, str]] = Counter()

    def action_on(self, head: Head) -> Action | None:
        """Count the request, and return the action on it; ``None`` if the rule is not due."""
        rule = self._rule
        if rule.method not in (None, head.method) or not re.search(rule.path, head.target):
            return None
        num_before = self._num_matched
        self._num_matched += 1
        alike = (head.method, _UPLOAD_ID.sub("", without_attempts(head.target)))
        self._num_alike[alike] += 1
        if num_before < rule.skip or (rule.times is not None and num_before >= rule.skip + rule.times):
            return None
        event = (rule.seed, *alike, self._num_alike[alike])
        if draw("acts", event) >= rule.probability:
            return None
        return _choose_cut(head, event) if isinstance(rule.action, CutSomewhere) else rule.action


def _choose_cut(head: Head, event: tuple[object, ...]) -> Action:
    kind, place = draw("kind", event), draw("place", event)
    if kind < 1 / 3:
        return CutRequest(after_bytes=int(place * ((head.length_bytes or 0) + 1)))
    if kind < 2 / 3:
        return LOSE_ANSWER
    return CutAnswer(after_bytes=int(place * _MAX_ANSWER_BYTES), reset=draw("reset", event) < 1 / 2)


class Wire:
    """A proxy for the endpoint `target_url` (``http://host:port``), open until its context ends.

    The first rule that is due for a request acts; all rules that match count it. The end of the context closes every
    connection and ends every thread.
    """

    def __init__(self, target_url: str, *rules: WireRule) -> None:
        parts = urlsplit(target_url)
        self._target = (parts.hostname or "", parts.port or 80)
        self._lock = threading.Lock()
        self._rules: list[_CountedRule] = []
        self._requests: list[Seen] = []
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        # A bound socket reserves the port while nothing listens on it.
        self._holder = _bind(port=0)
        self._port: int = self._holder.getsockname()[1]
        self._listener: socket.socket | None = None
        self.add(*rules)
        self._listen()

    @property
    def url(self) -> str:
        """The endpoint that clients use instead of the store's."""
        return f"http://{_HOST}:{self._port}"

    @property
    def requests(self) -> tuple[Seen, ...]:
        """All requests so far in the order of arrival, each with the action of a rule."""
        with self._lock:
            return tuple(self._requests)

    def add(self, *rules: WireRule) -> None:
        """Add rules after the existing ones; they count from now on."""
        with self._lock:
            self._rules += map(_CountedRule, rules)

    def clear(self) -> None:
        """Remove all rules. Stalled exchanges remain stalled."""
        with self._lock:
            self._rules.clear()

    @property
    def num_acted(self) -> int:
        """Number of requests that a rule acted on."""
        return sum(seen.action is not None for seen in self.requests)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse new connections during the context, and end the existing ones."""
        self._stop_listening()
        self._end_connections()
        try:
            yield
        finally:
            self._listen()

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """Ignore attempts to connect during the context, like a firewall that drops packets (Linux only).

        The queue of connections to accept is full, so the kernel ignores further ones.
        """
        with self.refusing(), contextlib.ExitStack() as stack:
            full = stack.enter_context(_bind(port=self._port))
            full.listen(0)
            for _ in range(2):
                waiting = stack.enter_context(socket.socket())
                waiting.settimeout(0.0)
                waiting.connect_ex((_HOST, self._port))
            yield

    def close(self) -> None:
        """End every connection and thread. A second call has no effect."""
        self._closing.set()
        self._stop_listening()
        self._end_connections()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(_WAIT_S)
        self._holder.close()
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            raise RuntimeError(f"{self.url}: {len(left)} connections did not end within {_WAIT_S:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, delay_s: float | None = None) -> None:
        """Wait for `delay_s` (``None``: for ever), at most until the wire is closed."""
        self._closing.wait(delay_s)

    def reach_store(self) -> socket.socket:
        """Connect to the store."""
        store = socket.create_connection(self._target, timeout=_WAIT_S)
        store.settimeout(None)  # closing the wire ends every wait
        self._keep(store)
        return store

    def record(self, head: Head) -> Seen:
        """Record a request, with the action of a rule."""
        with self._lock:
            actions = [rule.action_on(head) for rule in self._rules]
            due = next((action for action in actions if action is not None), None)
            self._requests.append(Seen(method=head.method, target=head.target, action=due))
            return self._requests[-1]

    def _listen(self) -> None:
        listener = _bind(port=self._port)
        listener.listen(128)
        self._listener = listener
        self._start(self._accept, listener)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._start(self._serve, client)

    def _start(self, function: Callable[[socket.socket], None], argument: socket.socket) -> None:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=function, args=(argument,), name=f"wire {self.url}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        try:
            self._keep(client)
            _Connection(client, self).run()
        except ConnectionError:
            _reset(client)

    def _keep(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open = {one for one in self._open if one.fileno() >= 0} | {connection}
            is_late = self._closing.is_set()
        if is_late:
            connection.close()
            raise ConnectionAbortedError

    def _end_connections(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _bind(*, port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((_HOST, port))
    except BaseException:
        bound.close()
        raise
    return bound


def _reset(connection: socket.socket) -> None:
    """Reset the connection, so that the other side gets an error."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class _Connection:
    """Forwards exchanges until either side, or a rule, ends the connection."""

    def __init__(self, client: socket.socket, wire: Wire) -> None:
        self._client = Stream(client)
        self._wire = wire
        self._store: Stream | None = None

    def run(self) -> None:
        """Forward exchanges until the end, and close both sockets."""
        try:
            while self._waits_for_client() and (head := self._client.head()) is not None:
                if not self._exchange(head):
                    break
        except (EndedError, OSError, ValueError):
            # A connection that one side broke is broken for the other side too.
            _reset(self._client.socket)
        finally:
            self._client.socket.close()
            if self._store is not None:
                self._store.socket.close()

    def _waits_for_client(self) -> bool:
        """Wait for the client. Return False if the store ends the connection first."""
        if self._store is None or self._client.holds_bytes:
            return True
        ready, _, _ = select.select([self._client.socket, self._store.socket], [], [])
        return self._client.socket in ready

    def _exchange(self, head: Head) -> bool:
        """Forward one request and its answer; return True if another may follow."""
        seen = self._wire.record(head)
        action = seen.action
        body = self._client.request_body(head)
        if isinstance(action, Reply):
            return self._reply(action, head, body)
        if isinstance(action, Throttle):
            self._wire.wait(action.delay_s)
            body = self._slow_down(body, action.bytes_per_s)
        if isinstance(action, CutRequest):
            return self._break_request(action, head, body)
        answer = self._pass_on(head, body)
        pieces = self._reach_store().answer_body(answer, method=head.method)
        if isinstance(action, CutAnswer):
            return self._break_answer(action, answer, pieces)
        if isinstance(action, WireCallback):
            pieces = iter(list(pieces))  # S3 has carried a completion out when its answer ends, not when it begins
            action.function(seen)
        if isinstance(action, Throttle):
            pieces = self._slow_down(pieces, action.bytes_per_s)
        self._client.socket.sendall(answer.raw)
        for piece in pieces:
            self._client.socket.sendall(piece)
        return answer.leaves_open(head)

    def _slow_down(self, pieces: Iterator[bytes], bytes_per_s: float) -> Iterator[bytes]:
        for piece in pieces:
            for start in range(0, len(piece), _THROTTLED_BYTES):
                part = piece[start : start + _THROTTLED_BYTES]
                self._wire.wait(len(part) / bytes_per_s)
                yield part

    def _reply(self, action: Reply, head: Head, body: Iterator[bytes]) -> bool:
        fields = [("Content-Length", str(len(action.body))), *action.headers]
        if head.expects_continue:
            fields.append(("Connection", "close"))
        else:
            for _ in body:
                pass
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        reason = http.client.responses.get(action.status, "")
        content = b"" if head.method == "HEAD" else action.body
        self._client.socket.sendall(f"HTTP/1.1 {action.status} {reason}\r\n{lines}\r\n".encode("latin-1") + content)
        return not head.expects_continue

    def _pass_on(self, head: Head, body: Iterator[bytes]) -> Head:
        """Forward the whole request, and return the head of the store's answer."""
        store = self._reach_store()
        store.socket.sendall(head.raw)
        if head.expects_continue:
            answer = self._next_answer(store)
            if not answer.is_interim:
                return answer
        with contextlib.suppress(ConnectionError):  # a store may refuse a request before it has read all
            for piece in body:
                store.socket.sendall(piece)
        while (answer := self._next_answer(store)).is_interim:
            pass
        return answer

    def _next_answer(self, store: Stream) -> Head:
        """Return the next answer; an interim one is forwarded."""
        answer = store.head()
        if answer is None:
            raise EndedError
        if answer.is_interim:
            self._client.socket.sendall(answer.raw)
        return answer

    def _break_request(self, action: CutRequest, head: Head, body: Iterator[bytes]) -> bool:
        pieces = _all_but_the_last_byte(body, most_bytes=action.after_bytes)
        first = next(pieces, None)
        if first is not None:  # a request without a body is complete with its head, so nothing is forwarded
            store = self._reach_store()
            store.socket.sendall(head.raw)
            store.socket.sendall(first)
            for piece in pieces:
                store.socket.sendall(piece)
        if action.stalls:
            self._wire.wait()
        _reset(self._client.socket)
        return False

    def _break_answer(self, action: CutAnswer, answer: Head, pieces: Iterator[bytes]) -> bool:
        if action.after_bytes is not None:
            self._client.socket.sendall(answer.raw)
            for piece in _all_but_the_last_byte(pieces, most_bytes=action.after_bytes):
                self._client.socket.sendall(piece)
        for _ in pieces:  # read the answer to its end, so that the store has carried the request out
            pass
        if action.stalls:
            self._wire.wait()
        if action.reset:
            _reset(self._client.socket)
        return False

    def _reach_store(self) -> Stream:
        if self._store is None:
            self._store = Stream(self._wire.reach_store())
        return self._store


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
    def is_interim(self) -> bool:
        """True if another answer to the same request follows."""
        return self.status < http.client.OK

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
        return method != "HEAD" and self.status not in (http.client.NO_CONTENT, http.client.NOT_MODIFIED)

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
            if not self._receive():
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


def _all_but_the_last_byte(pieces: Iterator[bytes], *, most_bytes: int) -> Iterator[bytes]:
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
