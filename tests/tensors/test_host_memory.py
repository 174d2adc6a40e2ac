"""Host memory: blocks of snapshots, pinned buffers, and loans within a budget."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from cloudckpt.background.stager import PinnedStager
from cloudckpt.tensors import host_memory
from cloudckpt.tensors.host_memory import Arena, MemoryBlock, PinnedBuffers, SnapshotPool

MIB = 1024 * 1024
TIMEOUT_S = WAIT_S = 60
KINDS = pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])


class FakeCudart:
    """The host memory that a CUDA runtime would know as pinned."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.most_bytes = 0
        self.num_calls = 0
        self.error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        assert flags == 1
        if self.error:
            return self.error
        ctypes.memset(address, 7, num_bytes)  # it is there, and can be written to
        self.registered[address] = num_bytes
        self.most_bytes = max(self.most_bytes, sum(self.registered.values()))
        self.num_calls += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # likewise
        del self.registered[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    made_up = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made_up)
    yield made_up
    assert made_up.registered == {}  # or CUDA would be asked in vain, once it is the real one


def snapshot(stager: PinnedStager, *sizes: int) -> dict[str, Any]:
    """Return the snapshot of tensors of so many MiB."""
    staging = stager.begin({str(n): torch.full((size * MIB,), n, dtype=torch.uint8) for n, size in enumerate(sizes)})
    staging.completed.result(WAIT_S)
    assert all(bool((tensor == int(name)).all()) for name, tensor in staging.state_dict.items())
    return staging.state_dict


@KINDS
def test_memory_is_taken_once_and_grows_by_what_is_missing(*, shared: bool) -> None:
    """If this fails, each save pays for memory again, or a state dict that grows a little needs twice its memory."""
    stager = PinnedStager(shared=shared)
    first = snapshot(stager, 40, 20)
    addresses = [tensor.data_ptr() for tensor in first.values()]
    assert stager.num_bytes == 60 * MIB
    for _ in range(3):
        again = snapshot(stager, 40, 20)
        assert [tensor.data_ptr() for tensor in again.values()] == addresses
        assert stager.num_bytes == 60 * MIB
    grown = snapshot(stager, 40, 20, 10)
    assert [tensor.data_ptr() for tensor in grown.values()][:2] == addresses
    assert stager.num_bytes == 70 * MIB
    snapshot(stager, 1)
    assert stager.num_bytes == 70 * MIB
    assert [tensor.data_ptr() for tensor in snapshot(stager, 40, 20).values()] == addresses
    stager.close()
    assert stager.num_bytes == 0


@KINDS
def test_tensors_of_a_closed_snapshot_stay_readable(*, shared: bool) -> None:
    """If this fails, a tensor that somebody still holds after close() crashes the process."""
    stager = PinnedStager(shared=shared)
    kept = snapshot(stager, 3, 2)["1"]
    view = kept[MIB:].view(2, -1)
    stager.close()
    gc.collect()
    assert bool((view == 1).all())
    assert stager.num_bytes == 0
    assert bool((snapshot(stager, 4)["0"] == 0).all())  # and it begins anew
    assert bool((view == 1).all())
    stager.close()


@KINDS
def test_a_copy_that_is_still_in_use_is_not_overwritten_by_torchs_next_save(*, shared: bool) -> None:
    """If this fails, two saves that overlap make one checkpoint of the values of both."""
    stager = PinnedStager(shared=shared)
    first: Any = stager.stage({"w": torch.ones(MIB)})
    second: Any = stager.stage({"w": torch.full((MIB,), 2.0)})
    assert bool((first["w"] == 1).all())
    assert bool((second["w"] == 2).all())
    assert stager.num_bytes == 8 * MIB
    address = first["w"].data_ptr()
    del first
    third: Any = stager.stage({"w": torch.full((MIB,), 3.0)})
    assert bool((second["w"] == 2).all())
    assert third["w"].data_ptr() == address
    assert stager.num_bytes == 8 * MIB
    stager.close()


