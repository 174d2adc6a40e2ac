"""A fast place in front of a bucket, beside what its memory and its drive give: ``python -m benchmarks.fast_place``.

One process saves into a directory, and a server on loopback (60 ms to the first byte, 80 MB/s a connection) is the
bucket. What is compared takes turns, after one turn that warms up; medians count. It measures:

- how long `CheckpointManager.save` blocks, beside one plain copy of the same bytes into memory that is in use;
- a foreground save, beside `write` and `fsync` of the same bytes by as many threads;
- `restore` from the fast place, beside `restore` of the same step from the bucket, each into the same tensors;
- the pace of a training loop beside a save and its copy to the bucket;
- with ``--hosts``, only this: the copy that two ranks make, each from a directory of its own, as two hosts have them,
  beside the copy that rank 0 makes from one directory; and the pace of rank 0 beside both.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import cloudckpt
from benchmarks import servers
from benchmarks.figures import Figure, text
from benchmarks.provenance import write_results
from benchmarks.sweeps import SLOW_BYTES_PER_S, SLOW_LATENCY_S
from benchmarks.training import ALONE_S, compared

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
NUM_TENSORS = 32
_WRITE_BYTES = 8 * MIB
_MIN_THREADS, _MAX_THREADS = 2, 8  # as a save to a path has
_WAIT_S = 300.0
_NEVER = 10**9
_NUM_RANKS = 2


class Bench:
    """The measures. `parent` is a directory of the drive, or of the memory, that the fast place is on."""

    def __init__(
        self, parent: Path, server: servers.Server, *, device: torch.device, num_bytes: int, repetitions: int
    ) -> None:
        self._parent = parent
        self._server = server
        self._device = device
        self._num_bytes = num_bytes
        self._repetitions = repetitions
        self._options = cloudckpt.Options(
            storage_options={"endpoint_url": server.endpoint_url, "region": server.region},
        )
        self.gb_per_s: dict[str, list[float]] = {}
        """Rates from which the ratios are computed."""

    def figures(self) -> Iterator[Figure]:
        """Each as it is there."""
        yield self._blocking()
        yield self._foreground()
        yield self._restore()
        yield self._pace()

    def figures_of_hosts(self) -> Iterator[Figure]:
        """The copies of two ranks, by turns from a directory of each, and from one for both."""
        found: dict[bool, list[_Copies]] = {False: [], True: []}
        for _ in range(self._repetitions):
            for is_shared, copies in found.items():
                self._server.reset()
                with tempfile.TemporaryDirectory(dir=self._parent) as directory:
                    copies.append(self._run_two_ranks(Path(directory), is_shared=is_shared))
        for is_shared, copies in found.items():
            name = "one directory for two ranks" if is_shared else "a directory of each of two ranks"
            for when, seconds in (
                ("that a thread waits for", [one.awaited_s for one in copies]),
                ("beside training", [one.beside_training_s for one in copies]),
            ):
                self.gb_per_s[f"copy {when}, {name}"] = [self._num_bytes / one / 1e9 for one in seconds]
        pairs = list(zip(found[False], found[True], strict=True))
        ratios = [own.awaited_s / shared.awaited_s for own, shared in pairs]
        formula = "seconds of a copy from a directory of each host ÷ from one for all"
        yield self._figure(f"{formula}, awaited", "≤", None, ratios)
        ratios = [own.beside_training_s / shared.beside_training_s for own, shared in pairs]
        yield self._figure(f"{formula}, beside training", "≤", None, ratios)
        for is_shared, copies in found.items():
            formula = f"steps a second of rank 0 beside a copy ÷ without, {'one directory' if is_shared else 'two'}"
            yield self._figure(formula, "≥", 0.97, [one.pace for one in copies])

    def _run_two_ranks(self, directory: Path, *, is_shared: bool) -> _Copies:
        spawning = multiprocessing.get_context("spawn")
        root = f"{self._server.uri}/{time.monotonic_ns()}"
        job = _Job(directory, root, self._options, is_shared, self._num_bytes)
        ranks = [spawning.Process(target=_save_and_copy, args=(rank, job)) for rank in range(_NUM_RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        return _Copies(**json.loads((directory / "copies.json").read_text()))

    def _blocking(self) -> Figure:
        state = self._state()
        copies = [torch.zeros_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in state.values()]

        def copy() -> None:
            for copied, tensor in zip(copies, state.values(), strict=True):
                copied.copy_(tensor, non_blocking=True)

        with self._manager(fast_every=1, save_every=_NEVER) as manager:
            steps = iter(range(1, 10**6))
            ratios = self._by_turns(
                {"save with a fast place, until training goes on": lambda: manager.save(next(steps), state)},
                {"plain copy": copy},
                between=lambda: manager.wait(_WAIT_S),
            )
        return self._figure("seconds that a save blocks ÷ one plain copy", "≤", 1.15, ratios)

    def _foreground(self) -> Figure:
        state = self._state()
        host = torch.zeros(self._num_bytes, dtype=torch.uint8)
        num_threads = min(max(os.cpu_count() or 1, _MIN_THREADS), _MAX_THREADS)
        files = self._parent / "plain"

        def write() -> None:
            files.mkdir()
            view = memoryview(host.numpy())
            share = -(-self._num_bytes // num_threads)
            with ThreadPoolExecutor(num_threads) as pool:
                shares = [view[begin : begin + share] for begin in range(0, self._num_bytes, share)]
                list(pool.map(_write_and_fsync, (files / str(number) for number in range(len(shares))), shares))

        def between() -> None:
            shutil.rmtree(files, ignore_errors=True)
            os.sync()

        with self._manager(fast_every=1, save_every=_NEVER, async_=False) as manager:
            steps = iter(range(1, 10**6))
            ratios = self._by_turns(
                {"foreground save": lambda: manager.save(next(steps), state)},
                {f"write + fsync, {num_threads} threads": write},
                between=between,
            )
        return self._figure("seconds of a foreground save ÷ write + fsync of its bytes", "≤", 1.2, ratios)

    def _restore(self) -> Figure:
        state = self._state()
        wanted = {name: tensor.clone() for name, tensor in state.items()}
        with self._manager(fast_every=1, save_every=1) as manager:
            manager.save(1, state)
        root = manager.root
        (fast,) = self._parent.iterdir()
        opened = contextlib.ExitStack()

        def restore(fast: Path | None) -> None:
            restoring = opened.enter_context(self._manager(root=root, fast=fast))
            restoring.restore(state)

        def check() -> None:
            opened.close()  # looks at the root once more, and is no part of a restore
            if any(not torch.equal(state[name], tensor) for name, tensor in wanted.items()):
                raise RuntimeError("what was restored is not what was saved")
            for tensor in state.values():
                tensor.zero_()

        ratios = self._by_turns(
            {"restore from the fast place": lambda: restore(fast)},
            {"restore from the bucket": lambda: restore(None)},
            between=check,
        )
        return self._figure("seconds to restore from the fast place ÷ from the bucket", "≤", 0.2, ratios)

    def _pace(self) -> Figure:
        state = self._state()
        ratios = []
        with self._manager(fast_every=1, save_every=1) as manager:
            for step in range(1, self._repetitions + 2):

                def begin(step: int = step) -> Callable[[], bool]:
                    manager.save(step, state)
                    # `wait` would make the copy faster. The loop asks with each of its steps: all else is done before.
                    return functools.partial(_is_drained, manager, manager.uri_of(step))

                found = compared(begin)
                if step > 1:
                    ratios.append(found.steps_per_s / found.steps_per_s_alone)
        return self._figure("steps a second beside a save and its copy to the bucket ÷ without", "≥", 0.97, ratios)

    def _by_turns(
        self,
        ours: dict[str, Callable[[], Any]],
        base: dict[str, Callable[[], Any]],
        *,
        between: Callable[[], Any] = lambda: None,
    ) -> list[float]:
        ((our_name, our_operation),) = ours.items()
        ((base_name, base_operation),) = base.items()
        ratios = []
        for repetition in range(self._repetitions + 1):
            base_s = self._timed(base_operation)
            between()
            our_s = self._timed(our_operation)
            between()
            if repetition:
                self.gb_per_s.setdefault(base_name, []).append(self._num_bytes / base_s / 1e9)
                self.gb_per_s.setdefault(our_name, []).append(self._num_bytes / our_s / 1e9)
                ratios.append(our_s / base_s)
        return ratios

    def _timed(self, operation: Callable[[], Any]) -> float:
        gc.collect()
        self._finish()
        started_s = time.perf_counter()
        operation()
        self._finish()
        return time.perf_counter() - started_s

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _state(self) -> dict[str, torch.Tensor]:
        numel = self._num_bytes // NUM_TENSORS // 4
        return {
            f"weight.{number}": torch.arange(numel, dtype=torch.int32, device=self._device) + number
            for number in range(NUM_TENSORS)
        }

    @contextlib.contextmanager
    def _manager(self, *, root: str | None = None, **settings: Any) -> Iterator[cloudckpt.CheckpointManager]:
        """A manager over places that were never used, the only ones there are, unless they are given."""
        if root is None:
            self._server.reset()
            for directory in self._parent.iterdir():
                shutil.rmtree(directory)
            root = f"{self._server.uri}/{time.monotonic_ns()}"
            settings["fast"] = tempfile.mkdtemp(prefix="fast-", dir=self._parent)
        with cloudckpt.CheckpointManager(root, no_dist=True, options=self._options, **settings) as manager:
            yield manager

    def _figure(self, formula: str, sense: Any, bar: float | None, values: list[float]) -> Figure:
        name = f"{self._num_bytes / MIB:g} MiB, {self._device.type}, {self._parent.parent}"
        return Figure(name=name, formula=formula, sense=sense, bar=bar, values=tuple(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """One copy that a thread waits for, and one beside training, as rank 0 sees them."""

    awaited_s: float
    beside_training_s: float
    pace: float
    """Steps a second beside the second one, divided by those without."""


class _Job(NamedTuple):
    """Two ranks that save and copy."""

    directory: Path
    root: str
    options: cloudckpt.Options
    is_shared: bool
    """True if the ranks share one directory."""
    num_bytes: int


def _save_and_copy(rank: int, job: _Job) -> None:
    """Run one of the ranks."""
    dist.init_process_group("gloo", init_method=f"file://{job.directory}/rendezvous", rank=rank, world_size=_NUM_RANKS)
    numel = job.num_bytes // _NUM_RANKS // NUM_TENSORS // 4
    state = {f"own-{rank}.{number}": torch.arange(numel, dtype=torch.int32) + number for number in range(NUM_TENSORS)}
    fast = job.directory / ("shared" if job.is_shared else f"host-{rank}")
    with cloudckpt.CheckpointManager(job.root, save_every=1, fast=fast, fast_every=1, options=job.options) as manager:
        begun_s = ended_s = 0.0
        for step in (1, 2):  # the first one warms up
            handle = manager.save(step, state)
            assert isinstance(handle, cloudckpt.AsyncSave)  # noqa: S101
            handle.result(_WAIT_S)
            dist.barrier()
            begun_s = time.perf_counter()
            manager.wait(_WAIT_S)
            ended_s = time.perf_counter()  # rank 0 has waited for both
            dist.barrier()

        def begin() -> Callable[[], bool]:
            nonlocal began_s
            manager.save(3, state)
            began_s = time.perf_counter()
            return functools.partial(_is_drained, manager, manager.uri_of(3))

        began_s = 0.0
        if rank:
            manager.save(3, state)
        else:
            found = compared(begin)
            took_s = time.perf_counter() - began_s - ALONE_S  # the loop goes on alone at its end
            pace = found.steps_per_s / found.steps_per_s_alone
            copies = _Copies(awaited_s=ended_s - begun_s, beside_training_s=took_s, pace=pace)
            (job.directory / "copies.json").write_text(json.dumps(asdict(copies)))
        dist.barrier()
    dist.destroy_process_group()


def _is_drained(manager: cloudckpt.CheckpointManager, uri: str) -> bool:
    report = manager.drains
    if report is not None and report.failed:
        raise RuntimeError(f"a step was not copied to the bucket: {report.failed}")
    return report is not None and uri in report.drained


def _write_and_fsync(path: Path, content: memoryview) -> None:
    with path.open("xb", buffering=0) as file:
        for begin in range(0, len(content), _WRITE_BYTES):
            file.write(content[begin : begin + _WRITE_BYTES])
        os.fsync(file)


def main(argv: list[str] | None = None) -> int:
    """Return 0 where all bars are met, 1 where one is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fast_place",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fasts3-binary", type=Path, required=True, help="the server")
    parser.add_argument("--parent", type=Path, default=Path("/dev/shm"), help="of the fast place (%(default)s)")  # noqa: S108  # memory, where there is no drive
    parser.add_argument("--mib", type=int, default=1024, help="of the state (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="of the state (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="after one that warms up (default: %(default)s)")
    parser.add_argument("--hosts", action="store_true", help="measure only copies from a directory of each host")
    parser.add_argument("--results", type=Path, help="write everything there as JSON")
    arguments = parser.parse_args(argv)
    figures = []
    with (
        tempfile.TemporaryDirectory(prefix="cloudckpt-benchmark-", dir=arguments.parent) as parent,
        servers.fasts3(arguments.fasts3_binary, latency_s=SLOW_LATENCY_S, bytes_per_s=SLOW_BYTES_PER_S) as server,
    ):
        os.environ |= servers.environment(None)
        bench = Bench(
            Path(parent),
            server,
            device=torch.device(arguments.device),
            num_bytes=arguments.mib * MIB,
            repetitions=arguments.repetitions,
        )
        for figure in bench.figures_of_hosts() if arguments.hosts else bench.figures():
            print(f"{figure.name}: {figure.formula}: {figure.verdict}", file=sys.stderr, flush=True)
            figures.append(figure)
            if arguments.results is not None:  # after each: a run that is interrupted keeps those that are complete
                write_results(arguments.results, ROOT, gb_per_s=bench.gb_per_s, figures=[*map(asdict, figures)])
    print(text(figures, bench.gb_per_s))
    return int(any(figure.bar is not None and not figure.verdict.startswith("met") for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
