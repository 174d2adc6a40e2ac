"""Seconds, CPU seconds and peak memory of an operation that is known."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest

from benchmarks import measure

MIB = 1024 * 1024
BLOCK_BYTES = 64 * MIB
# Python, threads and page tables need a little too.
SLACK_BYTES = 16 * MIB

needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")


def touch_and_free():
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        for offset in range(0, BLOCK_BYTES, mmap.PAGESIZE):
            block[offset] = 1


@needs_proc
def test_peak_sees_what_is_freed_before_the_end():
    """Buffers that a save frees before it returns would not count, and they are what the figure is about."""
    peak = measure.HighWaterPeak()
    touch_and_free()
    assert BLOCK_BYTES - SLACK_BYTES <= peak.extra_bytes() <= BLOCK_BYTES + SLACK_BYTES


def test_cpu_seconds_count_work_and_not_waiting():
    """Client CPU seconds would say how long an operation took, not what it cost."""

    def burn():
        until_s = time.process_time() + 0.2
        while time.process_time() < until_s:
            pass

    usage, _ = measure.measured(burn)
    assert usage.cpu_s >= 0.19
    assert usage.wall_s >= 0.19
