"""Wires between a client and a server: nothing, TLS, or a slow line."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.integration.servers.packages import from_debian
from tests.kit.wire import Throttle, Wire, WireRule

from benchmarks import relay
from benchmarks.certificates import HOST, Certificates
from benchmarks.cores import kept_off_the_loops_core
from benchmarks.servers import START_TIMEOUT_S
from cloudckpt.testing.servers import Program, clean_environment, reserved_port, running

_TERMINATOR = """\
global
  nbthread {num_threads}
  tune.bufsize {record_bytes}
defaults
  mode tcp
  timeout connect 10s
  timeout client 10m
  timeout server 10m
listen tls
  bind 127.0.0.1:{port} ssl crt {certificate}{ciphersuites}
  server store {target}
"""


@contextlib.contextmanager
def tls(
    endpoint_url: str, certificates: Certificates, *, cipher: str | None = None, record_bytes: int = 256 * 1024
) -> Iterator[str]:
    """The address of a TLS terminator in front of `endpoint_url`: a process whose seconds are not the client's.

    It offers the one `cipher` of TLS 1.3; else all that are usual. Its buffers have `record_bytes`; it sends records of
    as many, up to 16 KiB. Large buffers cost it less processor time, of which clients on the same cores get more.
    """
    target = _host_and_port(endpoint_url)
    with tempfile.TemporaryDirectory(prefix="benchmark-tls-") as directory, reserved_port() as port:
        configuration = Path(directory) / "haproxy.cfg"
        ciphersuites = f" ciphersuites {cipher}" if cipher else ""
        configuration.write_text(
            _TERMINATOR.format(
                record_bytes=record_bytes,
                num_threads=max(2, (os.cpu_count() or 2) // 2),
                port=port,
                certificate=certificates.server,
                ciphersuites=ciphersuites,
                target=target,
            )
        )
        program = Program(
            name="haproxy",
            command=[from_debian("haproxy", "haproxy"), "-db", "-q", "-f", configuration],
            environment=clean_environment(),
            is_ready=lambda timeout_s: _accepts(port, timeout_s),
        )
        with running(program, start_timeout_s=START_TIMEOUT_S):
            yield f"https://{HOST}:{port}"


@contextlib.contextmanager
def slow(endpoint_url: str, *, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """The address of a proxy that holds each request back, and each connection to a rate."""
    _host_and_port(endpoint_url)
    throttle = Throttle(bytes_per_s=bytes_per_s, delay_s=latency_s)
    with Wire(endpoint_url, WireRule(action=throttle, times=None)) as line:
        yield line.url


@contextlib.contextmanager
def capped(endpoint_url: str, *, bytes_per_s: float) -> Iterator[str]:
    """The address of a relay that holds what all connections send together to a rate."""
    _, _, target_port = _host_and_port(endpoint_url).partition(":")
    with reserved_port() as port:
        program = Program(
            name="the relay",
            command=[sys.executable, relay.__file__, str(port), target_port, f"{bytes_per_s:.0f}"],
            environment=clean_environment(),
            is_ready=lambda timeout_s: _accepts(port, timeout_s),
        )
        with contextlib.ExitStack() as stack:
            with kept_off_the_loops_core():
                stack.enter_context(running(program, start_timeout_s=START_TIMEOUT_S))
            yield f"http://{HOST}:{port}"


def _host_and_port(endpoint_url: str) -> str:
    parts = urlsplit(endpoint_url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"only a plain http:// endpoint can be given another wire, not {endpoint_url}")
    return f"{parts.hostname}:{parts.port or 80}"


def _accepts(port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
