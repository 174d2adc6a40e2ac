"""Measurements of ``cloudckpt bench``: small requests, and saves and loads by one process or several."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cloudckpt.cli._errors import interrupt_of
from cloudckpt.doctor.environment import removed_directories
from cloudckpt.errors import CloudckptError, UnsupportedOperationError, portable
from cloudckpt.io.retry import Retrier
from cloudckpt.stores.open import open_store
from cloudckpt.uri import parse_location

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    import torch

    from cloudckpt.cli._console import Console
    from cloudckpt.options import Options
    from cloudckpt.uri import Location

_SMALL_BYTES = 1024
_NUM_REMOVALS = 5
_PAUSE_S = 0.2
_JOIN_S = 10.0
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

    def bytes_of(self, rank: int) -> int:
        """Return the share of one rank."""
        return self.num_bytes * (rank + 1) // self.world_size - self.num_bytes * rank // self.world_size


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


@contextlib.contextmanager
def scratch_location(uri: str, options: Options, console: Console) -> Iterator[Location]:
    """Yield a new location below `uri`, and remove everything there on exit.

    Raises `StoreError` before anything is written, if objects there cannot be listed or removed.
    """
    above = parse_location(uri)
    location = above.child(f"cloudckpt-bench-{uuid.uuid4().hex[:12]}")
    _check_removable(location, options)
    with removed_directories(above):
        try:
            yield location
        except BaseException as error:
            interrupt = interrupt_of(error)
            if interrupt is None:
                raise
            raise interrupt from None  # the error says that data was kept, and it is removed here
        finally:
            try:
                _remove_all(location, options)
            except BaseException:
                console.warn(f"Not everything was removed: remove what is left under {location.uri}")
                raise


def _check_removable(location: Location, options: Options) -> None:
    store = open_store(location, options)
    next(store.list(), None)
    if location.scheme == "file":
        return
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    with contextlib.suppress(UnsupportedOperationError):
        retrier.call(lambda: next(store.list_uploads(), None))
    retrier.call(store.delete, ["nothing"])  # a store refuses this without the permission, although nothing is there


def _remove_all(location: Location, options: Options) -> None:
    store = open_store(location, options)
    retrier = Retrier(retries=options.retries, timeout_s=options.timeout_s)
    for _ in range(_NUM_REMOVALS):  # requests of an interrupted save may still arrive
        if location.scheme == "file":
            shutil.rmtree(location.path, ignore_errors=True)
            if not Path(location.path).exists():
                return
            time.sleep(_PAUSE_S)
            continue
        with contextlib.suppress(UnsupportedOperationError):
            for upload in retrier.call(lambda: list(store.list_uploads())):
                retrier.call(store.abort_multipart, upload.key, upload.upload_id)
        keys = retrier.call(lambda: [info.key for info in store.list()])
        if not keys:
            return
        retrier.call(store.delete, keys)


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


def _seconds_of(function: Callable[..., object], *arguments: object) -> float:
    begin_s = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin_s


def random_state(num_bytes: int, num_tensors: int, *, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return tensors of random bytes, which no store or network can compress."""
    import torch

    ends = [num_bytes * number // num_tensors for number in range(num_tensors + 1)]
    return {
        f"{prefix}tensor.{number}": torch.empty(ends[number + 1] - ends[number], dtype=torch.uint8).random_()
        for number in range(num_tensors)
    }


def measure_checkpoints(job: Job, show_progress: Callable[[int, int], None]) -> CheckpointTimings:
    """Measure saves and loads by `job.world_size` processes: by this one, or by as many new ones.

    Whatever ends this ends them. Raises the first failure of a rank, with its number.
    """
    seconds: list[dict[str, list[float]]] = [{"save": [], "load": []} for _ in range(job.world_size)]
    total_bytes, done_bytes = 2 * len(job.uris) * job.num_bytes, 0
    steps = _run_rank(0, job) if job.world_size == 1 else _run_ranks(job)
    for rank, what, step_s in steps:
        seconds[rank][what].append(step_s)
        done_bytes += job.bytes_of(rank)
        show_progress(done_bytes, total_bytes)
    return CheckpointTimings(
        together={
            what: summarize([max(times) for times in zip(*(one[what] for one in seconds), strict=True)])
            for what in ("save", "load")
        },
        by_rank=[{what: summarize(times) for what, times in one.items()} for one in seconds],
    )


def _run_rank(rank: int, job: Job, rendezvous: str = "") -> Iterator[tuple[int, str, float]]:
    """Save and load in each round, and yield the rank, ``save`` or ``load``, and the seconds."""
    import torch
    import torch.distributed as dist

    from cloudckpt.api import load, save
    from cloudckpt.inspect.removal import delete

    state = random_state(job.bytes_of(rank), job.num_tensors, prefix=f"rank.{rank}.")
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    no_dist = not rendezvous
    if rendezvous:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=max(job.options.timeout_s, _MIN_GROUP_TIMEOUT_S)),
        )
    wait_for_all: Callable[[], object] = dist.barrier if rendezvous else lambda: None
    for uri in job.uris:
        wait_for_all()
        begin_s = time.perf_counter()
        save(dict(state), uri, no_dist=no_dist, options=job.options)
        yield rank, "save", time.perf_counter() - begin_s
        wait_for_all()
        begin_s = time.perf_counter()
        load(into, uri, no_dist=no_dist, options=job.options)
        yield rank, "load", time.perf_counter() - begin_s
        wait_for_all()
        if rank == 0:
            delete(uri, options=job.options)
    wait_for_all()
    if rendezvous:
        dist.destroy_process_group()


