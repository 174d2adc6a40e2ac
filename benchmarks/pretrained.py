"""A model from safetensors files in a bucket into its shards, beside others' ways: ``python -m benchmarks.pretrained``.

A server on loopback has the files of a decoder in bfloat16. Each turn starts new ranks, whose model is sharded by FSDP2
on gloo, and times the load alone: from a barrier to the end of the slowest rank. The systems take turns, after one turn
each that warms up and compares every element.

- `cloudckpt`: ``cloudckpt.load(uri, model=model)``.
- `cloudckpt-exact`: the same without gaps: ``max_gap_bytes=0``, ``max_over_read=0.0``. On several ranks.
- `runai`: Run:ai's streamer (``runai-model-streamer[s3]``) on each rank, which keeps its part of each tensor.
- `runai-distributed`: the same with ``is_distributed=True``: ranks read parts, and broadcast them.
- `download`: rank 0 downloads the files by boto3 into memory (``/dev/shm``), and each rank takes slices by `safe_open`.
- `fsspec`: each rank reads whole files by s3fs, and keeps its part of each tensor.

The bars of `cloudckpt`: each rank reads at most 1.05 times the bytes that it keeps, and one rank is at least as fast as
Run:ai's streamer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import servers
from benchmarks.envs import RivalEnvironment, environment_of, is_installed_here, set_up
from benchmarks.figures import Figure, text
from benchmarks.provenance import write_results
from benchmarks.sweeps import SLOW_BYTES_PER_S, SLOW_LATENCY_S
from benchmarks.turns import rotated

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
_HIDDEN, _INNER, _KEYS = 2048, 5632, 256  # of a model with 1.1 billion parameters
_LAYER_BYTES = 2 * (2 * _HIDDEN * _HIDDEN + 2 * _KEYS * _HIDDEN + 3 * _INNER * _HIDDEN + 2 * _HIDDEN)
_FILE_BYTES = 256 * MIB
_TIMEOUT_S = 300.0
_MODULES = {
    "cloudckpt": ("cloudckpt.api", "cloudckpt.stores.s3"),
    "cloudckpt-exact": ("cloudckpt.api", "cloudckpt.stores.s3"),
    "runai": ("runai_model_streamer",),
    "runai-distributed": ("runai_model_streamer",),
    "download": ("boto3", "safetensors"),
    "fsspec": ("s3fs", "safetensors.torch"),
}
_OF_SEVERAL_RANKS = ("cloudckpt-exact", "runai-distributed")
_RUNAI = RivalEnvironment(system="runai_model_streamer", requirements=("runai-model-streamer[s3]>=0.15",))
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # the files are as near as they can be


class Layer(nn.Module):
    """The parameters of a decoder's layer with grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"q": _HIDDEN, "k": _KEYS, "v": _KEYS, "o": _HIDDEN, "gate": _INNER, "up": _INNER}
        for name, rows in shapes.items():
            self.register_module(name, nn.Linear(_HIDDEN, rows, bias=False, dtype=torch.bfloat16, device="meta"))
        self.down = nn.Linear(_INNER, _HIDDEN, bias=False, dtype=torch.bfloat16, device="meta")
        self.norms = nn.ModuleList(nn.RMSNorm(_HIDDEN, dtype=torch.bfloat16, device="meta") for _ in range(2))


