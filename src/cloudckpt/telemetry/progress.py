"""A progress bar for a save or load that its caller waits for, drawn from its events."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from cloudckpt._this_process import is_first_warning
from cloudckpt._workers import logging_failures
from cloudckpt.errors import install_advice
from cloudckpt.events import Event
from cloudckpt.telemetry.subscribers import subscribe

if TYPE_CHECKING:
    from rich.progress import Progress

_log = logging.getLogger("cloudckpt")

_PLANNED = ("save.planned", "load.reading")
_MOVED = ("save.part_uploaded", "load.range_read")


@contextlib.contextmanager
def showing_progress(verb: Literal["save", "load"], uri: str, *, is_wanted: bool) -> Iterator[None]:
    """Show a bar of the save or load while the context lasts, in a terminal or a notebook, and nothing in a log.

    A failure of the bar is logged, and changes nothing.
    """
    shown = contextlib.ExitStack()
    if is_wanted:
        with logging_failures("no progress bar is shown"):
            _show(verb, uri, shown)
    try:
        yield
    finally:
        with logging_failures("the progress bar could not be ended"):
            shown.close()


def _show(verb: str, uri: str, shown: contextlib.ExitStack) -> None:
    in_notebook = "ipykernel" in sys.modules
    if not in_notebook and (sys.stderr is None or not sys.stderr.isatty()):
        return
    if not _have_packages("rich", *["ipywidgets"] * in_notebook):
        return
    if (tqdm := sys.modules.get("tqdm")) is not None:  # a bar of the program has no line of its own
        shown.enter_context(tqdm.tqdm.external_write_mode(file=sys.stderr, nolock=True))
    bar = new_bar(redirect_stdout=False, redirect_stderr=False, refresh_per_second=4)
    task = bar.add_task(f"{verb} {uri.rpartition('/')[2]}", total=None)
    shown.enter_context(bar)
    shown.callback(subscribe(functools.partial(_update, bar, task, verb, uri)))


def _update(bar: Progress, task: Any, verb: str, uri: str, event: Event) -> None:
    if event.uri != uri or not event.name.startswith(verb):
        return
    if event.name in _MOVED:
        bar.advance(task, event.num_bytes)
    elif event.name in _PLANNED:
        bar.update(task, completed=0, total=event.num_bytes or None)
    elif event.name.endswith(".done"):
        # Tiles and headers have made it a little more than was planned. Another total would reset the speed.
        total = bar.tasks[0].total or event.num_bytes
        bar.update(task, completed=total, total=total, refresh=True)  # a notebook shows no further one


def _have_packages(*names: str) -> bool:
    """Return True if all are installed. Warns once if not."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing and is_first_warning("progress", " ".join(missing)):
        _log.warning("Options.progress needs %s: %s", " and ".join(missing), install_advice("cli"))
    return not missing


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
