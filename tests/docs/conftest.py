"""Fixtures of the documentation's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cloudckpt.testing.servers import S3Server, clean_environment, moto_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server of this process's own."""
    with moto_server() as server:
        yield server


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An empty bucket called ``bucket``, and an environment in which AWS clients find it and nothing else."""
    environment = clean_environment() | s3_server.environment
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3_server.reset()
    s3_server.create_bucket("bucket")
    return s3_server
