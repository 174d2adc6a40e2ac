"""What an export or import was asked for, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass

from cloudckpt._uri import Location
from cloudckpt.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """As `cloudckpt.export_checkpoint` was called."""

    source: Location
    target: Location
    options: Options
    target_options: Options
    include: tuple[str, ...]
    strip_prefix: str
    max_shard_bytes: int
    skip_non_tensors: bool
    overwrite: bool
    allow_pickle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """As `cloudckpt.import_checkpoint` was called."""

    source: Location
    target: Location
    options: Options
    target_options: Options
    include: tuple[str, ...]
    add_prefix: str
    overwrite: bool
    allow_pickle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What came of it."""

    num_tensors: int
    num_values: int
    files: dict[str, int]
    """The sizes, by their names."""
    left_out: tuple[str, ...] = ()
