"""Cores for one thread or process of a measurement, and for everything beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Cores:
    """Which core is the loop's, and which are all others'. None on a machine that has one, or cannot say so."""

    loop: int | None = field(init=False, default=None)
    others: frozenset[int] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) > 1:
            self.loop, self.others = cores[0], frozenset(cores[1:])


@contextlib.contextmanager
def kept_off_the_loops_core() -> Iterator[None]:
    """Keep the threads and processes that start in the block off the loop's core."""
    cores = Cores()
    if cores.loop is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores.others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def threads_of_this_process() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]


def pin(thread: int, cores: Iterable[int]) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        os.sched_setaffinity(thread, cores)


def threads_of_children() -> list[int]:
    children = [child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()]
    return [int(path.name) for child in children for path in Path(f"/proc/{child}/task").glob("*")]
