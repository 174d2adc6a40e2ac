"""Measurements of ``cloudckpt bench``: small requests, and saves and loads by one process or several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from cloudckpt.errors import CloudckptError
from cloudckpt.io.retry import Retrier
from cloudckpt.stores.open import open_store

if TYPE_CHECKING:
    import torch

    from cloudckpt.options import Options
    from cloudckpt.uri import Location

_SMALL_BYTES = 1024
_MIN_GROUP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of one operation that was measured several times."""

    p50_s: float
    p99_s: float
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The saves and loads to measure. `num_bytes` is the sum of all ranks, `num_tensors` that of each."""

    uris: Sequence[str]
    """One for each round."""
    options: Options
    world_size: int
    num_bytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTimings:
    """The times of ``save`` and ``load``."""

    together: Mapping[str, Timing]
    """From the start of all ranks to the end of the last one."""
    by_rank: Sequence[Mapping[str, Timing]]


def summarize(seconds: Sequence[float]) -> Timing:
    """Return the percentiles of at least one time."""
    ordered = sorted(seconds)
    p99_s = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
    return Timing(p50_s=statistics.median(ordered), p99_s=p99_s, number=len(ordered))


def measure_requests(location: Location, options: Options, *, num_requests: int) -> Mapping[str, Timing]:
    """Measure small requests, one after the other."""
    from awscrt.checksums import crc32c

    store = open_store(location, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    content = bytes(_SMALL_BYTES)
    keys = [f"small-{number}" for number in range(num_requests)]
    checksum = crc32c(content)
    calls: dict[str, Callable[[str], object]] = {
        "put 1 KiB": lambda key: store.put(key, [memoryview(content)], crc32c=checksum),
        "get 1 KiB": lambda key: store.read(key, max_bytes=_SMALL_BYTES),
        "head": store.head,
        "list": lambda key: list(store.list(key)),
        "delete": lambda key: store.delete([key]),
    }
    return {name: summarize([_seconds_of(retrier.call, call, key) for key in keys]) for name, call in calls.items()}


def _seconds_of(function: Callable[..., object], *arguments: object, **options: object) -> float:
    begin_s = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - begin_s


def measure_checkpoints(job: Job) -> CheckpointTimings:
    """Measure saves and loads by `job.world_size` processes: by this one, or by as many new ones."""
    by_rank = [_run_rank(0, job)] if job.world_size == 1 else _run_ranks(job)
    return CheckpointTimings(
        together={
            what: summarize([max(times) for times in zip(*(one[what] for one in by_rank), strict=True)])
            for what in ("save", "load")
        },
        by_rank=[{what: summarize(times) for what, times in one.items()} for one in by_rank],
    )


def _run_rank(rank: int, job: Job, rendezvous: str = "") -> dict[str, list[float]]:
    """Save and load in each round, and return the seconds of each ``save`` and ``load``."""
    import torch
    import torch.distributed as dist

    from cloudckpt.api import load, save
    from cloudckpt.inspect.removal import delete

    no_dist = not rendezvous
    if rendezvous:
        os.environ["LOCAL_WORLD_SIZE"] = str(job.world_size)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=max(job.options.timeout_s, _MIN_GROUP_TIMEOUT_S)),
        )
    wait_for_all: Callable[[], object] = dist.barrier if rendezvous else lambda: None
    num_bytes = job.num_bytes * (rank + 1) // job.world_size - job.num_bytes * rank // job.world_size
    state = _random_state(num_bytes, job.num_tensors, prefix=f"rank.{rank}.")
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    seconds: dict[str, list[float]] = {"save": [], "load": []}
    for uri in job.uris:
        wait_for_all()
        seconds["save"].append(
            _seconds_of(lambda uri=uri: save(dict(state), uri, no_dist=no_dist, options=job.options))
        )
        wait_for_all()
        seconds["load"].append(_seconds_of(load, into, uri, no_dist=no_dist, options=job.options))
        wait_for_all()
        if rank == 0:
            delete(uri, options=job.options)
    wait_for_all()
    if rendezvous:
        dist.destroy_process_group()
    return seconds


def _random_state(num_bytes: int, num_tensors: int, *, prefix: str) -> dict[str, torch.Tensor]:
    """Return tensors of random bytes, which no store or network can compress."""
    import torch

    ends = [num_bytes * number // num_tensors for number in range(num_tensors + 1)]
    return {
        f"{prefix}tensor.{number}": torch.empty(ends[number + 1] - ends[number], dtype=torch.uint8).random_()
        for number in range(num_tensors)
    }


def _run_ranks(job: Job) -> list[dict[str, list[float]]]:
    """Run each rank in a process of its own. Raises the first failure of a rank, and ends the others."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(job.world_size, mp_context=context) as executor:
        try:
            # A terminal sends Ctrl-C to all processes. The ranks leave it to this one, from their first moment on.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                ranks = [
                    executor.submit(_run_rank, rank, job, f"{folder}/rendezvous") for rank in range(job.world_size)
                ]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for rank in as_completed(ranks):
                rank.result()
            return [rank.result() for rank in ranks]
        except BrokenProcessPool as error:
            raise CloudckptError(
                "a rank ended without an error. If memory does not suffice for so many ranks, choose a smaller size or "
                "fewer ranks"
            ) from error
        finally:
            for process in multiprocessing.active_children():
                process.terminate()
