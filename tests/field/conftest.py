"""Places for the rivals' failures: a directory, and a bucket on an S3 server whose wire a test can break."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.e2e.places import LocalPlace, Place, S3Place
from tests.e2e.servers import FlakyS3, serve

from cloudckpt.testing.servers import S3Server, clean_environment

_bucket_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """moto, with conditional puts in order: it has to decide races."""
    with serve(FlakyS3()) as server:
        yield server


@pytest.fixture
def local(tmp_path: Path) -> LocalPlace:
    """An empty directory."""
    directory = tmp_path / "place"
    directory.mkdir()
    return LocalPlace(directory)


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """An empty bucket, which AWS clients find, and nothing else."""
    wanted = clean_environment() | s3_server.environment
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    bucket = f"field-{os.getpid()}-{next(_bucket_numbers)}"
    s3_server.create_bucket(bucket)
    client: Any = boto3.client("s3")
    return S3Place(client, bucket)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest) -> Place:
    """Each in turn."""
    found: Place = request.getfixturevalue(request.param)
    return found
