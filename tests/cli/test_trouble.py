"""What commands do where a store denies, is not there, or does not answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.cli.conftest import Run, save
from tests.e2e.places import S3Place
from tests.e2e.servers import FlakyS3

from cloudckpt.testing.servers import clean_environment, reserved_port


@pytest.fixture
def silent() -> Iterator[tuple[str, socket.socket]]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}", server


_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}


def test_a_missing_bucket_is_not_found(s3: S3Place, run: Run) -> None:
    """If this fails, a script cannot tell a typing error from a store that is down."""
    ended = run("ls", "s3://there-is-no-such-bucket/run")
    assert (ended.code, ended.out) == (3, "")
    assert len(ended.err.splitlines()) == 1


def test_what_is_denied_is_said_to_be(s3: S3Place, s3_application: FlakyS3, run: Run) -> None:
    """If this fails, a lacking permission looks like a missing checkpoint."""
    save(s3.uri())
    with s3_application.troubled(lambda method, url: "deny"):
        for command in (["ls", s3.root], ["show", s3.uri()], ["verify", s3.uri()], ["rm", s3.uri(), "--yes"]):
            ended = run(*command)
            assert (ended.code, ended.out) == (4, ""), command
            assert "s3:" in ended.err  # the permission


def test_a_store_that_stays_busy_is_unreachable(s3: S3Place, s3_application: FlakyS3, run: Run) -> None:
    """If this fails, a script does not know that trying again may help."""
    save(s3.uri())
    with s3_application.troubled(lambda method, url: "slow down"):
        assert run("show", s3.uri(), "--timeout", "1").code == 5


def test_what_cannot_be_reached_ends_in_its_time(run: Run) -> None:
    """If this fails, a wrong address hangs a script."""
    begun = time.monotonic()
    options = [option for name in ("access_key_id", "secret_access_key") for option in ("-o", f"{name}=x")]
    with reserved_port() as port:
        ended = run("ls", "s3://bucket/run", "--endpoint-url", f"http://127.0.0.1:{port}", "--timeout", "1", *options)
    assert ended.code == 5
    assert time.monotonic() - begun < 60


def test_ctrl_c_ends_what_waits_for_a_store(silent: tuple[str, socket.socket]) -> None:
    """If this fails, Ctrl-C does nothing while a store does not answer, or ends in a traceback."""
    address, server = silent
    asked = ["show", "s3://bucket/run", "--timeout", "3", "--endpoint-url", address]
    environment = clean_environment() | _CREDENTIALS
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    command = [sys.executable, "-m", "cloudckpt", *asked]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        try:
            server.settimeout(120)
            connection, _ = server.accept()  # it asks by now
            with connection:
                connection.settimeout(120)
                assert connection.recv(1)
                running.send_signal(signal.SIGINT)
                _, told = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130, told
    assert told == "Interrupted.\n"


_CLEANING = """
import os, signal, sys, threading
from cloudckpt.cli import _errors
_errors.handle_signals()
try:
    os.kill(os.getpid(), int(sys.argv[1]))
    threading.Event().wait(100)
finally:
    print("cleaning", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_it_at_once(first: signal.Signals) -> None:
    """If this fails, who presses Ctrl-C twice has to wait all the same, or is not told that something may be left."""
    command = [sys.executable, "-c", _CLEANING, str(int(first))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "cleaning\n"
            running.send_signal(signal.SIGINT)
            _, told = running.communicate(timeout=120)
        finally:
            running.kill()
    assert running.returncode == 130, told
    assert told == "Interrupted again: ended without cleaning up; cloudckpt gc removes what is left.\n"


def test_verbose_shows_where(run: Run) -> None:
    """If this fails, an error that nobody expected cannot be reported with what is needed to mend it."""
    done = subprocess.run(
        [sys.executable, "-m", "cloudckpt", "--verbose", "show", "/there/is/nothing"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")
