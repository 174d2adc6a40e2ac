"""Clients of a store's SDK: made when first needed, shared within a process, never across a fork."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from cloudckpt import _forks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, ValuesView

Key = TypeVar("Key", bound="Hashable")
Client = TypeVar("Client")
Environment: TypeAlias = tuple[tuple[str, str], ...]
"""The variables from which an SDK takes its configuration, sorted."""


class ClientCache(Generic[Key, Client]):
    """The clients of one SDK in this process: one for each configuration and environment, the latest used of them."""

    def __init__(self, make: Callable[[Key], Client], *, ambient: Callable[[], Environment], most: int) -> None:
        self._make = make
        self._ambient = ambient
        self._most = most
        self._lock = threading.Lock()
        self._clients: OrderedDict[tuple[Key, Environment], Client] = OrderedDict()
        _forks.watch(self)

    def client_for(self, key: Key, environment: Environment) -> Client:
        """The client for `key`, made if there is none yet."""
        with self._lock:
            if (key, environment) not in self._clients:
                environment = self._ambient()  # of which it will be made, whatever the store was opened under
            client = self._clients.get((key, environment))
            if client is None:
                client = self._clients[key, environment] = self._make(key)
                if len(self._clients) > self._most:
                    self._clients.popitem(last=False)
            else:
                self._clients.move_to_end((key, environment))
            return client

    def known(self, key: Key, environment: Environment) -> Client | None:
        """The client for `key`, if it has been made."""
        with self._lock:
            return self._clients.get((key, environment))

    def forget(self, client: Client) -> None:
        """Make a new client next time: the credentials of this one are of no use any more."""
        with self._lock:
            for key in [key for key, known in self._clients.items() if known is client]:
                del self._clients[key]

    def values(self) -> ValuesView[Client]:
        """All of them."""
        return self._clients.values()

    def clear(self) -> None:
        """Forget all of them."""
        self._clients.clear()

    def __len__(self) -> int:
        return len(self._clients)

    def after_fork(self) -> None:
        """A client of the parent would share its sockets; its lock may be held by a thread that no longer exists."""
        self._lock = threading.Lock()
        self._clients.clear()
