"""The command line: ``cloudckpt``, or ``python -m cloudckpt`` (``docs/command-line.md``).

Takes arguments, calls the library, prints the result to stdout and all else to stderr, and exits with a status.
`main` is the entry point; each module without an underscore is one command or a few that belong together.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cloudckpt._messages import install_advice

__all__ = ["main"]

_NEEDED = ("typer", "rich")
_WRONG_USAGE = 2
_COMPLETING = "_CLOUDCKPT_COMPLETE"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command, and exit with its status."""
    _prepare_streams()
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        print(f"The command line needs Typer and Rich: {install_advice('cli')}", file=sys.stderr)  # noqa: T201  # Typer's echo is missing
        sys.exit(_WRONG_USAGE)
    if _COMPLETING in os.environ:  # fish takes the second line of an explanation for another candidate
        os.environ["COLUMNS"] = "10000"
    from cloudckpt.cli._app import app
    from cloudckpt.cli._console import handle_signals

    handle_signals()
    app(args=None if arguments is None else list(arguments), prog_name="cloudckpt")
    sys.exit(0)


def _prepare_streams() -> None:
    # The next file that is opened would get the number of a closed stream. That could be a checkpoint's, and torch
    # writes its warnings to that number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  # open until the end
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # a caller's own stream may have none
    if reconfigure is not None:  # a name with characters that the terminal's encoding lacks is no error
        reconfigure(errors="backslashreplace")
