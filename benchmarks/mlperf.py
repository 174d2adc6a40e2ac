"""MLPerf Storage's checkpoint workload, by cloudckpt and DLIO's own classes: ``python -m benchmarks.mlperf``.

It needs an interpreter that has DLIO, MPI and s3torchconnector (``--dlio-python``). Each turn of a system is one run of
DLIO, which writes some checkpoints and then reads them. The systems take turns, with the same model, ranks and server.

- `cloudckpt`: `benchmarks.dlio.Cloudckpt`, one checkpoint of all ranks, committed and verified.
- `s3`: DLIO's `PT_S3_SAVE`, which writes two objects of each rank with ``torch.save`` over s3torchconnector.
- `file`: DLIO's `PT_SAVE`, which writes two files of each rank with ``torch.save`` to `--local-dir`.

The throughput of a checkpoint is its bytes divided by the seconds of its slowest rank, by the clocks of DLIO.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.provenance import provenance
from benchmarks.turns import rotated
from cloudckpt.testing.servers import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, ask

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("cloudckpt", "s3", "file")
VERBS = ("save", "load")
# llama_8b_zero3 with a quarter of its widths and of its vocabulary, and as many layers as make about 1.6 GiB.
SCALED = {
    "model.num_layers": 4,
    "model.transformer.vocab_size": 32064,
    "model.transformer.hidden_size": 1024,
    "model.transformer.ffn_hidden_size": 3584,
    "model.transformer.num_attention_heads": 8,
    "model.transformer.num_kv_heads": 2,
}
_TIMEOUT_S = 300.0
_GIB = 1 << 30


def settings_of(system: str, *, endpoint_url: str, folder: str, num_checkpoints: int) -> dict[str, Any]:
    """Return what DLIO's command line sets for `system`."""
    common = {
        "checkpoint.checkpoint_folder": folder,
        "checkpoint.num_checkpoints_write": num_checkpoints,
        "checkpoint.num_checkpoints_read": num_checkpoints,
        "checkpoint.time_between_checkpoints": 0,
    }
    if system == "file":
        return {**common, "storage.storage_type": "local_fs", "storage.storage_root": folder}
    options = {
        "endpoint_url": endpoint_url,
        "region": REGION,
        "access_key_id": ACCESS_KEY_ID,
        "secret_access_key": SECRET_ACCESS_KEY,
        "s3_force_path_style": "'true'",
    }
    classes = {"cloudckpt": "benchmarks.dlio.Cloudckpt", "verified": "benchmarks.dlio.Verified"}
    chosen = {"checkpoint.checkpoint_mechanism_classname": classes[system]} if system in classes else {}
    storage = {f"storage.storage_options.{name}": value for name, value in options.items()}
    return {**common, **chosen, **storage, "storage.storage_type": "s3", "storage.storage_root": servers.BUCKET} | {
        "dataset.format": "npz"  # which DLIO demands of S3, though this workload reads no data
    }


def put_markers(server: servers.Server, folder: str, num_checkpoints: int) -> None:
    """Put an empty object for each checkpoint under the prefix that DLIO lists to count them before it reads.

    That prefix is the whole URI, so it finds no object that any class writes, DLIO's own included.
    """
    for number in range(num_checkpoints):
        path = f"/{servers.BUCKET}/{folder}/{number}"
        status, text = ask(str(server.endpoint_url), "PUT", path, timeout_s=servers.CALL_TIMEOUT_S)
        if status != 200:
            raise RuntimeError(f"PUT {path} was answered with {status}: {text}")


