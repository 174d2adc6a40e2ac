"""The command line: ``cloudckpt``, or ``python -m cloudckpt``. One file per command; see ``docs/command-line.md``."""

from __future__ import annotations

import codecs
import importlib.util
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]

_NEEDED = ("typer", "rich")
_WRONG_USAGE = 2
_COMPLETING = "_CLOUDCKPT_COMPLETE"
_PLAINLY = {"✓": "+", "✗": "x", "–": "-", "…": "..."}  # noqa: RUF001  # the signs of tables


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command, and exit with its status."""
    _open_what_is_closed()
    _buffer_results()
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        print("The command line needs Typer and Rich: pip install 'cloudckpt[cli]'", file=sys.stderr)  # noqa: T201  # as a command does
        sys.exit(_WRONG_USAGE)
    if _COMPLETING in os.environ:  # fish takes the second line of an explanation for another candidate
        os.environ["COLUMNS"] = "10000"
    from cloudckpt.cli import _ending
    from cloudckpt.cli._app import app  # needs them

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of course: a command has no ranks
    codecs.register_error("cloudckpt.plainly", _plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whoever calls this may have replaced them
            stream.reconfigure(errors="cloudckpt.plainly")
    _ending.listen()
    app(args=None if arguments is None else list(arguments), prog_name="cloudckpt")
    sys.exit(0)


def _open_what_is_closed() -> None:
    """A stream that the caller has closed leads nowhere: else the next file that is opened gets its number.

    That could be a checkpoint's, and torch writes its warnings to that number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  # for as long as the process


def _buffer_results() -> None:
    """Python that is to buffer nothing (``PYTHONUNBUFFERED``, as in many containers) writes once, and forgets the rest.

    Where a pipe or a full disk takes only a part, a result would end in the middle, and the command with 0.
    """
    unbuffered = getattr(sys.stdout, "buffer", None)
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(unbuffered, io.RawIOBase):
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(unbuffered), encoding, errors, line_buffering=True)


def _plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """What a terminal's encoding lacks, in characters that all have: names are shown, and not an error about them."""
    if isinstance(error, UnicodeEncodeError):
        bad = error.object[error.start : error.end]
        return "".join(_PLAINLY.get(one, ascii(one)[1:-1]) for one in bad), error.end
    raise error
