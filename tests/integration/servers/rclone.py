"""rclone's ``serve s3``, which ignores ``If-None-Match``: what cloudckpt's probe has to catch."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.integration.servers.packages import from_servers_environment
from tests.integration.servers.s3 import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Service

from cloudckpt.testing.servers import Program, answers, clean_environment, reserved_port, running


@contextlib.contextmanager
def rclone(*, start_timeout_s: float = 60.0) -> Iterator[S3Service]:
    """A fresh, empty server. Its objects are files of a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="rclone-") as root, reserved_port() as port:
        endpoint_url = f"http://127.0.0.1:{port}"
        objects = Path(root, "objects")
        objects.mkdir()
        program = Program(
            name="rclone serve s3",
            command=[
                *(from_servers_environment("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}"),
                *("--config", f"{root}/rclone.conf", "--cache-dir", f"{root}/cache", "--vfs-cache-mode", "writes"),
                objects,
            ],
            environment=clean_environment() | {"RCLONE_AUTH_KEY": f'"{ACCESS_KEY_ID},{SECRET_ACCESS_KEY}"'},
            is_ready=lambda timeout_s: answers(endpoint_url, timeout_s=timeout_s),
        )
        with running(program, start_timeout_s=start_timeout_s) as process:
            yield S3Service(name="rclone", endpoint_url=endpoint_url, process=process, keeps_data=True)
