"""Check that a run of the tests leaves no file in the system's temporary directory, and no process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

_END_S = 30.0
_POLL_S = 0.05
_FOR_A_PROCESS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""Helpers that are started once for a process, and end with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A process that a test has started, and not ended."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"{self.pid}: {self.command}"


class Leftovers:
    """A plugin of the process that distributes the tests: their temporary directory, theirs alone, goes with them.

    pytest's own, with what failed tests have left, stays where it is otherwise.
    """

    def __init__(self) -> None:
        outside = tempfile.gettempdir()
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outside)
        # A short name: paths of sockets lie in it.
        self.directory = Path(tempfile.mkdtemp(prefix="ckpt-", dir=outside))
        self.directory.chmod(0o711)  # tests that give up root's rights have to come to what they made
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.directory)
        # After multiprocessing's own directory, which lies in it and is removed with priority -100.
        Finalize(None, shutil.rmtree, args=(self.directory, True), exitpriority=-200)
        self._survivors: list[Survivor] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Kill all processes that are left after the workers and the servers have ended, and fail the run."""
        self._survivors = survivors(self.directory, end_s=_END_S)
        for survivor in self._survivors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(survivor.pid, signal.SIGKILL)
        if self._survivors and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names them."""
        for survivor in self._survivors:
            terminalreporter.write_line(f"FAILED: a process outlived the tests: {survivor}", red=True)


def survivors(directory: Path, *, end_s: float) -> list[Survivor]:
    """Return the children of this process, and the processes with this temporary directory. Those that end within
    `end_s` are left out. Works on Linux alone.
    """
    deadline = time.monotonic() + end_s
    while found := list(_found(directory)):
        if time.monotonic() > deadline:
            return found
        time.sleep(_POLL_S)
    return []


def _found(directory: Path) -> Iterator[Survivor]:
    mark = f"TMPDIR={directory}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        # It may have ended meanwhile, and those of other users cannot be read.
        with contextlib.suppress(OSError):
            name, _, rest = (process / "stat").read_text().rpartition(")")
            state, parent = rest.split()[:2]
            if state in "ZX" or int(process.name) == os.getpid():
                continue
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").strip()
            is_child = int(parent) == os.getpid()
            if is_child and any(word in command for word in _FOR_A_PROCESS):
                continue
            variables = (process / "environ").read_bytes().split(b"\0")
            if is_child or any(one == mark or one.startswith(mark + b"/") for one in variables):
                # A process that has just been started has no command yet.
                yield Survivor(pid=int(process.name), command=command.decode(errors="replace") or name)
