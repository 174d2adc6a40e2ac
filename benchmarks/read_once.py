"""Loads of what several ranks want: ``python -m benchmarks.read_once``.

A server on loopback has a checkpoint. The ranks load it, each all of it (`ddp`) or in two replicas of shards (`hsdp`),
by each system in turn, after one turn each that warms up and compares every element. Seconds are from a barrier to the
end of the slowest rank.

- `never`, `always`: ``cloudckpt.load`` with this ``Options(share_reads=…)``.
- `broadcast`: rank 0 loads with cloudckpt, and torch broadcasts each tensor (`ddp` alone).
- `s3torchconnector`: its reader, in which each rank reads for itself.

The wires: `http`; `slow`, with 60 ms to the first byte and 80 MB/s for each connection; `thin`, with 60 ms and 10 MB/s.
The bars: bytes that the server sends ÷ bytes of the checkpoint, and `always` beside `never` on four ranks (`slow`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks import servers
from benchmarks.envs import environment_of, is_installed_here, set_up
from benchmarks.figures import Figure, text
from benchmarks.outcomes import Settings
from benchmarks.provenance import write_results
from benchmarks.sweeps import SLOW_BYTES_PER_S, SLOW_LATENCY_S
from benchmarks.turns import rotated

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("never", "always", "broadcast", "s3torchconnector")
_NUM_TENSORS = 32
_TIMEOUT_S = 580.0
_THIN_BYTES_PER_S = 10e6
"""The rate of one connection on a line that limits a load more than this machine does."""


class Rank:
    """One rank of one cell."""

    def __init__(self, layout: str, endpoint_url: str, num_bytes: int) -> None:
        import cloudckpt  # noqa: PLC0415

        dist.init_process_group("gloo")
        self._rank, self._layout = dist.get_rank(), layout
        self._server = servers._Fasts3(endpoint_url)  # noqa: SLF001  # its counts
        self._endpoint = {"endpoint_url": endpoint_url, "region": servers.REGION}
        self._options = cloudckpt.Options(storage_options=self._endpoint)
        self._rows = num_bytes // _NUM_TENSORS // 4096
        self._state = {f"w{number}": self._make(number) for number in range(_NUM_TENSORS)}
        cloudckpt.save(self._state, "s3://benchmark/ours", options=self._options)

    def _make(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        whole = torch.randint(-(2**31), 2**31, (self._rows, 1024), dtype=torch.int32, generator=generator)
        if self._layout == "ddp":
            return whole
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        part = whole.chunk(mesh.size(1))[mesh.get_local_rank("shard")].clone()
        return DTensor.from_local(part, mesh, (Replicate(), Shard(0)))

    def turn(self, system: str, *, compares: bool) -> tuple[float, int]:
        """Load once. Returns the seconds of the slowest rank, and the bytes that the server sent."""
        for tensor in self._local_tensors():
            tensor.zero_()
        load = getattr(self, f"_load_by_{system}", None) or self._load_by_cloudckpt
        dist.barrier()
        before = self._server.counts().num_bytes_sent
        dist.barrier()
        begun_s = time.perf_counter()
        load(system)
        dist.barrier()
        spent_s = time.perf_counter() - begun_s
        sent_bytes = self._server.counts().num_bytes_sent - before
        if compares:
            for number, tensor in enumerate(self._local_tensors()):
                expected = self._make(number)
                if not torch.equal(tensor, expected.to_local() if isinstance(expected, DTensor) else expected):
                    raise RuntimeError(f"{system} loaded w{number} wrong")
        dist.barrier()
        return spent_s, sent_bytes

    def prepare(self, system: str) -> None:
        """Save what a rival loads."""
        if system == "s3torchconnector":
            dcp.save(self._state, storage_writer=self._rival().writer("s3://benchmark/theirs"))

    def _local_tensors(self) -> list[torch.Tensor]:
        return [one.to_local() if isinstance(one, DTensor) else one for one in self._state.values()]

    def _load_by_cloudckpt(self, system: str) -> None:
        import dataclasses  # noqa: PLC0415

        import cloudckpt  # noqa: PLC0415

        options = dataclasses.replace(self._options, share_reads=system)
        cloudckpt.load(self._state, "s3://benchmark/ours", options=options)

    def _load_by_broadcast(self, _system: str) -> None:
        import cloudckpt  # noqa: PLC0415

        if self._rank == 0:
            cloudckpt.load(self._state, "s3://benchmark/ours", options=self._options, no_dist=True)
        for tensor in self._state.values():
            dist.broadcast(tensor, 0)

    def _load_by_s3torchconnector(self, _system: str) -> None:
        dcp.load(self._state, storage_reader=self._rival().reader("s3://benchmark/theirs"))

    def _rival(self) -> Any:
        from benchmarks.systems import S3TorchConnectorRival  # noqa: PLC0415

        place = {"endpoint_url": self._endpoint["endpoint_url"], "region": servers.REGION, "ca_bundle": None}
        return S3TorchConnectorRival(Settings(**place, no_dist=False))


def run_rank(layout: str, endpoint_url: str, num_bytes: int, repetitions: int, systems: list[str]) -> None:
    """Take all turns of one cell on this rank. Rank 0 prints the samples."""
    rank = Rank(layout, endpoint_url, num_bytes)
    samples: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for system in systems:
        rank.prepare(system)
    for repetition in range(repetitions + 1):
        for system in rotated(systems, repetition):
            sample = rank.turn(system, compares=not repetition)
            if repetition:
                samples[system].append(sample)
    if dist.get_rank() == 0:
        print(json.dumps(samples), flush=True)
    dist.destroy_process_group()


def measure(python: Path, server: servers.Server, arguments: argparse.Namespace, cell: list[str]) -> dict[str, Any]:
    """Run one cell (its layout and number of ranks) in new processes, and return the samples of each system."""
    layout, num_ranks = cell
    with servers.reserved_port() as port:
        pass
    systems = [one for one in arguments.systems if layout == "ddp" or one != "broadcast"]
    command = [python, "-m", "benchmarks.read_once", "--turns-of", layout, str(server.endpoint_url)]
    command += ["--mib", str(arguments.mib), "--repetitions", str(arguments.repetitions), "--systems", *systems]
    environment = {
        **os.environ,
        **servers.environment(None),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(int(num_ranks))
    ]
    try:
        answers = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found: dict[str, Any] = json.loads(answers[0].splitlines()[-1])
    return found


def figures_of(name: str, wire: str, samples: dict[str, Any], num_bytes: int) -> list[Figure]:
    """Return the bars of one cell."""
    seconds = {system: [s for s, _ in turns] for system, turns in samples.items()}
    found = [
        Figure(
            name=f"{name}, {system}",
            formula="bytes that the server sent ÷ bytes of the checkpoint",
            sense="≤",
            bar=1.02 if system == "always" else None,
            values=tuple(sent / num_bytes for _, sent in turns),
        )
        for system, turns in samples.items()
    ]
    for system in seconds.keys() & {"always", "broadcast", "s3torchconnector"} if "never" in seconds else ():
        bar = 2.0 if system == "always" and wire == "slow" and "4 ranks" in name else None
        ratios = tuple(own / shared for own, shared in zip(seconds["never"], seconds[system], strict=True))
        formula = f"seconds of never ÷ seconds of {system}"
        found.append(Figure(name=name, formula=formula, sense="≥", bar=bar, values=ratios))
    return found


def main(argv: list[str] | None = None) -> int:
    """Return 0 where all bars are met, 1 where one is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.read_once",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fasts3-binary", type=Path, help="the server")
    parser.add_argument("--mib", type=int, default=512, help="of the checkpoint (default: %(default)s)")
    parser.add_argument("--ranks", nargs="+", default=["2", "4"], help="(default: 2 4)")
    parser.add_argument("--layouts", nargs="+", choices=("ddp", "hsdp"), default=["ddp", "hsdp"])
    parser.add_argument("--wires", nargs="+", choices=("http", "slow", "thin"), default=["thin", "slow", "http"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--repetitions", type=int, default=3, help="after one that warms up (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="write everything there as JSON")
    parser.add_argument("--turns-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.turns_of is not None:
        layout, endpoint_url = arguments.turns_of
        run_rank(layout, endpoint_url, arguments.mib * MIB, arguments.repetitions, arguments.systems)
        return 0
    rival = environment_of("s3torchconnector")
    needs_rival = "s3torchconnector" in arguments.systems and not is_installed_here(rival)
    python = set_up(rival, ROOT) if needs_rival else Path(sys.executable)
    starts: dict[str, Callable[[], Any]] = {
        "http": lambda: servers.fasts3(arguments.fasts3_binary),
        "slow": lambda: servers.fasts3(arguments.fasts3_binary, latency_s=SLOW_LATENCY_S, bytes_per_s=SLOW_BYTES_PER_S),
        "thin": lambda: servers.fasts3(
            arguments.fasts3_binary, latency_s=SLOW_LATENCY_S, bytes_per_s=_THIN_BYTES_PER_S
        ),
    }
    figures: list[Figure] = []
    rates: dict[str, list[float]] = {}
    cells = []
    for wire in arguments.wires:
        for layout in arguments.layouts:
            for num_ranks in arguments.ranks:
                name = f"{arguments.mib} MiB, {layout}, {num_ranks} ranks, {wire}"
                with starts[wire]() as server:
                    samples = measure(python, server, arguments, [layout, num_ranks])
                num_bytes = arguments.mib * MIB
                cells.append({"name": name, "load_average": os.getloadavg(), "samples": samples})
                figures += figures_of(name, wire, samples, num_bytes)
                of_cell = {system: [num_bytes / s / 1e9 for s, _ in turns] for system, turns in samples.items()}
                rates |= {f"{name}, {system}": values for system, values in of_cell.items()}
                print(name, of_cell, os.getloadavg(), file=sys.stderr, flush=True)
                if arguments.results is not None:  # after each: an interrupted run keeps those that are complete
                    write_results(arguments.results, ROOT, cells=cells, figures=[*map(asdict, figures)])
    print(text(figures, rates))
    return int(any(one.bar is not None and one.verdict != "met" for one in figures))


if __name__ == "__main__":
    sys.exit(main())
