"""Events of saves and loads while they run.

A new event gets its name here, its meaning in ``docs/telemetry.md``, and a level if it is written to the log.
`Context.emit` sends it to `Options.on_event` and the subscribers of `cloudckpt.telemetry`; `log_and_deliver` in
`pipeline.context` also writes it to the log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cloudckpt._display import with_short_repr

if TYPE_CHECKING:
    from cloudckpt.report import LoadReport, Place, SaveReport

EventName = Literal[
    "save.begun",
    "save.staged",
    "save.set_up",
    "save.planned",
    "save.part_uploaded",
    "save.completing",
    "save.object_uploaded",
    "save.written",
    "save.committing",
    "save.committed",
    "save.removing",
    "save.cleaned_up",
    "save.done",
    "save.failed",
    "save.cancelled",
    "save.tolerated",
    "load.begun",
    "load.planned",
    "load.reading",
    "load.range_read",
    "load.done",
    "load.failed",
    "load.skipped",
    "verify.planned",
    "verify.range_read",
    "retention.removed",
    "retention.failed",
    "drain.committed",
    "drain.failed",
    "gc.removed",
    "gc.failed",
    "delete.done",
    "delete.failed",
    "retry",
    "hedge",
]

LEVELS: dict[EventName, int] = {
    "save.begun": logging.DEBUG,
    "save.staged": logging.DEBUG,
    "save.done": logging.INFO,
    "save.cancelled": logging.INFO,
    "save.failed": logging.INFO,
    "save.tolerated": logging.WARNING,
    "load.begun": logging.DEBUG,
    "load.done": logging.INFO,
    "load.failed": logging.INFO,
    "load.skipped": logging.WARNING,
    "gc.removed": logging.INFO,
    "gc.failed": logging.WARNING,
    "delete.done": logging.INFO,
    "delete.failed": logging.WARNING,
    "retention.removed": logging.INFO,
    "retention.failed": logging.WARNING,
    "drain.committed": logging.INFO,
    "drain.failed": logging.WARNING,
}
"""The level of each event that is written to the log; ranks other than 0 log at INFO at most."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of a save or load, at the time it happens. `Options.on_event` and `cloudckpt.telemetry` receive it."""

    name: EventName
    """Name of the step, such as ``save.committed``."""
    uri: str
    """URI of the checkpoint."""
    rank: int
    """Rank on which it happens."""
    place: Place = "root"
    """``fast`` if `uri` is in the fast place of a `CheckpointManager`."""
    key: str = ""
    """Key of the object concerned, relative to `uri`; of a ``retry``, the full address. Empty if it concerns none."""
    num_bytes: int = 0
    """Bytes of this step."""
    operation: str = ""
    """Identifier that all events of one save or load on one rank share."""
    seconds: float = 0.0
    """Duration of the step that has ended; 0.0 for a step that begins."""
    error: str = ""
    """Class of the error, such as ``ThrottledError``."""
    message: str = ""
    """Text of the error."""
    report: SaveReport | LoadReport | None = None
    """Report, if a save or load is done."""


def log_fields(**fields: object) -> dict[str, object]:
    """Return the fields with a value, for a log record's ``extra``."""
    return {name: value for name, value in fields.items() if value not in ("", None)}
