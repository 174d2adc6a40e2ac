"""gcp-storage-emulator, which refuses a wrong CRC32C, and ignores every precondition."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from tests.integration.servers.packages import from_servers_environment

from cloudckpt.testing.servers import (
    GCSServer,
    Program,
    answers,
    ask,
    clean_environment,
    reserved_port,
    running,
)

_REQUEST_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GCPStorageEmulator(GCSServer):
    """The same API by another server."""

    name: str = "gcp-storage-emulator"

    def reset(self) -> None:
        """Forget every bucket and object."""
        status, answer = ask(self.endpoint_url, "GET", "/wipe", timeout_s=_REQUEST_TIMEOUT_S)
        if status != 200:
            raise RuntimeError(f"{self.endpoint_url}: /wipe was answered with {status}: {answer}")


@contextlib.contextmanager
def gcp_storage_emulator(*, start_timeout_s: float = 60.0) -> Iterator[GCPStorageEmulator]:
    """A fresh, empty server that keeps its objects in memory."""
    with tempfile.TemporaryDirectory(prefix="gcp-emulator-") as root, reserved_port() as port:
        endpoint_url = f"http://127.0.0.1:{port}"
        program = Program(
            name="gcp-storage-emulator",
            command=[
                *(from_servers_environment("gcp-storage-emulator"), "start", "--in-memory"),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            environment=clean_environment() | {"TMPDIR": root},
            is_ready=lambda timeout_s: answers(endpoint_url, timeout_s=timeout_s),
        )
        with running(program, start_timeout_s=start_timeout_s) as process:
            yield GCPStorageEmulator(endpoint_url=endpoint_url, process=process, directory=None)
