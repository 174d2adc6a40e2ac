"""Reports of saves and loads at their end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cloudckpt._display import with_short_repr

Place = Literal["root", "fast"]
FAST_KEY = "fast"
"""The key, in the ``metadata`` of a manifest, of the record that a manager makes of a step in its fast place."""


def record_of(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a manager's record of a step in its fast place; empty for other metadata."""
    record = metadata.get(FAST_KEY)
    return record if isinstance(record, dict) else {}


def place_of(metadata: Mapping[str, Any]) -> Place:
    """Return the place of a manager whose options have this ``metadata``."""
    return "fast" if "root" in record_of(metadata) else "root"


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Report of one save on one rank."""

    uri: str
    """URI of the checkpoint."""
    place: Place = "root"
    """``"fast"`` if `uri` is in the fast place of a `CheckpointManager`."""
    attempt: str
    """Identifier of the attempt that saved: the keys of its objects begin with ``data/<attempt>/``."""
    rank: int
    """This rank in the group that saved."""
    num_bytes: int
    """Bytes that this rank sent, headers included."""
    num_bytes_unchanged: int = 0
    """Bytes of this rank that were not sent, because the base of the save has them (`Options.unchanged`)."""
    num_objects: int
    """Data objects that this rank wrote."""
    num_requests: int
    """Requests to the store, with retries and hedges."""
    num_retries: int
    """Requests that were made again after a failure."""
    num_hedges: int = 0
    """Parts that were sent once more on another connection, because they took far longer than their peers."""
    plan_s: float
    """Seconds from set-up to the start of writing: planning and its collectives."""
    write_s: float
    """Seconds of the writing phase: staging and upload, which overlap, from the first to the last byte."""
    stage_s: float = 0.0
    """Seconds of the writing phase that its connections together spent on copies and checksums, and on waits for room
    in `Options.staging_bytes`."""
    transfer_s: float = 0.0
    """Seconds of the writing phase that its connections together spent in calls to the store, and on waits between
    tries."""
    commit_s: float
    """Seconds of building and putting the manifest, and of removing what it replaced. 0 on all ranks but the
    coordinator."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the writing phase."""
        return self.num_bytes / self.write_s if self.write_s > 0 else 0.0


SavePhase = Literal["staging", "planning", "uploading", "committing", "committed", "failed", "cancelled"]


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgress:
    """Progress of a background save on one rank (`AsyncSave.progress`)."""

    phase: SavePhase
    """Phase of the save. The copy may go on in later phases. On a rank that is not the coordinator, ``"committing"``
    begins when it has sent its part, and lasts until it knows the outcome."""
    staged_bytes: int
    """Bytes that are copied."""
    uploaded_bytes: int
    """Bytes that the store has confirmed, headers included."""
    total_bytes: int
    """Bytes that this rank sends: 0 before its plan is made, then an estimate, exact at the end."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """A newer checkpoint that `load_latest` skipped, because it could not load it."""

    uri: str
    """URI of the checkpoint."""
    why: str
    """Reason, in words."""
    is_gone: bool = False
    """True if it was removed meanwhile, False if it is damaged."""


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Report of one load on one rank."""

    uri: str
    """URI of the checkpoint."""
    place: Place = "root"
    """``"fast"`` if `uri` is in the fast place of a `CheckpointManager`."""
    attempt: str
    """Identifier of the attempt that saved what was loaded."""
    rank: int
    """This rank in the group that loaded."""
    num_bytes_wanted: int
    """Bytes of the tensors and objects that were asked for."""
    num_bytes_read: int
    """Bytes that came from the store for them, in whole tiles and with small gaps."""
    num_bytes_received: int = 0
    """Bytes that other ranks have read for this one, and sent (`Options.share_reads`)."""
    num_requests: int
    """Requests to the store, with retries and hedges."""
    num_retries: int
    """Requests that were made again after a failure."""
    num_hedges: int = 0
    """Ranges that were requested once more on another connection, because they took far longer than their peers."""
    num_objects_of_copy: int = 0
    """Objects that were read from the copy in another place, because they could not be read at `uri`."""
    plan_s: float
    """Seconds of planning: the manifest, and the collectives."""
    manifest_s: float = 0.0
    """Seconds of `plan_s` that finding, fetching and decoding the manifest took."""
    read_s: float
    """Seconds of the reading phase: reading, checking and placing, which overlap, from the first to the last byte."""
    transfer_s: float = 0.0
    """Seconds of the reading phase that its connections together spent in calls to the store, and on waits between
    tries."""
    stage_s: float = 0.0
    """Seconds of the reading phase that its connections together spent on checksums, on copies of bytes that could not
    be received in place, and on waits for room in `Options.read_bytes`."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Checkpoints that `load_latest` skipped, the newest first."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the reading phase, in wanted bytes."""
        return self.num_bytes_wanted / self.read_s if self.read_s > 0 else 0.0


@with_short_repr
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Report of a verification that found no damage. `verify` returns it."""

    uri: str
    """URI of the checkpoint."""
    attempt: str
    """Identifier of the attempt that saved: the keys of its objects begin with ``data/<attempt>/``."""
    num_objects: int
    """Number of data objects."""
    num_tensors: int
    """Number of tensors."""
    num_values: int
    """Number of Python objects."""
    num_bytes: int
    """Size of all data objects. Every byte was read."""
    num_requests: int
    """Requests to the store, with retries and hedges."""
    num_retries: int
    """Requests that were made again after a failure."""
    verify_s: float
    """Seconds of the whole call."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the whole call."""
        return self.num_bytes / self.verify_s if self.verify_s > 0 else 0.0
