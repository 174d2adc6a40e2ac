"""A progress bar for a save or load, drawn from its events."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import html
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from cloudckpt._display import rate, seconds, size
from cloudckpt._messages import install_advice
from cloudckpt._this_process import is_first_warning
from cloudckpt._workers import logging_failures
from cloudckpt.events import Event
from cloudckpt.telemetry.subscribers import subscribe

if TYPE_CHECKING:
    from rich.progress import Progress

_log = logging.getLogger("cloudckpt")

_PLANNED = ("save.planned", "load.reading")
_MOVED = ("save.part_uploaded", "load.range_read")
_NOTEBOOK_INTERVAL_S = 0.25


def show_progress(
    verb: Literal["save", "load"], uri: str, *, is_wanted: bool, in_background: bool = False
) -> contextlib.ExitStack:
    """Show a bar of the save or load in a terminal or a notebook, and nothing in a log. Closing the result ends it.

    Only a notebook shows a bar of a background save: in a terminal, the program writes meanwhile. A failure of the bar
    is logged, and changes nothing.
    """
    bar, shown = contextlib.ExitStack(), contextlib.ExitStack()
    in_notebook = "ipykernel" in sys.modules
    if is_wanted and (in_notebook or (not in_background and has_terminal())):
        shown.callback(_end, bar)
        with logging_failures("no progress bar is shown"):
            if in_notebook:
                bar.enter_context(_NotebookBar(verb, uri, " in the background" if in_background else ""))
            elif _has_rich():
                # Keep a tqdm bar of the program from sharing our line.
                if (tqdm := sys.modules.get("tqdm")) is not None:
                    bar.enter_context(tqdm.tqdm.external_write_mode(file=sys.stderr, nolock=True))
                bar.enter_context(_TerminalBar(verb, uri))
    return shown


def has_terminal() -> bool:
    """Return True if stderr can redraw a line. A notebook's ``!command`` has a terminal that cannot."""
    return sys.stderr is not None and sys.stderr.isatty() and "JPY_PARENT_PID" not in os.environ


def _end(bar: contextlib.ExitStack) -> None:
    with logging_failures("the progress bar could not be ended"):
        bar.close()


class _Bar(abc.ABC):
    """Counts the bytes in the events of one save or load, and draws them."""

    def __init__(self, verb: str, uri: str, where: str = "") -> None:
        self._verb, self._uri = verb, uri
        self._name = f"{verb} {uri.rpartition('/')[2]}{where}"
        self._done_bytes = self._total_bytes = 0
        self._is_done = False
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._operation = ""

    def __enter__(self) -> None:
        self._unsubscribe = subscribe(self._count)

    def __exit__(self, *_: object) -> None:
        self._unsubscribe()

    def _count(self, event: Event) -> None:
        if event.name == f"{self._verb}.begun" and event.uri == self._uri and self._thread == threading.get_ident():
            self._operation = event.operation  # others may save or load the same checkpoint at once
        if event.operation != self._operation:
            return
        with self._lock:
            if event.name in _MOVED:
                self._done_bytes += event.num_bytes
            elif event.name in _PLANNED:
                self._done_bytes, self._total_bytes = 0, event.num_bytes
            elif event.name.endswith(".done"):
                # With tiles and headers, a little more has moved than planned. A new total would reset the speed.
                self._done_bytes = self._total_bytes = self._total_bytes or event.num_bytes
                self._is_done = True
            self._draw()

    @abc.abstractmethod
    def _draw(self) -> None: ...


class _TerminalBar(_Bar):
    """A bar of rich, which disappears if the save or load fails."""

    def __enter__(self) -> None:
        self._bar = new_bar(redirect_stdout=False, redirect_stderr=False, refresh_per_second=4)
        self._task = self._bar.add_task(self._name, total=None)
        self._bar.start()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._bar.update(self._task, visible=self._is_done)
        self._bar.stop()

    def _draw(self) -> None:
        self._bar.update(self._task, completed=self._done_bytes, total=self._total_bytes or None)


class _NotebookBar(_Bar):
    """A bar of HTML that ends as a line of text. It needs no widgets, so every viewer of notebooks shows it."""

    def __enter__(self) -> None:
        self._begun_s, self._drawn_s = time.monotonic(), 0.0
        self._spent_s: float | None = None
        self._shown: Any = importlib.import_module("IPython.display").display(self, display_id=True)
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._spent_s = time.monotonic() - self._begun_s
        self._update()

    def _draw(self) -> None:
        if (now_s := time.monotonic()) >= self._drawn_s + _NOTEBOOK_INTERVAL_S:
            self._drawn_s = now_s
            self._update()

    def _update(self) -> None:
        """Send the bar as output of the cell that runs now: nbclient drops that of a cell which has ended.

        The context of this thread has the cell that began the save.
        """
        contextvars.Context().run(self._shown.update, self)

    def __repr__(self) -> str:
        spent_s = self._spent_s or time.monotonic() - self._begun_s
        if self._spent_s is not None and not self._is_done:
            return f"{self._name}: not finished"
        if self._spent_s is None and not self._total_bytes:
            return f"{self._name}: planning"
        goal = f"of {size(self._total_bytes)}" if self._spent_s is None else f"in {seconds(spent_s)}"
        return f"{self._name}: {size(self._done_bytes)} {goal}, {rate(self._done_bytes / max(spent_s, 1e-9))}"

    def _repr_html_(self) -> str:
        value = f' value="{self._done_bytes}" max="{self._total_bytes}"' if self._total_bytes else ""
        bar = f"<progress{value}></progress>"
        return f"<div>{html.escape(repr(self))} {bar if self._spent_s is None else ''}</div>"


def _has_rich() -> bool:
    """Return True if rich is installed. Warns once if not."""
    is_there = importlib.util.find_spec("rich") is not None
    if not is_there and is_first_warning("progress", "rich"):
        _log.warning("Options.progress needs rich: %s", install_advice("cli"))
    return is_there


def new_bar(**settings: Any) -> Progress:
    """Return a bar on stderr, or in the notebook. `settings` are those of rich's ``Progress``."""
    from rich import console, progress  # noqa: PLC0415  # the package may not be there

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),  # in MB, as the speed
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=console.Console(stderr=True), **settings)
