"""CPU seconds and peak memory of each phase of this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # https://docs.kernel.org/filesystems/proc.html


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Cost of one phase."""

    cpu_s: float
    peak_bytes: int | None
    """Resident memory at its highest, with all that was there before; None where the system does not tell."""


@dataclass(slots=True)
class Clock:
    """Times phases, by name, in the order in which they come."""

    phases: dict[str, Phase] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the user and system time of the block to that phase, which may come in pieces."""
        before = self.phases.get(name)
        if before is None:
            _reset_peak()
        begun_s = time.process_time()
        yield
        cpu_s = time.process_time() - begun_s + (before.cpu_s if before else 0.0)
        self.phases[name] = Phase(cpu_s=cpu_s, peak_bytes=_status_bytes("VmHWM"))


def resident_bytes() -> int | None:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)


def _status_bytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
