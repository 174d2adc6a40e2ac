"""Clients of an SDK, shared within a process, and calls that another thread can end."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import urlsplit

from typing_extensions import Self

from cloudckpt.stores.http_body import WholeHeadResponse
from cloudckpt.stores.storage_options import is_loopback

_log = logging.getLogger("cloudckpt")

_MOST_CLIENTS = 16

Key = TypeVar("Key", bound=Hashable)
Client = TypeVar("Client")
Environment: TypeAlias = tuple[tuple[str, str], ...]
"""The variables from which an SDK takes its configuration, sorted."""


class ClientCache(Generic[Key, Client]):
    """The clients of one SDK in this process: one for each configuration and environment, the latest used of them."""

    def __init__(self, make: Callable[[Key], Client], *, read_environment: Callable[[], Environment]) -> None:
        self._make = make
        self._read_environment = read_environment
        self._lock = threading.Lock()
        self._clients: OrderedDict[tuple[Key, Environment], Client] = OrderedDict()

    def client_for(self, key: Key, environment: Environment) -> Client:
        """Return the client for `key`, made if there is none yet."""
        with self._lock:
            if (key, environment) not in self._clients:
                environment = self._read_environment()  # the client is made from the environment as it is now
            client = self._clients.get((key, environment))
            if client is None:
                client = self._clients[key, environment] = self._make(key)
                if len(self._clients) > _MOST_CLIENTS:
                    self._clients.popitem(last=False)
            else:
                self._clients.move_to_end((key, environment))
            return client

    def forget(self, client: Client) -> None:
        """Make a new client next time: the credentials of this one are of no use any more."""
        with self._lock:
            for key in [key for key, known in self._clients.items() if known is client]:
                del self._clients[key]

    def clear(self) -> None:
        """Forget all clients."""
        self._clients.clear()

    def __len__(self) -> int:
        return len(self._clients)


_warned_endpoints: set[str] = set()


def is_clear_text(endpoint_url: str) -> bool:
    """Return True if others on the way to the endpoint can read and change what is sent."""
    parts = urlsplit(endpoint_url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def warn_of_clear_text(endpoint_url: str, *, store: str) -> None:
    """Warn and log, once per process, if `endpoint_url` is plain HTTP to another machine."""
    if not is_clear_text(endpoint_url) or endpoint_url in _warned_endpoints:
        return
    _warned_endpoints.add(endpoint_url)
    text = (
        f"The {store} endpoint {endpoint_url} is plain HTTP: anyone on the way can read and change checkpoints, and "
        "take tokens from it. Use https:// where you can."
    )
    _log.warning("%s", text)
    warnings.warn(text, UserWarning, stacklevel=3)


_current = threading.local()


class CallScope:
    """The context of one call to a store. `cancel`, from any thread, ends the call by closing its connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_cancelled = False

    def __enter__(self) -> Self:
        self._outer = getattr(_current, "scope", None)
        _current.scope = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.scope = self._outer
        with self._lock:
            self._sockets.clear()  # another call may use the connection from now on

    @property
    def is_cancellable(self) -> bool:
        """True if the call waits on a connection that is known."""
        return bool(self._sockets)

    def cancel(self) -> None:
        """Wake the call if it waits on its connection. A request that it is about to make is not made."""
        with self._lock:
            self._is_cancelled = True
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    # Not the method of a TLS socket, which would take the session from under the thread that reads.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def follow(self, connection: socket.socket) -> None:
        """Note that the call's next request uses `connection`."""
        with self._lock:
            if self._is_cancelled:
                raise ConnectionAbortedError("the request is not needed any more")
            self._sockets = [connection]  # the one before may carry another call's request by now


def follow(connection: socket.socket | None) -> None:
    """Note that a request of this thread uses `connection`. Raises `ConnectionAbortedError` if nobody needs it."""
    scope: CallScope | None = getattr(_current, "scope", None)
    # A proxy that speaks TLS itself has another kind of connection: such a call cannot be ended from outside.
    if scope is not None and isinstance(connection, socket.socket):
        scope.follow(connection)


def make_cancellable(pool_classes_by_scheme: Mapping[str, Any]) -> dict[str, Any]:
    """Return pools of urllib3 whose connections say when they are used, and refuse an answer whose head is cut."""
    followed: dict[str, Any] = {}
    for scheme, pool in pool_classes_by_scheme.items():
        connection = type(pool.ConnectionCls.__name__, (_FollowedConnection, pool.ConnectionCls), {})
        followed[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})
    return followed


class _FollowedConnection:
    """A mixin for urllib3's connections."""

    sock: Any
    response_class = WholeHeadResponse

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]  # of the class that it is mixed into
        follow(self.sock)

    def request(self, *args: Any, **kwargs: Any) -> Any:
        follow(self.sock)
        return super().request(*args, **kwargs)  # type: ignore[misc]  # of the class that it is mixed into
