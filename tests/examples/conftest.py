"""Where the examples write to in these tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudckpt.testing.servers import S3Server, clean_environment, moto_server

REPOSITORY = Path(__file__).resolve().parents[2]
# The examples are no part of the installed package; `python -m examples.demo` finds them in the same way.
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server of this process's own."""
    with moto_server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty bucket, which the environment says how to reach."""
    s3_server.reset()
    s3_server.create_bucket("examples")
    wanted = clean_environment() | s3_server.environment
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    return "s3://examples"


@pytest.fixture(params=["path", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place on each kind of store in turn."""
    if request.param == "path":
        return str(tmp_path / "checkpoints")
    bucket: str = request.getfixturevalue("bucket")
    return f"{bucket}/run"
