"""What an export or import was asked for, and what it has done."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cloudckpt._convert.reports import ConversionReport, Format
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
    tie: dict[str, str]
    """Tensors by their further names."""
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


def reported(plan: ExportPlan | ImportPlan, kind: Format, done: Done, *, begun_s: float) -> ConversionReport:
    """What the caller gets of it. `begun_s` is of `time.monotonic`."""
    return ConversionReport(
        source=plan.source.uri,
        target=plan.target.uri,
        format=kind,
        num_tensors=done.num_tensors,
        num_values=done.num_values,
        left_out=done.left_out,
        files=tuple(sorted(done.files)),
        num_bytes=sum(done.files.values()),
        convert_s=time.monotonic() - begun_s,
    )
