"""What a process holds of the system, read from Linux's ``/proc``."""

from __future__ import annotations

import gc
import threading
from collections import Counter
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
    targets = open_files()
    num_sockets = sum(number for target, number in targets.items() if target.startswith("socket:"))
    return Held(
        rss_bytes=_status("VmRSS") * 1024,
        num_sockets=num_sockets,
        num_other_files=targets.total() - num_sockets,
        num_threads=len(list(Path("/proc/self/task").iterdir())),
    )


def open_files(pid: int | str = "self") -> Counter[str]:
    """What the descriptors of a process lead to, and how many to each.

    What is new is the later one less the earlier one. Numbers alone would not tell: a server of an earlier test that
    runs in this process closes its ends of connections when it comes to it.
    """
    links = Path(f"/proc/{pid}/fd").iterdir()
    return Counter(target for link in links if (target := _target_of(link)) is not None)


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
