"""The command line: ``cloudckpt``, or ``python -m cloudckpt``. One file per command; see ``docs/command-line.md``."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from cloudckpt.cli import _streams

__all__ = ["main"]

_NEEDED = ("typer", "rich")
_WRONG_USAGE = 2
_COMPLETING = "_CLOUDCKPT_COMPLETE"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command, and exit with its status."""
    _streams.prepare()
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        print("The command line needs Typer and Rich: pip install 'cloudckpt[cli]'", file=sys.stderr)  # noqa: T201  # as a command does
        sys.exit(_WRONG_USAGE)
    if _COMPLETING in os.environ:  # fish takes the second line of an explanation for another candidate
        os.environ["COLUMNS"] = "10000"
    from cloudckpt.cli import _ending
    from cloudckpt.cli._app import app  # needs them

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of course: a command has no ranks
    _ending.listen()
    app(args=None if arguments is None else list(arguments), prog_name="cloudckpt")
    sys.exit(0)
