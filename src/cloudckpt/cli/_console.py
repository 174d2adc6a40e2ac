"""Where a command's output goes: its result to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cloudckpt.cli._text import plain_line

_MOST_FOLDED = 500
"""Rows. A longer table is left to the terminal to break."""


def tell(text: str) -> None:
    """To stderr, at once."""
    sys.stderr.write(text)
    sys.stderr.flush()


class Progress:
    """How far something long is. Safe to call from any thread."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar, self._task = bar, task

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more are done."""
        if self._bar is not None:
            self._bar.advance(self._task, num_bytes)

    def set_total(self, num_bytes: int) -> None:
        """That is known now."""
        if self._bar is not None:
            self._bar.update(self._task, total=num_bytes)


class Console:
    """Of one command. With `as_json`, stdout gets one JSON document and nothing else."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet

    def document(self, value: Any) -> None:
        """One JSON document: the result of a command that was asked for it."""
        sys.stdout.write(json.dumps(value, indent=2) + "\n")

    def line(self, text: str = "") -> None:
        """A line of the result."""
        sys.stdout.write(plain_line(text) + "\n")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """A table of the result; the columns that `right` names are numbers. In a pipe, each row is one whole line."""
        shown = [[plain_line(cell) for cell in row] for row in rows]
        widths = _widths(titles, shown)
        is_terminal = sys.stdout.isatty()
        # Rich takes milliseconds for a row, and folds cells only where the terminal is too narrow.
        if is_terminal and len(rows) <= _MOST_FOLDED and sum(widths) + 2 * (len(widths) - 1) > _terminal_columns():
            _print_folded(titles, shown, right=right)
            return
        title = _row(titles, titles, widths, right=right)
        sys.stdout.write((f"\x1b[1m{title}\x1b[0m" if is_terminal and "NO_COLOR" not in os.environ else title) + "\n")
        for row in shown:
            sys.stdout.write(_row(row, titles, widths, right=right) + "\n")

    def say(self, text: str) -> None:
        """Something beside the result."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Something that has to be known, however quiet the command was asked to be."""
        tell(plain_line(text) + "\n")

    @property
    def is_interactive(self) -> bool:
        """Whether there is somebody to ask."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def confirms(self, question: str) -> bool:
        """Whether the user says yes."""
        tell(f"{plain_line(question)} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    @contextlib.contextmanager
    def progress(self, what: str, *, total_bytes: int | None = None) -> Iterator[Progress]:
        """A bar with bytes and rate on stderr while this lasts; nothing where that is no terminal."""
        if self.quiet or not sys.stderr.isatty():
            yield Progress()
            return
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=RichConsole(stderr=True), transient=True) as bar:
            yield Progress(bar, bar.add_task(plain_line(what), total=total_bytes))


def _widths(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(_width, (title, *(row[at] for row in rows)))) for at, title in enumerate(titles)]


def _width(text: str) -> int:
    """In columns of a terminal: some characters take two, some none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _row(row: Sequence[str], titles: Sequence[str], widths: Sequence[int], *, right: Sequence[str]) -> str:
    cells = []
    for cell, title, width in zip(row, titles, widths, strict=True):
        room = " " * (width - _width(cell))
        cells.append(room + cell if title in right else cell + room)
    return "  ".join(cells).rstrip()


def _terminal_columns() -> int:
    return shutil.get_terminal_size().columns


def _print_folded(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str]) -> None:
    """With the cells that have no room in several lines."""
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    RichConsole(file=sys.stdout, highlight=False).print(table)
