"""Fixtures of the documentation's tests."""

from __future__ import annotations

import pytest
from tests.kit.rights import use_environment

from cloudckpt.testing.servers import S3Server, clean_environment


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An empty bucket called ``bucket``, and an environment in which AWS clients find it and nothing else."""
    use_environment(clean_environment() | s3_server.environment, monkeypatch)
    s3_server.reset()
    s3_server.create_bucket("bucket")
    return s3_server
