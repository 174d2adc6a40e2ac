"""Pinned buffers, with a CUDA that is made up: what is pinned, kept, used again and given back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cloudckpt._stage.arena import Arena
from cloudckpt._stage.pinned import PINNED, PinnedBuffers, new_arena
from cloudckpt.options import MIB


class MadeUp:
    """What the CUDA runtime would know of host memory."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.most_bytes = 0
        self.num_calls = 0
        self.error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
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
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeUp]:
    made_up = MadeUp()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made_up)
    yield made_up
    assert made_up.registered == {}  # or CUDA would be asked in vain, once it is the real one


def test_buffers_are_pinned_as_large_as_they_are_needed(cuda: MadeUp) -> None:
    """If this fails, staging takes up to twice the memory that it may, or is not pinned at all."""
    source = PinnedBuffers()
    arena = Arena(budget_bytes=10 * MIB, source=source)
    with arena.lend(5 * MIB + 4096) as buffer:
        assert cuda.registered == {buffer.data_ptr(): 5 * MIB + 4096}
        buffer.fill_(1)
    arena.close()
    source.close()


def test_the_next_save_uses_them_again(cuda: MadeUp) -> None:
    """If this fails, every save pins its staging memory anew, which takes longer than the copies."""
    source = PinnedBuffers()
    for _ in range(5):
        arena = Arena(budget_bytes=8 * MIB, source=source)
        with arena.lend(4 * MIB), arena.lend(3 * MIB):
            pass
        arena.close()
    assert cuda.num_calls == 2
    assert source.num_bytes == 7 * MIB
    source.close()
    assert source.num_bytes == 0


def test_what_is_kept_is_bounded(cuda: MadeUp) -> None:
    """If this fails, a process that saved once with a large budget holds on to all of it."""
    source = PinnedBuffers(most_idle_bytes=5 * MIB)
    arena = Arena(budget_bytes=64 * MIB, source=source)
    with arena.lend(4 * MIB), arena.lend(4 * MIB), arena.lend(MIB):
        pass
    arena.close()
    assert sum(cuda.registered.values()) == source.num_bytes <= 5 * MIB
    source.close()


@pytest.mark.parametrize("seed", range(4))
def test_memory_is_bounded_by_the_budget_whatever_is_asked_for(cuda: MadeUp, seed: int) -> None:
    """If this fails, buffers of one save come on top of those that an earlier one left."""
    generator = torch.Generator().manual_seed(seed)
    source = PinnedBuffers(most_idle_bytes=8 * MIB)
    for _ in range(10):
        arena = Arena(budget_bytes=8 * MIB, source=source)
        for size in torch.randint(1, 4 * MIB, (10,), generator=generator).tolist():
            with arena.lend(size) as buffer, arena.lend(size // 2 + 1) as other:
                assert len(buffer) == size
                assert other.data_ptr() != buffer.data_ptr()
        arena.close()
    assert cuda.most_bytes <= 16 * MIB
    source.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(cuda: MadeUp, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a save fails where `ulimit -l` is low, instead of being slower."""
    cuda.error = 2
    source = PinnedBuffers()
    arena = Arena(budget_bytes=MIB, source=source)
    for _ in range(2):
        with arena.lend(4096) as buffer:
            buffer.fill_(3)
    arena.close()
    assert source.num_bytes == 0
    assert [record.getMessage().count("ulimit -l") for record in caplog.records] == [1]


def test_what_is_returned_after_the_end_is_given_back(cuda: MadeUp) -> None:
    """If this fails, a thread that outlives its load leaves pinned memory that nobody can free."""
    source = PinnedBuffers()
    arena = Arena(budget_bytes=MIB, source=source)
    with arena.lend(4096):
        arena.close()
    source.close()
    assert source.num_bytes == 0


def test_a_forked_child_forgets_them_without_cuda(cuda: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a child process unpins memory by a CUDA that it must not touch."""
    source = PinnedBuffers()
    arena = Arena(budget_bytes=MIB, source=source)
    with arena.lend(4096) as buffer:
        address = buffer.data_ptr()
    arena.close()
    with monkeypatch.context() as in_child:
        in_child.setattr("os.getpid", lambda: -1)
        source.forget()
    assert source.num_bytes == 0
    assert cuda.registered.pop(address) == 4096


def test_only_processes_that_use_cuda_pin(monkeypatch: pytest.MonkeyPatch, cuda: MadeUp) -> None:
    """If this fails, CPU jobs lock memory that no GPU will ever read."""

    def used(arena: Any) -> int:
        with arena.lend(4096):
            pass
        arena.close()
        return sum(cuda.registered.values())

    assert used(new_arena(budget_bytes=MIB)) == 0
    monkeypatch.setattr("cloudckpt._stage.pinned.cuda_in_use", lambda: True)
    assert used(new_arena(budget_bytes=MIB)) == 4096
    PINNED.close()
