"""Progress and reports of copies and conversions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cloudckpt.uri import Location

Format: TypeAlias = Literal["safetensors", "torch", "dcp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """Result of `cloudckpt.copy`."""

    source: str
    target: str
    attempts: tuple[str, ...]
    """Identifiers of the copy; one for each rank if the ranks saved separately."""
    num_objects: int
    num_bytes: int
    """Size of all data objects."""
    num_service_bytes: int
    """Bytes that the service copied, and for which it reported the CRC32C of the save."""
    num_read_back_bytes: int
    """Bytes that the service copied without a CRC32C, and that were read back and compared."""
    num_reused_bytes: int
    """Bytes that an earlier copy had left at the target (`Options.resume`), and that were read there and compared."""
    was_there: bool
    """True if an earlier copy had committed all of it (`Options.resume`), so that nothing was written."""
    num_requests: int
    num_retries: int
    copy_s: float

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the whole call."""
        return self.num_bytes / self.copy_s if self.copy_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """Result of `cloudckpt.export_checkpoint` or `cloudckpt.import_checkpoint`."""

    source: str
    target: str
    format: Format
    num_tensors: int
    num_values: int
    """Number of Python objects."""
    left_out: tuple[str, ...]
    """Names of Python objects that an export left out (`skip_non_tensors`)."""
    files: tuple[str, ...]
    """Names of the files that an export wrote, in their folder; of an import, the keys of the data objects."""
    num_bytes: int
    """Size of the files."""
    convert_s: float

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the whole call."""
        return self.num_bytes / self.convert_s if self.convert_s > 0 else 0.0


OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes done and their total. Any thread calls it, one at a time; the first number never falls."""


class Progress:
    """Counts bytes for several threads."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = 0

    def expect(self, num_bytes: int) -> None:
        """Add `num_bytes` to the total."""
        with self._lock:
            self._total_bytes += num_bytes
            self._tell()

    def add(self, num_bytes: int) -> None:
        """Add `num_bytes` to those that are done."""
        with self._lock:
            self._done_bytes += num_bytes
            self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Outcome of an export or import."""

    num_tensors: int
    num_values: int
    files: dict[str, int]
    """Sizes of the files by their names."""
    left_out: tuple[str, ...] = ()


def build_report(
    source: Location, target: Location, kind: Format, done: Conversion, *, begun_s: float
) -> ConversionReport:
    """Build the report of a conversion that began at `begun_s` of `time.monotonic`."""
    return ConversionReport(
        source=source.uri,
        target=target.uri,
        format=kind,
        num_tensors=done.num_tensors,
        num_values=done.num_values,
        left_out=done.left_out,
        files=tuple(sorted(done.files)),
        num_bytes=sum(done.files.values()),
        convert_s=time.monotonic() - begun_s,
    )
