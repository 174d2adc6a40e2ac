"""Simulate the costs of large jobs' checkpoints, apart from their bytes: `python -m benchmarks.scale`.

Each size of job runs in a process of its own, on one core: 300 tensors on each rank, up to 16,384 ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file
    sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.scaling.growth import growth_of, verdicts  # noqa: E402
from benchmarks.scaling.job import NUM_TENSORS, Job  # noqa: E402
from benchmarks.scaling.simulate import simulate  # noqa: E402
from benchmarks.scaling.table import plot, table  # noqa: E402

DEFAULT_RANKS = (16, 64, 256, 1024)
_STEP_RANKS = 16  # of the mesh of two dimensions


def main(argv: list[str] | None = None) -> int:
    """Return 0, or 1 where `--check-bars` was given and a bar was missed."""
    arguments = _arguments(argv)
    if arguments.one is not None:
        print(json.dumps(_measured(arguments.one, with_planning=arguments.one <= arguments.plan_up_to)))
        return 0
    sizes = []
    for num_ranks in sorted(set(arguments.ranks)):
        print(f"{num_ranks} ranks, {num_ranks * NUM_TENSORS:,} chunks …", file=sys.stderr, flush=True)
        sizes.append(_in_own_process(num_ranks, arguments.plan_up_to))
    lines = verdicts(sizes)
    print(table(sizes))
    print()
    for is_met, line in lines:
        print(f"{'met   ' if is_met else 'MISSED'}  {line}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_document(sizes, lines), indent=1) + "\n")
    if arguments.plot is not None:
        plot(sizes, arguments.plot)
    return 1 if arguments.check_bars and not all(is_met for is_met, _ in lines) else 0


def _measured(num_ranks: int, *, with_planning: bool) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    job = Job(num_ranks=num_ranks)
    outcome = simulate(job, with_planning=with_planning)
    return {"num_ranks": num_ranks, "num_chunks": job.num_chunks, **dataclasses.asdict(outcome)}


def _in_own_process(num_ranks: int, plan_up_to: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--one", str(num_ranks), "--plan-up-to", str(plan_up_to)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _document(sizes: list[dict[str, Any]], lines: list[tuple[bool, str]]) -> dict[str, Any]:
    packages = ("cloudckpt", "torch", "msgspec", "numpy")
    return {
        "schema": 1,
        "provenance": {
            **provenance(ROOT),
            "versions": {"cloudckpt": {name: importlib.metadata.version(name) for name in packages}},
        },
        "sweep": "scale",
        "sizes": sizes,
        "growth_exponents": growth_of(sizes),
        "bars": [{"is_met": is_met, "line": line} for is_met, line in lines],
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=_ranks, nargs="+", default=DEFAULT_RANKS, help="sizes of job, multiples of 16")
    parser.add_argument(
        "--plan-up-to",
        type=int,
        default=DEFAULT_RANKS[-1],
        metavar="RANKS",
        help="of larger jobs leave out torch's global plan, which takes most of the time and memory",
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--plot", type=Path, help="draw the growth there (PNG; needs matplotlib)")
    parser.add_argument("--check-bars", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--one", type=_ranks, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _ranks(text: str) -> int:
    number = int(text)
    if number < _STEP_RANKS or number % _STEP_RANKS:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {_STEP_RANKS}")
    return number


if __name__ == "__main__":
    sys.exit(main())
