"""Cost of one operation for its process: seconds, CPU seconds and memory over what was resident before."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

Result = TypeVar("Result")

SAMPLE_INTERVAL_S = 0.005

PeakMethod = Literal["VmHWM", "sampled", "unavailable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Cost of one operation in one process."""

    wall_s: float
    cpu_s: float
    """User and system seconds of the process, its threads and its children."""
    extra_peak_bytes: int | None
    """Highest resident memory while it ran, less that before it; None where the system does not tell."""
    peak_method: PeakMethod


def measured(operation: Callable[[], Result]) -> tuple[Usage, Result]:
    """Run `operation` once; what it took, and what it returned.

    Free heap memory is handed back first: what an earlier operation left cannot hide what this one needs.
    """
    gc.collect()
    _trim_heap()
    peak = _peak_watch()
    cpu_before_s = cpu_seconds()
    started_s = time.perf_counter()
    result = operation()
    wall_s = time.perf_counter() - started_s
    cpu_s = cpu_seconds() - cpu_before_s
    usage = Usage(
        wall_s=wall_s,
        cpu_s=cpu_s,
        extra_peak_bytes=peak.extra_bytes(),
        peak_method=peak.method,
    )
    return usage, result


def cpu_seconds() -> float:
    """User and system seconds that this process, its threads and its children have used."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _cpu_s_of_running_children()


def _cpu_s_of_running_children() -> float:
    """CPU seconds of running children, which the system counts once they have ended; 0 without `/proc`."""
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):  # a thread or a child that has ended meanwhile
            for pid in children.read_text().split():
                # proc_pid_stat(5): utime and stime are fields 14 and 15; what is in front of them may hold blanks.
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class PeakWatch(Protocol):
    """Watches resident memory from its construction on."""

    method: PeakMethod

    def extra_bytes(self) -> int | None:
        """The peak since construction over what was resident then."""


class HighWaterPeak:
    """The kernel's own high-water mark, which misses nothing; resetting it needs Linux and `clear_refs`."""

    method: PeakMethod = "VmHWM"

    def __init__(self) -> None:
        # proc_pid_clear_refs(5): "5" resets the peak resident set size to the current one.
        Path("/proc/self/clear_refs").write_text("5")
        self._before_bytes = status_bytes("VmRSS")

    def extra_bytes(self) -> int:
        return max(0, status_bytes("VmHWM") - self._before_bytes)


class SampledPeak:
    """Resident memory, read every few milliseconds: may miss a short peak."""

    method: PeakMethod = "sampled"

    def __init__(self) -> None:
        self._before_bytes = self._peak_bytes = rollup_rss_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_INTERVAL_S):
            self._peak_bytes = max(self._peak_bytes, rollup_rss_bytes())

    def extra_bytes(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self._peak_bytes, rollup_rss_bytes()) - self._before_bytes


class NoPeak:
    """Stands in where the system has no `/proc`."""

    method: PeakMethod = "unavailable"

    def extra_bytes(self) -> None:
        return None


def _peak_watch() -> PeakWatch:
    for kind in (HighWaterPeak, SampledPeak):
        with contextlib.suppress(OSError):
            return kind()
    return NoPeak()


def status_bytes(field: str) -> int:
    """One field of `/proc/self/status` that is given in kB."""
    return _kib_field(Path("/proc/self/status").read_text(), field)


def rollup_rss_bytes() -> int:
    """Resident memory, counted page by page."""
    return _kib_field(Path("/proc/self/smaps_rollup").read_text(), "Rss")


def _kib_field(text: str, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        raise OSError(f"no {field} in /proc")
    return int(match[1]) * 1024


def _trim_heap() -> None:
    # glibc alone has it; elsewhere freed memory is the allocator's business.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
