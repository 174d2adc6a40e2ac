"""Servers as processes: up inside, gone outside, killed and restarted, and never left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
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


def port_of(server: servers.Server) -> int:
    return int(server.endpoint_url.rpartition(":")[2])


def refuses(server: servers.Server) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port_of(server)), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return True
    return False


def program(command: list[str], **settings: Any) -> servers.Program:
    return servers.Program(
        **{"name": "the server", "environment": dict(os.environ), "is_ready": lambda _: False, **settings},
        command=command,
    )


@every_server
def test_it_is_up_inside_and_gone_outside(maker: str) -> None:
    """A server left behind by every test run would fill the machine."""
    with MAKERS[maker]() as server:
        assert server.endpoint_url.startswith("http://127.0.0.1:")
        assert servers.answers(server.endpoint_url, timeout_s=WAIT_S)
        pid = server.pid
    assert refuses(server)
    assert not is_alive(pid)


@every_server
def test_it_is_killed_and_comes_back_at_its_address(maker: str) -> None:
    """Tests that kill a server in the middle of a save would go on to talk to nothing, or to a stranger."""
    with MAKERS[maker]() as server:
        first, address = server.pid, server.endpoint_url
        assert server.is_running
        server.kill()
        assert not server.is_running
        assert not is_alive(first)
        assert refuses(server)
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


def _wait_for_ever(started: Any) -> None:
    started.set()
    signal.pause()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_does_not_keep_it_alive() -> None:
    """Ranks that are forked hold a copy of the pipe by which the server is told to end."""
    context = multiprocessing.get_context("fork")
    started = context.Event()
    with servers.fake_gcs_server() as server:
        child = context.Process(target=_wait_for_ever, args=(started,))
        child.start()
        try:
            assert started.wait(WAIT_S)
            server.kill()
            assert not is_alive(server.pid)
        finally:
            child.kill()
            child.join(WAIT_S)


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


def test_a_server_that_does_not_become_ready_is_given_up() -> None:
    """A server that hangs would hang the test run, or stay behind it."""
    asked = []

    def is_ready(timeout_s: float) -> bool:
        asked.append(timeout_s)
        return False

    silent = program(["sleep", "1000"], is_ready=is_ready)
    with (
        pytest.raises(RuntimeError, match=r"the server did not start within 0\.2 s: no output"),
        servers.running(silent, start_timeout_s=0.2),
    ):
        pass
    assert all(0 < timeout_s <= 0.2 for timeout_s in asked)  # none at all, where the machine is very slow


def test_it_is_not_started_twice() -> None:
    """The first server would be left behind."""
    with (
        servers.running(program(["sleep", "1000"], is_ready=lambda _: True), start_timeout_s=WAIT_S) as process,
        pytest.raises(RuntimeError, match="runs already"),
    ):
        process.start()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port cannot be kept for a server")
def test_a_reserved_port_is_given_to_nobody_else() -> None:
    """While a killed server is down, another would take its address and answer in its place."""
    with servers.reserved_port() as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            socket.create_connection(("127.0.0.1", port), timeout=WAIT_S).close()
        with contextlib.ExitStack() as stack:
            assert port not in [stack.enter_context(servers.reserved_port()) for _ in range(200)]


@every_server
def test_every_server_has_the_common_shape(maker: str) -> None:
    """A test written for one server could not be run against another."""
    with MAKERS[maker]() as made:
        server: servers.Server = made
        assert server.scheme in ("s3", "gs")
        assert server.storage_options["endpoint_url"] == server.endpoint_url
        assert server.endpoint_url in server.environment.values()
        assert server.name
        assert server.keeps_data is False
