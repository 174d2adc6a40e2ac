"""Settings of a system, and the outcomes that it reports. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a cell for a system."""

    endpoint_url: str | None
    region: str | None
    ca_bundle: str | None
    """The file of certificates that the server's is checked with; None for the system's own."""
    no_dist: bool
    """True where there is one process and no process group."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `cloudckpt.Options` that differ from the defaults."""
    connections: int | None = None
    """The connections that cloudckpt and the limit may use; None for their own defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Report of a system on one operation; None where it has no figure."""

    blocking_s: float | None = None
    """The seconds that training waited."""
    num_bytes_read: int | None = None
    """From the store."""
    steps_per_s: float | None = None
    """Pace of a training loop beside the save."""
    steps_per_s_alone: float | None = None
    """Pace of the same loop without it."""
    waiting_share: float | None = None
    """Share of the loop's time beside the save in which it waited for Python's lock."""
    copy_s: float | None = None
    """One copy of the same bytes into memory that is in use already, just before and after: the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A save in the background, from when training may go on."""

    blocking_s: float
    """The seconds that training waited."""
    is_done: Callable[[], bool]
    result: Callable[[], object]
    """Waits for it; raises its failure."""
