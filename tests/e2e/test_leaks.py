"""Jobs that save for weeks: nothing of a save is left in the process when it is over."""

from __future__ import annotations

import contextlib
import gc
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.models import assert_same
from tests.kit.places import LocalPlace
from tests.kit.ranks import run_ranks

import cloudckpt

MIB = 1024 * 1024


TIMEOUT_S = 600.0
WAIT_S = 120.0

pytestmark = [pytest.mark.faults, pytest.mark.multirank, pytest.mark.timeout(TIMEOUT_S + 60)]


def expect_failure(kind: type[BaseException], call: Callable[[], object]) -> None:
    """Unlike pytest.raises, this keeps no traceback, which would hold the state."""
    with contextlib.suppress(kind):
        call()
        raise AssertionError(f"no {kind.__name__} was raised")


# --- Copies of the model

LARGE_BYTES = 24 * MIB


def most_copies_left(uri: str, num_rounds: int) -> int:
    """Count the most copies of a large state between saves in the background and failures of all kinds, while nobody
    collects garbage: an object that holds one by then would hold it until Python looks for cycles.
    """
    state = {"large": torch.zeros(LARGE_BYTES, dtype=torch.uint8)}
    cloudckpt.save(state, uri)
    calls: list[Callable[[], object]] = [
        lambda: cloudckpt.async_save(state, uri, overwrite=True).result(WAIT_S),
        lambda: expect_failure(
            cloudckpt.CheckpointExistsError, lambda: cloudckpt.async_save(state, uri).result(WAIT_S)
        ),
        lambda: expect_failure(
            cloudckpt.CheckpointExistsError, lambda: cloudckpt.save({"large": state["large"].clone()}, uri)
        ),
        lambda: expect_failure(
            cloudckpt.CheckpointNotFoundError, lambda: cloudckpt.load({"large": state["large"].clone()}, f"{uri}-none")
        ),
    ]
    gc.collect()
    gc.disable()
    try:
        most = 0
        for call in calls * num_rounds:
            call()
            most = max(most, num_large() - 1)
        return most
    finally:
        gc.enable()


def num_large() -> int:
    """Tensors of that size, whoever holds them."""
    return sum(1 for found in gc.get_objects() if type(found) is torch.Tensor and found.numel() == LARGE_BYTES)


def test_no_copy_of_the_model_outlives_its_save(local: LocalPlace) -> None:
    """If this fails, saves pile up copies of the model until Python happens to collect garbage (pytorch#170163)."""
    # The one that there is lies in memory that is kept, and the next save fills it again.
    assert run_ranks(most_copies_left, local.uri(), 3, world_size=1) == [1]


# --- Memory, threads, descriptors

