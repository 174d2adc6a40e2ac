"""Reports of saves and loads at their end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
