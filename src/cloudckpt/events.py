"""Events of saves and loads while they run.

A new event gets its name and meaning here, and a level if it is written to the log. `Context.emit` sends it
to `Options.on_event` and the subscribers of `cloudckpt.telemetry`; `tell` in `pipeline.context` also writes it to the
log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cloudckpt.report import LoadReport, SaveReport

EventName = Literal[
    "save.begun",
    "save.staged",
    "save.set_up",
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
    "load.range_read",
    "load.done",
    "load.failed",
    "load.skipped",
    "verify.planned",
    "verify.range_read",
    "retention.removed",
    "retention.failed",
    "gc.removed",
    "gc.failed",
    "delete.done",
    "delete.failed",
    "retry",
    "hedge",
]

EVENTS: dict[EventName, str] = {
    "save.begun": "a save begins on this rank; a background save in the thread that asks for it",
    "save.staged": "a background save has copied the state dict: `num_bytes`, `seconds`",
    "save.set_up": "set-up is complete: from here on, bytes move",
    "save.part_uploaded": "the store has one part (`key`, `num_bytes`)",
    "save.completing": "the store has all parts of `key`, whose upload is about to be completed",
    "save.object_uploaded": "the store has the object `key`, of `num_bytes`",
    "save.written": "this rank has sent all its bytes: `num_bytes`",
    "save.committing": "on the coordinator: the manifest `key` is about to be put",
    "save.committed": "on the coordinator: the checkpoint exists",
    "save.removing": "on the coordinator: `key` of the overwritten checkpoint is about to be removed",
    "save.cleaned_up": "on the coordinator: the overwritten checkpoint is removed",
    "save.done": "the save is committed, and this rank knows it: `report`, `seconds`, `num_bytes`",
    "save.failed": "the save has failed: `error` and `message` of the first rank's cause, `seconds`",
    "save.cancelled": "a rank has cancelled the save: `message`, `seconds`",
    "save.tolerated": "a `CheckpointManager` lets training go on after a failed save: `error`, `message`",
    "load.begun": "a load begins on this rank",
    "load.planned": "the load has planned its reads",
    "load.range_read": "`num_bytes` of `key` are read and checked",
    "load.done": "this rank has loaded its state dict: `report`, `seconds`, `num_bytes`",
    "load.failed": "the load has failed: `error`, `message`, `seconds`",
    "load.skipped": "`load_latest` passes over the checkpoint at `uri`: `error`, `message`",
    "verify.planned": "`verify` has planned its reads: `num_bytes`",
    "verify.range_read": "`verify` has checked `num_bytes` of `key`",
    "retention.removed": "a `CheckpointManager` has removed the checkpoint at `uri`",
    "retention.failed": "a `CheckpointManager` could not remove it, and tries again after the next save",
    "gc.removed": "`gc` has removed all garbage at `uri`: `num_bytes` of objects; `message` has the counts by kind",
    "gc.failed": "`gc` could not remove the garbage at `uri`, or not list it: `error`, `message`",
    "delete.done": "`delete` has removed the checkpoint at `uri`",
    "delete.failed": "`delete` could not remove all of the checkpoint at `uri`: `error`, `message`",
    "retry": "a request about `key` failed and is made again: `error` (`ThrottledError` where the store asks to slow "
    "down), `message`",
    "hedge": "a request takes far longer than its peers, and is made once more beside it",
}
"""Each event and its meaning, for the documentation."""

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
}
"""The level of each event that is written to the log; ranks other than 0 log at INFO at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of a save or load, as it happens; `Options.on_event` and `cloudckpt.telemetry` receive it."""

    name: EventName
    """Name of the step, such as ``save.committed``."""
    uri: str
    """URI of the checkpoint."""
    rank: int
    """Rank on which it happens."""
    key: str = ""
    """Key of the object concerned, relative to `uri`; empty if it concerns none."""
    num_bytes: int = 0
    """Bytes of this step."""
    operation: str = ""
    """Identifier that all events of one save or load on one rank share."""
    seconds: float = 0.0
    """Seconds that it took, if something has ended."""
    error: str = ""
    """Class of the error, such as ``ThrottledError``."""
    message: str = ""
    """Text of the error."""
    report: SaveReport | LoadReport | None = None
    """Report, if a save or load is done."""
