"""Output of the commands: results to stdout, all else to stderr, and values as people read them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import typer

from cloudckpt.errors import printable

_MAX_RICH_ROWS = 500
"""Rich takes milliseconds for each row."""
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_KIB = 1024
_MB, _GB = 10**6, 10**9


class Console:
    """The output of one command. With `as_json`, stdout gets one JSON document and nothing else."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet

    def document(self, value: Any) -> None:
        """Print the result as one JSON document."""
        typer.echo(json.dumps(value, indent=2))

    def line(self, text: str = "") -> None:
        """Print a line of the result."""
        typer.echo(plain_line(text))

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """Print a table of the result; the columns in `right` are numbers. In a pipe, each row is one whole line."""
        plain_rows = [[plain_line(cell) for cell in row] for row in rows]
        if sys.stdout.isatty() and len(rows) <= _MAX_RICH_ROWS:
            _print_rich_table(titles, plain_rows, right=right)
        else:
            typer.echo("\n".join(_aligned_lines([list(titles), *plain_rows], [title in right for title in titles])))

    def say(self, text: str) -> None:
        """Print a remark, unless the command is to be quiet."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a remark that matters even to a quiet command."""
        typer.echo(plain_line(text), err=True)

    @property
    def is_interactive(self) -> bool:
        """True if there is a user to ask."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def confirm(self, question: str) -> bool:
        """Ask the user, whose default answer is no."""
        return typer.confirm(plain_line(question), err=True)

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show a bar on stderr, if that is a terminal. Yields a function of the bytes done and the bytes in total."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda _done_bytes, _total_bytes: None
            return
        from rich import console, progress

        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=console.Console(stderr=True), transient=True) as bar:
            task = bar.add_task(plain_line(what), total=None)
            yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)


def _print_rich_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str]) -> None:
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    color_system = None if "NO_COLOR" in os.environ else "auto"
    RichConsole(file=sys.stdout, highlight=False, color_system=color_system).print(table)  # type: ignore[arg-type]  # a literal


def _aligned_lines(rows: Sequence[Sequence[str]], is_right: Sequence[bool]) -> Iterator[str]:
    from rich.cells import cell_len  # some characters take two columns, some none

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for cell, width, right in zip(row, widths, is_right, strict=True):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if right else cell + space)
        yield "  ".join(cells).rstrip()


def plain_line(text: str) -> str:
    """Return `text` as one line without control characters, so that a name cannot fake further lines."""
    return printable(text).replace("\n", "\\n")


def size(num_bytes: float) -> str:
    """``1.5 GiB``."""
    if num_bytes < _KIB:
        return f"{num_bytes:.0f} B"
    for unit in _BINARY_UNITS:
        num_bytes /= _KIB
        if round(num_bytes, 1) < _KIB:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes:.1f} {_BINARY_UNITS[-1]}"


def rate(bytes_per_s: float) -> str:
    """``1.23 GB/s``: decimal, as the rates of networks are."""
    if bytes_per_s >= _GB:
        return f"{bytes_per_s / _GB:.2f} GB/s"
    return f"{bytes_per_s / _MB:.1f} MB/s"


def count(number: int, noun: str) -> str:
    """``1 object``, ``2 objects``; ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{number:,} {noun}s"


def age(moment: datetime) -> str:
    """``3 h``: the time since `moment` in its largest unit."""
    return duration(datetime.now(timezone.utc) - moment)


def duration(delta: timedelta) -> str:
    """``3 h``: a time in its largest unit."""
    seconds = max(delta.total_seconds(), 0.0)
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)} {unit}"
    return f"{int(seconds)} s"
