"""Background saves again and again, in one process or on several ranks: what is held between them must not grow."""

from __future__ import annotations

import contextlib
import gc
import os
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.e2e.leaks import MOST_OWN_BYTES, own_bytes
from tests.e2e.models import assert_same
from tests.resources import MIB, held

import cloudckpt

WAIT_S = 120.0
CYCLE = 10
"""So many saves contain every kind of them, and every shape of the state."""
NUM_WARM_CYCLES = 2
LARGE_ITEMS = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a process holds of the system at one moment, when nothing runs."""

    rss_bytes: int
    """Of its children, too: what is shared counts twice."""
    pinned_bytes: int
    num_files: int
    num_threads: int
    num_mappings: int
    """Of shared memory."""
    mapped_bytes: int
    num_children: int
    own_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.rss_bytes / MIB:.1f} MiB, {self.pinned_bytes / MIB:.1f} pinned, {self.num_files} descriptors, "
            f"{self.num_threads} threads, {self.num_mappings} shared mappings ({self.mapped_bytes / MIB:.1f} MiB), "
            f"{self.num_children} children, {self.own_bytes} bytes of our own"
        )


def holding() -> Holding:
    """Of this process, after a full collection of garbage, and of its children."""
    own = held()
    children = _children()
    mappings = _shared_mappings()
    return Holding(
        rss_bytes=own.rss_bytes + sum(_rss_bytes(pid) for pid in children),
        pinned_bytes=_pinned_bytes(),
        num_files=own.num_sockets + own.num_other_files + sum(_num_in(pid, "fd") for pid in children),
        num_threads=own.num_threads + sum(_num_in(pid, "task") for pid in children),
        num_mappings=len(mappings),
        mapped_bytes=sum(mappings),
        num_children=len(children),
        own_bytes=own_bytes() if tracemalloc.is_tracing() else 0,
    )


def check_flat(found: list[Holding], *, most_rss_bytes: int) -> None:
    """From the end of the warm-up on nothing grows, and memory within a bound."""
    before, after = found[NUM_WARM_CYCLES - 1], found[-1]
    text = "\n".join(f"{number}: {one}" for number, one in enumerate(found))
    print(text)
    assert len(found) > NUM_WARM_CYCLES, text
    assert after.num_files <= before.num_files, text
    assert after.num_threads <= before.num_threads, text
    assert after.num_children <= before.num_children, text
    assert after.num_mappings <= before.num_mappings, text
    assert after.mapped_bytes <= before.mapped_bytes, text
    assert after.pinned_bytes <= before.pinned_bytes, text
    assert after.rss_bytes - before.rss_bytes <= most_rss_bytes, text
    assert after.own_bytes - before.own_bytes <= MOST_OWN_BYTES, text


def repeated_saves(root: str, num_saves: int) -> list[Holding]:
    """Save a model that changes, in the background, and have some of the saves fail and some cancelled.

    What is held at the end of each cycle. Raises where what was committed cannot be loaded.
    """
    saves = _Saves(root=root, options=cloudckpt.Options(metadata={"run": "long"}))
    found = []
    tracemalloc.start(1)
    try:
        for number in range(num_saves):
            saves.save(number)
            if number % CYCLE == CYCLE - 1:
                found.append(holding())
    finally:
        tracemalloc.stop()
    cloudckpt.close()
    after = holding()
    assert after.num_children == 0, f"close left {after}"
    return found


@dataclass(slots=True, kw_only=True)
class _Saves:
    root: str
    options: cloudckpt.Options
    _random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    _kept: list[str] = field(default_factory=list)

    def save(self, number: int) -> None:
        """The one of that number: its kind and its shapes follow from it."""
        uri, state = f"{self.root}/save-{number}", self._state(number)
        kind = number % CYCLE
        if kind == 6:  # there is one already
            with _raising(cloudckpt.CheckpointExistsError):
                self._begin(state, self._kept[-1]).result(WAIT_S)
        elif kind == 7:
            handle = self._begin(state, uri)
            is_cancelled = handle.cancel()
            assert isinstance(handle.exception(WAIT_S), cloudckpt.errors.SaveCancelledError) == is_cancelled
            if not is_cancelled:
                self._kept.append(uri)
        elif kind == 8:  # it cannot be saved
            with _raising(cloudckpt.errors.UnsupportedValueError):
                self._begin({**state, "meta": torch.empty(4, device="meta")}, uri).result(WAIT_S)
        elif kind == 9:  # nobody asks, so that the next save tells
            self._begin(state, self._kept[-1])
            with _raising(cloudckpt.CheckpointExistsError):
                self._begin(state, uri).result(WAIT_S)
        else:
            handle = self._begin(state, uri)
            expected = {name: value.clone() for name, value in state.items()}
            for tensor in state.values():
                tensor.zero_()  # training goes on
            handle.result(WAIT_S)
            self._kept.append(uri)
            if kind == 5:
                loaded = {name: torch.empty_like(value) for name, value in expected.items()}
                cloudckpt.load(loaded, uri, no_dist=True)
                assert_same(loaded, expected)
        while len(self._kept) > 2:
            cloudckpt.delete(self._kept.pop(0))

    def _begin(self, state: dict[str, Any], uri: str) -> cloudckpt.AsyncSave:
        return cloudckpt.async_save(state, uri, no_dist=True, options=self.options)

    def _state(self, number: int) -> dict[str, torch.Tensor]:
        """Twelve tensors; one more, or one that is larger, now and then; other values each time."""
        sizes = {f"w{index}": 64 * 1024 for index in range(12)}
        if number % CYCLE in (2, 3):
            sizes["more"] = LARGE_ITEMS
        if number % CYCLE == 4:
            sizes["w3"] = LARGE_ITEMS
        return {name: torch.rand(size, generator=self._random) for name, size in sizes.items()}


class _raising:  # noqa: N801  # as pytest.raises, which keeps the traceback, and with it the state
    """Nothing else than this error."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        """It comes later."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if kind is None:
            raise AssertionError(f"no {self._kind.__name__} was raised")
        return isinstance(error, self._kind)


def _children() -> list[int]:
    tasks = Path("/proc/self/task")
    found: list[int] = []
    for task in list(tasks.iterdir()):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def _shared_mappings() -> list[int]:
    sizes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, path = line.partition(" ")
        if "/memfd:" in path or "/dev/shm/" in path:  # noqa: S108  # what others have mapped
            begin, end = (int(number, 16) for number in where.split("-"))
            sizes.append(end - begin)
    return sizes


def _rss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def _num_in(pid: int, folder: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/{folder}"))  # noqa: PTH208
    except OSError:
        return 0


def _pinned_bytes() -> int:
    if not torch.cuda.is_initialized() or not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    gc.collect()
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
