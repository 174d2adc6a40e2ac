"""Clients of an SDK, shared within a process, and calls that another thread can end."""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib.util
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from typing_extensions import Self

from cloudckpt._clock import compare_with_store
from cloudckpt._messages import install_advice
from cloudckpt._this_process import is_first_warning, warn_user
from cloudckpt.errors import InvalidOptionError, MissingDependencyError
from cloudckpt.stores.http_body import ViewsBody, WholeHeadResponse, send_all
from cloudckpt.stores.storage_options import is_loopback, parse_endpoint

_MAX_CLIENTS = 16
_MAX_CONNECT_S = 20.0
_TRIES_WITHIN_TIMEOUT = 3
_SHARED_PREFIXES = (
    "ALL_PROXY",
    "APPDATA",
    "CURL_CA_BUNDLE",
    "HOME",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "REQUESTS_CA_BUNDLE",
)
"""The beginnings of the names of the variables from which every SDK takes its configuration."""

Config = TypeVar("Config")


def require_sdk(module: str, *, store: str, extra: str) -> None:
    """Raise `MissingDependencyError` if the SDK's `module` is not installed."""
    try:
        specification = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # not even the package around it
        specification = None
    if specification is None:
        raise MissingDependencyError(
            f"{store} needs {module.replace('.', '-')}, which is not installed: {install_advice(extra)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKey(Generic[Config]):
    """The configuration of a client. May hold credentials, so it is never shown."""

    config: Config
    timeout_s: float
    connections: int

    def __repr__(self) -> str:
        return "ClientKey(…)"

    def timeouts_s(self, connect_s: float | None, read_s: float | None) -> tuple[float, float]:
        """Return the timeouts for connecting and for reading; the arguments are those that the user gave."""
        return (
            # urllib3 sends bodies under the connect timeout. It holds for each address of a host in turn.
            connect_s or min(self.timeout_s, _MAX_CONNECT_S),
            # A fraction of the timeout, so that one dead connection leaves time for another try.
            read_s or self.timeout_s / _TRIES_WITHIN_TIMEOUT,
        )


class SDKClient(abc.ABC):
    """A client of an SDK. The constructor looks for credentials."""

    is_refused = False
    """True once the service has refused the client's credentials: users then ask the cache for another client."""
    successor: Any = None
    """The client with new credentials that replaced this one, if there is one."""

    @property
    @abc.abstractmethod
    def credentials_source(self) -> str:
        """The source of the credentials, for an error."""

    @abc.abstractmethod
    def identity(self) -> tuple[object, ...] | None:
        """Return values that identify the credentials, secrets included; None if there are none. Fetches nothing."""

    @abc.abstractmethod
    def fetch_credentials(self) -> None:
        """Fetch the credentials from their source, unless that has been done. Raises the SDK's errors."""


Client = TypeVar("Client", bound=SDKClient)


class ClientCache(Generic[Config, Client]):
    """The most recently used clients of one SDK in this process: one for each configuration and environment.

    Args:
        make: Makes a client.
        environment_prefixes: The beginnings of the names of the variables that configure this SDK alone.

    """

    def __init__(self, make: Callable[[ClientKey[Config]], Client], *, environment_prefixes: tuple[str, ...]) -> None:
        self._prefixes = (*_SHARED_PREFIXES, *environment_prefixes)
        self._lock = threading.Lock()
        self._replacing = threading.Lock()

        @functools.lru_cache(maxsize=_MAX_CLIENTS)
        def make_for(key: ClientKey[Config], _environment: tuple[tuple[str, str], ...]) -> Client:
            return make(key)

        self._make_for = make_for

    def client_for(self, key: ClientKey[Config]) -> Client:
        """Return the client for `key` and the present environment. Make it if there is none."""
        environment = sorted(item for item in os.environ.items() if item[0].upper().startswith(self._prefixes))
        with self._lock:
            return self._make_for(key, tuple(environment))

    def replace(self, refused: Client, key: ClientKey[Config]) -> Client | None:
        """Look for credentials again. Return a client if they differ from those of the `refused` one, or None.

        An agent may have renewed a file. If several threads meet the refusal, one of them looks.
        """
        with self._replacing:
            if not refused.is_refused and refused.identity() is not None:
                self.clear()
                renewed = self.client_for(key)
                renewed.fetch_credentials()
                if renewed.identity() not in (None, refused.identity()):
                    refused.successor = renewed
            self.discard(refused)
            successor: Client | None = refused.successor
            return successor

    def discard(self, refused: Client) -> None:
        """Let the next call look for credentials anew, unless new ones were found."""
        refused.is_refused = True
        if refused.successor is None:
            self.clear()

    def clear(self) -> None:
        """Forget all clients."""
        self._make_for.cache_clear()

    def __len__(self) -> int:
        return self._make_for.cache_info().currsize


def is_clear_text(endpoint_url: str) -> bool:
    """Return True if others on the way to the endpoint can read and change what is sent."""
    parts = urlsplit(endpoint_url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def check_endpoint(endpoint_url: str, *, store: str, variables: str) -> None:
    """Refuse an endpoint with credentials in it. Warn, once per process, of plain HTTP to another machine.

    `variables` names the sources of an endpoint that is not in the storage options.
    """
    try:
        parse_endpoint("the storage options", endpoint_url)
    except ValueError as error:
        raise InvalidOptionError(f"The {store} endpoint (see {variables}) {error}") from None
    if not is_clear_text(endpoint_url) or not is_first_warning("endpoint", endpoint_url):
        return
    warn_user(
        f"The {store} endpoint {endpoint_url} is plain HTTP: anyone on the way can read and change checkpoints, and "
        "take tokens from it. Use https:// where you can."
    )


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

    def __exit__(self, *_: object) -> None:
        _current.scope = self._outer
        with self._lock:
            self._sockets.clear()  # another call may use the connection from now on

    @property
    def is_cancellable(self) -> bool:
        """True if the call waits on a known connection."""
        return bool(self._sockets)

    def cancel(self) -> None:
        """Wake the call if it waits on its connection. The call makes no further request."""
        with self._lock:
            self._is_cancelled = True
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    # Not the method of a TLS socket, which would end the session while a thread reads.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def follow(self, connection: socket.socket) -> None:
        """Note that the call's next request uses `connection`."""
        with self._lock:
            if self._is_cancelled:
                raise ConnectionAbortedError("the request is not needed any more")
            self._sockets = [connection]  # the one before may carry another call's request by now


def follow(connection: socket.socket | None) -> None:
    """Note that a request of this thread uses `connection`. Raises `ConnectionAbortedError` if it was cancelled."""
    scope: CallScope | None = getattr(_current, "scope", None)
    # A proxy that speaks TLS itself has another kind of connection: such a call cannot be ended from outside.
    if scope is not None and isinstance(connection, socket.socket):
        scope.follow(connection)


def make_cancellable(pool_classes_by_scheme: Mapping[str, Any]) -> dict[str, Any]:
    """Return pools of urllib3 whose connections report their use, and refuse an answer with a cut head."""
    followed: dict[str, Any] = {}
    for scheme, pool in pool_classes_by_scheme.items():
        connection = type(pool.ConnectionCls.__name__, (_FollowedConnection, pool.ConnectionCls), {})
        followed[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})
    return followed


_Connection: Any = object
"""The class that `_FollowedConnection` is mixed into, for mypy, which does not know urllib3 here."""


class _FollowedConnection(_Connection):  # type: ignore[misc]  # its base is Any
    """A mixin for urllib3's connections."""

    sock: Any
    host: str
    response_class = WholeHeadResponse
    _is_clock_compared = False

    def connect(self) -> None:
        super().connect()
        follow(self.sock)

    def request(self, method: str, url: str, body: Any = None, *args: Any, **kwargs: Any) -> Any:
        follow(self.sock)
        if isinstance(body, ViewsBody):
            body = [body.take_remaining()]  # urllib3 2 gives each item to `send`, and urllib3 1 the list
        return super().request(method, url, body, *args, **kwargs)

    def getresponse(self, *args: Any, **kwargs: Any) -> Any:
        response = super().getresponse(*args, **kwargs)
        if not self._is_clock_compared:
            self._is_clock_compared = True
            compare_with_store(response.headers.get("Date"), response.headers.get("Age"), self.host)
        return response

    def send(self, data: Any) -> None:
        """Send the views of a body by `send_all`, and everything else as urllib3 does."""
        if isinstance(data, list) and data:
            send_all(self.sock, data[0] if isinstance(data[0], list) else data)
        else:
            super().send(data)
