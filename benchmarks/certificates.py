"""A certificate authority for one run, and the certificate of its TLS endpoints."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.integration.servers.packages import from_debian

_DAYS = "2"
_KEY = ("-newkey", "rsa:2048", "-nodes")
HOST = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files: what clients check with, and what a server shows, its key with it."""

    ca_bundle: Path
    server: Path


def make_certificates(directory: Path) -> Certificates:
    """Fresh ones for `HOST`, with keys of 2048 bits, as the services have them."""
    openssl = from_debian("openssl", "openssl")

    def call(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=directory, check=True, capture_output=True)

    extensions = f"subjectAltName=DNS:{HOST},IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\n"
    (directory / "extensions").write_text(extensions)
    authority = ("-subj", "/CN=benchmark authority", "-addext", "keyUsage=critical,keyCertSign")
    call("req", "-x509", *_KEY, "-days", _DAYS, "-keyout", "ca.key", "-out", "ca.pem", *authority)
    call("req", *_KEY, "-keyout", "server.key", "-out", "server.csr", "-subj", f"/CN={HOST}")
    issue = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", _DAYS, "-extfile", "extensions")
    call("x509", "-req", "-in", "server.csr", "-out", "server.pem", *issue)
    server = directory / "shown.pem"
    server.write_bytes((directory / "server.pem").read_bytes() + (directory / "server.key").read_bytes())
    return Certificates(ca_bundle=directory / "ca.pem", server=server)