def make_model(num_bytes: int) -> nn.Module:
    """Return a model of about this size on the meta device."""
    return nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(max(num_bytes // _LAYER_BYTES, 1)))})


def fill(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the contents of a tensor, which its name decides. They repeat, but not by a power of two."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    block = torch.randint(-(2**15), 2**15, (65521,), dtype=torch.int16, generator=generator)
    num_blocks = -(-shape.numel() // len(block))
    return block.repeat(num_blocks)[: shape.numel()].view(torch.bfloat16).view(shape)


def put_files(uri: str, options: Any, num_bytes: int) -> int:
    """Write the files and their index, and return the bytes of the tensors."""
    from safetensors.torch import save  # noqa: PLC0415  # rivals' environments need not have it

    from cloudckpt.stores import open_store  # noqa: PLC0415
    from cloudckpt.testing import damage  # noqa: PLC0415

    store, groups, sizes = open_store(uri, options), [{}], [0]
    for name, parameter in make_model(num_bytes).named_parameters():
        if sizes[-1] + parameter.nbytes > _FILE_BYTES:
            groups.append({})
            sizes.append(0)
        groups[-1][name] = parameter.shape
        sizes[-1] += parameter.nbytes
    weight_map = {}
    for number, group in enumerate(groups, 1):
        key = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        damage.overwrite(store, key, save({name: fill(name, shape) for name, shape in group.items()}))
        weight_map.update(dict.fromkeys(group, key))
    index = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})
    damage.overwrite(store, "model.safetensors.index.json", index.encode())
    return sum(sizes)


class Rank:
    """One rank of one turn."""

    def __init__(self, system: str, uri: str, num_bytes: int) -> None:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        self._uri, self._system = uri, system
        for module in _MODULES[system]:  # as a job has them by then
            importlib.import_module(module)
        dist.init_process_group("gloo")
        self._model = make_model(num_bytes)
        for layer in self._model["layers"]:
            fully_shard(layer)
        self._model.to_empty(device="cpu")
        for parameter in self._model.parameters():
            parameter.detach().to_local().zero_()
        self._parameters = dict(self._model.named_parameters())
        self._files = [f"model-{n + 1:05d}-of-{self._num_files():05d}.safetensors" for n in range(self._num_files())]

    def run(self, *, compares: bool) -> float:
        """Load, and return the seconds of the slowest rank."""
        load = getattr(self, f"_load_by_{self._system.replace('-', '_')}")
        dist.barrier()
        begun_s = time.perf_counter()
        load()
        dist.barrier()
        spent_s = time.perf_counter() - begun_s
        if compares:
            for name, parameter in self._parameters.items():
                found, expected = parameter.detach().to_local(), self._part(fill(name, parameter.shape))
                if not torch.equal(found.view(torch.int16), expected.view(torch.int16)):  # some bits are NaN
                    raise RuntimeError(f"{name} is not what the files have")
        return spent_s

    def _num_files(self) -> int:
        total, count = 0, 1
        for parameter in self._parameters.values():
            num_bytes = parameter.numel() * parameter.element_size()
            total, count = (num_bytes, count + 1) if total + num_bytes > _FILE_BYTES else (total + num_bytes, count)
        return count

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(dist.get_world_size())[dist.get_rank()]

    def _keep(self, name: str, whole: torch.Tensor) -> None:
        self._parameters[name].detach().to_local().copy_(self._part(whole))

    def _load_by_cloudckpt(self, **advanced: Any) -> None:
        import cloudckpt  # noqa: PLC0415

        endpoint = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "region": os.environ["AWS_DEFAULT_REGION"]}
        options = cloudckpt.Options(storage_options=endpoint, advanced=cloudckpt.AdvancedOptions(**advanced))
        cloudckpt.load(self._uri, model=self._model, options=options)

    def _load_by_cloudckpt_exact(self) -> None:
        self._load_by_cloudckpt(max_gap_bytes=0, max_over_read=0.0)

    def _load_by_runai(self, *, is_distributed: bool = False) -> None:
        from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

        with SafetensorsStreamer() as streamer:
            streamer.stream_files([f"{self._uri}/{file}" for file in self._files], is_distributed=is_distributed)
            for name, tensor in streamer.get_tensors():
                self._keep(name, tensor)

    def _load_by_runai_distributed(self) -> None:
        self._load_by_runai(is_distributed=True)

    def _load_by_download(self) -> None:
        import boto3  # noqa: PLC0415
        from safetensors import safe_open  # noqa: PLC0415

        folder = Path(_SHARED_MEMORY, f"pretrained-{os.environ['MASTER_PORT']}")
        if dist.get_rank() == 0:
            folder.mkdir()
            bucket, _, prefix = self._uri.removeprefix("s3://").partition("/")
            client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
            for file in self._files:
                client.download_file(bucket, f"{prefix}/{file}", str(folder / file))
        dist.barrier()
        size, rank = dist.get_world_size(), dist.get_rank()
        for file in self._files:
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no dict
                    rows = -(-self._parameters[name].shape[0] // size)
                    part = opened.get_slice(name)[rows * rank : rows * (rank + 1)]
                    self._parameters[name].detach().to_local().copy_(part)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)

    def _load_by_fsspec(self) -> None:
        import fsspec  # noqa: PLC0415
        from safetensors.torch import load  # noqa: PLC0415

        system = fsspec.filesystem("s3", client_kwargs={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]})
        for file in self._files:
            for name, tensor in load(system.cat_file(f"{self._uri}/{file}")).items():
                self._keep(name, tensor)


SYSTEMS = tuple(_MODULES)


def python_of(system: str) -> Path:
    """Return the interpreter that a system runs in."""
    environment = {"runai": _RUNAI, "runai-distributed": _RUNAI, "fsspec": environment_of("s3fs")}.get(system)
    if environment is None or is_installed_here(environment):
        return Path(sys.executable)
    return set_up(environment, ROOT)


def _uri(server: servers.Server) -> str:
    return f"{server.uri}/hub"


