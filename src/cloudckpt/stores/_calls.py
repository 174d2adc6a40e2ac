"""Calls to a store that another thread can end, by closing the connection that they wait on.

A store that speaks HTTP says here on which connection each of its requests goes out. Whoever wants to be able to end a
call makes it in a `CallScope`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from typing_extensions import Self

from cloudckpt.stores._http_receiving import WholeHeadResponse

_current = threading.local()


class CallScope:
    """The context of one call. `cancel`, from any thread, makes it fail as if the connection had broken."""

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
            self._sockets.clear()  # the connection may be somebody else's from here on

    @property
    def is_cancellable(self) -> bool:
        """Whether the call waits on a connection that is known."""
        return bool(self._sockets)

    def cancel(self) -> None:
        """Wake the call if it waits on its connection; a request that it is about to make is not made."""
        with self._lock:
            self._is_cancelled = True
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    # Not the method of a TLS socket, which would take the session from under the thread that reads.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def follow(self, connection: socket.socket) -> None:
        """The call's next request goes out on `connection`."""
        with self._lock:
            if self._is_cancelled:
                raise ConnectionAbortedError("the request is not needed any more")
            self._sockets = [connection]  # the one before may carry somebody else's request by now


def follow(connection: socket.socket | None) -> None:
    """A request of this thread goes out on `connection`. Raises `ConnectionAbortedError` where nobody needs it."""
    scope: CallScope | None = getattr(_current, "scope", None)
    # Through a proxy that speaks TLS itself, it is none: such a call is never ended from elsewhere.
    if scope is not None and isinstance(connection, socket.socket):
        scope.follow(connection)


def cancellable(pool_classes_by_scheme: Mapping[str, Any]) -> dict[str, Any]:
    """Pools of urllib3, as its ``PoolManager`` knows them, whose connections say when they are used.

    A head of an answer that is cut is an error on them.
    """
    followed: dict[str, Any] = {}
    for scheme, pool in pool_classes_by_scheme.items():
        connection = type(pool.ConnectionCls.__name__, (_Followed, pool.ConnectionCls), {})
        followed[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})
    return followed


class _Followed:
    """Goes before the class of a connection of urllib3."""

    sock: Any
    response_class = WholeHeadResponse

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]  # it is mixed in
        follow(self.sock)

    def request(self, *args: Any, **kwargs: Any) -> Any:
        follow(self.sock)
        return super().request(*args, **kwargs)  # type: ignore[misc]
