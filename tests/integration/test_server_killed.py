"""The server is killed, as by the kernel's hand, in the middle of a save or of a load, and comes back or does not.

What is promised: the save is committed and loads bit for bit, or fails in bounded time, on every rank, with an error
that names the server; what was committed before is whole; and when the server is back, the next save works. Never a
checkpoint that is committed and does not load, and never a hang.

Some servers forget their objects when they die, which no protocol can mend. There, too, nothing may pass for a
checkpoint that cannot be loaded. On a path there is no server; what corresponds to its end is the process's own,
which is in ``tests/e2e/test_crash.py``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.servers import Servers
from tests.integration.switch import Killer, Switch, switch_of
from tests.kit.models import assert_same
from tests.kit.options import make_options
from tests.kit.ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt
from cloudckpt.events import EventName
from cloudckpt.options import MIB
from cloudckpt.testing.servers import Server

pytestmark = pytest.mark.multirank

NUM_PARTS = 3
PART_BYTES = 5 * MIB  # the least that S3 takes
BOUND_S = 60.0
"""Far more than a save or load with `IMPATIENT` may take, retries and cleaning up included."""

# A connection that is refused is refused at once, so only the retries take time; a server that is slow has its timeout.
IMPATIENT: Mapping[str, Any] = {"timeout_s": 30.0, "retries": 2}
PATIENT: Mapping[str, Any] = {"timeout_s": 60.0, "retries": 50}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment of the server's death: at the `nth` event of this name that `rank` has for one object."""

    rank: int
    event: EventName
    nth: int = 1
    connections: int = 1


# With one connection a rank's events come in order, part after part; with more, other requests are under way when the
# server dies. Only the large object has several parts.
WHILE_PARTS_GO_UP = Moment(rank=1, event="save.part_uploaded", nth=NUM_PARTS - 1, connections=4)
BEFORE_COMMIT = Moment(rank=0, event="save.committing")
AFTER_COMMIT = Moment(rank=0, event="save.committed")
WHILE_DATA_IS_READ = Moment(rank=1, event="load.range_read", connections=2)

UNCOMMITTED = {"while parts go up": WHILE_PARTS_GO_UP, "before the commit": BEFORE_COMMIT}