def test_a_stager_goes_on_after_it_found_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, one save too large for the machine breaks all later ones, or hangs them."""
    stager = PinnedStager()
    snapshot(stager, 4)

    def none_left(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", none_left)
        with pytest.raises(MemoryError, match="41943040 more bytes of host memory"):
            snapshot(stager, 40)
    snapshot(stager, 4)
    snapshot(stager, 40)
    stager.close()


@KINDS
def test_pinned_memory_is_unpinned_before_it_is_freed(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCudart, *, shared: bool
) -> None:
    """If this fails, CUDA keeps pages of memory that is no more, or they are pinned anew at every save."""
    monkeypatch.setattr(host_memory, "is_cuda_in_use", lambda: True)
    pool = SnapshotPool(shared=shared)
    for _ in range(2):
        pool.place([(0, MIB)], reuse_lent=True)
        pool.pin()
        assert cuda.registered == {block.address: block.num_bytes for block in pool.blocks}
    blocks = list(pool.blocks)
    pool.close()
    assert cuda.registered == {}
    assert not any(block.is_pinned for block in blocks)
    forgotten = MemoryBlock(2 * MIB, shared=shared)
    forgotten.pin()
    assert forgotten.is_pinned
    del forgotten
    gc.collect()
    assert cuda.registered == {}
    inherited = MemoryBlock(2 * MIB, shared=shared)
    inherited.pin()
    with monkeypatch.context() as in_child:
        in_child.setattr(os, "getpid", lambda: -1)
        inherited.release()
    assert cuda.registered.pop(inherited.address)  # it is the memory of the parent, who goes on with it


def test_the_next_save_uses_pinned_buffers_again(cuda: FakeCudart) -> None:
    """If this fails, every save pins its staging memory anew, which takes longer than the copies."""
    source = PinnedBuffers()
    for _ in range(5):
        arena = Arena(budget_bytes=8 * MIB, pinned=source)
        with arena.lend(4 * MIB), arena.lend(3 * MIB):
            pass
        arena.close()
    assert cuda.num_calls == 2
    assert source.num_bytes == sum(cuda.registered.values()) == 7 * MIB
    with contextlib.closing(Arena(budget_bytes=8 * MIB, pinned=source)) as arena, arena.lend(5 * MIB) as buffer:
        assert sum(cuda.registered.values()) <= 8 * MIB
        assert buffer.data_ptr() in cuda.registered
    del arena, buffer
    source.close()
    assert source.num_bytes == 0


@pytest.mark.timeout(TIMEOUT_S)
def test_kept_buffers_are_lent_in_pieces(cuda: FakeCudart) -> None:
    """If this fails, few threads of a load share the large buffers that a save left, and all others wait."""
    source = PinnedBuffers()
    for num_bytes in (8 * MIB, 2 * MIB + 1, 8 * MIB):
        with contextlib.closing(Arena(budget_bytes=8 * MIB, pinned=source)) as arena, contextlib.ExitStack() as loans:
            buffers = [loans.enter_context(arena.lend(num_bytes)) for _ in range(8 * MIB // num_bytes)]
            for number, buffer in enumerate(buffers):
                buffer.fill_(number)
                assert buffer.data_ptr() % 64 == 0
            assert all(bool((buffer == number).all()) for number, buffer in enumerate(buffers))
    assert cuda.num_calls == 1


@pytest.mark.timeout(TIMEOUT_S)
def test_threads_get_memory_in_the_order_in_which_they_came() -> None:
    """If this fails, parts that come later overtake a larger one for ever."""
    arena = Arena(budget_bytes=300)
    ended: list[int] = []

    def work(num_bytes: int) -> None:
        with arena.lend(num_bytes):
            ended.append(num_bytes)

    with ThreadPoolExecutor(3) as pool:
        with arena.lend(100):
            waiting = []
            for number, num_bytes in enumerate((300, 200, 100)):
                waiting.append(pool.submit(work, num_bytes))
                while len(arena._waiting) <= number:
                    threading.Event().wait(0.001)
            assert ended == []
        for future in waiting:
            future.result(TIMEOUT_S)
    assert ended[0] == 300


class Ledger:
    """The memory that is lent at once, as seen from outside."""

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
            assert arena._buffer_bytes <= 1000

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, worker) for worker in range(8)]:
            future.result(TIMEOUT_S)
    assert ledger.most_bytes <= 1000
    assert arena._num_lent == 0


def test_an_empty_loan_leaves_the_budget_as_it_is() -> None:
    """If this fails, a copy of an empty object keeps buffers of an arena in use for ever, and memory grows."""
    arena = Arena(budget_bytes=4096)
    for _ in range(3):
        with arena.lend(1024), arena.lend(0), arena.lend(64):
            pass
        with arena.lend(4096), arena.lend(0):
            assert arena._buffer_bytes <= 4096


@pytest.mark.timeout(TIMEOUT_S)
def test_buffer_larger_than_the_budget_is_lent_alone() -> None:
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


def test_a_loan_that_ends_in_an_error_is_returned() -> None:
    """If this fails, each failed part makes the budget smaller, until everything waits."""
    arena = Arena(budget_bytes=100)
    for _ in range(3):
        with pytest.raises(KeyError), arena.lend(100):
            raise KeyError
    with arena.lend(100) as buffer:
        assert len(buffer) == 100
