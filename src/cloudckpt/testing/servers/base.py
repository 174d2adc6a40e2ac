"""Common interface of the servers, and the process that runs each of them."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol
from urllib.parse import urlsplit


class Server(Protocol):
    """An object store that runs on this machine for tests."""

    @property
    def name(self) -> str:
        """Name of the server in messages and in test ids."""

    @property
    def endpoint_url(self) -> str:
        """Address of the server; a restart does not change it."""

    @property
    def pid(self) -> int:
        """Process id of the server; it changes with a restart."""

    @property
    def is_running(self) -> bool:
        """True if the program is started and has not ended."""

    @property
    def keeps_data(self) -> bool:
        """True if objects survive `kill` and `restart`."""

    @property
    def scheme(self) -> str:
        """Scheme of its URIs: ``s3`` or ``gs``."""

    @property
    def storage_options(self) -> dict[str, Any]:
        """The `cloudckpt.Options.storage_options` to reach it."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the store's clients to reach it, in addition to `clean_environment`."""

    def create_bucket(self, name: str) -> None:
        """Create the bucket `name` if it does not exist."""

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait for its end. Does nothing if it is not running."""

    def restart(self) -> None:
        """Kill the server if it runs, start it at the same address, and wait until it answers."""


_UNWANTED = (
    "ALL_PROXY",
    "API_ENDPOINT_OVERRIDE",  # google-cloud-storage's
    "AWS_",
    "BOTO_",
    "CLOUDSDK_",
    "GCE_METADATA_",
    "GCLOUD_",
    "GCSFS_",
    "GOOGLE_",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "MOTO_",
    "NO_GCE_CHECK",
    "STORAGE_EMULATOR_HOST",
)
_NOWHERE = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    # Clients look for application-default credentials below this path, and nothing exists below a file.
    "CLOUDSDK_CONFIG": os.devnull,
    "NO_GCE_CHECK": "true",
}


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `environment` (by default this process's) without the settings of AWS and Google clients.

    The user's profiles, credentials, endpoints and proxies could send the requests of a test to a real store.
    """
    source = os.environ if environment is None else environment
    kept = {name: value for name, value in source.items() if not name.upper().startswith(_UNWANTED)}
    return {**kept, **_NOWHERE}


def ask(
    endpoint_url: str,
    method: str,
    path: str,
    *,
    timeout_s: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Send a request and return the status and text of the answer.

    Raises `OSError` or `http.client.HTTPException` if there is none.
    """
    connection = http.client.HTTPConnection(urlsplit(endpoint_url).netloc, timeout=timeout_s)
    try:
        connection.request(method, path, body=body, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def answers(endpoint_url: str, path: str = "/", *, timeout_s: float) -> bool:
    """Return True if the server answers a request for `path` in time, with any status."""
    try:
        ask(endpoint_url, "GET", path, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException):
        return False
    return True


_STOP_S = 10.0
_POLL_S = 0.02
_LONGEST_LOG_BYTES = 4096
# A supervisor between this process and the server, because the server does not notice the end of this process. The
# supervisor kills the server and its children when it reads a byte from its standard input, or the end of file that
# follows the end of this process. On Linux its own end kills the server too. It ends when the server ends.
_SUPERVISOR = """
import ctypes, os, signal, subprocess, sys, threading

def die_with_the_supervisor(supervisor=os.getpid()):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

def kill():
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass

def obey():
    os.read(0, 1)
    if child.returncode is None:
        kill()

signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(
    sys.argv[1:],
    stdin=subprocess.DEVNULL,
    stdout=sys.stderr,
    start_new_session=True,
    preexec_fn=die_with_the_supervisor,
)
print(child.pid, flush=True)
threading.Thread(target=obey, daemon=True).start()
status = child.wait()
kill()
os._exit(status & 127)
"""


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port of the loopback interface.

    On Linux a bound socket that does not listen reserves the port, also while the server is down. On other systems the
    port is only known to be free at the start.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command, and a check that it is ready."""

    name: str
    """Name in messages."""
    command: Sequence[str | os.PathLike[str]]
    environment: Mapping[str, str] = field(repr=False)
    """The whole environment; it may contain secrets, so it is not in the repr."""
    is_ready: Callable[[float], bool]
    """Called repeatedly with a timeout in seconds, until it returns True."""


@dataclass(slots=True)
class ServerProcess:
    """A program that can be started, killed and restarted. Not safe for use by several threads."""

    program: Program
    log: IO[bytes]
    start_timeout_s: float
    pid: int = field(init=False, default=0)
    """Process id of the server, or of the previous one while it is down."""
    _supervisor: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def is_running(self) -> bool:
        """True if the program is started and has not ended."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> None:
        """Start it and wait until it is ready. Raises `RuntimeError` with the end of its output if that fails."""
        if self._supervisor is not None:
            raise RuntimeError(f"{self.program.name} runs already")
        deadline = time.monotonic() + self.start_timeout_s
        self._supervisor = subprocess.Popen(  # noqa: S603  # the command comes from the caller
            [sys.executable, "-I", "-S", "-c", _SUPERVISOR, *self.program.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=dict(self.program.environment),
        )
        try:
            self.pid = self._read_pid(self._supervisor, deadline)
            self._wait_until_ready(self._supervisor, deadline)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the server and its children with SIGKILL, and wait for the end. Does nothing if it has ended."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        # Closing the pipe is not enough: a forked child may hold it open.
        with contextlib.suppress(BrokenPipeError):
            os.write(_pipe(supervisor.stdin).fileno(), b"k")
        for pipe in (supervisor.stdin, supervisor.stdout):
            _pipe(pipe).close()
        try:
            supervisor.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait(_STOP_S)

    def restart(self) -> None:
        """Kill it if it runs, and start it again."""
        self.kill()
        self.start()

    def last_words(self) -> str:
        """Return the end of its standard output and error."""
        begin = max(0, os.fstat(self.log.fileno()).st_size - _LONGEST_LOG_BYTES)
        # pread instead of seek and read, because the server writes at the same file position.
        return os.pread(self.log.fileno(), _LONGEST_LOG_BYTES, begin).decode(errors="replace").strip() or "no output"

    def _read_pid(self, supervisor: subprocess.Popen[bytes], deadline: float) -> int:
        output, line = _pipe(supervisor.stdout), b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(self._failure(f"did not start within {self.start_timeout_s:g} s"))
            chunk = os.read(output.fileno(), _LONGEST_LOG_BYTES)
            if not chunk:
                raise RuntimeError(self._failure("could not be run"))
            line += chunk
        return int(line)

    def _wait_until_ready(self, supervisor: subprocess.Popen[bytes], deadline: float) -> None:
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(self._failure(f"did not start within {self.start_timeout_s:g} s"))
            if self.program.is_ready(left_s):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(_POLL_S)
                raise RuntimeError(self._failure("ended as soon as it was started"))

    def _failure(self, what: str) -> str:
        return f"{self.program.name} {what}: {self.last_words()}"


@contextlib.contextmanager
def running(program: Program, *, start_timeout_s: float) -> Iterator[ServerProcess]:
    """Start the program and yield its process once it is ready; kill it at the end."""
    with tempfile.TemporaryFile(mode="ab+", buffering=0) as log:
        process = ServerProcess(program, log, start_timeout_s)
        process.start()
        try:
            yield process
        finally:
            process.kill()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("the supervisor was started without pipes")
    return pipe
