"""Places to copy and convert between: memory, a directory, moto's S3, and fake-gcs-server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudckpt.testing.fixtures import (
    _cloudckpt_nowhere,
    cloudckpt_gcs_server,
    cloudckpt_gcs_uri,
    cloudckpt_s3_server,
    cloudckpt_s3_uri,
)

__all__ = ["_cloudckpt_nowhere", "cloudckpt_gcs_server", "cloudckpt_gcs_uri", "cloudckpt_s3_server", "cloudckpt_s3_uri"]

Root = Callable[[str], str]


@pytest.fixture
def root_of(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """Of a kind of place, a root on it where nothing lies yet; another one each time."""

    def make(kind: str) -> str:
        name = uuid.uuid4().hex
        if kind == "memory":
            return f"memory://convert-{name}/run"
        if kind == "path":
            return str(tmp_path / name)
        return f"{request.getfixturevalue({'s3': 'cloudckpt_s3_uri', 'gs': 'cloudckpt_gcs_uri'}[kind])}/{name}"

    return make
