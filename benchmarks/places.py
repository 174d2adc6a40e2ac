"""The places to which the systems of a cell save: servers and wires. Each starts when a cell first asks for it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import servers, wires
from benchmarks.certificates import Certificates, make_certificates
from benchmarks.cores import kept_off_the_loops_core
from benchmarks.servers import Counts, Server
from benchmarks.sweeps import CAPPED_BYTES_PER_S, FAR_LATENCY_S, SLOW_BYTES_PER_S, SLOW_LATENCY_S, Cell, WireName


class UnavailableError(RuntimeError):
    """The place cannot be had here; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Store that the user named: `uri` is a bucket, perhaps with a prefix."""

    uri: str
    endpoint_url: str | None
    region: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Addresses that were never used, and how to forget what was stored there."""

    server: Server | None
    """None: paths."""
    endpoint_url: str | None
    region: str | None
    ca_bundle: str | None
    root: str

    def new_uri(self, system: str) -> str:
        return f"{self.root}/{system}-{uuid.uuid4().hex[:12]}"

    def clear(self) -> None:
        if self.server is not None:
            self.server.reset()
            return
        for child in Path(self.root).iterdir():
            shutil.rmtree(child)

    def counts(self) -> Counts | None:
        """Return the counts of the server since `clear`."""
        return None if self.server is None else self.server.counts()

    @property
    def checks_signatures(self) -> bool:
        return self.server is not None and self.server.checks_signatures


class Places:
    """All that a run has started; ends with the stack."""

    def __init__(
        self, stack: contextlib.ExitStack, *, fasts3_binary: Path | None, given: Given | None, local_parent: Path
    ) -> None:
        self._stack = stack
        self._fasts3_binary = fasts3_binary
        self._given = given
        self._local_parent = local_parent
        self._servers: dict[tuple[str, WireName], Server] = {}
        self._endpoints: dict[tuple[str, WireName], str | None] = {}
        self._certificates: Certificates | None = None
        self._local_root: Path | None = None

    def place_of(self, cell: Cell) -> Place:
        """Raises `UnavailableError`."""
        try:
            if cell.server == "path":
                return Place(server=None, endpoint_url=None, region=None, ca_bundle=None, root=str(self._local()))
            server = self._server(cell)
            endpoint_url = self._endpoint(cell, server)
        except (OSError, RuntimeError, ValueError) as error:
            raise UnavailableError(str(error)) from error
        ca_bundle = str(self.certificates.ca_bundle) if cell.wire == "tls" else None
        return Place(
            server=server, endpoint_url=endpoint_url, region=server.region, ca_bundle=ca_bundle, root=server.uri
        )

    @property
    def certificates(self) -> Certificates:
        if self._certificates is None:
            directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-certificates-"))
            self._certificates = make_certificates(Path(directory))
        return self._certificates

    def _server(self, cell: Cell) -> Server:
        # Only fasts3 is slow by itself, and only of it one may take the cores that it is given.
        is_own = cell.server == "fasts3" and cell.wire in ("slow", "far", "capped")
        key = (cell.server, cell.wire if is_own else "http")
        if key not in self._servers:
            self._servers[key] = self._stack.enter_context(self._started(*key))
        return self._servers[key]

    def _started(self, name: str, wire: WireName) -> contextlib.AbstractContextManager[Server]:
        if name == "given":
            if self._given is None:
                raise ValueError("no store was given: --uri or --bucket name one")
            return servers.given(
                f"{self._given.uri.rstrip('/')}/cloudckpt-benchmark-{uuid.uuid4().hex[:12]}",
                endpoint_url=self._given.endpoint_url,
                region=self._given.region,
            )
        if name != "fasts3":
            return servers.start(name)
        if self._fasts3_binary is None:
            raise ValueError("fasts3 is not there: install cargo, which builds it, or give --fasts3-binary")
        if wire == "slow":
            return servers.fasts3(self._fasts3_binary, latency_s=SLOW_LATENCY_S, bytes_per_s=SLOW_BYTES_PER_S)
        if wire == "far":
            return servers.fasts3(self._fasts3_binary, latency_s=FAR_LATENCY_S)
        if wire == "capped":
            return _kept_off(servers.fasts3(self._fasts3_binary))
        return servers.fasts3(self._fasts3_binary)

    def _endpoint(self, cell: Cell, server: Server) -> str | None:
        key = (cell.server, cell.wire)
        if key not in self._endpoints:
            endpoint_url = server.endpoint_url
            if cell.wire == "tls":
                endpoint_url = self._stack.enter_context(wires.tls(endpoint_url or "", self.certificates))
            elif cell.wire == "slow" and cell.server != "fasts3":
                slow = wires.slow(endpoint_url or "", latency_s=SLOW_LATENCY_S, bytes_per_s=SLOW_BYTES_PER_S)
                endpoint_url = self._stack.enter_context(slow)
            elif cell.wire == "capped":
                capped = wires.capped(endpoint_url or "", bytes_per_s=CAPPED_BYTES_PER_S)
                endpoint_url = self._stack.enter_context(capped)
            self._endpoints[key] = endpoint_url
        return self._endpoints[key]

    def _local(self) -> Path:
        if self._local_root is None:
            directory = tempfile.TemporaryDirectory(prefix="cloudckpt-benchmark-", dir=self._local_parent)
            self._local_root = Path(self._stack.enter_context(directory))
        return self._local_root


@contextlib.contextmanager
def _kept_off(starting: contextlib.AbstractContextManager[Server]) -> Iterator[Server]:
    """A server that leaves the core of a training loop alone."""
    with contextlib.ExitStack() as stack:
        with kept_off_the_loops_core():
            server = stack.enter_context(starting)
        yield server
