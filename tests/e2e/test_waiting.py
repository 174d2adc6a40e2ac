"""A rank that dies, hangs or never comes: the others fail in time and name it. One that is slow is waited for."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from tests.kit.places import LocalPlace
from tests.kit.ranks import PRELOAD, ROOT

import cloudckpt

pytestmark = [pytest.mark.faults, pytest.mark.multirank]

TIMEOUT_S = 2.0
SLACK_S = 5.0
"""For what a loaded machine takes to notice, beyond the timeout."""
WAIT_S = 90.0
Fate = Literal["killed", "stopped"]
Way = Literal["save", "async_save", "load"]


SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetsItsFate:
    """Listens to events; at the first of this name on this rank, the process gets the signal."""

    rank: int
    moment: str
    fate: Fate

    def __call__(self, event: cloudckpt.Event) -> None:
        if event.rank == self.rank and event.name == self.moment:
            os.kill(os.getpid(), SIGNALS[self.fate])


def pause(duration_s: float) -> None:
    """Be busy elsewhere for so long: this is what is tested, and no wait for something to happen."""
    deadline_s = time.monotonic() + duration_s
    while time.monotonic() < deadline_s:
        torch.ones(100).sum()
        os.sched_yield()


def values(fill: float = 1.0) -> dict[str, Any]:
    return {"shared": torch.full((1000,), fill), f"own-{dist.get_rank()}": torch.full((100,), fill)}


def options_with(listener: Callable[[cloudckpt.Event], None] | None, *, timeout_s: float = TIMEOUT_S) -> Any:
    return cloudckpt.Options(on_event=listener, timeout_s=timeout_s)


def go(way: Way, uri: str, options: cloudckpt.Options) -> None:
    if way == "save":
        cloudckpt.save(values(), uri, options=options)
    elif way == "async_save":
        cloudckpt.async_save(values(), uri, options=options).result(WAIT_S)
    else:
        cloudckpt.load(values(0.0), uri, options=options)


def outcome_of(call: Callable[[], object]) -> tuple[float, BaseException | None]:
    """Return the seconds that it took, and its error."""
    begun_s = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # the test looks at it
        return time.monotonic() - begun_s, error
    return time.monotonic() - begun_s, None


def run_and_tell(function: Callable[[], Any], rank: int, size: int, scratch: str, out: Connection) -> None:
    """One rank, with a TCP store that rank 0 keeps, as without torchrun. It ends as scripts do."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store_at = Path(scratch, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        store_at.with_suffix(".new").write_text(str(store.port))
        store_at.with_suffix(".new").rename(store_at)
    else:
        deadline_s = time.monotonic() + WAIT_S
        while not store_at.exists():
            assert time.monotonic() < deadline_s
            os.sched_yield()
        store = dist.TCPStore("127.0.0.1", int(store_at.read_text()), size, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    out.send_bytes(pickle.dumps(function()))
    out.close()


@contextlib.contextmanager
def ranks(function: Callable[..., Any], *args: Any, size: int, scratch: Path, **more: Any) -> Iterator[Ranks]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    running = Ranks(processes=[], readers=[])
    job = functools.partial(function, *args, **more)
    try:
        for rank in range(size):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=run_and_tell, args=(job, rank, size, str(scratch), writer))
            process.start()
            writer.close()
            running.processes.append(process)
            running.readers.append(reader)
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.join(WAIT_S)
        for reader in running.readers:
            reader.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    processes: list[Any]
    readers: list[Connection]

    def told_by(self, rank: int) -> Any:
        """Return what the rank's function returned."""
        assert wait([self.readers[rank]], WAIT_S), f"rank {rank} does not come back"
        return pickle.loads(self.readers[rank].recv_bytes())

    def assert_ends(self, rank: int) -> None:
        self.processes[rank].join(WAIT_S)
        assert self.processes[rank].exitcode is not None, f"rank {rank} hangs at its exit"


def assert_lost(outcome: tuple[float, BaseException | None], lost: tuple[int, ...], uri: str) -> None:
    elapsed_s, error = outcome
    assert isinstance(error, cloudckpt.RankLostError), error
    assert error.ranks == lost, error
    assert error.uri == uri
    assert uri in str(error)
    assert elapsed_s < TIMEOUT_S + SLACK_S


