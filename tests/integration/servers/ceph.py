"""Ceph's RADOS Gateway: a real object store, with one monitor and one OSD that keeps its objects in memory."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.servers.packages import from_debian
from tests.integration.servers.s3 import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Service

from cloudckpt.testing.servers import Program, ServerProcess, answers, clean_environment, reserved_port, running

_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port},v1:127.0.0.1:{old_mon_port}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
run dir = {root}
admin socket =
pid file =
crash dir = {root}
log file =
log to stderr = true
err to stderr = true
mon cluster log to file = false
# Errors alone, and no dump of what was not shown.
debug mon = 0/0
debug monc = 0/0
debug ms = 0/0
debug osd = 0/0
debug paxos = 0/0
debug rgw = 0/0
debug rocksdb = 0/0
debug asok = 0/0
auth cluster required = none
auth service required = none
auth client required = none
# The gateway asks for the 'secure' mode towards the monitor, which needs the authentication that is off.
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon warn on pool no redundancy = false
[mon]
mon data = {root}/mon
# It counts the disk as full at 5 % otherwise, and stops.
mon data avail warn = 1
mon data avail crit = 1
paxos propose interval = 0.05
paxos min wait = 0.01
[osd]
osd data = {root}/osd
osd objectstore = memstore
memstore device bytes = {capacity_bytes}
memstore page set = false
osd op num shards = 2
osd op num threads per shard = 2
[client.rgw]
rgw data = {root}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
# Gateways tell each other what to forget, and would wait half a minute for one that was killed.
rgw cache enabled = false
rgw enable usage log = false
rgw enable ops log = false
rgw dynamic resharding = false
rgw override bucket index max shards = 1
# A gateway that is killed while it completes an upload leaves it locked, for ten minutes by default.
rgw mp lock max time = 1
# What was deleted is given back at once: the objects are in memory.
rgw gc obj min wait = 5
rgw gc processor period = 10
rgw gc processor max time = 10
"""
_CAPACITY_BYTES = 8 << 30
_MAX_WORDS = 2000
_DEBIAN_PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"


@dataclass(slots=True, kw_only=True)
class _Cluster:
    """One monitor, one OSD, one gateway, all below one directory."""

    root: Path
    port: int
    mon_port: int
    old_mon_port: int
    deadline: float
    fsid: str = field(default_factory=lambda: str(uuid.uuid4()))
    daemons: list[ServerProcess] = field(default_factory=list)

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, stack: contextlib.ExitStack) -> ServerProcess:
        """Make the cluster and return its gateway; all of it is gone when the stack is unwound."""
        self._configure()
        monmap, osd = str(self.root / "monmap"), str(uuid.uuid4())
        address = f"[v2:127.0.0.1:{self.mon_port},v1:127.0.0.1:{self.old_mon_port}]"
        self._call("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", address, monmap)
        self._call("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap)
        self._run(stack, "ceph-mon", "-i", "a", is_ready=lambda timeout_s: _listens(self.mon_port, timeout_s))
        self._call("ceph", "osd", "new", osd)
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        # The gateway waits for it.
        self._run(stack, "ceph-osd", "-i", "0", is_ready=lambda _: True)
        gateway = self._run(
            *(stack, "radosgw", "-n", "client.rgw"),
            is_ready=lambda timeout_s: answers(self.endpoint_url, timeout_s=timeout_s),
        )
        self._call(
            *("radosgw-admin", "user", "create", "-n", "client.rgw", "--uid", "tester", "--display-name", "tester"),
            *("--access-key", ACCESS_KEY_ID, "--secret", SECRET_ACCESS_KEY),
        )
        return gateway

    def last_words(self) -> str:
        """Return the last output of each daemon that has started."""
        return "\n".join(f"{daemon.program.name}: {daemon.last_words()}" for daemon in self.daemons)

    def _configure(self) -> None:
        for directory in ("mon", "osd", "rgw"):
            (self.root / directory).mkdir()
        text = _CONFIGURATION.format(
            root=self.root,
            fsid=self.fsid,
            port=self.port,
            mon_port=self.mon_port,
            old_mon_port=self.old_mon_port,
            capacity_bytes=_CAPACITY_BYTES,
        )
        (self.root / "ceph.conf").write_text(text)

    def _call(self, program: str, *arguments: str) -> None:
        """Run one of Ceph's tools to its end."""
        try:
            subprocess.run(
                [from_debian(program, _DEBIAN_PACKAGES), *arguments],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self._left_s(),
                check=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            words = (error.output or b"").decode(errors="replace").strip()[:_MAX_WORDS]
            raise RuntimeError(f"{program} {arguments[0]} failed: {words or error}") from error

    def _run(
        self, stack: contextlib.ExitStack, program: str, *arguments: str, is_ready: Callable[[float], bool]
    ) -> ServerProcess:
        """Start one of Ceph's daemons."""
        started = Program(
            name=program,
            command=[from_debian(program, _DEBIAN_PACKAGES), "-f", *arguments],
            environment=self._environment(),
            is_ready=is_ready,
        )
        daemon = stack.enter_context(running(started, start_timeout_s=self._left_s()))
        self.daemons.append(daemon)
        return daemon

    def _environment(self) -> dict[str, str]:
        return clean_environment() | {"CEPH_CONF": str(self.root / "ceph.conf"), "CEPH_ARGS": ""}

    def _left_s(self) -> float:
        return max(0.01, self.deadline - time.monotonic())


@contextlib.contextmanager
def ceph_rgw(*, start_timeout_s: float = 120.0) -> Iterator[S3Service]:
    """A fresh cluster with a gateway. `kill` takes the gateway alone: the OSD keeps the data."""
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ceph-")))
        port, mon_port, old_mon_port = (stack.enter_context(reserved_port()) for _ in range(3))
        cluster = _Cluster(
            root=root,
            port=port,
            mon_port=mon_port,
            old_mon_port=old_mon_port,
            deadline=time.monotonic() + start_timeout_s,
        )
        try:
            gateway = cluster.start(stack)
        except RuntimeError as error:
            raise RuntimeError(f"Ceph did not start: {error}\n{cluster.last_words()}") from error
        yield S3Service(name="ceph-rgw", endpoint_url=cluster.endpoint_url, process=gateway, keeps_data=True)


def _listens(port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
