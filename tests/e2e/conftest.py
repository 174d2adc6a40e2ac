"""Fixtures of the end-to-end tests: a place on each kind of store."""

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
def s3_application() -> FlakyS3:
    """The store behind `s3_server`, for tests that let it fail."""
    return FlakyS3()


@pytest.fixture(scope="session")
def s3_server(s3_application: FlakyS3) -> Iterator[S3Server]:
    """An S3 server of this process's own."""
    with serve(s3_application, pid=os.getpid()) as server:
        yield server


@pytest.fixture
def local(tmp_path: Path) -> LocalPlace:
    """An empty directory."""
    directory = tmp_path / "place"
    directory.mkdir()
    return LocalPlace(directory)


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """An empty bucket, with the environment such that AWS clients find it and nothing else."""
    environment = clean_environment() | s3_server.environment
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client: Any = boto3.client("s3")
    bucket = f"bucket-{next(_bucket_numbers)}"
    client.create_bucket(Bucket=bucket)
    return S3Place(client, bucket)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest) -> Place:
    """Each kind of store in turn."""
    found: Place = request.getfixturevalue(request.param)
    return found