KEEPING = ("rgw", "fake-gcs")
"""moto forgets all that it had, and MiniStack the unfinished uploads: that matters only once they are back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One save or load of all ranks, and when it loses its server."""

    uri: str
    storage_options: Mapping[str, Any]
    connections: int = 1
    killer: Killer | None = None

    def options(self) -> cloudckpt.Options:
        return make_options(
            storage_options=self.storage_options,
            connections=self.connections,
            part_bytes=PART_BYTES,
            object_bytes=MIB,
            on_event=self.killer,
            **(PATIENT if self.killer is None or self.killer.restarts else IMPATIENT),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The outcome that the caller of a save or load on one rank gets."""

    error: str | None
    classes: frozenset[str] = frozenset()
    seconds: float


def values(version: float) -> dict[str, Any]:
    """On each rank: an object of `NUM_PARTS` parts, some small ones in other objects, and a Python value."""
    rank = dist.get_rank()
    large = torch.arange((NUM_PARTS - 1) * PART_BYTES // 4 + MIB // 4, dtype=torch.float32)
    small = {f"small-{rank}-{n}": torch.full((MIB // 4,), version + n) for n in range(3)}
    return {f"large-{rank}": large * version, **small, "shared": torch.full((1000,), version), "version": version}


def told_of(call: Callable[[], object]) -> Told:
    begun_s = time.monotonic()
    try:
        call()
    except CheckpointException as error:
        classes = frozenset(kind.__name__ for kind in type(error).__mro__)
        return Told(error=str(error), classes=classes, seconds=time.monotonic() - begun_s)
    return Told(error=None, seconds=time.monotonic() - begun_s)


def save(job: Job, version: float) -> Told:
    return told_of(lambda: cloudckpt.save(values(version), job.uri, overwrite=True, options=job.options()))


def load(job: Job, version: float) -> Told:
    """Into other values; after a success they are those of `version`."""
    state = values(-1.0)
    results = told_of(lambda: cloudckpt.load(state, job.uri, options=job.options()))
    if results.error is None:
        assert_same(state, values(version))
    return results


def save_and_lose_a_save(calm: Job, fatal: Job) -> Told:
    assert save(calm, 1.0).error is None
    return save(fatal, 2.0)


def save_and_lose_a_load(calm: Job, fatal: Job) -> Told:
    assert save(calm, 1.0).error is None
    return load(fatal, 1.0)


def version_there(job: Job) -> float | None:
    """Return the version of the checkpoint, which must be whole; None if there is none."""
    state = values(-1.0)
    try:
        cloudckpt.load(state, job.uri, options=job.options())
    except cloudckpt.CheckpointNotFoundError:
        return None
    version: float = state["version"]
    assert_same(state, values(version))
    return version


def version_there_before_the_next_save(job: Job) -> float | None:
    found = version_there(job)
    assert save(job, 3.0).error is None
    assert version_there(job) == 3.0
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A bucket on a server that has a switch."""

    switch: Switch
    bucket: str

    @property
    def server(self) -> Server:
        return self.switch.server

    def keeps(self, moment: Moment) -> bool:
        """Return True if the server still has, after its death, what a save had given to it by then."""
        # MiniStack writes objects to its disk, and unfinished uploads only to its memory.
        forgets_uploads = self.server.name == "ministack"
        return self.server.keeps_data and not (forgets_uploads and moment.event == "save.part_uploaded")

    def job(self, **more: Any) -> Job:
        uri = f"{self.server.scheme}://{self.bucket}/run/step-1"
        return Job(uri=uri, storage_options=self.server.storage_options, **more)

    def fatal_job(self, moment: Moment, *, restarts: bool) -> Job:
        killer = Killer(
            address=self.switch.address, rank=moment.rank, moment=moment.event, nth=moment.nth, restarts=restarts
        )
        return self.job(connections=moment.connections, killer=killer)

    def run(self, what: Callable[[Job, Job], Told], fatal: Job) -> list[Told]:
        """On two ranks, with a job that nothing disturbs, and one that loses its server."""
        answers: list[Told] = run_ranks(what, self.job(), fatal, world_size=2)
        assert self.switch.has_killed
        return answers

    def comes_back(self) -> None:
        """The server, after a death that nobody has ended; with a bucket, where it has forgotten that."""
        self.server.restart()
        self.server.create_bucket(self.bucket)

    def check_afterwards(self, *, there: float | None) -> None:
        """The checkpoint that is there is that version, and whole; and the next save works."""
        self.server.create_bucket(self.bucket)
        expected = there if self.server.keeps_data else None
        assert run_ranks(version_there_before_the_next_save, self.job(), world_size=2) == [expected] * 2


def on(*servers: str) -> pytest.MarkDecorator:
    """Run the test on each of these servers."""
    return pytest.mark.parametrize("scene", servers, indirect=True)


@pytest.fixture
def scene(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Iterator[Scene]:
    """An empty bucket on a server."""
    server = servers.up(request.param)
    bucket = f"killed-{uuid.uuid4().hex}"
    server.create_bucket(bucket)
    with switch_of(server, tmp_path) as switch:
        yield Scene(switch=switch, bucket=bucket)


def check_all_failed(scene: Scene, answers: list[Told]) -> None:
    """In time, and with the address of the server that is gone."""
    address = scene.server.endpoint_url.removeprefix("http://")
    for answer in answers:
        assert answer.error is not None
        assert address in answer.error
        assert answer.seconds < BOUND_S
        assert answer.classes & {"TransientStoreError", "CommitUnknownError"}


@on(*KEEPING)
@pytest.mark.parametrize("moment", UNCOMMITTED)
def test_a_save_whose_server_stays_dead_fails_and_keeps_the_old(scene: Scene, moment: str) -> None:
    """If this fails, a store that dies hangs the job, or takes the last good checkpoint with it."""
    check_all_failed(scene, scene.run(save_and_lose_a_save, scene.fatal_job(UNCOMMITTED[moment], restarts=False)))
    scene.comes_back()
    scene.check_afterwards(there=1.0)


@pytest.mark.parametrize(
    ("scene", "moment"),
    [(server, name) for server in (*KEEPING, "moto") for name in UNCOMMITTED] + [("ministack", "while parts go up")],
    indirect=["scene"],
)
def test_a_save_whose_server_comes_back_is_committed(scene: Scene, moment: str) -> None:
    """If this fails, a restart of the store costs a save, or a save is called committed whose data is gone."""
    answers = scene.run(save_and_lose_a_save, scene.fatal_job(UNCOMMITTED[moment], restarts=True))
    assert scene.switch.has_restarted
    if scene.keeps(UNCOMMITTED[moment]):
        assert [reported.error for reported in answers] == [None, None]
    else:
        assert all(reported.error is not None and scene.bucket in reported.error for reported in answers)
    scene.check_afterwards(there=2.0 if scene.keeps(UNCOMMITTED[moment]) else 1.0)


@on(*KEEPING)
def test_a_save_whose_server_dies_after_the_commit_has_succeeded(scene: Scene) -> None:
    """If this fails, a checkpoint that exists is reported as failed because its predecessor could not be removed."""
    answers = scene.run(save_and_lose_a_save, scene.fatal_job(AFTER_COMMIT, restarts=False))
    assert [reported.error for reported in answers] == [None, None]
    assert all(reported.seconds < BOUND_S for reported in answers)
    scene.comes_back()
    scene.check_afterwards(there=2.0)


@on(*KEEPING)
def test_a_load_whose_server_stays_dead_fails(scene: Scene) -> None:
    """If this fails, a job that starts while the store dies hangs, or trains on with half of its weights."""
    check_all_failed(scene, scene.run(save_and_lose_a_load, scene.fatal_job(WHILE_DATA_IS_READ, restarts=False)))
    scene.comes_back()
    scene.check_afterwards(there=1.0)


@on(*KEEPING, "moto")
def test_a_load_whose_server_comes_back_goes_on(scene: Scene) -> None:
    """If this fails, a restart of the store costs a load, or a load of what the store forgot passes for one."""
    answers = scene.run(save_and_lose_a_load, scene.fatal_job(WHILE_DATA_IS_READ, restarts=True))
    assert scene.switch.has_restarted
    if scene.server.keeps_data:
        assert [reported.error for reported in answers] == [None, None]
    else:
        assert all(reported.error is not None and scene.bucket in reported.error for reported in answers)
    scene.check_afterwards(there=1.0)
