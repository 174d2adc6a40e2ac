"""The same save, load and background save again and again in one process: what it holds must not grow with them."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.models import assert_same
from tests.resources import MIB, Held, held, python_threads

import cloudckpt

WAIT_S = 120.0
NUM_WARM_ROUNDS = 8
LARGE_BYTES = 24 * MIB
MOST_OWN_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Between the warm-up and the end."""

    num_rounds: int
    before: Held
    after: Held
    new_threads: tuple[str, ...]
    own_bytes: int
    """What lines of cloudckpt's allocated of Python and still hold (tracemalloc)."""

    def __str__(self) -> str:
        return f"{self.num_rounds} rounds: {self.before}; then {self.after}; {self.own_bytes} bytes more of our own"


def values(version: float) -> dict[str, Any]:
    return {f"w{n}": torch.full((50_000,), version + n) for n in range(4)} | {"version": version}


def one_round(uri: str, version: float) -> None:
    cloudckpt.save(values(version), uri, overwrite=True)
    state = values(-1.0)
    cloudckpt.load(state, uri)
    assert_same(state, values(version))
    cloudckpt.async_save(values(version + 0.5), uri, overwrite=True).result(WAIT_S)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.save(values(-2.0), uri)
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.load(values(-2.0), f"{uri}-that-is-not-there")


def growth_of_rounds(uri: str, num_rounds: int) -> Growth:
    """Of so many rounds, each a save, a load, a background save, and one of the first two that fails."""
    for number in range(NUM_WARM_ROUNDS):
        one_round(uri, float(number))
    tracemalloc.start(1)
    one_round(uri, 0.0)
    threads, before = python_threads(), held()
    own_before_bytes = own_bytes()
    for number in range(num_rounds):
        one_round(uri, float(number))
    after = held()
    own_after_bytes = own_bytes()
    tracemalloc.stop()
    return Growth(
        num_rounds=num_rounds,
        before=before,
        after=after,
        new_threads=tuple(sorted(set(python_threads()) - set(threads))),
        own_bytes=own_after_bytes - own_before_bytes,
    )


def own_bytes() -> int:
    ours = tracemalloc.Filter(inclusive=True, filename_pattern=f"{Path(cloudckpt.__file__).parent}/*")
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([ours]).traces)


def check_growth(growth: Growth, *, most_rss_bytes: int) -> None:
    """No thread and no descriptor more, and memory to within these bounds."""
    print(growth)
    before, after = growth.before, growth.after
    assert growth.new_threads == (), growth
    assert after.num_threads <= before.num_threads, growth
    assert after.num_other_files == before.num_other_files, growth
    assert after.num_sockets <= before.num_sockets, growth
    assert after.rss_bytes - before.rss_bytes <= most_rss_bytes, growth
    assert growth.own_bytes <= MOST_OWN_BYTES, growth


def most_copies_left(uri: str, num_rounds: int) -> int:
    """How many copies of a large state exist at most between saves in the background and failures of all kinds, while
    nobody collects garbage: what holds one by then would hold it until Python happens to look for cycles.
    """
    state = {"large": torch.zeros(LARGE_BYTES, dtype=torch.uint8)}
    cloudckpt.save(state, uri)
    gc.collect()
    gc.disable()
    try:
        most = 0
        for _ in range(num_rounds):
            cloudckpt.async_save(state, uri, overwrite=True).result(WAIT_S)
            most = max(most, num_large() - 1)
            with pytest.raises(cloudckpt.CheckpointExistsError):
                cloudckpt.async_save(state, uri).result(WAIT_S)
            most = max(most, num_large() - 1)
            with pytest.raises(cloudckpt.CheckpointExistsError):
                cloudckpt.save({"large": state["large"].clone()}, uri)
            most = max(most, num_large() - 1)
            with pytest.raises(cloudckpt.CheckpointNotFoundError):
                cloudckpt.load({"large": state["large"].clone()}, f"{uri}-that-is-not-there")
            most = max(most, num_large() - 1)
        return most
    finally:
        gc.enable()


def num_large() -> int:
    """Tensors of that size, whoever holds them."""
    return sum(1 for found in gc.get_objects() if type(found) is torch.Tensor and found.numel() == LARGE_BYTES)
