"""What a process holds of the system, read from Linux's ``/proc``."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """At one moment, when nothing runs."""

    rss_bytes: int
    num_sockets: int
    num_other_files: int
    num_threads: int

    def __str__(self) -> str:
        return (
            f"{self.rss_bytes / MIB:.1f} MiB, {self.num_sockets} sockets, {self.num_other_files} other descriptors, "
            f"{self.num_threads} threads"
        )


def held() -> Held:
    """By this process, after a full collection of garbage.

    The memory is the resident set as the system counts it (VmRSS): what the allocator keeps for later is in it.
    """
    gc.collect()
    targets = [target for link in Path("/proc/self/fd").iterdir() if (target := _target_of(link)) is not None]
    sockets = [target for target in targets if target.startswith("socket:")]
    return Held(
        rss_bytes=_status("VmRSS") * 1024,
        num_sockets=len(sockets),
        num_other_files=len(targets) - len(sockets),
        num_threads=len(list(Path("/proc/self/task").iterdir())),
    )


def python_threads() -> list[str]:
    """The names of the threads that Python knows of."""
    return sorted(thread.name for thread in threading.enumerate())


def _target_of(link: Path) -> str | None:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return None  # that of the listing itself


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