def take_turn(
    python: Path, system: str, server: servers.Server, *, num_bytes: int, num_ranks: int, compares: bool
) -> tuple[float, int]:
    """Run one turn in new processes. Returns its seconds, and the bytes that the server sent."""
    with servers.reserved_port() as port:
        pass
    common = {
        **os.environ,
        **servers.environment(None),
        "AWS_ENDPOINT_URL": str(server.endpoint_url),
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_LOG_LEVEL": "ERROR",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    before = server.counts()
    command = [
        python,
        "-m",
        "benchmarks.pretrained",
        "--turn-of",
        system,
        _uri(server),
        str(num_bytes),
        str(int(compares)),
    ]
    with tempfile.TemporaryFile("w+") as said:
        ranks = [
            subprocess.Popen(
                command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=said
            )
            for rank in range(num_ranks)
        ]
        try:
            answers = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            said.seek(0)
            raise RuntimeError(f"{system} failed on {num_ranks} ranks:\n{said.read()[-2000:]}")
    after = server.counts()
    assert before is not None and after is not None  # noqa: S101, PT018  # fasts3 counts
    return max(float(answer.split()[-1]) for answer in answers), after.num_bytes_sent - before.num_bytes_sent


def measure(
    server: servers.Server, wire: str, arguments: argparse.Namespace, pythons: dict[str, Path]
) -> Iterator[tuple[dict[str, Any], list[Figure], dict[str, list[float]]]]:
    """Yield, for each number of ranks, the samples, the figures and the rates."""
    from cloudckpt.options import Options  # noqa: PLC0415

    credentials = {"access_key_id": servers.ACCESS_KEY_ID, "secret_access_key": servers.SECRET_ACCESS_KEY}
    endpoint = {"endpoint_url": server.endpoint_url, "region": server.region, **credentials}
    kept_bytes = put_files(_uri(server), Options(storage_options=endpoint), arguments.mib * MIB)
    for num_ranks in arguments.ranks:
        taken: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        failed: dict[str, str] = {}
        for repetition in range(arguments.repetitions + 1):
            for system in rotated(list(pythons), repetition):
                if system in failed or (num_ranks == 1 and system in _OF_SEVERAL_RANKS):
                    continue
                try:
                    turn = take_turn(
                        pythons[system],
                        system,
                        server,
                        num_bytes=arguments.mib * MIB,
                        num_ranks=num_ranks,
                        compares=not repetition,
                    )
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failed[system] = str(error)
                    print(f"{system}: {error}", file=sys.stderr, flush=True)
                    continue
                if repetition:
                    taken[system].append(turn)
                    print(f"{wire}, {num_ranks} ranks, {system}: {turn[0]:.2f} s", file=sys.stderr, flush=True)
        name = f"{arguments.mib} MiB, {wire}, {num_ranks} ranks"
        rates = {f"{name}, {system}": [kept_bytes / s / 1e9 for s, _ in turns] for system, turns in taken.items()}
        figures = [
            Figure(
                name=f"{name}, {system}",
                formula="bytes that the server sent ÷ bytes that the ranks keep",
                sense="≤",
                bar=1.05 if system == "cloudckpt" else None,
                values=tuple(sent / kept_bytes for _, sent in turns),
            )
            for system, turns in taken.items()
        ]
        if num_ranks == 1 and taken["runai"] and taken["cloudckpt"]:
            pairs = zip(taken["runai"], taken["cloudckpt"], strict=False)
            ratios = tuple(theirs[0] / ours[0] for theirs, ours in pairs)
            formula = "seconds of Run:ai's streamer ÷ ours"
            figures.append(Figure(name=name, formula=formula, sense="≥", bar=1.0, values=ratios))
        yield {"wire": wire, "ranks": num_ranks, "samples": dict(taken), "failed": failed}, figures, rates


def main(argv: list[str] | None = None) -> int:
    """Return 0 where all bars are met, 1 where one is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pretrained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fasts3-binary", type=Path, help="the server")
    parser.add_argument("--mib", type=int, default=2048, help="of the model (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)")
    parser.add_argument("--wires", nargs="+", choices=("http", "slow"), default=["http", "slow"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--repetitions", type=int, default=3, help="after one that warms up (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="write everything there as JSON")
    parser.add_argument("--turn-of", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.turn_of is not None:
        system, uri, num_bytes, compares = arguments.turn_of
        print(Rank(system, uri, int(num_bytes)).run(compares=bool(int(compares))), flush=True)
        dist.destroy_process_group()
        return 0
    pythons = {system: python_of(system) for system in arguments.systems}
    starts: dict[str, Callable[[], Any]] = {
        "http": lambda: servers.fasts3(arguments.fasts3_binary),
        "slow": lambda: servers.fasts3(arguments.fasts3_binary, latency_s=SLOW_LATENCY_S, bytes_per_s=SLOW_BYTES_PER_S),
    }
    figures: list[Figure] = []
    rates: dict[str, list[float]] = {}
    cells = []
    for wire in arguments.wires:
        with starts[wire]() as server:
            for cell, found, of_cell in measure(server, wire, arguments, pythons):
                cells.append(cell)
                figures += found
                rates |= of_cell
                if arguments.results is not None:  # after each: a run that is interrupted keeps those that are complete
                    write_results(
                        arguments.results,
                        ROOT,
                        median_gb_per_s={name: statistics.median(values) for name, values in rates.items()},
                        cells=cells,
                        figures=[*map(asdict, figures)],
                    )
    print(text(figures, rates))
    return int(any(one.bar is not None and one.verdict != "met" for one in figures))


if __name__ == "__main__":
    sys.exit(main())
