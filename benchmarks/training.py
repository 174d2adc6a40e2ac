"""A small training loop that needs Python for nearly all it does, and how fast it goes, alone and beside an upload.

The loop has a core to itself, and everything else in its process and its children the other cores, where the server
is, too: so it waits for Python's lock and for memory, as it would on a machine with cores to spare, and not for a core.
What other programs take of its core is not counted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.cores import Cores, pin, threads_of_this_process

ALONE_S = 2.5
"""Length of the window before the upload, and of the one after it."""
_SETTLE_S = 0.3
_NUM_LAYERS = 24
_WIDTH = 16


class Loop:
    """One thread, many small operations of torch, and as much plain Python between them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights = [torch.randn(_WIDTH, _WIDTH, generator=generator) / _WIDTH for _ in range(_NUM_LAYERS)]
        self._inputs = torch.randn(_WIDTH, _WIDTH, generator=generator)
        self._seen: dict[int, float] = {}

    def step(self) -> None:
        values = self._inputs
        for number, weights in enumerate(self._weights):
            values = torch.tanh(values @ weights).add_(self._inputs)
            # What a data loader, a scheduler and some logging do.
            tokens = [(number * 31 + token) % 97 for token in range(40)]
            self._seen[number] = sum(token * token for token in tokens) / len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps and waits of the loop in some time."""

    num_steps: int
    seconds: float
    """Without those in which its core was somebody else's."""
    waiting_s: float
    """Seconds in which it could not run, because another thread had Python's lock."""

    @property
    def steps_per_s(self) -> float:
        return self.num_steps / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The loop beside an upload, and without it just before and after."""

    steps_per_s: float
    steps_per_s_alone: float
    waiting_share: float
    """Share of the loop's time beside the upload in which it waited for Python's lock."""


def compared(begin: Callable[[], Callable[[], bool]]) -> Compared:
    """Train, begin an upload and train until it is done, and train once more.

    `begin` returns when training may go on, what says whether the upload is done. The calling thread is the loop's.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loop, cores = Loop(), Cores()
    all_cores = os.sched_getaffinity(0) if cores.loop is not None else set()
    try:
        _window(loop, cores, _for_s(_SETTLE_S))
        alone = [_window(loop, cores, _for_s(ALONE_S))]
        # Threads have the cores of who started them.
        _pin(cores, loop_runs=False)
        is_done = begin()
        beside = _window(loop, cores, is_done)
        alone.append(_window(loop, cores, _for_s(ALONE_S)))
    finally:
        torch.set_num_threads(num_threads)
        for thread in threads_of_this_process() if cores.loop is not None else ():
            pin(thread, all_cores)
    return Compared(
        steps_per_s=beside.steps_per_s,
        steps_per_s_alone=sum(one.num_steps for one in alone) / sum(one.seconds for one in alone),
        waiting_share=beside.waiting_s / beside.seconds,
    )


def _window(loop: Loop, cores: Cores, is_over: Callable[[], bool]) -> Window:
    _pin(cores, loop_runs=True)
    num_steps = 0
    (ran_before_s, queued_before_s), started_s = _scheduled_s(), time.perf_counter()
    while not is_over():
        loop.step()
        num_steps += 1
    wall_s = time.perf_counter() - started_s
    ran_s, queued_s = _scheduled_s()
    seconds = wall_s - (queued_s - queued_before_s)
    return Window(num_steps=max(num_steps, 1), seconds=seconds, waiting_s=max(0.0, seconds - (ran_s - ran_before_s)))


def _for_s(seconds: float) -> Callable[[], bool]:
    end_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end_s


def _scheduled_s() -> tuple[float, float]:
    """Return the seconds that this thread has run, and those that it waited for a core (Linux's schedstat)."""
    with contextlib.suppress(OSError, ValueError):
        ran, queued, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
        return int(ran) / 1e9, int(queued) / 1e9
    return time.thread_time(), 0.0


def _pin(cores: Cores, *, loop_runs: bool) -> None:
    if cores.loop is None:
        return
    own = threading.get_native_id()
    for thread in threads_of_this_process():
        pin(thread, {cores.loop} if thread == own and loop_runs else cores.others)
