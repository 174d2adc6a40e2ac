"""Servers as processes: up inside, gone outside, killed and restarted, and never left behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from cloudckpt.testing import servers

MAKERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "moto_server": servers.moto_server,
    "fake_gcs_server": servers.fake_gcs_server,
}
WAIT_S = 30.0


@pytest.mark.parametrize("maker", MAKERS)
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
