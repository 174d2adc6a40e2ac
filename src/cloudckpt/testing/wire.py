"""The network between a client and a store, with a will of its own: a proxy on loopback that breaks things by rule.

It stands in front of a store's real endpoint and passes every byte through untouched, the Host header too, so that
signatures stay valid. What it breaks, and when, is said by rules that count requests or draw with a seed; nothing
depends on time, but for what is to be slow::

    with Wire(server.endpoint_url, Rule(action=LoseAnswer(), method="PUT", path="manifest.json")) as wire:
        options = Options(storage_options={**server.storage_options, "endpoint_url": wire.url})
        cloudckpt.save(state_dict, "s3://bucket/run", options=options)  # commits, and has to find out that it did
        print(wire.requests)

It speaks HTTP/1.1 without TLS, to servers that do not mind under which name they are called: those that run on one's
own machine do not, the big services do.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from urllib.parse import urlsplit

from typing_extensions import Self

from cloudckpt.testing._wire_actions import (
    GCS_FORBIDDEN,
    GCS_TOO_MANY_REQUESTS,
    GCS_UNAVAILABLE,
    S3_ACCESS_DENIED,
    S3_INTERNAL_ERROR,
    S3_SLOW_DOWN,
    Action,
    CutAnswer,
    CutRequest,
    CutSomewhere,
    Delay,
    LoseAnswer,
    Reply,
    Seen,
    StallAnswer,
    StallRequest,
    Tell,
    Throttle,
)
from cloudckpt.testing._wire_connection import Connection, reset
from cloudckpt.testing._wire_http import Head
from cloudckpt.testing._wire_rules import CountedRule, Rule

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
    """A proxy in front of the endpoint `target_url` (``http://host:port``), for as long as its context lasts.

    Of the rules that are due for a request the first acts; all that match count it. When the context ends, every
    connection is closed and every thread has ended. Rules that slow an exchange down wait with `pause`, which gets
    seconds; by default for real, but no longer than the wire is open.
    """

    def __init__(self, target_url: str, *rules: Rule, pause: Callable[[float], object] | None = None) -> None:
        parts = urlsplit(target_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"The wire passes plain HTTP alone, and {target_url!r} is no http://host:port.")
        self._target = (parts.hostname, parts.port or 80)
        self._lock = threading.Lock()
        self._rules: list[CountedRule] = []
        self._requests: list[Seen] = []
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._pause = pause or self._closing.wait
        # It holds the port, so that nobody else gets it while nothing listens there.
        self._holder = _bound(port=0)
        self._port: int = self._holder.getsockname()[1]
        self._listener: socket.socket | None = None
        self.add(*rules)
        self._listen()

    @property
    def url(self) -> str:
        """Where clients must turn to in place of the store."""
        return f"http://{_HOST}:{self._port}"

    @property
    def requests(self) -> tuple[Seen, ...]:
        """All that came over the wire so far, in the order of arrival, with what was done to each."""
        with self._lock:
            return tuple(self._requests)

    def add(self, *rules: Rule) -> None:
        """Further rules, after those that are there; they count from now on."""
        with self._lock:
            self._rules += [CountedRule(rule=rule) for rule in rules]

    def clear(self) -> None:
        """No rules any more. What has been stalled stays so."""
        with self._lock:
            self._rules.clear()

    @property
    def num_acted(self) -> int:
        """To how many requests something was done."""
        return sum(seen.action is not None for seen in self.requests)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Meanwhile nothing listens: connections are refused, and those that there were have ended."""
        self._stop_listening()
        self._reset_all()
        try:
            yield
        finally:
            self._listen()

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """Meanwhile nobody answers to a connect, as behind a firewall that drops packets (on Linux).

        The queue of connections that wait to be accepted is full, and the kernel ignores all further ones.
        """
        self._stop_listening()
        self._reset_all()
        with contextlib.ExitStack() as stack:
            stack.callback(self._listen)
            full = stack.enter_context(_bound(port=self._port))
            full.listen(0)
            for _ in range(2):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)  # noqa: FBT003  # a name for it does not exist
                waiting.connect_ex((_HOST, self._port))
            yield

    def close(self) -> None:
        """End every connection and thread. A second call does nothing."""
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
                listener.shutdown(socket.SHUT_RDWR)  # wakes whoever is in accept()
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
        store.settimeout(None)  # whoever closes the wire ends every wait
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
