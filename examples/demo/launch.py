"""Starts torchrun, shows what its ranks print, and never waits for ever."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# torchrun gives its ranks 30 seconds to end when it is asked to.
SHUTDOWN_TIMEOUT_S = 45.0
LOOPBACK_INTERFACES = ("lo", "lo0")


class RunTimedOutError(Exception):
    """A run took longer than it may, and was stopped."""


def _environment() -> dict[str, str]:
    """One thread per rank, and no traffic but on this machine."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for _, name in socket.if_nameindex():
        if name in LOOPBACK_INTERFACES:
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
    return environment


def torchrun(program: Sequence[str], *, num_ranks: int, log: Path, timeout_s: float) -> int:
    """Run `program` on so many ranks, print their lines, and return torchrun's exit status.

    `program` is a script, or ``--module`` and a module, and its arguments. What the ranks write to standard error goes
    to `log`. Raises `RunTimedOutError` where the run had to be stopped.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("--log-dir", str(log.parent / "torchrun")),  # or it leaves one that nobody removes
        *("--nproc-per-node", str(num_ranks), *program),
    ]
    with (
        log.open("w") as standard_error,
        subprocess.Popen(  # noqa: S603 - our own command
            command,
            cwd=REPOSITORY,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=standard_error,
            text=True,
        ) as process,
    ):
        # In a thread of its own, so that a run which prints nothing is still stopped in time.
        printer = threading.Thread(target=_show_lines, args=(process,), daemon=True)
        printer.start()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            what = " ".join(program[:2])
            raise RunTimedOutError(f"{what} on {num_ranks} ranks did not end within {timeout_s:g} s") from None
        finally:
            _stop(process)
            printer.join(SHUTDOWN_TIMEOUT_S)
        return process.returncode


def _show_lines(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None  # noqa: S101 - it was asked for
    for line in process.stdout:
        print(f"    {line.rstrip()}", flush=True)


def _stop(process: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its ranks; does nothing where it has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
