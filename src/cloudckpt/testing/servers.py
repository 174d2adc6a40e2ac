"""An S3 server for tests and demonstrations: moto's, on the loopback interface, for as long as it is needed.

Needs ``moto[s3,server]`` (in the extra ``dev``). It keeps objects in memory and forgets them. It is no
judge of races or checksums: moto neither locks a conditional put nor refuses a wrong checksum.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cloudckpt.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ACCESS_KEY_ID = "testing"
SECRET_ACCESS_KEY = "testing-secret"  # noqa: S105 (moto takes anything)
REGION = "us-east-1"

_STOP_S = 10.0
_LONGEST_LOG_BYTES = 4096
# The server picks its port itself: one picked here could be taken before the server gets to it. It ends with
# this process, however that ends, because its standard input does.
_SERVER = """
import logging, os, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("PORT", server.get_host_and_port()[1], flush=True)
sys.stdin.read()
os._exit(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A server that runs."""

    endpoint_url: str
    pid: int

    @property
    def storage_options(self) -> dict[str, Any]:
        """What `cloudckpt.Options.storage_options` need to reach it."""
        return {
            "endpoint_url": self.endpoint_url,
            "region": REGION,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }

    @property
    def environment(self) -> dict[str, str]:
        """What the ordinary AWS configuration needs to reach it, over what `clean_environment` leaves."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def create_bucket(self, name: str) -> None:
        """Create the bucket `name`; one that exists is left as it is."""
        self._request("PUT", f"/{name}")

    def reset(self) -> None:
        """Forget every bucket, object and upload."""
        self._request("POST", "/moto-api/reset")

    def _request(self, method: str, path: str) -> None:
        status, answer = _ask(self.endpoint_url, method, path, timeout_s=_STOP_S)
        if status not in (200, 409):
            raise RuntimeError(f"{self.endpoint_url}: {method} {path} was answered with {status}: {answer}")


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """`environment` (this process's, if ``None``) without what would lead AWS clients elsewhere.

    Profiles, credentials, endpoints and proxies of the user's own would send a test's requests to a real
    store.
    """
    source = os.environ if environment is None else environment
    unwanted = ("AWS_", "BOTO_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "MOTO_")
    kept = {name: value for name, value in source.items() if not name.upper().startswith(unwanted)}
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    return {**kept, **nowhere, "AWS_EC2_METADATA_DISABLED": "true"}


@contextlib.contextmanager
def moto_server(*, start_timeout_s: float = 60.0) -> Iterator[S3Server]:
    """A fresh, empty server on a free port, in a process of its own, stopped at the end.

    Raises `MissingDependencyError` without moto, and `RuntimeError` with the server's own words where it
    does not start within `start_timeout_s`.
    """
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("werkzeug") is None:
        raise MissingDependencyError("moto's server is not installed: pip install 'moto[s3,server]'")
    deadline = time.monotonic() + start_timeout_s
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603 (our own interpreter, our own words)
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=clean_environment(),
        )
        try:
            port = _read_port(process, deadline)
            endpoint_url = f"http://127.0.0.1:{port}"
            if port is None or not _answers(endpoint_url, deadline):
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LONGEST_LOG_BYTES))
                words = log.read().decode(errors="replace").strip()
                raise RuntimeError(f"moto's server did not start within {start_timeout_s:g} s: {words or 'no output'}")
            yield S3Server(endpoint_url=endpoint_url, pid=process.pid)
        finally:
            _stop(process)


def _read_port(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    output = process.stdout
    if output is None:
        return None
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(output.fileno(), _LONGEST_LOG_BYTES) if ready else b""
        if not chunk:
            return None
        line += chunk
    word, _, port = line.decode(errors="replace").partition(" ")
    return int(port) if word == "PORT" else None


def _answers(endpoint_url: str, deadline: float) -> bool:
    """Whether the server, which listens already, answers its first request in time."""
    try:
        _ask(endpoint_url, "GET", "/moto-api/", timeout_s=max(0.1, deadline - time.monotonic()))
    except OSError:
        return False
    return True


def _ask(endpoint_url: str, method: str, path: str, *, timeout_s: float) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(endpoint_url).netloc, timeout=timeout_s)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)
