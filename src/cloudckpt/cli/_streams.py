"""stdin, stdout and stderr, as commands need them, however Python was started."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any

_STDOUT, _STDERR = 1, 2
_PLAINLY = {"✓": "+", "✗": "x", "–": "-", "…": "..."}  # noqa: RUF001  # the signs of tables


def prepare() -> None:
    """Once, before anything is written. What the caller has replaced by streams of its own stays."""
    _open_what_is_closed()
    _buffer_results()
    _keep_remarks_from_failing()
    codecs.register_error("cloudckpt.plainly", _plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="cloudckpt.plainly")


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
    if not isinstance(sys.stdout, io.TextIOWrapper) or sys.stdout is not sys.__stdout__:
        return
    if isinstance(sys.stdout.buffer, io.RawIOBase):
        # Of a file object of its own: with this stream's end, Python's would be closed, too.
        results = io.BufferedWriter(io.FileIO(_STDOUT, "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(results, encoding=sys.stdout.encoding, line_buffering=True)


def _keep_remarks_from_failing() -> None:
    """Where stderr cannot be written, as on a full disk, the result and the exit code count all the same.

    Also those of Typer, which writes to it where the usage is wrong.
    """
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        remarks = io.BufferedWriter(_Remarks(_STDERR, "wb", closefd=False))
        sys.stderr = io.TextIOWrapper(remarks, encoding=sys.stderr.encoding, line_buffering=True)


class _Remarks(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            num_written: int | None = super().write(data)
        except OSError:
            num_written = None
        return len(data) if num_written is None else num_written  # None: it would have to wait


def _plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """What a terminal's encoding lacks, in characters that all have: names are shown, and not an error about them."""
    if isinstance(error, UnicodeEncodeError):
        bad = error.object[error.start : error.end]
        return "".join(_PLAINLY.get(one, ascii(one)[1:-1]) for one in bad), error.end
    raise error
