"""Object stores on the loopback interface, for tests and demonstrations.

`moto_server` speaks S3, `fake_gcs_server` speaks GCS. Both need no network, and end with the process that started them,
even if it is killed. Do not test races or checksums with them: moto does not lock a conditional put and accepts a wrong
checksum; fake-gcs-server accepts a wrong checksum and ignores preconditions except in simple uploads.
"""

from __future__ import annotations

from cloudckpt.testing.servers.base import (
    Program,
    Server,
    ServerProcess,
    answers,
    ask,
    clean_environment,
    reserved_port,
    running,
)
from cloudckpt.testing.servers.fake_gcs import GCSServer, fake_gcs_server
from cloudckpt.testing.servers.moto import S3Server, moto_server

__all__ = [
    "GCSServer",
    "Program",
    "S3Server",
    "Server",
    "ServerProcess",
    "answers",
    "ask",
    "clean_environment",
    "fake_gcs_server",
    "moto_server",
    "reserved_port",
    "running",
]
