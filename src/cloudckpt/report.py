"""Events of saves and loads while they run, and the reports at their end."""

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
    "save.begun": "a save begins on this rank; a background save in the thread that asks for it",
    "save.staged": "a background save has copied the state dict: `num_bytes`, `seconds`",
    "save.set_up": "the save may go on: from here on bytes move",
    "save.part_uploaded": "the store has one part (`key`, `num_bytes`)",
    "save.completing": "the store has all parts of `key`, whose upload is about to be completed",
    "save.object_uploaded": "the store has the object `key`, of `num_bytes`",
    "save.resumed": "the store had `num_bytes` already, from an earlier save (`Options.resume`)",
    "save.written": "this rank has sent all its bytes: `num_bytes`",
    "save.committing": "on the coordinator: the manifest `key` is about to be put",
    "save.committed": "on the coordinator: the checkpoint exists",
    "save.removing": "on the coordinator: `key` of the overwritten checkpoint is about to be removed",
    "save.cleaned_up": "on the coordinator: the overwritten checkpoint is removed",
    "save.done": "the save is committed, and this rank knows it: `report`, `seconds`, `num_bytes`",
    "save.failed": "the save has failed: `error` and `message` of the first rank's cause, `seconds`",
    "save.cancelled": "a rank has cancelled the save: `message`, `seconds`",
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
    """An id that all events of one save or load on one rank share."""
    seconds: float = 0.0
    """The time that it took, if something has ended."""
    error: str = ""
    """The class of the error, such as ``ThrottledError``."""
    message: str = ""
    """The text of the error."""
    report: SaveReport | LoadReport | None = None
    """The report, if a save or load is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Describes one save of one rank."""

    uri: str
    attempt: str
    rank: int
    num_bytes: int
    """Bytes this rank sent, headers included."""
    num_reused_bytes: int = 0
    """Bytes that this save did not send, because an earlier one had left them there (`Options.resume`)."""
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
    """Seconds of the writing phase that its connections together spent on copies and checksums, waits for room in
    `Options.staging_bytes` included."""
    transfer_s: float = 0.0
    """Seconds of the writing phase that its connections together spent in calls to the store, waits between tries
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
    """The progress of a background save on one rank, as `AsyncSave.progress` gives it."""

    phase: SavePhase
    """The copy may go on in later phases. ``"committing"`` of a rank that is not the coordinator begins when it has
    sent its part, and lasts until it knows the outcome."""
    staged_bytes: int
    """Bytes that are copied."""
    uploaded_bytes: int
    """Bytes that the store has confirmed, headers included."""
    total_bytes: int
    """Bytes that this rank sends: 0 before its plan is made, then an estimate, exact at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """A newer checkpoint that `load_latest` could not load and skipped."""

    uri: str
    why: str
    is_gone: bool = False
    """True if it was removed meanwhile, False if it is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Describes one load of one rank."""

    uri: str
    attempt: str
    rank: int
    num_bytes_wanted: int
    """Bytes of the tensors and objects that were asked for."""
    num_bytes_read: int
    """Bytes that came from the store for them, in whole tiles and with small gaps."""
    num_bytes_received: int = 0
    """Bytes of them that another rank read and passed on to this one."""
    num_requests: int
    num_retries: int
    num_hedges: int = 0
    """Ranges that were requested once more on another connection, because they took far longer than their peers."""
    plan_s: float
    """Manifest and planning, with its collectives."""
    manifest_s: float = 0.0
    """Seconds of `plan_s` that finding, fetching and decoding the manifest took."""
    read_s: float
    """Reading, checking and placing, which overlap, from the first to the last byte."""
    transfer_s: float = 0.0
    """Seconds of the reading phase that its connections together spent in calls to the store, waits between tries
    included."""
    stage_s: float = 0.0
    """Seconds of the reading phase that its connections together spent on checksums, and on copies of bytes that could
    not be received in place, waits for room in `Options.read_bytes` included."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """The checkpoints that `load_latest` skipped, the newest first."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the reading phase, in wanted bytes."""
        return self.num_bytes_wanted / self.read_s if self.read_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Describes a verification that found no damage."""

    uri: str
    attempts: tuple[str, ...]
    """The attempt of the save; one for each rank if the ranks saved without collectives."""
    num_objects: int
    num_tensors: int
    num_values: int
    num_bytes: int
    """Bytes of all data objects, each of them read."""
    num_requests: int
    num_retries: int
    verify_s: float

    @property
    def bytes_per_s(self) -> float:
        """Throughput."""
        return self.num_bytes / self.verify_s if self.verify_s > 0 else 0.0
