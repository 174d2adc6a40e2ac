"""Output of the commands: results to stdout, all else to stderr, and values as people read them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import typer

from cloudckpt.errors import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.status import Status

_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_KIB = 1024
_MB, _GB = 10**6, 10**9


class Console:
    """The output of one command. With `as_json`, stdout gets one JSON document and nothing else."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, is_verbose: bool = False) -> None:
        self.as_json, self.quiet, self.is_verbose = as_json, quiet, is_verbose

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show that the command works, while it prints nothing. Only on a terminal's stderr; a log would tear it."""
        if self.quiet or self.as_json or self.is_verbose or not sys.stderr.isatty():
            yield
            return
        from rich import console, status

        shown = status.Status(plain_line(what), console=console.Console(stderr=True))
        _shown.append(shown)
        try:
            with shown:
                yield
        finally:
            _shown.remove(shown)

    def document(self, value: Any) -> None:
        """Print the result as one JSON document. Dataclasses in it become objects."""
        _echo(json.dumps(value, indent=2, default=dataclasses.asdict))

    def line(self, text: str = "") -> None:
        """Print a line of the result."""
        _echo(plain_line(text))

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """Print a table of the result, each row as one line; the columns in `right` are numbers."""
        from rich.cells import cell_len  # some characters take two columns, some none

        lines = [list(titles), *([plain_line(cell) for cell in row] for row in rows)]
        texts = []
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = []
            for title, cell, width in zip(titles, line, widths, strict=True):
                space = " " * (width - cell_len(cell))
                cells.append(space + cell if title in right else cell + space)
            texts.append("  ".join(cells).rstrip())
        _echo("\n".join(texts))

    def say(self, text: str) -> None:
        """Print a remark, unless the command is to be quiet."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a remark that matters even to a quiet command."""
        _echo(plain_line(text), err=True)

    @property
    def is_interactive(self) -> bool:
        """True if there is a user to ask."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def confirm(self, question: str) -> bool:
        """Ask the user, whose default answer is no."""
        with _without_status():
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
            progress.DownloadColumn(),  # in MB, as the speed
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        with (
            _without_status(),
            progress.Progress(*columns, console=console.Console(stderr=True), transient=True) as bar,
        ):
            task = bar.add_task(plain_line(what), total=None)
            yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)


_shown: list[Status] = []
"""The one of the running command, if it is shown: a process has one terminal."""


@contextlib.contextmanager
def _without_status() -> Iterator[None]:
    for shown in _shown:
        shown.stop()
    try:
        yield
    finally:
        for shown in _shown:
            shown.start()


def _echo(text: str, *, err: bool = False) -> None:
    with _without_status():
        typer.echo(text, err=err)


def describe_report(report: DataclassInstance, seconds: float) -> dict[str, Any]:
    """Return the members of a library's report for ``--json``, with `seconds` in place of its own durations."""
    members = dataclasses.asdict(report)
    return {name: members[name] for name in members if not name.endswith("_s")} | {"seconds": seconds}


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


def date(moment: datetime) -> str:
    """``2026-01-31 12:00:00Z``."""
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%SZ}"


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