def run_dlio(python: Path, settings: dict[str, Any], *, num_ranks: int, output: Path) -> str:
    """Run DLIO once, and return what it printed."""
    command: list[str] = [str(python.parent / "mpirun"), "-n", str(num_ranks), "--oversubscribe", "--bind-to", "none"]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command += [str(python.parent / "dlio_benchmark"), "workload=llama_8b_zero3", f"++hydra.run.dir={output}"]
    command += [f"++workload.{name}={value}" for name, value in {**SCALED, **settings}.items()]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    common = {**servers.environment(None), "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "DFTRACER_ENABLE": "0"}
    done = subprocess.run(command, env=common, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"DLIO failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    return done.stdout


def samples_of(output: Path, num_ranks: int) -> dict[str, Any]:
    """Return the seconds of the slowest rank for each checkpoint, and DLIO's own summary of rank 0."""
    ranks = [json.loads((output / f"{rank}_per_epoch_stats.json").read_text())["1"] for rank in range(num_ranks)]
    seconds: dict[str, Any] = {
        verb: [max(rank[name]["duration"] for rank in ranks) for name in ranks[0] if name.startswith(f"{verb}_ckpt")]
        for verb in VERBS
    }
    return {"seconds": seconds, "summary": json.loads((output / "summary.json").read_text())["metric"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of DLIO against one server."""

    server: servers.Server
    python: Path
    num_ranks: int
    local_dir: Path

    def take_turn(self, system: str, num_checkpoints: int) -> tuple[dict[str, Any], str]:
        """Write and read checkpoints on an empty server, and return the samples and what DLIO printed."""
        self.server.reset()
        with (
            tempfile.TemporaryDirectory(dir=self.local_dir) as local,
            tempfile.TemporaryDirectory() as output,
        ):
            folder = local if system == "file" else f"{self.server.uri}/{system}"
            if system != "file":
                put_markers(self.server, folder, num_checkpoints)
            url = str(self.server.endpoint_url)
            settings = settings_of(system, endpoint_url=url, folder=folder, num_checkpoints=num_checkpoints)
            printed = run_dlio(self.python, settings, num_ranks=self.num_ranks, output=Path(output))
            return samples_of(Path(output), self.num_ranks), printed

    def verify(self) -> list[str]:
        """Save and load once with cloudckpt, and return each rank's report that all tensors are equal."""
        _, printed = self.take_turn("verified", 1)
        equal = [line for line in printed.splitlines() if "are equal to those saved" in line]
        if len(equal) != self.num_ranks:
            raise RuntimeError(f"{len(equal)} of {self.num_ranks} ranks compared what they loaded:\n{printed[-3000:]}")
        return equal


def line_of(system: str, turns: list[dict[str, Any]]) -> str:
    """Return the median throughput of a system and its range, for people."""
    num_bytes = turns[0]["summary"]["checkpoint_size_GB"] * _GIB  # DLIO's GB are GiB
    parts = []
    for verb in VERBS:
        rates = sorted(num_bytes / seconds / 1e9 for turn in turns for seconds in turn["seconds"][verb])
        parts.append(f"{verb} {statistics.median(rates):.2f} ({rates[0]:.2f}-{rates[-1]:.2f})")
    return f"{system}: GB/s of {num_bytes / 1e9:.2f} GB: {', '.join(parts)}"


def main(argv: list[str] | None = None) -> int:
    """Print the figures, and write them to a file if one is named."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mlperf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dlio-python", type=Path, required=True, help="the interpreter of the environment that has DLIO and mpirun")
    add("--ranks", type=int, default=2, help="of MPI (default: 2)")
    add("--checkpoints", type=int, default=3, help="that each turn writes and reads (default: 3)")
    add("--repetitions", type=int, default=3, help="turns of each system (default: 3)")
    add("--local-dir", type=Path, default=Path("/dev/shm"), help="the parent of `file`'s folder")  # noqa: S108
    add("--fasts3-binary", type=Path, help="the server; built with cargo where absent")
    add("--out", type=Path, help="write all samples to this file as JSON")
    arguments = parser.parse_args(argv)
    binary = arguments.fasts3_binary
    if binary is None:
        binary = servers.require_fasts3(parser, ROOT)
    before = provenance(ROOT)
    taken: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    with servers.fasts3(binary) as server:
        runs = Runs(
            server=server,
            python=arguments.dlio_python,
            num_ranks=arguments.ranks,
            local_dir=arguments.local_dir,
        )
        equal = runs.verify()
        print("\n".join(equal))
        for repetition in range(arguments.repetitions):
            for system in rotated(SYSTEMS, repetition):
                taken[system].append(runs.take_turn(system, arguments.checkpoints)[0])
    for system, turns in taken.items():
        print(line_of(system, turns))
    if arguments.out:
        names = ("ranks", "checkpoints", "repetitions")
        given = {name: getattr(arguments, name) for name in names} | {"local_dir": str(arguments.local_dir)}
        after = {"load_average_at_end": os.getloadavg()}
        document = {
            "provenance": before | after,
            "arguments": given,
            "model": SCALED,
            "verified": equal,
            "samples": taken,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
