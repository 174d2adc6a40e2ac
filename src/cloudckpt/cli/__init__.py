"""The command line: ``cloudckpt``, or ``python -m cloudckpt``. One file per command; see ``docs/command-line.md``."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]

_NEEDED = ("typer", "rich")
_WRONG_USAGE, _TERMINATED = 2, 128 + signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command, and exit with its status."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        print("The command line needs Typer and Rich: pip install 'cloudckpt[cli]'", file=sys.stderr)  # noqa: T201  # as a command does
        sys.exit(_WRONG_USAGE)
    from cloudckpt.cli._app import app  # needs them

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of course: a command has no ranks

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)
    app(args=None if arguments is None else list(arguments), prog_name="cloudckpt")
    sys.exit(0)


def _on_sigterm(_number: int, _frame: object) -> NoReturn:
    """So that a command cleans up, as it does after Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(_TERMINATED)