# --- A rank that dies or hangs


def call_twice(way: Way, uri: str, listener: Any) -> tuple[float, BaseException | None]:
    """The first time all is well, so that the group is there; the second is what is tested."""
    cloudckpt.save(values(), f"{uri}-before", options=options_with(None))
    if way == "load":
        uri = f"{uri}-before"
    return outcome_of(lambda: go(way, uri, options_with(listener)))


CASES = [
    ("save", "save.object_uploaded", "killed", 1),
    ("save", "save.set_up", "stopped", 1),
    ("save", "save.committing", "stopped", 0),
    ("async_save", "save.object_uploaded", "stopped", 1),
    ("load", "load.planned", "stopped", 1),
]


@pytest.mark.parametrize(("way", "moment", "fate", "rank"), CASES, ids=str)
def test_a_rank_that_is_lost_is_named_by_the_others_in_time(  # noqa: PLR0917  # fixtures and parameters
    local: LocalPlace, tmp_path: Path, way: Way, moment: str, fate: Fate, rank: int
) -> None:
    """If this fails, one dead rank keeps the whole job waiting for half an hour, or forever, and nobody says which."""
    uri = local.uri()
    listener = MeetsItsFate(rank=rank, moment=moment, fate=fate)
    size = 3
    with ranks(call_twice, way, uri, listener, size=size, scratch=tmp_path) as running:
        others = [other for other in range(size) if other != rank]
        for other in others:
            outcome = running.told_by(other)
            assert_lost(outcome, (rank,), uri if way != "load" else f"{uri}-before")
        for other in others:
            if rank != 0:  # rank 0 keeps the store, without which torch itself waits at the exit
                running.assert_ends(other)
    assert [key for key in local.manifest_keys() if key.startswith("checkpoint/")] == []


def train(root: str, listener: Any) -> tuple[float, BaseException | None]:
    """With a manager that survives the failures of a store."""
    manager = cloudckpt.CheckpointManager(root, on_failure="warn", options=options_with(listener))
    return outcome_of(lambda: [manager.save(step, values()) for step in (1, 2)])


def test_a_lost_rank_is_no_failure_of_the_store(local: LocalPlace, tmp_path: Path) -> None:
    """If this fails, ranks that survive the failures of a store train on, and hang, without one of them."""
    listener = MeetsItsFate(rank=1, moment="save.object_uploaded", fate="killed")
    with ranks(train, local.root, listener, size=3, scratch=tmp_path) as running:
        for other in (0, 2):
            _, error = running.told_by(other)
            assert isinstance(error, cloudckpt.RankLostError), error
            assert error.ranks == (1,), error


# --- A rank that does not come


def call_on_all_but_one(
    way: Way, uri: str, missing: int, *, is_first: bool
) -> tuple[float, BaseException | None] | None:
    if not is_first:
        cloudckpt.save(values(), f"{uri}-before", options=options_with(None))
        cloudckpt.async_save(values(), f"{uri}-before-2", options=options_with(None)).result(WAIT_S)
    if dist.get_rank() == missing:
        pause(2 * TIMEOUT_S)  # alive, and busy with something else
        return None
    return outcome_of(lambda: go(way, uri, options_with(None)))


@pytest.mark.parametrize(
    ("way", "missing", "is_first"),
    [("save", 0, False), ("async_save", 1, True)],
)
def test_a_rank_that_never_calls_is_named_by_those_that_did(
    local: LocalPlace,
    tmp_path: Path,
    way: Way,
    missing: int,
    is_first: bool,  # noqa: FBT001  # pytest's
) -> None:
    """If this fails, an `if rank == 0` around one call stops the whole job, without a word about who is missing."""
    size = 3
    with ranks(
        call_on_all_but_one, way, local.uri(), missing, size=size, scratch=tmp_path, is_first=is_first
    ) as running:
        for rank in range(size):
            if rank != missing:
                assert_lost(running.told_by(rank), (missing,), local.uri())
        for rank in range(size):
            running.assert_ends(rank)
    assert [key for key in local.manifest_keys() if key.startswith("checkpoint/")] == []


# --- A rank that is slow
