"""What a save or a load did: events while it runs, and a report at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EventName = Literal[
    "save.begun",
    "save.staged",
    "save.set_up",
    "save.part_uploaded",
    "save.completing",
    "save.object_uploaded",
    "save.resumed",
    "save.written",
    "save.committing",
    "save.committed",
    "save.removing",
    "save.cleaned_up",
    "save.done",
    "save.failed",
    "save.cancelled",
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
    "save.begun": "a save begins on this rank; of a background save, in the thread that asked for it",
    "save.staged": "a background save has copied the state dict: `num_bytes`, `seconds`",
    "save.set_up": "nothing stands against the save: bytes may move",
    "save.part_uploaded": "the store has one part (`key`, `num_bytes`)",
    "save.completing": "all parts of `key` are there, and it is about to be completed",
    "save.object_uploaded": "the store has the object `key`, of `num_bytes`",
    "save.resumed": "so many bytes (`num_bytes`) were there already, from an earlier save (`Options.resume`)",
    "save.written": "this rank has sent all that is its own: `num_bytes`",
    "save.committing": "on the coordinator: the manifest `key` is about to be put",
    "save.committed": "on the coordinator: the checkpoint exists",
    "save.removing": "on the coordinator: `key` of what was overwritten is about to be removed",
    "save.cleaned_up": "on the coordinator: nothing is left of what was overwritten",
    "save.done": "the save is committed, and this rank knows it: `report`, `seconds`, `num_bytes`",
    "save.failed": "the save has failed: `error` and `message` of the first rank's cause, `seconds`",
    "save.cancelled": "the save was cancelled, by whichever rank: `message`, `seconds`",
    "load.begun": "a load begins on this rank",
    "load.planned": "it is known what to read",
    "load.range_read": "`num_bytes` of `key` have been read and checked",
    "load.done": "this rank has loaded what it wanted: `report`, `seconds`, `num_bytes`",
    "load.failed": "the load has failed: `error`, `message`, `seconds`",
    "load.skipped": "`load_latest` passes over the checkpoint at `uri`: `error`, `message`",
    "verify.planned": "`verify` knows what to read: `num_bytes`",
    "verify.range_read": "`verify` has checked `num_bytes` of `key`",
    "retention.removed": "a `CheckpointManager` has removed the checkpoint at `uri`",
    "retention.failed": "it could not, and tries again after the next save",
    "gc.removed": "`gc` has removed all garbage at `uri`: `num_bytes` of objects, and in `message` how many of what",
    "gc.failed": "`gc` could not remove what is at `uri`, or not look at it: `error`, `message`",
    "delete.done": "`delete` has removed the checkpoint at `uri`",
    "delete.failed": "`delete` has not, or not all of it: `error`, `message`",
    "retry": "a request about `key` failed and is made again: `error` (`ThrottledError` where the store asks to slow "
    "down), `message`",
    "hedge": "a request takes far longer than its peers, and is made once more beside it",
}
"""What each of them means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of a save or load, as it happens; `Options.on_event` and `cloudckpt.telemetry` receive it."""

    name: EventName
    uri: str
    rank: int
    key: str = ""
    """The object concerned, relative to `uri`; empty where it concerns none."""
    num_bytes: int = 0
    operation: str = ""
    """The same in all events of one save or load on one rank."""
    seconds: float = 0.0
    """Where something has ended: how long it took."""
    error: str = ""
    """The class of what went wrong, such as ``ThrottledError``."""
    message: str = ""
    """What it says."""
    report: SaveReport | LoadReport | None = None
    """Where a save or load is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What one rank did in one save."""

    uri: str
    attempt: str
    rank: int
    num_bytes: int
    """Bytes this rank sent, headers included."""
    num_reused_bytes: int = 0
    """Bytes that an earlier save had left there, and this one did not send (`Options.resume`)."""
    num_objects: int
    num_requests: int
    num_retries: int
    num_hedges: int = 0
    """Parts that were sent once more on another connection, because they took far longer than their peers."""
    plan_s: float
    """From set-up to the start of writing: planning and its collectives."""
    write_s: float
    """Staging and upload, which overlap, from the first to the last byte."""
    stage_s: float = 0.0
    """Of the writing phase, the seconds that its connections together spent on copies and checksums; this includes
    their waits for room in `Options.staging_bytes`."""
    transfer_s: float = 0.0
    """Of the writing phase, the seconds that its connections together spent in calls to the store, waits between tries
    included."""
    commit_s: float
    """Building and putting the manifest; 0 on all ranks but the coordinator."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the writing phase."""
        return self.num_bytes / self.write_s if self.write_s > 0 else 0.0


SavePhase = Literal["staging", "planning", "uploading", "committing", "committed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgress:
    """How far a background save is, on one rank. `AsyncSave.progress` gives it."""

    phase: SavePhase
    """Copying may go on beside the phases that follow it. ``"committing"`` begins on a rank that does not commit itself
    when it has sent its part, and lasts until it knows the outcome."""
    staged_bytes: int
    """That have been copied."""
    uploaded_bytes: int
    """That the store has confirmed, headers included."""
    total_bytes: int
    """That this rank sends: 0 before its plan is made, then an estimate, exact at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """A newer checkpoint that `load_latest` could not load, and so passed over."""

    uri: str
    why: str
    is_gone: bool = False
    """Whether it was removed meanwhile; else it is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one rank did in one load."""

    uri: str
    attempt: str
    rank: int
    num_bytes_wanted: int
    """Bytes of the tensors and objects that were asked for."""
    num_bytes_read: int
    """Bytes that came from the store for them: to whole tiles, and over small gaps."""
    num_bytes_received: int = 0
    """Bytes of them that another rank read and handed on, and this one did not read."""
    num_requests: int
    num_retries: int
    num_hedges: int = 0
    """Ranges that were asked for once more on another connection, because they took far longer than their peers."""
    plan_s: float
    """Manifest and planning, with its collectives."""
    manifest_s: float = 0.0
    """Of `plan_s`, what it took to find, fetch and decode the manifest."""
    read_s: float
    """Reading, checking and placing, which overlap, from the first to the last byte."""
    transfer_s: float = 0.0
    """Of the reading phase, the seconds that its connections together spent in calls to the store, waits between tries
    included."""
    stage_s: float = 0.0
    """Of the reading phase, the seconds that its connections together spent on checksums and on copies
    of what could not be received in its place; this includes their waits for room in `Options.read_bytes`."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """What `load_latest` passed over to get here, the newest first."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the reading phase, in wanted bytes."""
        return self.num_bytes_wanted / self.read_s if self.read_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was found to be as it was saved."""

    uri: str
    attempts: tuple[str, ...]
    """Of the save; of each rank's, where the ranks saved on their own, without collectives."""
    num_objects: int
    num_tensors: int
    num_values: int
    num_bytes: int
    """Of all data objects, each of them read."""
    num_requests: int
    num_retries: int
    verify_s: float

    @property
    def bytes_per_s(self) -> float:
        """Throughput."""
        return self.num_bytes / self.verify_s if self.verify_s > 0 else 0.0
