"""Fixtures of the integration tests: real servers, each started when a test first asks for it.

A server that cannot be started fails the tests that need it, with the reason. Each worker of xdist has servers of its
own: they start in about a second, and tests kill them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest
from tests.integration.servers import Servers
from tests.kit.rights import use_environment

from cloudckpt.testing.servers import Server, clean_environment

_bucket_numbers = itertools.count()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], str]:
    """Makes clients find that server and nothing else; the URI of a fresh bucket on it."""

    return lambda server: f"{server.scheme}://{make_fresh_bucket(server, monkeypatch)}"


def make_fresh_bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the bucket's name; from here on the environment is such that clients find this server and nothing else."""
    use_environment(clean_environment() | server.environment, monkeypatch)
    bucket = f"bucket-{os.getpid()}-{next(_bucket_numbers)}"
    server.create_bucket(bucket)
    return bucket


@pytest.fixture
def rgw(servers: Servers) -> Server:
    """Ceph's RADOS Gateway; what is killed is the gateway, and the data stay."""
    return servers.up("rgw")
