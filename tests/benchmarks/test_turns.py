"""The order of turns, what counts in them, and workers that fail."""

from __future__ import annotations

import contextlib
import sys

import pytest

from benchkit.fleet import Fleet, NotInstalledError, WorkerFailedError
from benchkit.measure import Usage
from benchkit.systems import Settings
from benchkit.turns import Places, rotated, take_turns
from benchkit.worker import Worker, WorkerSpec

MIB = 1024 * 1024


def spec(system="filesystem", *, num_ranks=1, rank=0, rendezvous_path=""):
    return WorkerSpec(
        system=system,
        rank=rank,
        num_ranks=num_ranks,
        rendezvous_path=rendezvous_path,
        num_tensors=3,
        tensor_bytes=64 * 1024,
        timeout_s=60,
        settings=Settings(endpoint_url=None, region="us-east-1", rival_threads=1, no_dist=num_ranks == 1),
    )


class NoServer:
    bucket, prefix = "bucket", "run/"

    def __init__(self):
        self.num_resets = 0

    def reset(self):
        self.num_resets += 1


class FakeFleet:
    """Two ranks that take the time they are given, and note what they were told."""

    def __init__(self, log, name):
        self._log, self._name = log, name
        self.commands = []

    def do(self, command, **_arguments):
        self.commands.append(command)

    def usages(self, command, uri):
        self.commands.append(command)
        self._log.append((self._name, command, uri))
        return [
            Usage(wall_s=1.0, cpu_s=0.5, extra_peak_bytes=10, peak_method="VmHWM"),
            Usage(wall_s=2.0, cpu_s=0.25, extra_peak_bytes=30, peak_method="VmHWM"),
        ]


def test_rotated():
    """One system would always run first, in the state that the reset server leaves."""
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated([], 3) == []


def test_turns_alternate_rotate_and_mark_the_warm_up(tmp_path):
    """Systems would run in blocks, the cold first turn would count as warm, or two turns share an address."""
    log, server = [], NoServer()
    fleets = {name: FakeFleet(log, name) for name in ("cloudckpt", "s3fs")}
    places = Places(server=server, local_directory=tmp_path)
    samples = take_turns(
        fleets, num_ranks=2, num_bytes=4 * MIB, repetitions=2, places=places, progress=lambda _text: None
    )
    order = [name for name, command, _uri in log if command == "save"]
    assert order == ["cloudckpt", "s3fs", "s3fs", "cloudckpt", "cloudckpt", "s3fs"]
    assert [sample.repetition for sample in samples] == [0] * 4 + [1] * 4 + [2] * 4
    uris = [uri for _name, _command, uri in log]
    assert len(set(uris)) == 6
    assert all(uri.startswith("s3://bucket/run/") for uri in uris)
    assert server.num_resets == 6
    assert fleets["s3fs"].commands[:6] == ["prepare", "save", "zero", "load", "verify", "release"]


def test_ranks_are_put_together(tmp_path):
    """A save would be as fast as its fastest rank, or cost the CPU seconds of one."""
    places = Places(server=NoServer(), local_directory=tmp_path)
    samples = take_turns(
        {"s3fs": FakeFleet([], "s3fs")},
        num_ranks=2,
        num_bytes=4 * MIB,
        repetitions=1,
        places=places,
        progress=lambda _text: None,
    )
    assert {(one.wall_s, one.cpu_s, one.extra_peak_bytes) for one in samples} == {(2.0, 0.75, 30)}


def test_spec_survives_the_command_line():
    """A worker would measure something else than its parent asked for."""
    assert WorkerSpec.from_json(spec().to_json()) == spec()


def test_verify_finds_a_single_flipped_bit():
    """A system that loads wrong values would be compared as if it worked."""
    worker = Worker(spec())
    worker.prepare()
    worker.verify()
    next(iter(worker._state_dict.values())).view(dtype=__import__("torch").int32)[3, 7] ^= 1
    with pytest.raises(ValueError, match=r"layers\.0\.weight"):
        worker.verify()


def test_tensors_differ_and_are_finite():
    """A store or a client could gain from equal tensors, or stumble over NaN where memory is compared as floats."""
    worker = Worker(spec())
    worker.prepare()
    first, second, third = worker._state_dict.values()
    assert not first.equal(second)
    assert not second.equal(third)
    assert all(tensor.isfinite().all() for tensor in (first, second, third))
    assert len({tensor.untyped_storage().data_ptr() for tensor in (first, second, third)}) == 3


@pytest.fixture
def fleets(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(*specs):
            fleet = Fleet(sys.executable, specs, environment={}, log_directory=tmp_path)
            stack.callback(fleet.close)
            return fleet

        yield start


@pytest.mark.multirank
def test_two_ranks_save_and_load(fleets, tmp_path):
    """The ranks would not meet, or each would save all of the tensors instead of its half."""
    rendezvous = str(tmp_path / "rendezvous")
    fleet = fleets(*(spec(num_ranks=2, rank=rank, rendezvous_path=rendezvous) for rank in range(2)))
    assert "torch" in fleet.versions()
    uri = str(tmp_path / "checkpoint")
    fleet.do("prepare")
    saved = fleet.usages("save", uri)
    fleet.do("zero")
    fleet.usages("load", uri)
    fleet.do("verify")
    assert len(saved) == 2
    assert all(usage.wall_s > 0 for usage in saved)
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoint").glob("*.distcp")]
    assert len(sizes) == 2
    assert all(3 * 32 * 1024 <= size < 3 * 64 * 1024 for size in sizes)


def test_failure_of_a_worker_is_told(fleets, tmp_path):
    """A failed load would be counted, or its cause be lost with the process."""
    fleet = fleets(spec())
    fleet.versions()
    fleet.do("prepare")
    with pytest.raises(WorkerFailedError, match=r"(?s)filesystem rank 0 failed.*CheckpointException"):
        fleet.usages("load", str(tmp_path / "absent"))
    fleet.do("verify")


def test_dead_worker_is_told(fleets):
    """The benchmark would hang on a worker that crashed."""
    fleet = fleets(spec())
    fleet.versions()
    fleet._ranks[0]._process.kill()
    with pytest.raises(WorkerFailedError, match="filesystem rank 0 has died"):
        fleet.do("prepare")


def test_absent_library_is_told_apart(fleets, monkeypatch):
    """A rival that is not installed would look like one that fails, and end the run."""
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    try:
        import s3fs  # noqa: F401, PLC0415
    except ImportError:
        with pytest.raises(NotInstalledError, match="s3fs"):
            fleets(spec("s3fs")).versions()
    else:
        assert "s3fs" in fleets(spec("s3fs")).versions()
