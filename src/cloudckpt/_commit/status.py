"""What `survey` finds, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from cloudckpt._uri import Location
from cloudckpt.errors import StoreError

CheckpointState = Literal["committed", "damaged", "newer", "denied", "in progress", "garbage", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """A checkpoint, or what saves have written beside none. One location can have several: each in a state of its own.

    ``"committed"``: it can be loaded. ``"damaged"``: something counts there, and cannot be read. ``"newer"``: it is in
    a format that only a newer cloudckpt reads. ``"denied"``: what lies there may not be looked at. ``"in progress"``:
    data of a save that may still be committed. ``"garbage"``: data that no save will commit any more, or that has
    shown no sign of life for long; `gc` removes it by and by. ``"torch"``: a checkpoint of torch's own writer.
    """

    uri: str
    name: str
    """Its last segment: ``step-100`` of ``s3://bucket/run/step-100``."""
    state: CheckpointState
    moment: datetime
    """When it was committed, as in `CheckpointInfo.committed_at`; else the last sign of life, by the store's clock;
    where denied, the time of the look.
    """
    num_bytes: int
    """Of data objects. What unfinished uploads hold, no store says."""
    num_objects: int
    num_uploads: int = 0
    """Unfinished ones."""
    attempt: str = ""
    """Of the save."""
    world_size: int | None = None
    """How many ranks saved; of what is not committed, how many have written something so far."""
    num_tensors: int | None = None
    num_overwrites: int = 0
    """How often what counts had been saved before."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """``Options.metadata`` of the save."""
    problem: str = ""
    """Why it cannot be read."""


def denied_status(location: Location, error: StoreError) -> CheckpointStatus:
    """Of what may not be looked at."""
    return CheckpointStatus(
        uri=location.uri,
        name=location.name,
        state="denied",
        moment=datetime.now(timezone.utc),
        num_bytes=0,
        num_objects=0,
        problem=str(error),
    )
