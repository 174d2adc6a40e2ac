"""MiniStack's S3: conditional calls that race rightly, and checksums that are verified."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

from tests.integration.servers.packages import from_servers_environment
from tests.integration.servers.s3 import S3Service

from cloudckpt.testing.servers import Program, answers, clean_environment, reserved_port, running


@contextlib.contextmanager
def ministack(*, start_timeout_s: float = 60.0) -> Iterator[S3Service]:
    """A fresh, empty server. Its objects are files of a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="ministack-") as root, reserved_port() as port:
        endpoint_url = f"http://127.0.0.1:{port}"
        program = Program(
            name="MiniStack",
            command=[from_servers_environment("ministack")],
            environment=clean_environment()
            | {
                "BIND_HOST": "127.0.0.1",
                "GATEWAY_PORT": str(port),
                "SERVICES": "s3",
                "S3_PERSIST": "1",
                "S3_DATA_DIR": f"{root}/s3",
                "TMPDIR": root,
                "LOG_LEVEL": "WARNING",
            },
            is_ready=lambda timeout_s: answers(endpoint_url, "/_ministack/health", timeout_s=timeout_s),
        )
        with running(program, start_timeout_s=start_timeout_s) as process:
            yield S3Service(name="ministack", endpoint_url=endpoint_url, process=process, keeps_data=True)
