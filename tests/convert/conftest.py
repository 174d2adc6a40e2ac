"""Places to copy and convert between: memory, a directory, an S3 server, and a GCS server.

S3 is moto and GCS is fake-gcs-server, unless ``--places`` names one server of the integration tests: then only what
uses a server of its kind is run, there. So ``--places rgw`` runs on a Ceph RADOS Gateway what can run on it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.servers import SERVERS, Servers

from cloudckpt.testing.fixtures import _cloudckpt_nowhere, cloudckpt_gcs_uri, cloudckpt_s3_uri
from cloudckpt.testing.servers import Server

__all__ = ["_cloudckpt_nowhere", "cloudckpt_gcs_uri", "cloudckpt_s3_uri"]

HERE = Path(__file__).parent
Root = Callable[[str], str]

_DEFAULTS = {"s3": "moto", "gs": "fake-gcs"}


def servers_of(config: pytest.Config) -> dict[str, str]:
    """Return the server of each kind of store that the tests use."""
    named = [name for name in config.getoption("--places").split(",") if name in SERVERS]
    return {"gs" if name in {"fake-gcs", "gcp-emulator"} else "s3": name for name in named} or _DEFAULTS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what uses no server, or another one, where servers are named."""
    kinds = servers_of(config)
    if kinds is _DEFAULTS:
        return
    left_out = {item for item in items if item.path.is_relative_to(HERE) and not set() < _kinds_of(item) <= {*kinds}}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _kinds_of(item: pytest.Item) -> set[str]:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return {value for value in parameters.values() if isinstance(value, str)} & _DEFAULTS.keys()


@pytest.fixture(scope="session")
def cloudckpt_s3_server(servers: Servers, pytestconfig: pytest.Config) -> Server:
    """The chosen one."""
    return servers.up(servers_of(pytestconfig)["s3"])


@pytest.fixture(scope="session")
def cloudckpt_gcs_server(servers: Servers, pytestconfig: pytest.Config) -> Server:
    """The chosen one."""
    return servers.up(servers_of(pytestconfig)["gs"])


@pytest.fixture
def root_of(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """Make a new, empty root on a kind of place."""

    def make(kind: str) -> str:
        name = uuid.uuid4().hex
        if kind == "memory":
            return f"memory://convert-{name}/run"
        if kind == "path":
            return str(tmp_path / name)
        return f"{request.getfixturevalue({'s3': 'cloudckpt_s3_uri', 'gs': 'cloudckpt_gcs_uri'}[kind])}/{name}"

    return make


@pytest.fixture
def copies_by_service(pytestconfig: pytest.Config) -> Callable[[str], bool]:
    """Tell if a kind of place copies within the service. Moto does not: it reports CRC32 instead of CRC32C."""
    return lambda kind: kind in {"gs", "memory"} or (kind == "s3" and servers_of(pytestconfig)["s3"] != "moto")
