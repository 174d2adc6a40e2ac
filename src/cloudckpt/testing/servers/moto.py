"""moto's S3 server."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cloudckpt.errors import MissingDependencyError
from cloudckpt.testing.servers._environment import clean_environment
from cloudckpt.testing.servers._http import answers, ask
from cloudckpt.testing.servers._process import Program, ServerProcess, reserved_port, running

ACCESS_KEY_ID = "testing"
SECRET_ACCESS_KEY = "testing-secret"  # noqa: S105 (moto takes anything)
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
    """A `Server` that speaks S3 and forgets its objects when it ends."""

    endpoint_url: str
    process: ServerProcess | None = None
    """``None`` where it runs in threads of this process, and cannot be killed apart from it."""
    name: str = "moto"

    @property
    def scheme(self) -> str:
        """``s3``."""
        return "s3"

    @property
    def keeps_data(self) -> bool:
        """It does not."""
        return False

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

    @property
    def pid(self) -> int:
        """The process that serves; another one after a restart."""
        return self._own_process().pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and neither killed nor ended by itself."""
        return self.process is None or self.process.is_running

    def create_bucket(self, name: str) -> None:
        """Create the bucket `name`; one that exists is left as it is."""
        self._request("PUT", f"/{name}")

    def reset(self) -> None:
        """Forget every bucket, object and upload."""
        self._request("POST", "/moto-api/reset")

    def kill(self) -> None:
        """SIGKILL. On return it is gone, and its objects with it."""
        self._own_process().kill()

    def restart(self) -> None:
        """Start it again at the same address, empty."""
        self._own_process().restart()

    def _own_process(self) -> ServerProcess:
        if self.process is None:
            raise RuntimeError(f"{self.endpoint_url} is served by threads of this process, not by a process of its own")
        return self.process

    def _request(self, method: str, path: str) -> None:
        status, answer = ask(self.endpoint_url, method, path, timeout_s=_REQUEST_TIMEOUT_S)
        if status not in (200, 409):
            raise RuntimeError(f"{self.endpoint_url}: {method} {path} was answered with {status}: {answer}")


@contextlib.contextmanager
def moto_server(*, start_timeout_s: float = 60.0) -> Iterator[S3Server]:
    """A fresh, empty S3 server on a port of its own, in a process of its own, gone at the end.

    Raises `MissingDependencyError` without moto, and `RuntimeError` with the server's own words where it
    does not start within `start_timeout_s`.
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
