"""Servers as processes: up inside, gone outside, killed and restarted, and never left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from cloudckpt.testing import servers

MAKERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "moto_server": servers.moto_server,
    "fake_gcs_server": servers.fake_gcs_server,
}
WAIT_S = 30.0

every_server = pytest.mark.parametrize("maker", MAKERS)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def program(command: list[str], **settings: Any) -> servers.Program:
    return servers.Program(
        **{"name": "the server", "environment": dict(os.environ), "is_ready": lambda _: False, **settings},
        command=command,
    )


@every_server
def test_it_is_killed_and_comes_back_at_its_address(maker: str) -> None:
    """Tests that kill a server in the middle of a save would go on to talk to nothing, or to a stranger."""
    with MAKERS[maker]() as server:
        first, address = server.pid, server.endpoint_url
        assert server.is_running
        server.kill()
        assert not server.is_running
        assert not is_alive(first)
        assert not servers.answers(server.endpoint_url, timeout_s=WAIT_S)
        server.kill()
        server.restart()
        assert server.endpoint_url == address
        server.create_bucket("abc")
        second = server.pid
        server.restart()  # while it runs
        assert not is_alive(second)
        server.create_bucket("abc")
        os.kill(server.pid, signal.SIGKILL)  # as another process does it
        server.restart()
        server.create_bucket("abc")
        last = server.pid
    assert len({first, second, last}) == 3
    assert not is_alive(last)


@every_server
def test_it_ends_with_a_process_that_was_killed(maker: str) -> None:
    """A demo killed with SIGKILL would leave its server behind."""
    source = (
        f"from cloudckpt.testing.servers import {maker} as maker\n"
        "with maker() as server:\n"
        "    print(server.endpoint_url, flush=True)\n"
        "    input()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner, owner.stdin, owner.stdout:
        endpoint_url = owner.stdout.readline().decode().strip()
        port = int(endpoint_url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
            owner.send_signal(signal.SIGKILL)
            owner.wait(WAIT_S)
            # Ends when the server does: it keeps a connection open that has not asked for anything.
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_what_the_server_started_is_killed_with_it(tmp_path: Path) -> None:
    """A server of several processes would go on serving after it was killed."""
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    # The grandchild alone holds the other end of it, after it has said so.
    source = f"(echo started; exec sleep 1000) > {fifo} & wait"

    def is_ready(timeout_s: float) -> bool:
        return bool(select.select([reader], [], [], timeout_s)[0]) and os.read(reader, 100) == b"started\n"

    try:
        with servers.running(program(["sh", "-c", source], is_ready=is_ready), start_timeout_s=WAIT_S):
            pass
        assert select.select([reader], [], [], WAIT_S)[0], "the grandchild lives on"
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "echo no such luck >&2; exit 3"], "ended as soon as it was started: no such luck"),
        (["sh", "-c", "echo no such luck; exit 3"], "ended as soon as it was started: no such luck"),
        (["sh", "-c", "exit 3"], "ended as soon as it was started: no output"),
        (["/does/not/exist"], r"(?s)could not be run: .*/does/not/exist"),
    ],
)
def test_a_server_that_cannot_start_says_why(command: list[str], words: str) -> None:
    """A broken installation would end in a timeout without a word."""
    with pytest.raises(RuntimeError, match=words), servers.running(program(command), start_timeout_s=WAIT_S):
        pass
