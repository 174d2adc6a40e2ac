"""The embedded server: it starts, tells where, keeps to itself, and is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from cloudckpt.stores.s3 import S3Store
from cloudckpt.testing import servers

if TYPE_CHECKING:
    from cloudckpt.testing.servers import S3Server


def answers(endpoint_url: str) -> bool:
    try:
        urllib.request.urlopen(endpoint_url, timeout=10).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False
    return True


def test_it_is_up_inside_and_gone_outside() -> None:
    """A server left behind by every test run would fill the machine."""
    with servers.moto_server() as server:
        assert server.endpoint_url.startswith("http://127.0.0.1:")
        assert answers(server.endpoint_url)
    assert not answers(server.endpoint_url)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_it_ends_with_a_process_that_was_killed() -> None:
    """A demo killed with SIGKILL would leave its server behind."""
    source = (
        "from cloudckpt.testing.servers import moto_server\n"
        "with moto_server() as server:\n"
        "    print(server.endpoint_url, flush=True)\n"
        "    input()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner, owner.stdin, owner.stdout:
        endpoint_url = owner.stdout.readline().decode().strip()
        port = int(endpoint_url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            owner.send_signal(signal.SIGKILL)
            owner.wait(30)
            # Ends when the server does: it keeps a connection open that has not asked for anything.
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_a_bucket_can_be_made_twice_and_reset_forgets(s3_server: S3Server) -> None:
    """Fixtures share a server: a second creation must not fail, and leftovers must not leak."""
    with servers.moto_server() as server:
        server.create_bucket("twice")
        server.create_bucket("twice")
        store = S3Store("twice", "", storage_options=server.storage_options, timeout_s=30, connections=1)
        store.put("k", [memoryview(b"x")], crc32c=0)
        server.reset()
        server.create_bucket("twice")
        assert list(store.list()) == []
        assert server.endpoint_url != s3_server.endpoint_url
        with pytest.raises(RuntimeError, match="InvalidBucketName"):
            server.create_bucket("x")


def test_the_environment_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own profile or proxy would send a test's requests to a real store."""
    dirty = {"AWS_PROFILE": "prod", "aws_session_token": "x", "https_proxy": "http://proxy", "PATH": "/bin"}
    clean = servers.clean_environment(dirty)
    assert clean["PATH"] == "/bin"
    assert set(clean) & set(dirty) == {"PATH"}
    assert clean["AWS_EC2_METADATA_DISABLED"] == "true"
    assert clean["AWS_CONFIG_FILE"] == os.devnull
    monkeypatch.setenv("AWS_PROFILE", "prod")
    assert "AWS_PROFILE" not in servers.clean_environment()


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation would end in a timeout without a word."""
    monkeypatch.setattr(servers, "_SERVER", "raise SystemExit('no such luck')")
    with pytest.raises(RuntimeError, match="no such luck"), servers.moto_server():
        pass
    monkeypatch.setattr(servers, "_SERVER", "import sys; sys.stdin.read()")
    with pytest.raises(RuntimeError, match=r"within 0\.2 s"), servers.moto_server(start_timeout_s=0.2):
        pass


def test_without_moto_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo of a user without moto would end in a ModuleNotFoundError of a child process."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ImportError, match="moto"), servers.moto_server():
        pass
