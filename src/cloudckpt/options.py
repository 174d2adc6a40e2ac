"""Everything that can be tuned, with its default, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cloudckpt.errors import InvalidOptionError

if TYPE_CHECKING:
    from cloudckpt.report import Event

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to save and load. Sizes are in bytes, times in seconds.

    Raises `InvalidOptionError`, with every problem at once, where a value cannot work.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the store's own client takes: ``endpoint_url``, ``region``, ``profile``, … (see ``docs/stores.md``)."""
    timeout_s: float = 60.0
    """The longest that anything waits without progress."""
    retries: int = 5
    """How often a call that failed in passing is tried again, within `timeout_s` of its last progress."""
    connections: int = 8
    """Requests in flight at once, per rank."""
    part_bytes: int = 32 * MIB
    """Size of an upload's parts; grows by itself where an object would need too many."""
    object_bytes: int = 4 * GIB
    """A rank's tensors are packed into objects of about this size; a larger tensor gets one of its own."""
    tile_bytes: int = 1 * MIB
    """One CRC32C is kept for each so many bytes; the smallest unit that a load verifies and so reads."""
    staging_bytes: int = 512 * MIB
    """Most memory that a save uses for copies of what cannot be sent from where it lies (GPU, strided tensors)."""
    read_bytes: int = 256 * MIB
    """Most memory that a load uses besides the tensors themselves."""
    request_bytes: int = 32 * MIB
    """Largest ranged read; longer runs are split into parallel ones, and a small load into smaller ones."""
    max_gap_bytes: int = 1 * MIB
    """Two wanted ranges that lie no further apart are read as one."""
    verify: bool = True
    """Check every byte that is read against the checksum recorded at save."""
    commit: Literal["conditional", "unconditional"] = "conditional"
    """``"unconditional"`` accepts a store that cannot create-if-absent, and with it lost overwrite protection."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's own JSON values, kept in the manifest."""
    on_event: Callable[[Event], None] | None = None
    """Called at each step, in the thread that made it. Must be quick, and picklable for async saves by process."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be {what}, not {getattr(self, name)!r}"
            for name, good, what in (
                ("timeout_s", self.timeout_s > 0, "positive"),
                ("retries", self.retries >= 0, "at least 0"),
                ("connections", self.connections >= 1, "at least 1"),
                ("part_bytes", self.part_bytes >= self.tile_bytes, "at least tile_bytes"),
                ("object_bytes", self.object_bytes >= 1, "positive"),
                (
                    "tile_bytes",
                    4 * KIB <= self.tile_bytes <= GIB and self.tile_bytes % 64 == 0,
                    "a multiple of 64, from 4096 to 1 GiB",
                ),
                ("staging_bytes", self.staging_bytes >= self.part_bytes, "at least part_bytes"),
                ("request_bytes", self.request_bytes >= self.tile_bytes, "at least tile_bytes"),
                ("read_bytes", self.read_bytes >= self.request_bytes, "at least request_bytes"),
                ("max_gap_bytes", self.max_gap_bytes >= 0, "at least 0"),
                (
                    "commit",
                    self.commit in ("conditional", "unconditional"),
                    "'conditional' or 'unconditional'",
                ),
            )
            if not good
        ]
        if problems:
            raise InvalidOptionError("Options: " + "; ".join(problems))
