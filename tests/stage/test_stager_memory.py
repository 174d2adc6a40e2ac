"""The memory of snapshots: taken once, grown, safe to read for as long as a tensor is left, and given back."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.resources import held

from cloudckpt._stage import memory
from cloudckpt._stage.memory import Block, Pool
from cloudckpt._stage.stager import PinnedStager
from cloudckpt.errors import UnsupportedOperationError

MIB = 1024 * 1024
WAIT_S = 60
KINDS = pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])


def snapshot(stager: PinnedStager, *sizes: int) -> dict[str, Any]:
    """Of tensors of so many MiB."""
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
def test_a_tensor_that_grows_from_save_to_save_does_not_collect_memory(*, shared: bool) -> None:
    """If this fails, saving a growing buffer runs out of memory after some hundred saves."""
    stager = PinnedStager(shared=shared)
    for size in range(4, 32, 3):
        snapshot(stager, 2, size)
        assert stager.num_bytes <= 2.3 * (size + 2) * MIB + 4 * MIB
    stager.close()


@KINDS
def test_what_is_left_of_a_closed_snapshot_can_be_read(*, shared: bool) -> None:
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


@KINDS
def test_nothing_is_left_after_close(*, shared: bool) -> None:
    """If this fails, every job that makes and closes stagers loses memory, descriptors or threads."""

    def use() -> None:
        stager = PinnedStager(shared=shared)
        for _ in range(2):
            snapshot(stager, 16, 1, 1)
        stager.close()

    use()
    before = held()
    for _ in range(10):
        use()
    after = held()
    print(before, after, sep="\n")  # read where it fails
    assert after.num_threads <= before.num_threads  # those of tests before may end meanwhile
    assert after.num_other_files <= before.num_other_files
    # Of 180 that were taken; glibc keeps up to 64 of what was freed, here of the state dicts.
    assert after.rss_bytes < before.rss_bytes + 120 * MIB


@KINDS
def test_nothing_is_left_of_a_stager_that_was_not_closed(*, shared: bool) -> None:
    """If this fails, forgetting close() leaks memory or descriptors for the rest of the process."""
    snapshot(PinnedStager(shared=shared), 16)
    before = held()
    for _ in range(24):
        snapshot(PinnedStager(shared=shared), 16)
    after = held()
    print(before, after, sep="\n")  # read where it fails
    assert after.num_other_files <= before.num_other_files
    # Of 384 that were taken; what glibc keeps of the state dicts, and what other threads take, is far from half of it.
    assert after.rss_bytes < before.rss_bytes + 192 * MIB


def test_shared_memory_is_named_by_its_descriptor() -> None:
    """If this fails, another process reads other bytes than the snapshot's."""
    stager = PinnedStager(shared=True)
    staging = stager.begin({"a": torch.arange(1000), "b": torch.randn(MIB), "rest": torch.ones(3)[1:]})
    staging.completed.result(WAIT_S)
    for tensor in staging.state_dict.values():
        found = staging.segment_of(tensor.data_ptr(), tensor.nbytes)
        assert found is not None
        descriptor, offset = found
        page = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(descriptor, offset - page + tensor.nbytes, prot=mmap.PROT_READ, offset=page) as memory_:
            assert memory_[offset - page :] == tensor.numpy().tobytes()
    other = torch.ones(3)
    assert staging.segment_of(other.data_ptr(), other.nbytes) is None
    stager.close()
    private = PinnedStager()
    staged = private.begin({"a": other})
    assert staged.segment_of(staged.state_dict["a"].data_ptr(), 12) is None
    private.close()


def test_a_forked_child_leaves_its_parents_snapshot_alone(tmp_path: Path) -> None:
    """If this fails, a forked child that saves writes into the snapshot that its parent is uploading."""
    script = """
import os, sys, torch
from cloudckpt._stage.stager import PinnedStager
torch.set_num_threads(1)  # more of them do not survive a fork
stager = PinnedStager(shared=True)
staged = stager.begin({"w": torch.zeros(2 << 20)})
staged.completed.result(30)
child = os.fork()
if child == 0:
    own = stager.begin({"w": torch.ones(2 << 20)})
    own.completed.result(30)
    ok = bool((own.state_dict["w"] == 1).all())
    stager.close()
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bool((staged.state_dict["w"] == 0).all())
stager.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=WAIT_S, cwd=tmp_path)


def test_where_memory_cannot_be_shared_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, users of other systems get an AttributeError in the middle of a save."""
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsupportedOperationError, match="memfd_create"):
        PinnedStager(shared=True)
    PinnedStager().close()


def test_a_stager_goes_on_after_it_found_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, one save too large for the machine breaks all later ones, or hangs them."""
    stager = PinnedStager()
    snapshot(stager, 4)

    def none_left(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", none_left)
        with pytest.raises(MemoryError, match="no memory for 41943040 more bytes"):
            snapshot(stager, 40)
    snapshot(stager, 4)
    snapshot(stager, 40)
    stager.close()


class Cudart:
    """What CUDA is told of host memory."""

    def __init__(self, *, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        assert flags == 1
        if not self.error:
            self.registered[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        del self.registered[address]
        return 0


@KINDS
def test_pinned_memory_is_unpinned_before_it_is_freed(monkeypatch: pytest.MonkeyPatch, *, shared: bool) -> None:
    """If this fails, CUDA keeps pages of memory that is no more, or they are pinned anew at every save."""
    cudart = Cudart()
    monkeypatch.setattr(memory, "cuda_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    pool = Pool(shared=shared)
    for _ in range(2):
        pool.lay_out([(0, MIB)], reuse_lent=True)
        pool.pin()
        assert cudart.registered == {block.address: block.num_bytes for block in pool.blocks}
    blocks = list(pool.blocks)
    pool.close()
    assert cudart.registered == {}
    assert not any(block.is_pinned or block.descriptor is not None for block in blocks)
    forgotten = Block(2 * MIB, shared=shared)
    forgotten.pin()
    assert forgotten.is_pinned
    del forgotten
    gc.collect()
    assert cudart.registered == {}
    inherited = Block(2 * MIB, shared=shared)
    inherited.pin()
    with monkeypatch.context() as in_child:
        in_child.setattr(os, "getpid", lambda: -1)
        inherited.release()
    assert list(cudart.registered) == [inherited.address]  # it is its parent's, who goes on with it


def test_what_cannot_be_pinned_is_used_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If this fails, a limit on locked memory fails saves, or floods the log."""
    monkeypatch.setattr(memory, "cuda_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(error=2))
    pool = Pool(shared=False)
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        for _ in range(3):
            pool.lay_out([(0, MIB)], reuse_lent=True)
            pool.pin()
    assert len(caplog.records) == 1
    assert "ulimit -l" in caplog.text
    pool.close()


def test_a_cpu_job_does_not_initialise_cuda(tmp_path: Path) -> None:
    """If this fails, CPU processes take GPU memory, and cannot fork any more."""
    script = """
import torch
from cloudckpt._stage.stager import PinnedStager
for shared in (False, True):
    stager = PinnedStager(shared=shared)
    stager.begin({"w": torch.ones(5_000_000), "t": torch.ones(30, 40).t(), "step": 3}).completed.result(30)
    stager.close()
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S, cwd=tmp_path)
