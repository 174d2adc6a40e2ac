"""Saves and loads beside bare sockets where memory is slow: ``python -m benchmarks.passes --fasts3-binary PATH``.

cloudckpt and bare sockets take turns, with nothing beside them, and then beside a process that copies memory in a loop.
It takes a core's time and the bandwidth of the memory, as other tenants of a machine do. Each pass over the bytes that
the processor's caches do not hold costs more there. Ratios are of two samples of one round. Bytes of memory traffic are
not counted: virtual machines seldom have the processor's counters.

The bars: a load of 0.8 and a save of 0.9 times the throughput of bare sockets, at 1.5 times their processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import servers
from benchmarks.payloads import MIB, uniform
from benchmarks.places import Places
from benchmarks.progress import Progress
from benchmarks.provenance import provenance
from benchmarks.results.model import Sample
from benchmarks.runner import Row, Run
from benchmarks.sweeps import Cell, Sweep

ROOT = Path(__file__).resolve().parent.parent
MIN_THROUGHPUT = {"save": 0.9, "load": 0.8}
MAX_CPU = 1.5
_TENSOR_BYTES = 32 * MIB
_TIMEOUT_S = 300.0
_COPY_FOR_EVER = """\
import numpy as np
source, target = np.ones(1 << 28, np.uint8), np.zeros(1 << 28, np.uint8)
print(flush=True)
while True:
    np.copyto(target, source)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table, and return 1 if a target is missed."""
    arguments = _arguments(argv)
    payload = uniform(max(arguments.mib * MIB // _TENSOR_BYTES, 1), _TENSOR_BYTES)
    cells = tuple(Cell(payload=payload, wire=wire, systems=("cloudckpt", "limit")) for wire in arguments.wire)
    sweep = Sweep(name="passes", about=__doc__ or "", cells=cells, repetitions=arguments.repetitions)
    about, rows = provenance(ROOT), {}
    for num_neighbours in arguments.neighbours:
        with _copying(num_neighbours):
            rows[num_neighbours] = _measured(sweep, arguments.fasts3_binary)
    lines = [line for number, of_number in rows.items() for line in _compared(number, of_number)]
    print("neighbours | wire, verb | GB/s | GB/s ÷ bare sockets' | CPU s/GB | CPU ÷ bare sockets' | bars")
    print(*(text for text, _ in lines), sep="\n")
    if arguments.out is not None:
        cells_by_number = {number: [row.to_json() for row in of_number] for number, of_number in rows.items()}
        document = {"provenance": about, "parameters": vars(arguments), "cells": cells_by_number}
        arguments.out.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return 0 if all(is_met for _, is_met in lines) else 1


@contextlib.contextmanager
def _copying(num_processes: int) -> Iterator[None]:
    """So many processes copy memory until the context ends."""
    command = [sys.executable, "-c", _COPY_FOR_EVER]
    with contextlib.ExitStack() as stack:
        for _ in range(num_processes):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            if process.stdout is not None:
                process.stdout.readline()  # its memory is there
        yield


def _measured(sweep: Sweep, fasts3_binary: Path) -> list[Row]:
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-logs-")))
        places = Places(stack, fasts3_binary=fasts3_binary, given=None, local_parent=logs)
        has_tls = any(cell.wire == "tls" for cell in sweep.cells)
        run = Run(
            places=places,
            environment=servers.environment(places.certificates.ca_bundle if has_tls else None),
            pythons={},
            options={},
            timeout_s=_TIMEOUT_S,
            logs=logs,
            progress=stack.enter_context(Progress(sweep)),
        )
        run.measure(sweep)
    return run.rows


def _compared(num_neighbours: int, rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """Yield a line for each verb on each wire, and whether its bars are met. The first sample warms up."""
    for row in rows:
        if row.system == "limit":
            continue
        limit = next(one for one in rows if (one.cell, one.verb, one.system) == (row.cell, row.verb, "limit"))
        if row.failed or limit.failed:
            yield f"{num_neighbours} | {row.cell.wire}, {row.verb} | failed: {row.failed or limit.failed}", False
            continue
        pairs: list[tuple[Sample, Sample]] = list(zip(row.samples, limit.samples, strict=True))[1:]
        gb = row.cell.payload.num_bytes / 1e9
        throughput = [bare.wall_s / ours.wall_s for ours, bare in pairs]
        cpu = [ours.cpu_s / bare.cpu_s for ours, bare in pairs]
        is_met = statistics.median(throughput) >= MIN_THROUGHPUT[row.verb] and statistics.median(cpu) <= MAX_CPU
        cells = (
            str(num_neighbours),
            f"{row.cell.wire}, {row.verb}",
            f"{gb / statistics.median(ours.wall_s for ours, _ in pairs):.2f}",
            _range(throughput),
            f"{statistics.median(ours.cpu_s for ours, _ in pairs) / gb:.2f}",
            _range(cpu),
            "met" if is_met else "MISSED",
        )
        yield " | ".join(cells), is_met


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasts3-binary", type=Path, required=True)
    parser.add_argument("--wire", nargs="+", choices=("http", "tls"), default=("http",))
    parser.add_argument("--neighbours", nargs="+", type=int, default=(0, 1), help="processes that copy memory")
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
