"""The cost of comparing replicas in a save: each rank holds a whole model and Adam's moments, as under DDP.

Saves that compare and saves that take all copies for equal, without reading them, alternate; their plans are the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import cloudckpt
from benchmarks.payloads import Payload, transformer, uniform
from cloudckpt.dcp import save_planner
from cloudckpt.dcp.replicas import Fingerprints, SynchronizedNames

PAYLOADS = {
    one.name: one
    for one in (transformer(num_layers=3, vocabulary=8000), uniform(2000, 64 * 1024), uniform(20, 16 * 2**20))
}
ARMS = ("assumed", "sample", "whole")
NUM_WARM_UPS = 1


def main() -> int:
    """Print one line for each payload and number of ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--payload", choices=PAYLOADS, nargs="+", default=list(PAYLOADS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go (default: a temporary folder)")
    arguments = parser.parse_args()
    for name in arguments.payload:
        for num_ranks in arguments.ranks:
            folder = Path(tempfile.mkdtemp(prefix="replicas-", dir=arguments.folder))
            try:
                multiprocessing.spawn(
                    _run_rank, (num_ranks, PAYLOADS[name], arguments.repetitions, folder), nprocs=num_ranks
                )
            finally:
                shutil.rmtree(folder)
    return 0


def _run_rank(rank: int, num_ranks: int, payload: Payload, repetitions: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=num_ranks)
    state: dict[str, Any] = {
        f"{group.name}.{number}": torch.full(group.shape, 1.0)
        for group in payload.tensors
        for number in range(group.count)
    }
    compare, compared_s = save_planner.take_fingerprints, list[float]()

    def assume(items: list[Any], *_: Any, **__: Any) -> Fingerprints:
        of_items = array("Q", [1]) * len(items)
        return Fingerprints(of_items=of_items, synchronized=SynchronizedNames(), common=frozenset())

    def measure(*args: Any, **kwargs: Any) -> Fingerprints:
        begun_s = time.thread_time()
        fingerprints = compare(*args, **kwargs)
        compared_s.append(time.thread_time() - begun_s)
        return fingerprints

    taken: dict[str, list[tuple[float, float, float]]] = {arm: [] for arm in ARMS}
    for turn in range(NUM_WARM_UPS + repetitions):
        for arm in ARMS if turn % 2 else reversed(ARMS):
            save_planner.take_fingerprints = assume if arm == "assumed" else measure
            options = cloudckpt.Options(compare_replicas="whole" if arm == "whole" else "sample")
            dist.barrier()
            begun_s, used_s = time.monotonic(), time.process_time()
            cloudckpt.save(state, f"{folder}/{arm}", overwrite=True, options=options)
            mine = (time.monotonic() - begun_s, time.process_time() - used_s, compared_s[-1] if compared_s else 0.0)
            gathered: list[Any] = [None] * num_ranks
            dist.all_gather_object(gathered, mine)
            if turn >= NUM_WARM_UPS:
                walls, cpus, compares = zip(*gathered, strict=True)
                taken[arm].append((max(walls), sum(cpus), sum(compares)))
    if rank == 0:
        assumed_s, assumed_cpu_s, _ = map(statistics.median, zip(*taken["assumed"], strict=True))
        for arm in ARMS[1:]:
            wall_s, cpu_s, compare_s = map(statistics.median, zip(*taken[arm], strict=True))
            print(
                f"{payload.name} ({payload.num_tensors} tensors, {payload.num_bytes / 1e6:.0f} MB), {num_ranks} ranks, "
                f"{os.cpu_count()} cores, {arm}: wall {wall_s:.3f} s instead of {assumed_s:.3f}, CPU of all ranks "
                f"{cpu_s:.3f} s instead of {assumed_cpu_s:.3f}, of which comparing {compare_s * 1000:.1f} ms = "
                f"{100 * compare_s / cpu_s:.2f} %",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
