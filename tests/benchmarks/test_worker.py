"""One rank and its tensors, and processes that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.fleet import Fleet, WorkerFailedError
from benchmarks.outcomes import Outcome, Settings
from benchmarks.payloads import KIB, Payload, Tensors, uniform
from benchmarks.state import State
from benchmarks.systems import system_named
from benchmarks.worker import Worker, WorkerSpec

from benchmarks import measure, training

PAYLOAD = Payload(
    name="mixed",
    tensors=(
        *uniform(3, 64 * KIB).tensors,
        Tensors(name="norm", count=1, shape=(64,)),
        Tensors(name="step", count=2, shape=()),
    ),
)
SETTINGS = Settings(endpoint_url=None, region=None, ca_bundle=None, no_dist=True)


def spec(system="filesystem", *, num_ranks=1, rank=0, rendezvous_path=""):
    return WorkerSpec(system=system, rank=rank, num_ranks=num_ranks, rendezvous_path=rendezvous_path, timeout_s=60)


def test_verify_finds_a_single_flipped_bit():
    """A system that loads wrong values would be compared as if it worked."""
    state = State(PAYLOAD, None)
    state.fill()
    state.verify()
    state.state_dict["weight.1"].view(dtype=torch.int32)[3, 7] ^= 1
    with pytest.raises(ValueError, match=r"1 tensors hold other values than were saved, the first is weight\.1"):
        state.verify()


@pytest.mark.parametrize("system", ["filesystem", "cloudckpt-path"])
def test_a_part_of_each_shard_is_loaded(system, tmp_path):
    """A resharded load would want all of the tensors, or other rows than those that it is compared with."""
    worker = Worker(spec(system))
    worker.configure(dataclasses.asdict(SETTINGS))
    payload = dataclasses.asdict(PAYLOAD)
    worker.prepare(payload, "sharded")
    worker.measure("save", str(tmp_path / "checkpoint"))
    assert worker.prepare(payload, "part") == 3 * 8 * KIB + 32 + 2 * 4
    worker.zero()
    with pytest.raises(ValueError, match="6 tensors"):
        worker.verify()
    worker.measure("resharded_load", str(tmp_path / "checkpoint"))
    worker.verify()
    worker.release()
    assert not torch.distributed.is_initialized()


@pytest.fixture
def fleets(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(*specs):
            fleet = Fleet(sys.executable, specs, environment=dict(os.environ), log_directory=tmp_path)
            stack.callback(fleet.close)
            return fleet

        yield start


def test_failure_of_a_worker_is_reported(fleets, tmp_path):
    """A failed load would be counted, or its cause be lost; or the benchmark would hang on a worker that crashed."""
    fleet = fleets(spec())
    fleet.versions()
    fleet.configure(SETTINGS)
    fleet.prepare(PAYLOAD, "sharded")
    with pytest.raises(WorkerFailedError, match=r"(?s)filesystem rank 0 failed.*CheckpointException"):
        fleet.measure("load", str(tmp_path / "absent"))
    fleet.do("verify")
    fleet._ranks[0]._process.kill()
    with pytest.raises(WorkerFailedError, match="filesystem rank 0 has died"):
        fleet.prepare(PAYLOAD, "sharded")


def test_a_save_beside_training_says_how_fast_it_went(monkeypatch, tmp_path):
    """The cell would be empty, or a save that failed be counted."""
    monkeypatch.setattr(training, "ALONE_S", 0.2)
    state = State(uniform(2, 64 * KIB), None)
    state.fill()
    settings = Settings(endpoint_url=None, region=None, ca_bundle=None, no_dist=True)
    for name in ("cloudckpt-path", "filesystem"):
        system = system_named(name)(settings)
        outcome = system.save_beside_training(state.state_dict, str(tmp_path / name))
        assert isinstance(outcome, Outcome)
        assert outcome.steps_per_s
        assert outcome.steps_per_s_alone
        state.zero()
        system.load(state.state_dict, str(tmp_path / name))
        state.verify()
    (tmp_path / "taken").write_text("")
    with pytest.raises(BaseException, match="taken"):
        system_named("cloudckpt-path")(settings).save_beside_training(state.state_dict, str(tmp_path / "taken" / "x"))


MIB = 1024 * 1024
BLOCK_BYTES = 64 * MIB
# Python, threads and page tables need a little too.
SLACK_BYTES = 16 * MIB

needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")


def touch_and_free():
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        for offset in range(0, BLOCK_BYTES, mmap.PAGESIZE):
            block[offset] = 1


@needs_proc
def test_peak_sees_what_is_freed_before_the_end():
    """Buffers that a save frees before it returns would not count, and they are what the figure is about."""
    peak = measure.HighWaterPeak()
    touch_and_free()
    assert BLOCK_BYTES - SLACK_BYTES <= peak.extra_bytes() <= BLOCK_BYTES + SLACK_BYTES


def test_cpu_seconds_count_work_and_not_waiting():
    """Client CPU seconds would say how long an operation took, not what it cost."""

    def burn():
        until_s = time.process_time() + 0.2
        while time.process_time() < until_s:
            pass

    usage, _ = measure.measured(burn)
    assert usage.cpu_s >= 0.19
    assert usage.wall_s >= 0.19