def _run_ranks(job: Job) -> Iterator[tuple[int, str, float]]:
    context = multiprocessing.get_context("spawn")
    ranks: dict[Connection, tuple[int, SpawnProcess]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            # A terminal sends Ctrl-C to all processes. The ranks leave it to this one, from their first moment on.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for rank in range(job.world_size):
                    receiver, sender = context.Pipe(duplex=False)
                    arguments = (rank, job, f"{folder}/rendezvous", sender)
                    process = context.Process(target=_run_rank_process, args=arguments, daemon=True)
                    process.start()
                    sender.close()
                    ranks[receiver] = (rank, process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            yield from _receive_steps(ranks)
        finally:
            for _, process in ranks.values():
                process.terminate()
            for receiver, (_, process) in ranks.items():
                process.join(_JOIN_S)
                process.kill()
                process.join()
                receiver.close()


def _receive_steps(ranks: Mapping[Connection, tuple[int, SpawnProcess]]) -> Iterator[tuple[int, str, float]]:
    pending = dict(ranks)
    while pending:
        ready = set(multiprocessing.connection.wait(list(pending)))
        for receiver in [one for one in pending if one in ready]:
            rank, process = pending[receiver]
            try:
                step = receiver.recv()
            except EOFError:
                process.join(_JOIN_S)
                raise CloudckptError(
                    f"rank {rank} ended with exit code {process.exitcode} and no error. If memory does not suffice for "
                    "so many ranks, choose a smaller size or fewer ranks"
                ) from None
            if isinstance(step, BaseException):
                raise step
            if step is None:
                del pending[receiver]
                process.join(_JOIN_S)
            else:
                yield step


def _run_rank_process(rank: int, job: Job, rendezvous: str, sender: Connection) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(job.world_size)
    try:
        for step in _run_rank(rank, job, rendezvous):
            sender.send(step)
    except BaseException as error:  # noqa: BLE001  # the parent raises it
        sender.send(_with_rank(rank, error))
    else:
        sender.send(None)
    sender.close()


def _with_rank(rank: int, error: BaseException) -> Exception:
    """Return the error of a rank with its number, or of the lowest rank that failed."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        rank, (error, _trace) = min(failures.items())
    if isinstance(error, CloudckptError):
        error.args = (f"rank {rank}: {error.message}",)
        return portable(error)
    return CloudckptError(f"rank {rank}: {type(error).__name__}: {error}")
