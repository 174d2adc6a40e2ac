"""The weighted mean of checkpoints, streamed and by hand: ``python -m benchmarks.merges``.

A server on loopback has checkpoints of a model in bfloat16. Each turn starts a process, and counts the time, the
processor time and the peak of memory over that of the imports. The systems take turns, after one turn each that warms
up.

- `merge`: ``cloudckpt.merge``, which streams and verifies.
- `by-hand`: `cloudckpt.read` of each checkpoint, a sum in float32, `cloudckpt.save`.
- `torch`: the same with files of `torch.save` that boto3 downloads into memory and uploads: no checks, no commit.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import servers
from benchmarks.provenance import write_results
from benchmarks.turns import rotated

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("merge", "by-hand", "torch")
WEIGHTS = (0.5, 0.3, 0.2)
_TENSOR_BYTES = 32 * MIB
_TIMEOUT_S = 300.0


def _weights_of(number: int, num_mib: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    count, numel = max(num_mib * MIB // _TENSOR_BYTES, 1), _TENSOR_BYTES // 2
    return {f"layers.{k}": torch.randn(numel, generator=generator).to(torch.bfloat16) for k in range(count)}


def _mean(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: sum(
            (weight * state[name].float() for weight, state in zip(WEIGHTS, states, strict=True)),
            start=torch.zeros(1),
        ).to(torch.bfloat16)
        for name in states[0]
    }


def _put(client: Any, uri: str, state: dict[str, torch.Tensor]) -> None:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    bucket, _, key = f"{uri}.pt".removeprefix("s3://").partition("/")
    client.upload_fileobj(file, bucket, key)


def _get(client: Any, uri: str) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    bucket, _, key = f"{uri}.pt".removeprefix("s3://").partition("/")
    client.download_fileobj(bucket, key, file)
    file.seek(0)
    loaded: dict[str, torch.Tensor] = torch.load(file)
    return loaded


def run(system: str, root: str, num_mib: int) -> dict[str, float]:
    """Do what `system` does in this process, and return what it cost."""
    import boto3  # noqa: PLC0415

    import cloudckpt  # noqa: PLC0415
    import cloudckpt.api  # noqa: PLC0415

    client = boto3.client("s3")
    uris = [f"{root}/{number}" for number in range(len(WEIGHTS))]
    if system == "prepare":
        for number, uri in enumerate(uris):
            state = _weights_of(number, num_mib)
            cloudckpt.save(state, uri, no_dist=True)
            _put(client, uri, state)
        return {}
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    target = f"{root}/{system}"
    if system == "merge":
        cloudckpt.merge(uris, target, weights=WEIGHTS, overwrite=True)
    elif system == "by-hand":
        cloudckpt.save(_mean([cloudckpt.read(uri) for uri in uris]), target, no_dist=True, overwrite=True)
    else:
        _put(client, target, _mean([_get(client, uri) for uri in uris]))
    cost = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}
    return cost | {"mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes) / MIB}


def compare(root: str) -> float:
    """Return the largest difference of an element between the merge and the mean by hand."""
    import cloudckpt  # noqa: PLC0415

    merged, by_hand = (cloudckpt.read(f"{root}/{system}") for system in ("merge", "by-hand"))
    return max(float((merged[name].float() - by_hand[name].float()).abs().max()) for name in by_hand)


def take_turn(system: str, root: str, num_mib: int) -> dict[str, float]:
    """Start a process for one turn, and return its figures."""
    common = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.merges", "--turn-of", system, root, str(num_mib)]
    done = subprocess.run(command, env=common, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{system} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(argv: list[str] | None = None) -> int:
    """Print the figures, and write them to a file if one is named."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.merges", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="of each checkpoint (default: 512)")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each system (default: 3)")
    parser.add_argument("--out", type=Path, help="write all samples to this file as JSON")
    parser.add_argument("--turn-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.turn_of:
        system, root, num_mib = arguments.turn_of
        print(json.dumps(run(system, root, int(num_mib))))
        return 0
    binary = servers.require_fasts3(parser, ROOT)
    taken: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    with servers.fasts3(binary) as server:
        os.environ.update(servers.environment(None), AWS_ENDPOINT_URL=str(server.endpoint_url))
        root = f"{server.uri}/merges"
        take_turn("prepare", root, arguments.mib)
        for repetition in range(arguments.repetitions + 1):
            for system in rotated(SYSTEMS, repetition):
                figures = take_turn(system, root, arguments.mib)
                if repetition:
                    taken[system].append(figures)
        print(f"largest difference from the mean by hand: {compare(root):.2g}")
    for system, turns in taken.items():
        medians = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        spread = " ".join(f"{turn['wall_s']:.2f}" for turn in turns)
        print(f"{system}: {medians['wall_s']:.2f} s ({spread}), CPU {medians['cpu_s']:.2f} s, {medians['mib']:.0f} MiB")
    if arguments.out:
        write_results(arguments.out, ROOT, arguments={"mib": arguments.mib}, samples=taken)
    return 0


if __name__ == "__main__":
    sys.exit(main())
