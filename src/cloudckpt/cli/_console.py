"""Where a command's output goes: its result to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cloudckpt.cli._text import plain, plain_line

_PIPE_COLUMNS = 100_000


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
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for title in titles:
            table.add_column(title, justify="right" if title in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(plain_line(cell)) for cell in row))
        if sys.stdout.isatty():
            RichConsole(file=sys.stdout, highlight=False).print(table)
            return
        rendered = io.StringIO()
        RichConsole(file=rendered, width=_PIPE_COLUMNS, no_color=True, highlight=False).print(table)
        for line in rendered.getvalue().splitlines():
            sys.stdout.write(line.rstrip() + "\n")

    def say(self, text: str) -> None:
        """Something beside the result."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Something that has to be known, however quiet the command was asked to be."""
        sys.stderr.write(plain(text) + "\n")
        sys.stderr.flush()

    @property
    def is_interactive(self) -> bool:
        """Whether there is somebody to ask."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def confirms(self, question: str) -> bool:
        """Whether the user says yes."""
        sys.stderr.write(f"{plain(question)} [y/N] ")
        sys.stderr.flush()
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
            yield Progress(bar, bar.add_task(plain(what), total=total_bytes))
