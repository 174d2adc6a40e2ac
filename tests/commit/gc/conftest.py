"""Places to keep tidy: memory, a directory, and moto's S3."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudckpt.testing.fixtures import _cloudckpt_nowhere, cloudckpt_s3_server, cloudckpt_s3_uri

__all__ = ["_cloudckpt_nowhere", "cloudckpt_s3_server", "cloudckpt_s3_uri"]


@pytest.fixture(params=["memory", "path", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URI of an empty place on each kind of store."""
    if request.param == "memory":
        return f"memory://housekeeping-{tmp_path.name}/run"
    if request.param == "path":
        return str(tmp_path / "run")
    return f"{request.getfixturevalue('cloudckpt_s3_uri')}/run"
