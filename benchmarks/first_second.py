"""The first save or load of a process: ``python -m benchmarks.first_second``.

Each turn starts a process that imports torch and `torch.distributed.checkpoint`, and counts processor time and resident
memory from there on, until 4 MiB are saved to or loaded from a server on loopback. The systems take turns.

- `cloudckpt`, `cloudckpt-path`: ``cloudckpt.save`` and ``cloudckpt.load``, over S3 and with a directory.
- `s3torchconnector`: torch's `dcp.save` and `dcp.load` with its writer and reader.
- `boto3`: one PutObject or GetObject by boto3 alone, without DCP: the share of the SDK in the time of `cloudckpt`.
- `filesystem`: torch's `dcp.save` and `dcp.load` with a directory.

The bars: no more processor time than s3torchconnector, and 30 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.envs import environment_of, is_installed_here, set_up
from benchmarks.figures import Figure, text
from benchmarks.provenance import write_results
from benchmarks.turns import rotated

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("cloudckpt", "s3torchconnector", "boto3", "cloudckpt-path", "filesystem")
VERBS = ("save", "load")
_NUM_ELEMENTS = 1 << 20
_TIMEOUT_S = 120.0
_MIB_BAR = 30.0


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(verb: str, system: str, uri: str) -> dict[str, float]:
    """Save or load in this process, and return what it cost over the imports of torch."""
    import torch  # noqa: PLC0415
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    state = {
        "weight": torch.arange(_NUM_ELEMENTS, dtype=torch.float32) if verb == "save" else torch.zeros(_NUM_ELEMENTS)
    }
    cpu_s, wall_s, num_bytes = time.process_time(), time.perf_counter(), _resident_bytes()
    if system == "boto3":
        import boto3  # noqa: PLC0415

        bucket, _, key = uri.removeprefix("s3://").partition("/")
        client = boto3.client("s3")
        if verb == "save":
            client.put_object(Bucket=bucket, Key=key, Body=state["weight"].numpy().tobytes())
        else:
            answer = client.get_object(Bucket=bucket, Key=key)["Body"].read()
            state["weight"] = torch.frombuffer(bytearray(answer), dtype=torch.float32)
    elif system.startswith("cloudckpt"):
        import cloudckpt  # noqa: PLC0415

        call = cloudckpt.save if verb == "save" else cloudckpt.load
        call(state, uri, no_dist=True)
    else:
        arguments: dict[str, Any] = {"checkpoint_id": uri}
        if system == "s3torchconnector":
            from s3torchconnector import S3ClientConfig  # noqa: PLC0415
            from s3torchconnector.dcp import S3StorageReader, S3StorageWriter  # noqa: PLC0415

            backend = S3StorageWriter if verb == "save" else S3StorageReader
            config = S3ClientConfig(force_path_style=True)
            storage = backend(region=os.environ["AWS_DEFAULT_REGION"], path=uri, s3client_config=config)
            arguments["storage_writer" if verb == "save" else "storage_reader"] = storage
        (dcp.save if verb == "save" else dcp.load)(state, no_dist=True, **arguments)
    cost = {
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.perf_counter() - wall_s,
        "mib": (_resident_bytes() - num_bytes) / (1 << 20),
    }
    if not torch.equal(state["weight"], torch.arange(_NUM_ELEMENTS, dtype=torch.float32)):
        raise RuntimeError(f"{system} loaded something else")
    return cost


def take_turn(python: Path, verb: str, system: str, uri: str, server: servers.Server) -> dict[str, float]:
    """Start a process that saves or loads, and return its figures."""
    common = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    common |= servers.environment(None)
    common |= {"AWS_ENDPOINT_URL": str(server.endpoint_url), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [python, "-W", "ignore", "-m", "benchmarks.first_second", "--turn-of", verb, system, uri]
    done = subprocess.run(command, env=common, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{system} failed to {verb}:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(server: servers.Server, folder: Path, repetitions: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Return the figures of all turns by verb and system. The first turn, which writes bytecode, does not count."""
    pythons = {}
    for system in SYSTEMS:
        environment = environment_of(system)
        is_foreign = environment is not None and not is_installed_here(environment)
        pythons[system] = set_up(environment, ROOT) if is_foreign and environment else Path(sys.executable)
    taken: dict[str, dict[str, list[dict[str, float]]]] = {verb: defaultdict(list) for verb in VERBS}
    for repetition in range(repetitions + 1):
        for system in rotated(SYSTEMS, repetition):
            root = str(folder) if system in ("cloudckpt-path", "filesystem") else server.uri
            for verb in VERBS:  # what is saved in a turn is loaded in it
                figures = take_turn(pythons[system], verb, system, f"{root}/{system}-{repetition}", server)
                if repetition:
                    taken[verb][system].append(figures)
    return taken


def main(argv: list[str] | None = None) -> int:
    """Return 0 where all bars are met, 1 where one is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_second",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repetitions", type=int, default=10, help="turns of each system (default: 10)")
    parser.add_argument("--out", type=Path, help="write all samples to this file as JSON")
    parser.add_argument("--turn-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.turn_of:
        print(json.dumps(run(*arguments.turn_of)))
        return 0
    binary = servers.require_fasts3(parser, ROOT)
    with servers.fasts3(binary) as server, tempfile.TemporaryDirectory() as folder:
        taken = measure(server, Path(folder), arguments.repetitions)
    figures = []
    for verb, systems in taken.items():
        rival_s = statistics.median(turn["cpu_s"] for turn in systems["s3torchconnector"])
        for system, turns in systems.items():
            for key, name, bar in (("cpu_s", "CPU s", rival_s), ("mib", "MiB", _MIB_BAR)):
                figures.append(
                    Figure(
                        name=f"{verb}, {system}, {name}",
                        formula="over torch and torch.distributed.checkpoint",
                        sense="≤",
                        bar=bar if system == "cloudckpt" else None,
                        values=tuple(turn[key] for turn in turns),
                    )
                )
    print(text(figures, {}))
    if arguments.out:
        write_results(arguments.out, ROOT, samples=taken)
    return int(any(figure.verdict.startswith("MISSED") for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
