"""A save whose ranks are killed at one step of the protocol, and what has to be true afterwards, on any store.

The victims die of SIGKILL: at an event of the save, which the rank itself sees, or once the store has carried out the
request that follows the event and before its answer is there. On a bucket that moment is the wire's, which stands
between this rank and the server; on a path, which has no wire, it is a store's in front of the path.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.kills import Kill, Version
from tests.kit.models import assert_same
from tests.kit.options import make_options
from tests.kit.places import BucketPlace, LocalPlace, Place, S3Place
from tests.kit.ranks import RankError, run_ranks
from tests.kit.wire import Seen, Wire, WireCallback, WireRule
from tests.kit.wrapped import watching

import cloudckpt
from cloudckpt.options import KIB, MIB
from cloudckpt.types import GarbageReport

MAX_FENCE_BYTES = 128


def check_gc(place: Place, *, has_checkpoint: bool, must_find: bool = False) -> GarbageReport:
    """It finds exactly the rest, says so, removes it, and then finds no more; what the dry run reported."""
    left, left_uploads = frozenset(place.keys()), place.num_unfinished_uploads()
    assert left or left_uploads or not must_find
    found = cloudckpt.gc(place.root, older_than=0)
    assert (frozenset(place.keys()), place.num_unfinished_uploads()) == (left, left_uploads)
    removed = cloudckpt.gc(place.root, older_than=0, dry_run=False)
    assert (removed.keys, removed.uploads, removed.num_bytes) == (found.keys, found.uploads, found.num_bytes)
    now = assert_nothing_needless(place, num_manifests=int(has_checkpoint))
    gone = left - now
    assert set(removed.keys) == {key for key in gone if not _is_part(key)}
    had_parts = bool(left_uploads or any(map(_is_part, gone)))
    # Who dies before the first file of an upload to a path leaves an empty hidden folder.
    assert bool(removed.num_uploads) == had_parts or (isinstance(place, LocalPlace) and not had_parts)
    if left_uploads:
        assert removed.num_uploads == left_uploads
    cloudckpt.gc(place.root, older_than=0, dry_run=False)
    again = assert_nothing_needless(place, num_manifests=int(has_checkpoint))
    assert {key for key in again if "/data/" in key} == {key for key in now if "/data/" in key}
    return found


def assert_nothing_needless(place: Place, *, num_manifests: int) -> frozenset[str]:
    """Return what lies there: manifests, whatever they name, and at most one fence."""
    keys = frozenset(place.keys())
    contents = {key: place.read(key) for key in place.manifest_keys()}
    manifests = {key: content for key, content in contents.items() if len(content) > MAX_FENCE_BYTES}
    assert len(manifests) == num_manifests
    assert len(contents) - len(manifests) <= 1
    named = {
        f"{key.rpartition('/')[0]}/{name}"
        for key, content in manifests.items()
        for name in _data_keys_in(json.loads(content))
    }
    assert keys == contents.keys() | named
    assert place.num_unfinished_uploads() == 0
    if isinstance(place, LocalPlace):
        assert list(place.directory.rglob(".cloudckpt-*")) == []  # folders, too
    return keys


def _is_part(key: str) -> bool:
    """Return True for the key of an unfinished upload: a file of a path's, or an object of GCS's."""
    return "/.cloudckpt-tmp." in key or key.endswith(".~part")


def _data_keys_in(document: Any) -> set[str]:
    """Every string of the manifest that is a data object's key, wherever it stands."""
    if isinstance(document, Mapping):
        document = [*document.keys(), *document.values()]
    if isinstance(document, list):
        return {key for value in document for key in _data_keys_in(value)}
    return {document} if isinstance(document, str) and document.startswith("data/") else set()


