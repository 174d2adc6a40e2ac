"""How the upload process is started, and what its end means."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from cloudckpt._process.channel import Channel
from cloudckpt.errors import InvalidOptionError


def started() -> tuple[Channel, subprocess.Popen[bytes]]:
    """One that listens at the other end of the channel as soon as it has imported all that it needs.

    Raises `OSError` or `ValueError` where it cannot be started, and `InvalidOptionError` where none could be.
    """
    if not hasattr(os, "memfd_create"):
        raise InvalidOptionError("Options: async_mode='process' needs Linux; use 'thread'")
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would begin anew as a whole
        raise InvalidOptionError(
            "Options: async_mode='process' needs a Python that can be started (sys.executable); use 'thread'"
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        process = subprocess.Popen(  # noqa: S603  # of this program
            [sys.executable, "-m", "cloudckpt._process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=_environment(),
            # Out of the reach of signals that a terminal or a launcher sends to all of a job: the parent decides.
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Channel(ours), process


def _environment() -> dict[str, str]:
    """For its start: it must find what this process has found, and hold none of its devices."""
    here = str(Path(__file__).parents[2])
    paths = [entry or str(Path.cwd()) for entry in sys.path if isinstance(entry, str)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths if here in paths else [*paths, here]),
        "PYTHONSAFEPATH": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def how_it_ended(code: int) -> str:
    """In words, from a return code as `subprocess` has it."""
    if code == 0:
        return "was closed"
    if code > 0:
        return f"ended by itself, with status {code} (what it wrote to stderr says more)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the kernel does where memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
