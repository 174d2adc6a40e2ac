"""Memory that is lent within a budget, to many threads."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cloudckpt._stage.arena import Arena, cuda_in_use

TIMEOUT_S = 60


class Ledger:
    """What is lent at once, as seen from outside."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now_bytes = 0
        self.most_bytes = 0
        self.now = 0

    def add(self, num_bytes: int) -> None:
        with self.lock:
            self.now += 1 if num_bytes > 0 else -1
            self.now_bytes += num_bytes
            self.most_bytes = max(self.most_bytes, self.now_bytes)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("seed", range(4))
def test_many_threads_stay_within_the_budget_and_come_to_an_end(seed: int) -> None:
    """If this fails, staging takes more memory than it may (G7), two parts share a buffer, or a save hangs."""
    arena = Arena(budget_bytes=1000)
    ledger = Ledger()

    def work(worker: int) -> None:
        sizes = random.Random(seed * 100 + worker)
        for _ in range(60):
            num_bytes = sizes.choice([1, 10, 99, 250, 400, 600, 1000])
            with arena.lend(num_bytes) as buffer:
                ledger.add(num_bytes)
                assert buffer.shape == (num_bytes,)
                buffer.fill_(worker)
                assert bool((buffer == worker).all())
                ledger.add(-num_bytes)
            assert arena._held_bytes <= 1000

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, worker) for worker in range(8)]:
            future.result(TIMEOUT_S)
    assert ledger.most_bytes <= 1000
    assert arena._num_lent == 0


@pytest.mark.timeout(TIMEOUT_S)
def test_what_is_larger_than_the_budget_is_lent_alone() -> None:
    """If this fails, one large part can never be staged, and its save waits for ever; or it comes on top."""
    arena = Arena(budget_bytes=100)
    ledger = Ledger()

    def work(num_bytes: int) -> None:
        for _ in range(20):
            with arena.lend(num_bytes):
                ledger.add(num_bytes)
                if num_bytes > 100:
                    assert ledger.now == 1
                ledger.add(-num_bytes)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, num_bytes) for num_bytes in (50, 500, 300, 100)]:
            future.result(TIMEOUT_S)
    assert ledger.most_bytes == 500


def test_buffers_are_reused() -> None:
    """If this fails, every part of every save allocates, and pins, memory of its own."""
    arena = Arena(budget_bytes=1000)
    addresses = set()
    for num_bytes in (400, 300, 400, 1):
        with arena.lend(num_bytes) as buffer:
            addresses.add(buffer.data_ptr())
    assert len(addresses) == 1


def test_the_smallest_that_fits_is_lent() -> None:
    """If this fails, small loans take the large buffers, and large ones have to wait."""
    arena = Arena(budget_bytes=1000)
    with arena.lend(600) as large, arena.lend(200) as small:
        kept = {"large": large.data_ptr(), "small": small.data_ptr()}
    with arena.lend(150) as again:
        assert again.data_ptr() == kept["small"]


def test_a_loan_that_ends_in_an_error_is_returned() -> None:
    """If this fails, each failed part makes the budget smaller, until everything waits."""
    arena = Arena(budget_bytes=100)
    for _ in range(3):
        with pytest.raises(KeyError), arena.lend(100):
            raise KeyError
    with arena.lend(100) as buffer:
        assert len(buffer) == 100


def test_memory_that_cannot_be_had_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, one failed allocation blocks the staging of everything that follows."""
    arena = Arena(budget_bytes=100)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("no")))
        with pytest.raises(MemoryError), arena.lend(100):
            pass
    with arena.lend(100) as buffer:
        assert len(buffer) == 100


def test_a_cpu_job_does_not_initialise_cuda(tmp_path: object) -> None:
    """If this fails, CPU processes take GPU memory, and cannot fork any more."""
    script = f"""
import warnings, torch, cloudckpt
warnings.filterwarnings("ignore")
state = {{"w": torch.ones(1000), "t": torch.ones(30, 40).t(), "step": 3}}
cloudckpt.save(state, {str(tmp_path)!r} + "/c")
cloudckpt.load(state, {str(tmp_path)!r} + "/c")
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=TIMEOUT_S)
    assert cuda_in_use() == torch.cuda.is_initialized()
