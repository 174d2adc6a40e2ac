"""A server in a process of its own, which ends with this one, and can be killed and started again."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

_STOP_S = 10.0
_POLL_S = 0.02
_LONGEST_LOG_BYTES = 4096
# It stands between this process and the server, because a program that is not ours does not watch for our end. A byte
# on its standard input, or the end of that, which comes with the end of this process, kills the server and whatever
# the server started; and on Linux its own end does so too. It ends when the server has.
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
    """A port of the loopback interface that nobody else is given while this lasts, and that a server may listen at.

    On Linux a socket that is bound and does not listen keeps it, also while the server is down. Elsewhere it was free
    a moment ago.
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
    """What to run, and how to know that it is ready."""

    name: str
    """In messages."""
    command: Sequence[str | os.PathLike[str]]
    environment: Mapping[str, str] = field(repr=False)
    """All of it; it may hold what nobody should read in a log."""
    is_ready: Callable[[float], bool]
    """Called again and again, with the seconds it may take, until it says so."""


@dataclass(slots=True)
class ServerProcess:
    """A program that runs, until it is killed, and again once it is restarted. Not for many threads at once."""

    program: Program
    log: IO[bytes]
    start_timeout_s: float
    pid: int = field(init=False, default=0)
    """The server's own; that of the last one while it is down."""
    _supervisor: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def is_running(self) -> bool:
        """Whether it was started and neither killed nor ended by itself."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> None:
        """Start it and wait until it is ready; `RuntimeError` with its own last words where it does not get so far."""
        if self._supervisor is not None:
            raise RuntimeError(f"{self.program.name} runs already")
        deadline = time.monotonic() + self.start_timeout_s
        self._supervisor = subprocess.Popen(  # noqa: S603 (the caller's own command)
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
        """SIGKILL, to the server and all that it started. It is gone on return; nothing happens where it is already."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        # A byte, since a child that was forked meanwhile may hold the pipe open.
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
        """The end of what it wrote to its standard output and error."""
        begin = max(0, os.fstat(self.log.fileno()).st_size - _LONGEST_LOG_BYTES)
        # Not by seeking: the server writes at the same position.
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
    """The program, ready; gone at the end."""
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
