"""pytest fixtures for your own tests: an S3 and a GCS server that need no network and no account.

Name the module in your ``conftest.py``, and ask for a place to save to::

    pytest_plugins = ["cloudckpt.testing.fixtures"]

    def test_training_resumes(cloudckpt_s3_uri):
        train(checkpoints=f"{cloudckpt_s3_uri}/run")

While such a test runs, the environment leads AWS and Google clients to the embedded server and nowhere else: profiles,
credentials, endpoints and proxies of your own are hidden, from the processes that the test starts, too.
Needs ``pip install 'cloudckpt[testing]'``, and the extra of the store: ``s3`` or ``gcs``.

The servers are made for tests. They do not show what happens when two writers race, nor that a store refuses damaged
bytes; run `cloudckpt.testing.StoreContract` against the store that you use to see that.
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
    """An S3 server (moto's) for the whole session, one for each worker of xdist.

    It leaves the environment as it is; its ``storage_options`` say how to reach it. A test may ``kill`` and
    ``restart`` it, and it comes back empty.
    """
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def cloudckpt_gcs_server() -> Iterator[GCSServer]:
    """A GCS server (fake-gcs-server) for the whole session, one for each worker of xdist.

    It leaves the environment as it is; its ``storage_options`` say how to reach it. A test may ``kill`` and
    ``restart`` it, and its objects are still there.
    """
    with fake_gcs_server(keeps_data=True) as server:
        yield server


@pytest.fixture
def cloudckpt_s3_uri(
    cloudckpt_s3_server: S3Server,
    _cloudckpt_nowhere: None,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The URI of an empty bucket, ``s3://…``, which the environment says how to reach while the test runs."""
    return _fresh_bucket(cloudckpt_s3_server, monkeypatch)


@pytest.fixture
def cloudckpt_gcs_uri(
    cloudckpt_gcs_server: GCSServer,
    _cloudckpt_nowhere: None,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The URI of an empty bucket, ``gs://…``, which the environment says how to reach while the test runs."""
    return _fresh_bucket(cloudckpt_gcs_server, monkeypatch)


@pytest.fixture
def _cloudckpt_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a test, which may use both stores."""
    wanted = clean_environment()
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)


def _fresh_bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    if not server.is_running:  # a test before has killed it
        server.restart()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex}"
    server.create_bucket(bucket)
    return f"{server.scheme}://{bucket}"
