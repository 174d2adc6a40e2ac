"""The whole benchmark, small."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"
MIB = 1024 * 1024


def run_module():
    spec = importlib.util.spec_from_file_location("benchmarks_run", RUN)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.multirank
def test_small_run_on_moto(tmp_path):
    """The benchmark would not run on a machine with nothing but this package, or not record what it measured."""
    report = tmp_path / "report.json"
    command = [
        sys.executable, RUN, "--total-mib", "16", "--num-tensors", "4", "--ranks", "2", "--repetitions", "1",
        "--timeout-s", "120",
        "--systems", "cloudckpt", "cloudckpt-path", "filesystem",
        "--local-dir", str(tmp_path), "--json", str(report),
    ]  # fmt: skip
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert completed.returncode == 0, completed.stderr
    document = json.loads(report.read_text())
    measured = {(one["system"], one["num_ranks"], one["operation"]) for one in document["samples"]}
    assert measured == {
        (system, 2, operation)
        for system in ("cloudckpt", "cloudckpt-path", "filesystem")
        for operation in ("save", "load")
    }
    assert all(one["num_bytes"] == 16 * MIB for one in document["samples"])
    assert all(one["wall_s"] > 0 and one["cpu_s"] > 0 for one in document["samples"])
    assert document["versions"]["cloudckpt"]["torch"]
    assert document["parameters"]["server"] == "moto"
    assert "cloudckpt (path) ÷ torch FileSystemWriter/Reader" in completed.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "given"], "needs --bucket"),
        (["--server", "fasts3"], "needs --fasts3-binary or --fasts3-source"),
        (["--endpoint-url", "http://127.0.0.1:1"], "go with --server given"),
        (["--repetitions", "0"], "--repetitions must be at least 1"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--option", "connections"], "not of the form NAME=VALUE"),
        (["--total-mib", "0"], "do not fit into 0 MiB"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    """A wrong command line would end in a traceback, or in a run of something else."""
    with pytest.raises(SystemExit) as ended:
        run_module().main(arguments)
    assert ended.value.code not in (0, None)
    assert message in capsys.readouterr().err + str(ended.value.code)


def test_sizes_divide_evenly():
    """Ranks would hold tensors of other sizes than the table says, or half a float."""
    module = run_module()
    sizes = module._Sizes.of(module._arguments(["--total-mib", "10", "--num-tensors", "7", "--ranks", "1", "3"]))
    assert sizes.tensor_bytes % (4 * 1024 * 3) == 0
    assert 10 * MIB - 7 * 12 * 1024 <= sizes.total_bytes <= 10 * MIB
