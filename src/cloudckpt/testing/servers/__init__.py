"""Object stores for tests and demonstrations, on the loopback interface, for as long as they are needed.

`moto_server` speaks S3, `fake_gcs_server` speaks GCS. Both are made for tests: they keep to themselves, need no
network, and end with the process that started them, however that ends. Neither is a judge of races or checksums: moto
does not lock a conditional put and takes a wrong checksum, fake-gcs-server takes a wrong checksum and ignores
preconditions of everything but simple uploads.
"""

from __future__ import annotations

from cloudckpt.testing.servers._environment import clean_environment
from cloudckpt.testing.servers._http import answers, ask
from cloudckpt.testing.servers._process import Program, ServerProcess, reserved_port, running
from cloudckpt.testing.servers.fake_gcs import GCSServer, fake_gcs_server
from cloudckpt.testing.servers.moto import S3Server, moto_server
from cloudckpt.testing.servers.shape import Server

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
