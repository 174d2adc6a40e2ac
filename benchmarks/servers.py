"""The object stores that systems are measured against: how to reach them, and how to empty them between turns."""

from __future__ import annotations

import abc
import argparse
import contextlib
import importlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from cloudckpt.options import Options
from cloudckpt.stores import open_store
from cloudckpt.testing.servers import (
    ACCESS_KEY_ID,
    REGION,
    SECRET_ACCESS_KEY,
    Program,
    ask,
    clean_environment,
    moto_server,
    reserved_port,
    running,
)

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0
BUCKET = "benchmark"


class Counts(NamedTuple):
    """Counts of a server since its last reset."""

    num_bytes_sent: int
    """In the bodies of answers."""
    num_requests: int
    num_bytes_received: int
    """In the bodies of requests."""


class Server(abc.ABC):
    """An endpoint, and a place on it that is the run's own."""

    endpoint_url: str | None
    """None where the client's own configuration says it."""
    region: str | None
    uri: str
    """Everything the run stores lies under it."""
    checks_signatures = True

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all that the run stored, so that no system finds memory or disk already in use."""

    def counts(self) -> Counts | None:
        """Return what the server has counted; None if it counts nothing."""
        return None


class _Local(Server):
    """One that was started for the run."""

    region = REGION
    uri = f"s3://{BUCKET}"

    def __init__(self, endpoint_url: str) -> None:
        self.endpoint_url = endpoint_url


class _Fasts3(_Local):
    checks_signatures = False

    def reset(self) -> None:
        self._get("/_reset")

    def counts(self) -> Counts:
        text = self._get("/_stats")
        found = re.search(r"\bin (\d+) out (\d+) requests (\d+)\b", text)
        if found is None:
            raise RuntimeError(f"fasts3 does not count bytes and requests: {text!r}. Build it anew")
        return Counts(num_bytes_sent=int(found[2]), num_requests=int(found[3]), num_bytes_received=int(found[1]))

    def _get(self, path: str) -> str:
        status, text = ask(str(self.endpoint_url), "GET", path, timeout_s=CALL_TIMEOUT_S)
        if status != 200:
            raise RuntimeError(f"{self.endpoint_url}{path} was answered with {status}: {text}")
        return text


class _Emptied(_Local):
    """Any other one."""

    def reset(self) -> None:
        _empty(self.uri, _options_of(self))


class _Given(Server):
    """The user's own: what the run stored is deleted, and nothing else."""

    def __init__(self, uri: str, *, endpoint_url: str | None, region: str | None) -> None:
        self.endpoint_url = endpoint_url
        self.region = region
        self.uri = uri

    def reset(self) -> None:
        _empty(self.uri, _options_of(self))


def environment(ca_bundle: Path | None) -> dict[str, str]:
    """A worker's, that leads it to the servers started here and to none of the user's."""
    certificates = {} if ca_bundle is None else {name: str(ca_bundle) for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE")}
    return {
        **clean_environment(),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "AWS_DEFAULT_REGION": REGION,
        **certificates,
    }


@contextlib.contextmanager
def fasts3(binary: Path, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> Iterator[Server]:
    """A server in memory that checks nothing and so measures the client.

    It takes `latency_s` to the first byte of each answer, and gives a connection `bytes_per_s`; 0: all it can.
    """
    with reserved_port() as port:
        server = _Fasts3(f"http://127.0.0.1:{port}")

        def is_ready(_timeout_s: float) -> bool:
            with contextlib.suppress(OSError):
                server.reset()
                return True
            return False

        program = Program(
            name="fasts3",
            command=[binary.absolute(), str(port), f"{latency_s * 1e3:.0f}", f"{bytes_per_s / 1e6:g}"],
            environment=clean_environment(),
            is_ready=is_ready,
        )
        with running(program, start_timeout_s=START_TIMEOUT_S):
            yield server


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """The server of moto: everywhere at hand and right, but so slow that only small sizes make sense."""
    with moto_server() as started:
        started.create_bucket(BUCKET)
        yield _Emptied(started.endpoint_url)


@contextlib.contextmanager
def rgw() -> Iterator[Server]:
    """Ceph's RADOS Gateway on a cluster of its own: what a service costs that does all that a service does."""
    ceph = importlib.import_module("tests.integration.servers.ceph")
    with ceph.ceph_rgw() as started:
        started.create_bucket(BUCKET)
        yield _Emptied(started.endpoint_url)


@contextlib.contextmanager
def given(uri: str, *, endpoint_url: str | None, region: str | None) -> Iterator[Server]:
    """Yield a server that runs already; `uri` is a prefix of the run's own, and empty at the end."""
    server = _Given(uri, endpoint_url=endpoint_url, region=region)
    try:
        yield server
    finally:
        server.reset()


STARTED_HERE: Mapping[str, Any] = {"moto": moto, "rgw": rgw}


def start(name: str) -> AbstractContextManager[Server]:
    """One of `STARTED_HERE`."""
    started: AbstractContextManager[Server] = STARTED_HERE[name]()
    return started


def find_cargo() -> Path | None:
    """Return Rust's cargo; None where there is none."""
    # rustup installs it there, and not every shell has the folder on its PATH.
    found = shutil.which("cargo") or shutil.which(Path.home() / ".cargo" / "bin" / "cargo")
    return None if found is None else Path(found)


def build_fasts3(cargo: Path, target: Path) -> Path:
    """Compile the server into the folder `target`, unless it is there, and return the program."""
    source = Path(__file__).with_name("fasts3")
    command = [cargo, "build", "--release", "--locked", "--quiet", "--target-dir", target.absolute()]
    subprocess.run(command, cwd=source, check=True)
    return target / "release" / "fasts3"


def require_fasts3(parser: argparse.ArgumentParser, root: Path) -> Path:
    """Return the program, compiled in `root`. Ends the command with an error of `parser` without Rust's cargo."""
    cargo = find_cargo()
    if cargo is None:
        parser.error("the server is built by Rust's cargo, which is not here")
    return build_fasts3(cargo, root / "build" / "fasts3")


def _options_of(server: Server) -> dict[str, Any]:
    credentials = (
        {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY} if isinstance(server, _Local) else {}
    )
    wanted = {"endpoint_url": server.endpoint_url, "region": server.region, **credentials}
    return {name: value for name, value in wanted.items() if value is not None}


def _empty(uri: str, storage_options: Mapping[str, Any]) -> None:
    store = open_store(uri, Options(storage_options=storage_options, timeout_s=CALL_TIMEOUT_S))
    store.delete([found.key for found in store.list()])
    for upload in store.list_uploads():
        store.abort_multipart(upload.key, upload.upload_id)
