"""What ranks that wait for one another post on the store that they share."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank posts under its number."""

    beat: int = 0
    call: int = 0
    """The save or load that it is in, counted from 1."""
    num_met: int = 0
    has_left: bool = False
    task: str = "-"
    """What it is to do in that call, as `task_of` says: ranks that are to do different things are not waited for."""
    process: str = "-"

    def encoded(self) -> str:
        return f"{self.beat} {self.call} {self.num_met} {int(self.has_left)} {self.task} {self.process}"


def sign_of(text: bytes) -> Sign:
    *numbers, task, process = text.decode().split()
    beat, call, num_met, has_left = map(int, numbers)
    return Sign(beat=beat, call=call, num_met=num_met, has_left=bool(has_left), task=task, process=process)


def task_of(doing: str, uri: str) -> str:
    """The same for ranks that are to do the same. Not the URI itself, which the store of all ranks need not know."""
    return hashlib.sha256(f"{doing}\0{uri}".encode(errors="surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What rank 0 says to all: until where they may go on, and whom it has given up, in which call."""

    num_met: int = 0
    lost_in_call: int = 0
    why: str = ""
    lost: tuple[int, ...] = ()

    def encoded(self) -> str:
        return f"{self.num_met} {self.lost_in_call} {','.join(map(str, self.lost)) or '-'} {self.why}"


def word_of(text: bytes) -> Word:
    num_met, call, lost, why = text.decode().split(" ", 3)
    ranks = tuple(map(int, lost.split(","))) if lost != "-" else ()
    return Word(num_met=int(num_met), lost_in_call=int(call), lost=ranks, why=why)


def own_process() -> str:
    """What tells those on the same machine whether this process is still there; "-" where nothing can."""
    pid = os.getpid()
    started = _state_and_start_of(pid)
    return f"{pid}:{started[1]}:{_process_numbers()}" if started is not None and _process_numbers() else "-"


def has_ended(process: str) -> bool:
    """Whether it is known that the process that `own_process` named is gone; never of one on another machine."""
    pid, _, rest = process.partition(":")
    start, _, numbers = rest.partition(":")
    if not numbers or numbers != _process_numbers():
        return False
    found = _state_and_start_of(int(pid))
    return found is None or found[0] in "ZX" or found[1] != start


def _state_and_start_of(pid: int) -> tuple[str, str] | None:
    try:
        # The name before it, in brackets, may hold anything (https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html).
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


@functools.cache
def _process_numbers() -> str:
    """Where a process number means one and the same: a boot of a machine and a container; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def read(store: Any, keys: list[str], known: set[str]) -> dict[str, bytes]:
    """The values of those of `keys` that there are: a store waits for one that is not."""
    known.update(key for key in keys if key not in known and store.check([key]))
    there = [key for key in keys if key in known]
    if not there:
        return {}
    if store.has_extended_api():
        return dict(zip(there, store.multi_get(there), strict=True))
    return {key: store.get(key) for key in there}


def connection_of_its_own(store: Any) -> Any:
    # Calls over one connection wait for each other, and training may be using it.
    with contextlib.suppress(AttributeError):
        return store.clone()
    return store
