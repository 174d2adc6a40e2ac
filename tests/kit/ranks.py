"""Run one function on several ranks, each a process of its own in one gloo group, and bring back what they return.

The processes are forked from a server that has imported torch once, so that a run costs tenths of a second and no
test shares a rank with another. Every wait has a bound: a rank that dies, hangs or raises ends the run with the
traceback (for a hang: the stacks) of each rank that has one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import faulthandler
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kit import secrets_watch

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 10.0
"""Seconds for which the other ranks may still report after the first failure, by default."""

# Imported once, in the server: what every test here needs. Of cloudckpt, coverage sees all but the modules' own lines
# run in the ranks, and those run in the tests' process too.
PRELOAD = [
    "__main__",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "boto3.crt",
    "boto3.s3.inject",
    "fsspec",
    "msgspec",
    "pytest",
    "hypothesis",
    "cloudckpt.api",
    "cloudckpt.dcp.enable",
    "cloudckpt.removal",
    "cloudckpt.manager.restore",
    "cloudckpt.manager.preemption",
    "cloudckpt.stores.fsspec_store",
    "cloudckpt.stores.gcs",
    "cloudckpt.stores.s3",
    "tests.kit.secrets_watch",
    "tests.kit.ranks",
    "tests.kit.models",
    "tests.kit.places",
]


class RankError(AssertionError):
    """At least one rank raised, died or did not come to an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The report of one rank: a value, or the text of a traceback."""

    value: Any = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Everything that a rank needs to know."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    process_group: bool
    scratch: Path
    environment: Mapping[str, str]
    timeout_s: float


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    timeout_s: float = 120.0,
    process_group: bool = True,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Call ``function(*args)`` on every rank and return the values in the order of the ranks.

    `function` must be a module's own, and the arguments and values picklable. Each rank sees this process's
    environment as it is now, one torch thread, and the same seed. Raises `RankError` unless every rank returns
    within `timeout_s`; once one has failed, the others are ended after `grace_s`, as torchrun ends them.
    """
    if str(ROOT) not in sys.path:  # the ranks import the test's module by its name
        sys.path.insert(0, str(ROOT))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        readers: list[multiprocessing.connection.Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                job = _Job(
                    function=function,
                    args=args,
                    rank=rank,
                    world_size=world_size,
                    process_group=process_group,
                    scratch=Path(scratch),
                    environment=dict(os.environ),
                    timeout_s=timeout_s,
                )
                process = context.Process(target=_rank_main, args=(job, writer), name=f"rank{rank}")
                process.start()
                writer.close()
                readers.append(reader)
                processes.append(process)
            outcomes = _collect(readers, timeout_s=timeout_s, grace_s=grace_s)
            _join([processes[rank] for rank in outcomes])
        finally:
            # Without a grace period no stacks are wanted, and to ask a running process for them can crash it.
            _end(processes, wait_s=min(1.0 + grace_s, GRACE_S), at_once=not grace_s)
            late = _last_words(readers)
            for reader in readers:
                reader.close()
        # A rank that has ended by itself meanwhile keeps its own outcome.
        outcomes = late | outcomes
        failures = [
            _describe(rank, outcomes.get(rank), processes[rank], Path(scratch))
            for rank in range(world_size)
            if rank not in outcomes or outcomes[rank].traceback is not None
        ]
        if failures:
            raise RankError("\n".join(failures))
        return [outcomes[rank].value for rank in range(world_size)]


class _Body:
    """Find the body of a test by its name, under which pickle would find the decorated test."""

    def __init__(self, body: Callable[..., None]) -> None:
        self.module, self.name = body.__module__, body.__qualname__

    def __call__(self, arguments: Mapping[str, Any]) -> None:
        getattr(importlib.import_module(self.module), self.name).__wrapped__(**arguments)


def on_ranks(world_size: int, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let the body of a test run on each of `world_size` ranks, with the arguments of the test, which are picklable.

    `settings` are those of `run_ranks`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.multirank
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            run_ranks(_Body(body), arguments, world_size=world_size, **settings)

        return test

    return decorate


def _collect(
    readers: list[multiprocessing.connection.Connection], *, timeout_s: float, grace_s: float
) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    open_readers = {reader: rank for rank, reader in enumerate(readers)}
    deadline_s = time.monotonic() + timeout_s
    while open_readers:
        left_s = deadline_s - time.monotonic()
        ready = multiprocessing.connection.wait(list(open_readers), timeout=max(left_s, 0.0))
        if not ready:
            break
        for reader in ready:
            rank = open_readers.pop(reader)  # type: ignore[index]
            with contextlib.suppress(EOFError):  # the process is gone without a word: _describe says so
                outcomes[rank] = pickle.loads(readers[rank].recv_bytes())
            if rank not in outcomes or outcomes[rank].traceback is not None:
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
    return outcomes


def _join(processes: list[BaseProcess], *, wait_s: float = GRACE_S) -> None:
    deadline_s = time.monotonic() + wait_s
    for process in processes:
        process.join(timeout=max(deadline_s - time.monotonic(), 0.0))


def _last_words(readers: list[multiprocessing.connection.Connection]) -> dict[int, Outcome]:
    """Return the reports in the pipes of processes that have ended."""
    outcomes: dict[int, Outcome] = {}
    for rank, reader in enumerate(readers):
        with contextlib.suppress(EOFError, OSError):  # the process was killed before it had reported
            if reader.poll():
                outcomes[rank] = pickle.loads(reader.recv_bytes())
    return outcomes


def _end(processes: list[BaseProcess], *, wait_s: float, at_once: bool) -> None:
    for process in processes:
        if at_once:
            process.kill()
        else:
            process.terminate()  # a rank that hangs writes its stacks when it gets this
    _join(processes, wait_s=wait_s)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def _describe(rank: int, outcome: Outcome | None, process: BaseProcess, scratch: Path) -> str:
    if outcome is not None:
        return f"--- rank {rank} raised:\n{outcome.traceback}"
    stacks = scratch / f"stacks-{rank}"
    text = stacks.read_text() if stacks.exists() else ""
    return f"--- rank {rank} did not report (exit code {process.exitcode}); its stacks:\n{text or '(none)'}"


def _rank_main(job: _Job, writer: multiprocessing.connection.Connection) -> None:
    for name in os.environ.keys() - job.environment.keys():
        del os.environ[name]
    os.environ.update(job.environment)
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",  # torch's checkpoint process takes the host name otherwise
        RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(job.rank),
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with (job.scratch / f"stacks-{job.rank}").open("w") as stacks:
        faulthandler.register(signal.SIGTERM, file=stacks, chain=True)
        outcome = _run(job)
        faulthandler.unregister(signal.SIGTERM)
    writer.send_bytes(pickle.dumps(outcome))
    writer.close()


def _run(job: _Job) -> Outcome:
    secrets_watch.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            if not job.process_group:
                value = job.function(*job.args)
                secrets_watch.check()
                return Outcome(value=value)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(job.scratch / "rendezvous"), job.world_size),
                rank=job.rank,
                world_size=job.world_size,
                timeout=dt.timedelta(seconds=job.timeout_s),
            )
            try:
                value = job.function(*job.args)
                secrets_watch.check()
                dist.barrier()  # no rank ends while another one still uses its store
            finally:
                dist.destroy_process_group()
            return Outcome(value=value)
    except BaseException:  # noqa: BLE001  CheckpointException is one, and a test must hear of every kind
        return Outcome(traceback=traceback.format_exc())
