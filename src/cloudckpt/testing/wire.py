"""A proxy on the loopback interface that breaks or slows down HTTP exchanges by rule.

It forwards every byte to the store's endpoint unchanged, including the Host header, so that signatures remain valid.
Rules choose requests by counting them or by random numbers with a seed; only delays depend on time::

    with Wire(server.endpoint_url, Rule(action=LoseAnswer(), method="PUT", path="manifest.json")) as wire:
        options = Options(storage_options={**server.storage_options, "endpoint_url": wire.url})
        cloudckpt.save(state_dict, "s3://bucket/run", options=options)  # commits, and has to find out that it did
        print(wire.requests)

It supports HTTP/1.1 without TLS, and only servers that accept any host name: local servers do, cloud services do not.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TypeAlias
from urllib.parse import urlsplit

from typing_extensions import Self

from cloudckpt.testing.wire_rules import (
    GCS_FORBIDDEN,
    GCS_TOO_MANY_REQUESTS,
    GCS_UNAVAILABLE,
    S3_ACCESS_DENIED,
    S3_INTERNAL_ERROR,
    S3_SLOW_DOWN,
    Action,
    CountedRule,
    CutAnswer,
    CutRequest,
    CutSomewhere,
    Delay,
    EndedError,
    Head,
    LoseAnswer,
    Moment,
    Reply,
    Rule,
    Seen,
    StallAnswer,
    StallRequest,
    Stream,
    Tell,
    Throttle,
    all_but_the_last_byte,
)

__all__ = [
    "GCS_FORBIDDEN",
    "GCS_TOO_MANY_REQUESTS",
    "GCS_UNAVAILABLE",
    "S3_ACCESS_DENIED",
    "S3_INTERNAL_ERROR",
    "S3_SLOW_DOWN",
    "Action",
    "CutAnswer",
    "CutRequest",
    "CutSomewhere",
    "Delay",
    "LoseAnswer",
    "Reply",
    "Rule",
    "Seen",
    "StallAnswer",
    "StallRequest",
    "Tell",
    "Throttle",
    "Wire",
]

_WAIT_S = 30.0
_HOST = "127.0.0.1"


class Wire:
    """A proxy for the endpoint `target_url` (``http://host:port``), open until its context ends.

    The first rule that is due for a request acts; all rules that match count it. The end of the context closes every
    connection and ends every thread. Rules that slow an exchange down call `pause` with seconds; by default it waits,
    at most until the wire is closed.
    """

    def __init__(self, target_url: str, *rules: Rule, pause: Callable[[float], object] | None = None) -> None:
        parts = urlsplit(target_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"Wire supports only plain HTTP. Give http://host:port, not {target_url!r}")
        self._target = (parts.hostname, parts.port or 80)
        self._lock = threading.Lock()
        self._rules: list[CountedRule] = []
        self._requests: list[Seen] = []
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._pause = pause or self._closing.wait
        # A bound socket reserves the port while nothing listens on it.
        self._holder = _bound(port=0)
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

    def add(self, *rules: Rule) -> None:
        """Add rules after the existing ones; they count from now on."""
        with self._lock:
            self._rules += [CountedRule(rule=rule) for rule in rules]

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
        self._reset_all()
        try:
            yield
        finally:
            self._listen()

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """Ignore attempts to connect during the context, like a firewall that drops packets (Linux only).

        The queue of connections to accept is full, so the kernel ignores further ones.
        """
        self._stop_listening()
        self._reset_all()
        with contextlib.ExitStack() as stack:
            stack.callback(self._listen)
            full = stack.enter_context(_bound(port=self._port))
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
        self._reset_all()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> None:
        listener = _bound(port=self._port)
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
        kept = [client]
        try:
            self._keep(client)
            Connection(
                client,
                connect=lambda: self._reach_store(kept),
                decide=self._decide,
                stall=self._closing.wait,
                pause=self._pause,
            ).run()
        except ConnectionError:
            reset(client)
        finally:
            with self._lock:
                self._open.difference_update(kept)

    def _reach_store(self, kept: list[socket.socket]) -> socket.socket:
        store = socket.create_connection(self._target, timeout=_WAIT_S)
        store.settimeout(None)  # closing the wire ends every wait
        kept.append(store)
        self._keep(store)
        return store

    def _keep(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(connection)
            is_late = self._closing.is_set()
        if is_late:
            connection.close()
            raise ConnectionAbortedError

    def _reset_all(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _decide(self, head: Head) -> Seen:
        request = Seen(method=head.method, target=head.target, headers=head.public_headers)
        with self._lock:
            actions = [counted.action_on(request) for counted in self._rules]
            request = replace(request, action=next((action for action in actions if action is not None), None))
            self._requests.append(request)
        return request


def _bound(*, port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((_HOST, port))
    except BaseException:
        bound.close()
        raise
    return bound


Decide: TypeAlias = Callable[[Head], Seen]
"""Records the request, with the action of a rule."""
Connect: TypeAlias = Callable[[], socket.socket]
Stall: TypeAlias = Callable[[], object]
"""Returns once the wire is closed."""
Pause: TypeAlias = Callable[[float], object]
"""Waits for a number of seconds."""

_FINAL = 200
_THROTTLED_BYTES = 16 * 1024  # the size of the pieces that are forwarded at a limited rate


def reset(connection: socket.socket) -> None:
    """Reset the connection, so that the other side gets an error."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Connection:
    """Forwards exchanges until either side, or a rule, ends the connection."""

    def __init__(self, client: socket.socket, *, connect: Connect, decide: Decide, stall: Stall, pause: Pause) -> None:
        self._client = Stream(client)
        self._connect = connect
        self._decide = decide
        self._stall = stall
        self._pause = pause
        self._store: Stream | None = None

    def run(self) -> None:
        """Forward exchanges until the end, and close both sockets."""
        try:
            while self._waits_for_client() and (head := self._client.head()) is not None:
                if not self._exchange(head):
                    break
        except (EndedError, OSError, ValueError):
            # A connection that one side broke is broken for the other side too.
            reset(self._client.socket)
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
        seen = self._decide(head)
        action = seen.action
        body = self._client.request_body(head)
        if isinstance(action, Reply):
            return self._reply(action, head, body)
        self._act("request", seen)
        if isinstance(action, Throttle):
            body = self._slowly(body, action.request_bytes_per_s)
        if isinstance(action, CutRequest | StallRequest):
            return self._break_request(action, head, body)
        answer = self._pass_on(head, body)
        pieces = self._reach_store().answer_body(answer, method=head.method)
        if isinstance(action, LoseAnswer | CutAnswer | StallAnswer):
            return self._break_answer(action, answer, pieces)
        if isinstance(action, Tell | Delay) and action.moment == "answer":
            pieces = iter(list(pieces))  # S3 has carried a completion out when its answer ends, not when it begins
        self._act("answer", seen)
        if isinstance(action, Throttle):
            pieces = self._slowly(pieces, action.answer_bytes_per_s)
        self._client.socket.sendall(answer.raw)
        for piece in pieces:
            self._client.socket.sendall(piece)
        return answer.leaves_open(head)

    def _act(self, moment: Moment, seen: Seen) -> None:
        action = seen.action
        if isinstance(action, Tell) and action.moment == moment:
            action.function(seen)
        if isinstance(action, Delay) and action.moment == moment:
            self._pause(action.delay_s)

    def _slowly(self, pieces: Iterator[bytes], bytes_per_s: float | None) -> Iterator[bytes]:
        if bytes_per_s is None:
            yield from pieces
            return
        for piece in pieces:
            for start in range(0, len(piece), _THROTTLED_BYTES):
                part = piece[start : start + _THROTTLED_BYTES]
                self._pause(len(part) / bytes_per_s)
                yield part

    def _reply(self, action: Reply, head: Head, body: Iterator[bytes]) -> bool:
        if not head.expects_continue:
            for _ in body:
                pass
        reason = http.client.responses.get(action.status, "")
        fields = [("Content-Length", str(len(action.body))), *action.headers]
        if head.expects_continue:
            fields.append(("Connection", "close"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        content = b"" if head.method == "HEAD" else action.body
        self._client.socket.sendall(f"HTTP/1.1 {action.status} {reason}\r\n{lines}\r\n".encode("latin-1") + content)
        return not head.expects_continue

    def _pass_on(self, head: Head, body: Iterator[bytes]) -> Head:
        """Forward the whole request, and return the head of the store's answer."""
        store = self._reach_store()
        store.socket.sendall(head.raw)
        if head.expects_continue:
            answer = self._final_answer(store, stops_at_interim=True)
            if answer is not None:
                return answer
        with contextlib.suppress(ConnectionError):  # a store may refuse a request before it has read all
            for piece in body:
                store.socket.sendall(piece)
        answer = self._final_answer(store)
        if answer is None:
            raise EndedError
        return answer

    def _final_answer(self, store: Stream, *, stops_at_interim: bool = False) -> Head | None:
        while (answer := store.head()) is not None:
            if answer.status >= _FINAL:
                return answer
            self._client.socket.sendall(answer.raw)
            if stops_at_interim:
                return None
        raise EndedError

    def _break_request(self, action: CutRequest | StallRequest, head: Head, body: Iterator[bytes]) -> bool:
        pieces = all_but_the_last_byte(body, most_bytes=action.after_bytes)
        first = next(pieces, None)
        if first is not None:  # a request without a body is complete with its head, so nothing is forwarded
            store = self._reach_store()
            store.socket.sendall(head.raw)
            store.socket.sendall(first)
            for piece in pieces:
                store.socket.sendall(piece)
        if isinstance(action, StallRequest):
            self._stall()
        reset(self._client.socket)
        return False

    def _break_answer(
        self, action: LoseAnswer | CutAnswer | StallAnswer, answer: Head, pieces: Iterator[bytes]
    ) -> bool:
        after_bytes = None if isinstance(action, LoseAnswer) else action.after_bytes
        if after_bytes is not None:
            self._client.socket.sendall(answer.raw)
            for piece in all_but_the_last_byte(pieces, most_bytes=after_bytes):
                self._client.socket.sendall(piece)
        for _ in pieces:  # read the answer to its end, so that the store has carried the request out
            pass
        if isinstance(action, StallAnswer):
            self._stall()
        if isinstance(action, LoseAnswer) or (isinstance(action, CutAnswer) and action.reset):
            reset(self._client.socket)
        return False

    def _reach_store(self) -> Stream:
        if self._store is None:
            self._store = Stream(self._connect())
        return self._store
