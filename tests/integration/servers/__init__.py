"""Every server that the integration tests run against, under the name by which it is chosen.

Each is a `cloudckpt.testing.servers.Server`, started by calling its maker, and gone with the context that that returns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.integration.servers.ceph import ceph_rgw
from tests.integration.servers.gcp_emulator import gcp_storage_emulator
from tests.integration.servers.ministack import ministack

from cloudckpt.testing.servers import Server, fake_gcs_server, moto_server

__all__ = ["SERVERS", "Servers"]

SERVERS: dict[str, Callable[[], AbstractContextManager[Server]]] = {
    "moto": moto_server,
    "rgw": ceph_rgw,
    "ministack": ministack,
    "fake-gcs": functools.partial(fake_gcs_server, keeps_data=True),
    "gcp-emulator": gcp_storage_emulator,
}


class Servers:
    """The servers of this process."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._started: dict[str, Server] = {}

    def up(self, name: str) -> Server:
        """The server of that name (see `SERVERS`), which answers; a test before may have killed it."""
        if name not in self._started:
            self._started[name] = self._stack.enter_context(SERVERS[name]())
        server = self._started[name]
        if not server.is_running:
            server.restart()
        return server
