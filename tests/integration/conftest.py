"""Fixtures of the integration tests: real servers, each started when a test first asks for it.

A server that cannot be started fails the tests that need it, with the reason. Each worker of xdist has servers of its
own: they start in about a second, and tests kill them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

import pytest
from tests.integration.servers import SERVERS

from cloudckpt.testing.servers import Server, clean_environment

_bucket_numbers = itertools.count()


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


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Every server by its name, for tests that take several."""
    with contextlib.ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], str]:
    """Makes clients find that server and nothing else; the URI of a fresh bucket on it."""

    return lambda server: f"{server.scheme}://{make_fresh_bucket(server, monkeypatch)}"


def make_fresh_bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the bucket's name; from here on the environment is such that clients find this server and nothing else."""
    wanted = clean_environment() | server.environment
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{os.getpid()}-{next(_bucket_numbers)}"
    server.create_bucket(bucket)
    return bucket


@pytest.fixture
def rgw(servers: Servers) -> Server:
    """Ceph's RADOS Gateway; what is killed is the gateway, and the data stay."""
    return servers.up("rgw")