_WAIT_S = 100.0
_SEEDS: Mapping[Version, int] = {"old": 1, "new": 2, "again": 3}
_WRITES = frozenset({"PUT", "POST", "DELETE"})
_WRITING_CALLS = frozenset({"put", "complete_multipart", "delete"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """So that an object has three parts, on a store with its limits."""

    part_bytes: int
    tile_bytes: int
    all_ranks_large: bool

    @property
    def num_elements(self) -> int:
        """The float32 elements of a large tensor. With the header, they take two parts and a half."""
        return 5 * self.part_bytes // 8


S3_SIZES = Sizes(part_bytes=5 * MIB, tile_bytes=1 * MIB, all_ranks_large=False)  # the least that S3 takes
SMALL_SIZES = Sizes(part_bytes=64 * KIB, tile_bytes=4 * KIB, all_ranks_large=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The orders for each rank."""

    uri: str
    kill: Kill
    sizes: Sizes
    scratch: Path
    """Directory for the process ids of the ranks, and for the watching rank's sign that it has come to its step."""
    storage_options: Mapping[str, Any]
    """The options of the watching rank alone, whose requests cross the wire."""
    has_wire: bool

    def options(self, **more: Any) -> cloudckpt.Options:
        """With one connection, the parts of an object go up one after the other."""
        return make_options(
            part_bytes=self.sizes.part_bytes,
            tile_bytes=self.sizes.tile_bytes,
            connections=1,
            timeout_s=60.0,
            **more,
        )

    def values(self, version: Version) -> dict[str, Any]:
        """Return what this rank saves."""
        rank = dist.get_rank()
        return _values(version, [rank], self._large_ranks)

    def all_values(self, version: Version) -> dict[str, Any]:
        """Return what the checkpoint holds."""
        return _values(version, range(self.kill.world_size), self._large_ranks)

    @property
    def _large_ranks(self) -> dict[int, int]:
        ranks = range(self.kill.world_size) if self.sizes.all_ranks_large else [self.kill.watching_rank]
        return dict.fromkeys(ranks, self.sizes.num_elements)


def _values(version: Version, ranks: Any, num_elements_of: Mapping[int, int]) -> dict[str, Any]:
    def tensor(number: int, num_elements: int) -> torch.Tensor:
        return torch.rand(num_elements, generator=torch.Generator().manual_seed(100 * _SEEDS[version] + number))

    own = {f"own-{rank}": tensor(rank, num_elements_of.get(rank, 500)) for rank in ranks}
    return {"shared": tensor(99, 1000), "version": version, **own}


@dataclass(slots=True, kw_only=True)
class Killer:
    """Listens to a rank's save. On the watching rank it kills at the step, or makes the next write the last."""

    job: Job
    num_seen: int = 0

    def __call__(self, event: cloudckpt.Event) -> None:
        kill = self.job.kill
        if event.rank != kill.watching_rank or event.name != kill.moment.event:
            return
        self.num_seen += 1
        if self.num_seen != kill.moment.nth:
            return
        if kill.moment.when == "at once":
            kill_victims(self.job)
        _armed(self.job).touch()


def _armed(job: Job) -> Path:
    return job.scratch / "armed"


def kill_victims(job: Job) -> None:
    """Kill as the kernel does. The calling process, if it is one of them, is killed last."""
    pids = set()
    for path in job.scratch.glob("*.*"):
        rank, pid = (int(number) for number in path.name.split("."))
        if rank in job.kill.victims:
            pids.add(pid)
    # All are stopped before the first is gone: none of them is to hear of another's end.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
            if number == signal.SIGKILL or pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _kill_if_armed(job: Job) -> None:
    if _armed(job).exists():
        kill_victims(job)


def save_and_die(job: Job) -> None:
    """On each rank: the old version, if there is to be one, and then the new one, in which some die."""
    kill, rank = job.kill, dist.get_rank()
    if kill.overwrite:
        cloudckpt.save(job.values("old"), job.uri, options=job.options())
    (job.scratch / f"{rank}.{os.getpid()}").touch()
    dist.barrier()
    more: dict[str, Any] = {"on_event": Killer(job=job)}
    if rank == kill.watching_rank and kill.moment.when != "at once":
        if job.has_wire:
            more["storage_options"] = job.storage_options
        else:
            more["wrap_store"] = watching(*_WRITING_CALLS, after=lambda _: _kill_if_armed(job))
    options = job.options(**more)
    if kill.how == "save":
        cloudckpt.save(job.values("new"), job.uri, overwrite=kill.overwrite, options=options)
        return
    cloudckpt.async_save(job.values("new"), job.uri, overwrite=kill.overwrite, options=options).result(_WAIT_S)


def save_again(job: Job, overwrite: bool) -> None:  # noqa: FBT001
    """On each rank: what the job does that was started again."""
    cloudckpt.save(_values("again", [dist.get_rank()], {}), job.uri, overwrite=overwrite)


def check(place: Place, kill: Kill, scratch: Path) -> None:
    """Kill, and hold what is left to what is promised."""
    scratch.mkdir(parents=True)
    with job_at(place, kill, scratch) as job:
        die(job)
        expected = kill.version_after
        assert version_there(job) == expected
        left_something = kill.moment.leaves and expected is None
        check_gc(place, has_checkpoint=expected is not None, must_find=left_something)
        assert version_there(job) == expected
        # A job that is started again finds what it left, and goes on.
        run_ranks(save_again, job, expected is not None, world_size=kill.world_size)
        assert_loads(job.uri, _values("again", range(kill.world_size), {}))


@contextlib.contextmanager
def job_at(place: Place, kill: Kill, scratch: Path) -> Iterator[Job]:
    """With a wire in front of a bucket's server, where the step needs one."""
    sizes = S3_SIZES if isinstance(place, S3Place) else SMALL_SIZES
    with contextlib.ExitStack() as stack:
        has_wire = isinstance(place, BucketPlace) and kill.moment.when == "carried out"
        storage_options: dict[str, Any] = {}
        reached: list[Job] = []
        if has_wire:
            assert isinstance(place, BucketPlace)
            tell = WireCallback(function=lambda seen: _kill_by_wire(seen, reached[0]))
            wire = stack.enter_context(Wire(_endpoint_url(place), WireRule(action=tell, times=None)))
            storage_options = place.options_at(wire.url)
        job = Job(
            uri=place.uri(),
            kill=kill,
            sizes=sizes,
            scratch=scratch,
            storage_options=storage_options,
            has_wire=has_wire,
        )
        reached.append(job)
        yield job


def _endpoint_url(place: BucketPlace) -> str:
    return os.environ["AWS_ENDPOINT_URL_S3" if place.scheme == "s3" else "STORAGE_EMULATOR_HOST"]


def _kill_by_wire(seen: Seen, job: Job) -> None:
    if seen.method in _WRITES and _armed(job).exists():
        kill_victims(job)


def die(job: Job) -> None:
    """Every victim is gone, and none of the others, which are ended too as torchrun does, believes that all is well."""
    kill = job.kill
    # Nobody is ended while victims are still being killed, one after the other.
    grace_s = 40.0 if kill.who == "all ranks" else 0.0
    with pytest.raises(RankError) as caught:
        run_ranks(save_and_die, job, world_size=kill.world_size, grace_s=grace_s)
    ends = dict(
        re.findall(r"^--- rank (\d+) (raised|did not report \(exit code \S+\))", str(caught.value), re.MULTILINE)
    )
    ended = {f"did not report (exit code -{number})" for number in (signal.SIGTERM.value, signal.SIGKILL.value)}
    for rank in range(kill.world_size):
        ways = {"did not report (exit code -9)"} if rank in kill.victims else {"raised", *ended}
        assert ends.get(str(rank)) in ways, str(caught.value)
    assert kill.moment.when == "at once" or _armed(job).exists(), str(caught.value)


def version_there(job: Job) -> Version | None:
    """Return the version of the checkpoint, which must be whole, to the bit; None if there is none."""
    state = job.all_values("again")
    try:
        cloudckpt.load(state, job.uri, no_dist=True)
    except cloudckpt.CheckpointNotFoundError:
        assert cloudckpt.latest(job.uri.rpartition("/")[0]) is None
        return None
    version: Version = state["version"]
    assert_same(state, job.all_values(version))
    newest = cloudckpt.latest(job.uri.rpartition("/")[0])
    assert newest is not None
    assert newest.uri == job.uri
    return version


def assert_loads(uri: str, expected: dict[str, Any]) -> None:
    """To the bit."""
    state = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for name, value in expected.items()
    }
    cloudckpt.load(state, uri, no_dist=True)
    assert_same(state, expected)