CYCLE = 10
"""So many saves contain every kind of them, and every shape of the state."""
NUM_WARM_CYCLES = 2
MAX_RSS_BYTES = 16 * MIB
MAX_OWN_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The resources of a process and its children at one moment, when nothing runs."""

    rss_bytes: int
    """Resident, as the system counts it (VmRSS): what the allocator keeps for later is in it."""
    own_bytes: int
    """Python memory that lines of cloudckpt allocated and still hold (tracemalloc)."""
    num_files: int
    num_threads: int
    num_children: int
    shared_mappings: int
    shared_bytes: int


def holding() -> Holding:
    """After a full collection of garbage."""
    gc.collect()
    children = child_processes()
    shared = shared_mappings()
    ours = tracemalloc.Filter(inclusive=True, filename_pattern=f"{Path(cloudckpt.__file__).parent}/*")
    return Holding(
        rss_bytes=status_kib("VmRSS") * 1024,
        own_bytes=sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([ours]).traces),
        num_files=len(list(Path("/proc/self/fd").iterdir())),
        num_threads=len(list(Path("/proc/self/task").iterdir())),
        num_children=len(children),
        shared_mappings=len(shared),
        shared_bytes=sum(shared),
    )


def status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def child_processes() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def shared_mappings() -> list[int]:
    """The sizes of the shared memory that is mapped."""
    sizes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, path = line.partition(" ")
        if "/memfd:" in path or f"{os.sep}dev{os.sep}shm{os.sep}" in path:
            begin, end = (int(number, 16) for number in where.split("-"))
            sizes.append(end - begin)
    return sizes


def repeated_saves(root: str, num_saves: int) -> list[Holding]:
    """Save a model that changes, in the background, and have some of the saves fail and some cancelled.

    Returns what is held at the end of each cycle. Raises where what was committed cannot be loaded.
    """
    kept: list[str] = []
    found = []
    tracemalloc.start(1)
    for number in range(num_saves):
        save_one(root, number, kept)
        while len(kept) > 2:
            cloudckpt.delete(kept.pop(0))
        if number % CYCLE == CYCLE - 1:
            found.append(holding())
    tracemalloc.stop()
    cloudckpt.close()
    return found


def save_one(root: str, number: int, kept: list[str]) -> None:
    """The save of that number: its kind and its shapes follow from it."""
    uri, state, kind = f"{root}/save-{number}", state_of(number), number % CYCLE
    if kind == 6:  # there is one already
        expect_failure(cloudckpt.CheckpointExistsError, lambda: begin(state, kept[-1]).result(WAIT_S))
    elif kind == 7:
        handle = begin(state, uri)
        is_cancelled = handle.cancel()
        assert isinstance(handle.exception(WAIT_S), cloudckpt.errors.SaveCancelledError) == is_cancelled
        if not is_cancelled:
            kept.append(uri)
    elif kind == 8:  # it cannot be saved
        unsupported = {**state, "meta": torch.empty(4, device="meta")}
        expect_failure(cloudckpt.errors.UnsupportedValueError, lambda: begin(unsupported, uri).result(WAIT_S))
    elif kind == 9:  # nobody asks, so that the next save tells
        begin(state, kept[-1])
        expect_failure(cloudckpt.CheckpointExistsError, lambda: begin(state, uri).result(WAIT_S))
    else:
        handle = begin(state, uri)
        expected = {name: value.clone() for name, value in state.items()}
        for tensor in state.values():
            tensor.zero_()  # training goes on
        handle.result(WAIT_S)
        kept.append(uri)
        if kind == 5:
            loaded = {name: torch.empty_like(value) for name, value in expected.items()}
            cloudckpt.load(loaded, uri, no_dist=True)
            assert_same(loaded, expected)


def begin(state: dict[str, Any], uri: str) -> cloudckpt.AsyncSave:
    return cloudckpt.async_save(state, uri, no_dist=True)


def state_of(number: int) -> dict[str, torch.Tensor]:
    """Twelve tensors; one more, or one that is larger, now and then; other values each time."""
    sizes = {f"w{index}": 64 * 1024 for index in range(12)}
    if number % CYCLE in (2, 3):
        sizes["more"] = 256 * 1024
    if number % CYCLE == 4:
        sizes["w3"] = 256 * 1024
    generator = torch.Generator().manual_seed(number)
    return {name: torch.rand(size, generator=generator) for name, size in sizes.items()}


def test_two_hundred_background_saves_leave_nothing(tmp_path: Path) -> None:
    """If this fails, a job that saves in the background runs out of memory, threads or descriptors after some days."""
    (found,) = run_ranks(repeated_saves, str(tmp_path / "run"), 20 * CYCLE, world_size=1, timeout_s=TIMEOUT_S)
    print(*found, sep="\n")
    before, after = found[NUM_WARM_CYCLES - 1], found[-1]
    assert after.num_files <= before.num_files
    assert after.num_threads <= before.num_threads
    assert after.num_children <= before.num_children
    assert after.shared_mappings <= before.shared_mappings
    assert after.shared_bytes <= before.shared_bytes
    assert after.rss_bytes - before.rss_bytes <= MAX_RSS_BYTES
    assert after.own_bytes - before.own_bytes <= MAX_OWN_BYTES
