"""``cloudckpt watch``."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Annotated

import typer

from cloudckpt.cli._console import Console, date, size
from cloudckpt.cli._options import CommonOptions, parse_duration
from cloudckpt.cli.ls import document_of

if TYPE_CHECKING:
    from cloudckpt.inspect.catalog import CheckpointInfo

_STEP = re.compile(r"([0-9]+)$")
_MIN_INTERVAL, _MAX_INTERVAL = timedelta(seconds=1), timedelta(hours=1)


def parse_interval(text: str) -> timedelta:
    """Parse a time between two listings, for ``typer.Option(parser=…)``."""
    interval = parse_duration(text)
    if not _MIN_INTERVAL <= interval <= _MAX_INTERVAL:
        raise typer.BadParameter(f"{text!r} is not between 1s and 1h")
    return interval


def watch(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder that the checkpoints lie in.")],
    *,
    interval: Annotated[
        timedelta, typer.Option(parser=parse_interval, metavar="TIME", help="From one listing to the next: 1s to 1h.")
    ] = "10s",  # type: ignore[assignment]  # Typer parses it
    until_step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="End once step N or a later one is committed."),
    ] = None,
    common: CommonOptions,
) -> None:
    """Follow a run: print each checkpoint in ROOT, and each save under way, when its state changes; until Ctrl-C.

    Example: cloudckpt watch s3://bucket/run --until-step 1000
    """
    from cloudckpt.errors import CheckpointChangedError, TransientStoreError
    from cloudckpt.inspect.catalog import list_checkpoints

    console = common.console
    options = common.options()
    known: dict[tuple[str, str], CheckpointInfo] = {}
    while True:
        try:
            listed = list_checkpoints(root, all=True, options=options)
        except (TransientStoreError, CheckpointChangedError) as error:
            console.warn(error.with_advice("The next listing is the next try."))
            time.sleep(interval.total_seconds())
            continue
        # An attempt can be listed twice: committed, and as garbage for objects that its manifest does not name.
        listed.sort(key=lambda one: one.state == "committed")
        found = {(one.name, one.attempt): one for one in listed}
        for key in known.keys() - found.keys():
            _tell(console, known.pop(key), is_gone=True)
        for key, one in found.items():
            if key not in known or known[key].state != one.state:
                _tell(console, one)
            known[key] = one
        if until_step is not None and any(_step_of(one) >= until_step for one in found.values()):
            return
        time.sleep(interval.total_seconds())


def _tell(console: Console, one: CheckpointInfo, *, is_gone: bool = False) -> None:
    state = "gone" if is_gone else one.state
    if console.as_json:
        typer.echo(json.dumps(document_of(one) | {"state": state}))
        return
    moment = datetime.now(timezone.utc) if is_gone else one.committed_at
    size_text = "" if one.num_bytes is None else f"  {size(one.num_bytes)}"
    console.line(f"{date(moment)}  {one.name}  {state}{size_text}{one.problem and '  '}{one.problem}")


def _step_of(one: CheckpointInfo) -> int:
    """Return the number that ends the name of a committed checkpoint; -1 if there is none."""
    match = _STEP.search(one.name) if one.state == "committed" else None
    return -1 if match is None else int(match[1])
