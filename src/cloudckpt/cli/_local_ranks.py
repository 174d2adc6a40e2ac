"""Saves and loads by several processes of this machine together, for ``cloudckpt bench --ranks``."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from cloudckpt.cli._measuring import Seconds, random_state
from cloudckpt.errors import CloudckptError, portable

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from cloudckpt._uri import Location
    from cloudckpt.options import Options

_ENDING_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What each rank is to do."""

    uris: Sequence[str]
    """Of the rounds."""
    options: Options
    world_size: int
    num_bytes: int
    """Of all ranks together."""
    num_tensors: int
    """Of each rank."""
    rendezvous: str

    def bytes_of(self, rank: int) -> int:
        """Its share."""
        return self.num_bytes * (rank + 1) // self.world_size - self.num_bytes * rank // self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRanks:
    """What was measured."""

    together: Mapping[str, Seconds]
    """From the moment when all begin until the last one has ended."""
    by_rank: Sequence[Mapping[str, Seconds]]


def measure_ranks(
    location: Location,
    options: Options,
    *,
    num_ranks: int,
    num_bytes: int,
    num_tensors: int,
    num_rounds: int,
    on_bytes: Callable[[int], None],
) -> OfRanks:
    """Saves and loads of `num_ranks` new processes, of tensors of `num_bytes` together; every byte checked.

    Whatever ends this ends them. Raises what a rank met first, with its number.
    """
    measured: list[dict[str, list[float]]] = [{"save": [], "load": []} for _ in range(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            uris=[location.child(f"round-{number}").uri for number in range(num_rounds)],
            options=options,
            world_size=num_ranks,
            num_bytes=num_bytes,
            num_tensors=num_tensors,
            rendezvous=f"{folder}/rendezvous",
        )
        with _running(job) as ranks:
            for rank, what, seconds in _heard(ranks):
                measured[rank][what].append(seconds)
                on_bytes(job.bytes_of(rank))
    return OfRanks(
        together={
            what: Seconds.of([max(times) for times in zip(*(one[what] for one in measured), strict=True)])
            for what in ("save", "load")
        },
        by_rank=[{what: Seconds.of(times) for what, times in one.items()} for one in measured],
    )


@contextlib.contextmanager
def _running(job: Job) -> Iterator[dict[Connection, tuple[int, SpawnProcess]]]:
    """The ranks by what they are heard through; none is left afterwards."""
    context = multiprocessing.get_context("spawn")
    ranks: dict[Connection, tuple[int, SpawnProcess]] = {}
    try:
        # A terminal sends Ctrl-C to all; the ranks leave it to this process for good, from their first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(job.world_size):
                ours, its = context.Pipe(duplex=False)
                process = context.Process(target=_as_rank, args=(rank, job, its), daemon=True)
                process.start()
                its.close()
                ranks[ours] = (rank, process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield ranks
        for _, process in ranks.values():
            process.join(_ENDING_S)
    finally:
        for _, process in ranks.values():
            process.terminate()
        for heard, (_, process) in ranks.items():
            process.join(_ENDING_S)
            process.kill()
            process.join()
            heard.close()


def _heard(ranks: Mapping[Connection, tuple[int, SpawnProcess]]) -> Iterator[tuple[int, str, float]]:
    """What the ranks tell, until all have told everything. Raises the first failure."""
    pending = dict(ranks)
    while pending:
        ready = set(multiprocessing.connection.wait(list(pending)))
        for heard in [one for one in pending if one in ready]:
            rank, process = pending[heard]
            try:
                what, value = heard.recv()
            except EOFError:
                process.join(_ENDING_S)
                raise CloudckptError(
                    f"rank {rank} ended without a word, with exit code {process.exitcode}. Perhaps memory does not "
                    "suffice for so many: choose a smaller size, or fewer ranks"
                ) from None
            if what == "failed":
                raise value
            if what == "done":
                del pending[heard]
            else:
                yield rank, what, value


def _as_rank(rank: int, job: Job, tell: Connection) -> None:
    """What a new process does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["LOCAL_WORLD_SIZE"] = str(job.world_size)
    try:
        _measure(rank, job, lambda what, seconds: tell.send((what, seconds)))
    except BaseException as error:  # noqa: BLE001  # it is raised where it can be told
        tell.send(("failed", _named(rank, error)))
    else:
        tell.send(("done", None))
    tell.close()


def _measure(rank: int, job: Job, tell: Callable[[str, float], None]) -> None:
    import torch
    import torch.distributed as dist

    from cloudckpt.api import load, save
    from cloudckpt.housekeeping import delete

    options = job.options
    state = random_state(job.bytes_of(rank), job.num_tensors, prefix=f"rank.{rank}.")
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.rendezvous}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=max(options.timeout_s, 60.0)),
    )
    for uri in job.uris:
        dist.barrier()
        begun = time.perf_counter()
        save(dict(state), uri, options=options)
        tell("save", time.perf_counter() - begun)
        dist.barrier()
        begun = time.perf_counter()
        load(into, uri, options=options)
        tell("load", time.perf_counter() - begun)
        dist.barrier()
        if rank == 0:
            delete(uri, options=options)
    dist.barrier()
    dist.destroy_process_group()


def _named(rank: int, error: BaseException) -> Exception:
    """What a rank met, with its number; where several did, the first one that is to blame."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        rank, (error, _trace) = min(failures.items())
    if isinstance(error, CloudckptError):
        error.args = (f"rank {rank}: {error}",)
        return portable(error)
    return CloudckptError(f"rank {rank}: {type(error).__name__}: {error}")


def _end_with_parent() -> None:
    """A process that was killed can end nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
