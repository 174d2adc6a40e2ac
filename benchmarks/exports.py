"""An export within one service, by the service and through the client: ``python -m benchmarks.exports``.

A server on loopback has a checkpoint with the shapes of a model of 8 billion parameters in bfloat16, as ranks of FSDP2
save it. One process exports it to safetensors files on the same server. The systems take turns, after one turn each
that warms up and compares every byte of the files.

- `service`: the service copies what it can (``docs/design/040-exports-by-the-service.md``).
- `streamed`: the target has another name for the same endpoint, so every byte is read and sent.

The server takes no time for a copy besides its latency, and S3 does. So the bytes are what the figures show, and the
seconds are those that the client needs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import cloudckpt
from benchmarks import servers
from benchmarks.provenance import write_results
from benchmarks.sweeps import SLOW_BYTES_PER_S, SLOW_LATENCY_S
from benchmarks.turns import rotated
from cloudckpt.stores import open_store

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
_HIDDEN, _INNER, _KEYS = 4096, 14336, 1024
_SHAPES = {
    "q": (_HIDDEN, _HIDDEN),
    "k": (_KEYS, _HIDDEN),
    "v": (_KEYS, _HIDDEN),
    "o": (_HIDDEN, _HIDDEN),
    "gate": (_INNER, _HIDDEN),
    "up": (_INNER, _HIDDEN),
    "down": (_HIDDEN, _INNER),
    "norm": (_HIDDEN,),
}
_LAYER_BYTES = 2 * sum(torch.Size(shape).numel() for shape in _SHAPES.values())
_TIMEOUT_S = 240.0


def options_of(endpoint_url: str) -> cloudckpt.Options:
    """Return options that reach the server by this name."""
    credentials = {"access_key_id": servers.ACCESS_KEY_ID, "secret_access_key": servers.SECRET_ACCESS_KEY}
    return cloudckpt.Options(storage_options={"endpoint_url": endpoint_url, "region": servers.REGION, **credentials})


def save_rank(uri: str, endpoint_url: str, num_layers: int) -> None:
    """Save the shards of one rank."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(dist.get_rank())
    state = {}
    for layer in range(num_layers):
        for name, shape in _SHAPES.items():
            local = torch.empty(shape[0] // dist.get_world_size(), *shape[1:], dtype=torch.int16)
            local.random_(-(2**15), 2**15, generator=generator)
            shard = DTensor.from_local(local.view(torch.bfloat16), mesh, [Shard(0)])
            state[f"layers.{layer}.{name}"] = shard
    cloudckpt.save({"model": state}, uri, options=options_of(endpoint_url))
    dist.destroy_process_group()


def save(server: servers.Server, *, num_layers: int, num_ranks: int) -> str:
    """Save the model by processes of its own, and return the URI."""
    with servers.reserved_port() as port:
        pass
    uri = f"{server.uri}/step-1"
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    command = [sys.executable, "-m", "benchmarks.exports", "--rank-of", uri, str(server.endpoint_url), str(num_layers)]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(num_ranks)]
    try:
        codes = [rank.wait(_TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise RuntimeError(f"the save failed on {num_ranks} ranks: {codes}")
    return uri


def take_turn(server: servers.Server, uri: str, system: str) -> dict[str, Any]:
    """Export once, and return the figures of this turn."""
    own = str(server.endpoint_url)
    target = own if system == "service" else own.replace("127.0.0.1", "localhost")
    before = server.counts()
    begun_s = time.perf_counter()
    report = cloudckpt.export_checkpoint(
        uri,
        f"{server.uri}/{system}",
        include="model",
        strip_prefix="model",
        overwrite=True,
        options=options_of(own),
        target_options=options_of(target),
    )
    spent_s = time.perf_counter() - begun_s
    after = server.counts()
    assert before is not None and after is not None  # noqa: S101, PT018  # fasts3 counts
    return {
        "seconds": spent_s,
        "num_bytes": report.num_bytes,
        "num_service_bytes": report.num_service_bytes,
        "num_bytes_to_client": after.num_bytes_sent - before.num_bytes_sent,
        "num_bytes_from_client": after.num_bytes_received - before.num_bytes_received,
        "num_requests": after.num_requests - before.num_requests,
    }


def compare(server: servers.Server) -> None:
    """Raise if the two exports differ in a byte."""
    stores = [open_store(f"{server.uri}/{system}", options_of(str(server.endpoint_url))) for system in SYSTEMS]
    for keys in zip(*(sorted(info.key for info in store.list()) for store in stores), strict=True):
        one, other = (store.read(key, max_bytes=1 << 40) for store, key in zip(stores, keys, strict=True))
        if keys[0] != keys[1] or one != other:
            raise RuntimeError(f"the exports differ in {keys}")


SYSTEMS = ("service", "streamed")


def main(argv: list[str] | None = None) -> int:
    """Print the figures, and write them to a file if one is named."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exports",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8], help="of the save (default: 1 8)")
    parser.add_argument("--layers", type=int, default=2, help=f"of {_LAYER_BYTES // MIB} MiB each (default: 2)")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each system (default: 3)")
    parser.add_argument("--out", type=Path, help="write all samples to this file as JSON")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rank_of:
        uri, endpoint_url, num_layers = arguments.rank_of
        save_rank(uri, endpoint_url, int(num_layers))
        return 0
    binary = servers.require_fasts3(parser, ROOT)
    runs = []
    for num_ranks in arguments.ranks:
        with servers.fasts3(binary, latency_s=SLOW_LATENCY_S, bytes_per_s=SLOW_BYTES_PER_S) as server:
            uri = save(server, num_layers=arguments.layers, num_ranks=num_ranks)
            turns: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
            for repetition in range(arguments.repetitions + 1):
                for system in rotated(list(SYSTEMS), repetition):
                    turn = take_turn(server, uri, system)
                    if repetition:
                        turns[system].append(turn)
                if not repetition:
                    compare(server)
        runs.append({"ranks": num_ranks, "turns": dict(turns)})
        for system, own in turns.items():
            crossed = [(one["num_bytes_to_client"] + one["num_bytes_from_client"]) / one["num_bytes"] for one in own]
            seconds = statistics.median(one["seconds"] for one in own)
            print(
                f"{num_ranks} ranks, {system}: {statistics.median(crossed):.3f} times the files' bytes crossed the "
                f"client, {seconds:.2f} s, {own[0]['num_requests']} requests",
                flush=True,
            )
    if arguments.out:
        write_results(arguments.out, ROOT, arguments={"layers": arguments.layers}, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
