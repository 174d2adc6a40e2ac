"""What ranks that wait for one another post on the store that they share."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

_MOST_NAMED = 16
LEFT = "left before the end; its own error says why"
LATE = "the others had waited too long for this one, and went on without it"
APART = "came to do something else: all ranks have to make the same calls, and save to the same URI"
GROUP_DESTROYED = (
    "the process group was destroyed meanwhile. Nothing was removed, and rank 0 may have committed: see "
    "cloudckpt.latest. Before destroy_process_group(), wait for the handle's result(), or call cloudckpt.close()"
)
"""For who finds that it has no group any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank posts under its number."""

    beat: int = 0
    call: int = 0
    """The save or load that it is in, counted from 1, and on where the ranks meet anew."""
    num_met: int = 0
    left_call: int = 0
    """One that it left before its end, where it is not known yet what became of that; else 0."""
    left_task: str = "-"
    """What that was to do, where this rank left it on its own, or knows that it has missed it; else "-"."""
    has_cancelled: bool = False
    """Wants the call that it is in to come to nothing."""
    task: str = "-"
    """What it is to do in that call, as `task_of` says: ranks that are to do different things are not waited for."""
    process: str = "-"

    def of_call(self, call: int, doing: str, uri: str, *, left_call: int) -> Sign:
        """As it begins; this rank may go on in another process than it was."""
        task = task_of(doing, uri)
        left_task = self.left_task if left_call else "-"
        return replace(
            self,
            call=call,
            left_call=left_call,
            left_task=left_task,
            has_cancelled=False,
            task=task,
            process=own_process(),
        )

    def encoded(self) -> str:
        numbers = f"{self.beat} {self.call} {self.num_met} {self.left_call} {int(self.has_cancelled)}"
        return f"{numbers} {self.left_task} {self.task} {self.process}"


def sign_of(text: bytes) -> Sign:
    *numbers, left_task, task, process = text.decode().split()
    beat, call, num_met, left_call, has_cancelled = map(int, numbers)
    return Sign(
        beat=beat,
        call=call,
        num_met=num_met,
        left_call=left_call,
        has_cancelled=bool(has_cancelled),
        left_task=left_task,
        task=task,
        process=process,
    )


def task_of(doing: str, uri: str) -> str:
    """The same for ranks that are to do the same. Not the URI itself, which the store of all ranks need not know."""
    return hashlib.sha256(f"{doing}\0{uri}".encode(errors="surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What rank 0 says to all: until where they may go on, and who was given up or has cancelled, in which call."""

    num_met: int = 0
    lost_in_call: int = 0
    why: str = ""
    lost: tuple[int, ...] = ()
    cancelled_in_call: int = 0
    cancelled_by: tuple[int, ...] = ()

    def with_cancelled(self, mine: Sign, others: Mapping[int, Sign]) -> Word:
        """With the ranks that have cancelled the call that rank 0 is in."""
        signs = {0: mine, **others}
        ranks = tuple(sorted(rank for rank, sign in signs.items() if sign.has_cancelled and sign.call == mine.call))
        return replace(self, cancelled_in_call=mine.call, cancelled_by=ranks) if ranks else self

    def encoded(self) -> str:
        given_up = f"{self.lost_in_call} {_listed(self.lost)}"
        return f"{self.num_met} {given_up} {self.cancelled_in_call} {_listed(self.cancelled_by)} {self.why}"


def word_of(text: bytes) -> Word:
    num_met, lost_in_call, lost, cancelled_in_call, cancelled_by, why = text.decode().split(" ", 5)
    return Word(
        num_met=int(num_met),
        lost_in_call=int(lost_in_call),
        lost=_ranks_in(lost),
        cancelled_in_call=int(cancelled_in_call),
        cancelled_by=_ranks_in(cancelled_by),
        why=why,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """In which call a rank has found, perhaps alone, that the ranks do not meet any more; 0: it has not."""

    call: int = 0
    task: str = "-"
    """What it was to do in that call, as `task_of` says; "-" where that is not known."""

    def encoded(self) -> str:
        return f"{self.call} {self.task}"


def given_up_of(text: bytes) -> GivenUp:
    call, task = text.decode().split()
    return GivenUp(call=int(call), task=task)


def _listed(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) or "-"


def _ranks_in(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text != "-" else ()


def loss_in(mine: Sign, word: Word, signs: Mapping[int, Sign], *, on_rank: int) -> tuple[Iterable[int], str] | None:
    """Who is lost for the call that a rank is in, by what all have said, and why."""
    apart = [rank for rank, sign in signs.items() if sign.call == mine.call and sign.task != mine.task]
    if apart:
        return apart, APART
    if word.lost_in_call >= mine.call:
        if on_rank not in word.lost:
            return word.lost, word.why
        if word.why == APART:
            return (0,), APART  # whose sign is read only where this rank waits, and its word always
        return (on_rank,), LATE
    gone = [rank for rank, sign in signs.items() if sign.call > mine.call or sign.left_call == mine.call]
    return (gone, LEFT) if gone else None


def loss_text(*, doing: str, uri: str, on_rank: int, lost: tuple[int, ...], why: str) -> str:
    """What a rank says that has given up `lost`, or found itself given up."""
    shown = ", ".join(map(str, lost[:_MOST_NAMED])) + (", …" if len(lost) > _MOST_NAMED else "")
    who = f"{'rank' if len(lost) == 1 else 'ranks'} {shown} " if lost and lost != (on_rank,) else ""
    return (
        f"{doing} {uri} was given up on rank {on_rank}: {who}{why}. Nothing was removed, and a rank that was lost may "
        "still have committed: see cloudckpt.latest. Where ranks may come later than that, raise Options(timeout_s=…)"
    )


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


def under(prefix: str, store: Any) -> Any:
    """`store`, of which only keys with this prefix are seen."""
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]  # the stubs leave it out
    return prefixed(prefix, store)


def connection_of_its_own(store: Any) -> Any:
    # Calls over one connection wait for each other, and training may be using it.
    with contextlib.suppress(AttributeError):
        return store.clone()
    return store
