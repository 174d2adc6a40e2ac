"""S3 server of moto."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import MissingDependencyError
from cloudckpt.testing.servers.base import (
    Program,
    ServerProcess,
    answers,
    ask,
    clean_environment,
    reserved_port,
    running,
)

ACCESS_KEY_ID = "testing"
SECRET_ACCESS_KEY = "testing-secret"  # noqa: S105  # moto accepts any secret
REGION = "us-east-1"

_REQUEST_TIMEOUT_S = 10.0
_SERVER = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
application = DomainDispatcherApplication(create_backend_app)
make_server("127.0.0.1", int(sys.argv[1]), application, threaded=True).serve_forever()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A `Server` that speaks S3 and loses its objects when it ends."""

    endpoint_url: str
    process: ServerProcess | None = None
    """``None`` if it runs in threads of this process, and cannot be killed alone."""
    name: str = "moto"

    @property
    def scheme(self) -> str:
        """``s3``."""
        return "s3"

    @property
    def keeps_data(self) -> bool:
        """Always False."""
        return False

    @property
    def storage_options(self) -> dict[str, Any]:
        """The `cloudckpt.Options.storage_options` to reach it."""
        return {
            "endpoint_url": self.endpoint_url,
            "region": REGION,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for AWS clients to reach it, in addition to `clean_environment`."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def pid(self) -> int:
        """Process id of the server; it changes with a restart."""
        return self._own_process().pid

    @property
    def is_running(self) -> bool:
        """True if the server is started and has not ended."""
        return self.process is None or self.process.is_running

    def create_bucket(self, name: str) -> None:
        """Create the bucket `name` if it does not exist."""
        self._request("PUT", f"/{name}")

    def reset(self) -> None:
        """Delete every bucket, object and upload."""
        self._request("POST", "/moto-api/reset")

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait for its end. Its objects are lost."""
        self._own_process().kill()

    def restart(self) -> None:
        """Start it again at the same address, empty."""
        self._own_process().restart()

    def _own_process(self) -> ServerProcess:
        if self.process is None:
            raise RuntimeError(f"{self.endpoint_url} runs in threads of this process and has no process to kill")
        return self.process

    def _request(self, method: str, path: str) -> None:
        status, answer = ask(self.endpoint_url, method, path, timeout_s=_REQUEST_TIMEOUT_S)
        if status not in (200, 409):
            raise RuntimeError(f"{self.endpoint_url}: {method} {path} was answered with {status}: {answer}")


@contextlib.contextmanager
def moto_server(*, start_timeout_s: float = 60.0) -> Iterator[S3Server]:
    """Start an empty S3 server in its own process on a free port; it ends with the context.

    Raises `MissingDependencyError` without moto, and `RuntimeError` with the output of the server if it does not start
    within `start_timeout_s`.
    """
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("werkzeug") is None:
        raise MissingDependencyError("moto's server is not installed: pip install 'cloudckpt[testing]'")
    with reserved_port() as port:
        endpoint_url = f"http://127.0.0.1:{port}"
        program = Program(
            name="moto's server",
            command=[sys.executable, "-c", _SERVER, str(port)],
            environment=clean_environment(),
            is_ready=lambda timeout_s: answers(endpoint_url, "/moto-api/", timeout_s=timeout_s),
        )
        with running(program, start_timeout_s=start_timeout_s) as process:
            yield S3Server(endpoint_url=endpoint_url, process=process)
