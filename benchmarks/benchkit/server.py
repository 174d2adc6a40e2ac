"""The S3-compatible server that all systems of a run are measured against."""

# ruff: noqa: S310  # the only URLs opened are loopback ones made here

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

START_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
CALL_TIMEOUT_S = 60.0

LOCAL_ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_EC2_METADATA_DISABLED": "true",
    # A user's own configuration must not reach a server that is started here.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


class Server(abc.ABC):
    """An endpoint, and how to empty it between turns."""

    name: str
    endpoint_url: str | None
    region: str
    bucket: str
    prefix: str
    """Everything the run stores lies under it; empty, or with a slash at its end."""
    environment: Mapping[str, str]
    """What workers need in their environment to reach it."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all that the run stored, so that no system finds memory or disk already in use."""


class _LocalServer(Server):
    """A server process of our own on a free loopback port, that is reset by one request."""

    environment = LOCAL_ENVIRONMENT
    region = "us-east-1"
    bucket = "benchmark"
    prefix = ""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        port: int,
        log_path: Path,
        reset_request: urllib.request.Request,
    ) -> None:
        self.name = name
        self.endpoint_url = f"http://127.0.0.1:{port}"
        self._reset_request = reset_request
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **self.environment}
            )

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.reset()
                return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.name} did not start:\n{self._log_path.read_text(errors='replace')}")
            time.sleep(POLL_INTERVAL_S)

    def reset(self) -> None:
        # Both servers forget the bucket too.
        create_bucket = urllib.request.Request(f"{self.endpoint_url}/{self.bucket}", method="PUT")
        for request in (self._reset_request, create_bucket):
            with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S):
                pass

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _GivenServer(Server):
    """The user's own endpoint: what the run stored is deleted, and nothing else."""

    environment: Mapping[str, str] = {}

    def __init__(self, endpoint_url: str | None, *, bucket: str, prefix: str, region: str) -> None:
        self.name = endpoint_url or f"Amazon S3 ({region})"
        self.endpoint_url = endpoint_url
        self.region = region
        self.bucket = bucket
        self.prefix = prefix
        self._client: Any = boto3.client("s3", endpoint_url=endpoint_url, region_name=region)

    def reset(self) -> None:
        where = {"Bucket": self.bucket, "Prefix": self.prefix}
        for page in self._client.get_paginator("list_objects_v2").paginate(**where):
            for item in page.get("Contents", []):
                self._client.delete_object(Bucket=self.bucket, Key=item["Key"])
        for page in self._client.get_paginator("list_multipart_uploads").paginate(**where):
            for upload in page.get("Uploads", []):
                self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])


@contextlib.contextmanager
def fasts3(binary: Path, *, log_directory: Path) -> Iterator[Server]:
    """A server in memory that checks nothing and so measures the client; reset by `GET /_reset`."""
    port = _free_port()
    reset = urllib.request.Request(f"http://127.0.0.1:{port}/_reset")
    with _running(
        _LocalServer(
            "fasts3",
            [str(binary), str(port)],
            port=port,
            log_path=log_directory / "fasts3.log",
            reset_request=reset,
        )
    ) as server:
        yield server


@contextlib.contextmanager
def moto(*, log_directory: Path) -> Iterator[Server]:
    """The server of moto: everywhere at hand and right, but so slow that only small sizes make sense."""
    port = _free_port()
    reset = urllib.request.Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(
        _LocalServer("moto", command, port=port, log_path=log_directory / "moto.log", reset_request=reset)
    ) as server:
        yield server


@contextlib.contextmanager
def given(endpoint_url: str | None, *, bucket: str, prefix: str, region: str) -> Iterator[Server]:
    """A server that runs already; None means Amazon S3. What the run stored is removed at the end too."""
    server = _GivenServer(endpoint_url, bucket=bucket, prefix=prefix, region=region)
    try:
        yield server
    finally:
        server.reset()


@contextlib.contextmanager
def _running(server: _LocalServer) -> Iterator[_LocalServer]:
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.end()


def build_fasts3(source: Path, target: Path) -> Path:
    """Compile the server with cargo into `target` and return the binary."""
    cargo = shutil.which("cargo") or str(Path.home() / ".cargo" / "bin" / "cargo")
    subprocess.run([cargo, "build", "--release", "--quiet", "--target-dir", str(target)], cwd=source, check=True)
    return target / "release" / "fasts3"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
