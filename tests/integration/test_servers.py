"""The servers themselves: what the other tests here take for granted."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Servers
from tests.integration.servers import SERVERS, ceph

from cloudckpt import Options
from cloudckpt.stores import open_store
from cloudckpt.testing.servers import Server

every_server = pytest.mark.parametrize("name", SERVERS)


@every_server
def test_objects_are_kept_over_a_kill_where_it_says_so(
    servers: Servers, use: Callable[[Server], str], name: str
) -> None:
    """A test that kills the server would blame cloudckpt for what the server lost, or not notice that it lost it."""
    server = servers.up(name)
    uri = use(server)
    with_storage_options = Options(storage_options=server.storage_options)
    for options in (Options(), with_storage_options):
        store = open_store(uri, options)
        store.put("a/b c", [memoryview(b"body")], crc32c=0x263FC950)
        assert store.read("a/b c", max_bytes=10) == b"body"
    first = server.pid
    server.kill()
    assert not server.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert servers.up(name) is server
    assert server.is_running
    os.kill(server.pid, signal.SIGKILL)
    server.restart()
    server.create_bucket(uri.partition("://")[2])
    assert [info.key for info in open_store(uri, Options()).list()] == (["a/b c"] if server.keeps_data else [])


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Those of Ceph that are started; its files are below `tmp_path`."""
    started: list[Any] = []
    enter_running = ceph.running

    @contextlib.contextmanager
    def running(*arguments: Any, **settings: Any) -> Iterator[Any]:
        with enter_running(*arguments, **settings) as daemon:
            started.append(daemon)
            yield daemon

    monkeypatch.setattr(ceph, "running", running)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return started


def test_a_daemon_that_cannot_start_is_quoted(
    daemons: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A lane that fails on somebody's machine would not say why, or leave half a cluster behind."""
    monkeypatch.setattr(ceph, "_CONFIGURATION", ceph._CONFIGURATION.replace("endpoint=127.0.0.1", "endpoint=no-host"))
    words = r"(?s)Ceph did not start: radosgw ended as soon as it was started: .*no-host.*\nceph-mon: .*\nceph-osd: "
    with pytest.raises(RuntimeError, match=words), ceph.ceph_rgw():
        pass
    assert len(daemons) == 2
    assert not any(daemon.is_running for daemon in daemons)
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_takes_too_long_is_given_up(daemons: list[Any], tmp_path: Path) -> None:
    """A lane would hang until the whole run is killed."""
    with pytest.raises(RuntimeError, match="Ceph did not start"), ceph.ceph_rgw(start_timeout_s=0.1):
        pass
    assert not any(daemon.is_running for daemon in daemons)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rgw", "ministack", "rclone", "gcp-emulator"])
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """A lane would fail on a machine without the servers, and not say what to do."""
    monkeypatch.setenv("CLOUDCKPT_SERVERS_VENV", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError, match="make integration"), SERVERS[name]():
        pass
