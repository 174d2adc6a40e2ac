"""Fixtures of the end-to-end tests: a place on each kind of store."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from tests.e2e.places import LocalPlace, Place, S3Place
from werkzeug.serving import make_server

from cloudckpt.testing.servers import S3Server, clean_environment

_bucket_numbers = itertools.count()


class _S3(DomainDispatcherApplication):
    """moto, with conditional puts one after the other, as a real store has them: moto itself checks and then writes."""

    def __init__(self) -> None:
        super().__init__(create_backend_app)
        self.conditional_puts = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            answer: Iterable[bytes] = super().__call__(environ, start_response)
            return answer
        with self.conditional_puts:
            return list(super().__call__(environ, start_response))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server of this process's own."""
    server = make_server("127.0.0.1", 0, _S3(), threaded=True)
    thread = threading.Thread(target=server.serve_forever, name="s3-server", daemon=True)
    thread.start()
    yield S3Server(endpoint_url=f"http://127.0.0.1:{server.server_port}", pid=os.getpid())
    server.shutdown()
    thread.join(timeout=10)


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
