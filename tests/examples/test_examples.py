"""Each example program runs as its first lines say, and its own check of what it shows holds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples.demo.launch import torchrun

import cloudckpt

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

TIMEOUT_S = 200.0

# A run takes seconds. What an example does is the same on every store: each runs on one, and all stores have one.
on_s3 = pytest.mark.parametrize("uri", ["s3"], indirect=True)


def run_example(name: str, uri: str, tmp_path: Path) -> None:
    """Run it on two ranks; fail with what they said."""
    log = tmp_path / f"{name}.log"
    status = torchrun([f"examples/{name}.py", uri], num_ranks=2, log=log, timeout_s=TIMEOUT_S)
    assert status == 0, log.read_text(errors="replace")


@on_s3
def test_async_with_faults(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loop that saves in the background and reloads after each fault would end with other weights, or not at all."""
    run_example("async_with_faults", uri, tmp_path)
    output = capsys.readouterr().out
    assert output.count("failed") >= 4
    assert re.search(r"after 24 epochs and [4-9]\d* faults the weights are those of a run without faults", output)
    names = [info.name for info in cloudckpt.list_checkpoints(f"{uri}/async-with-faults")]
    assert names == [f"epoch-{epoch}" for epoch in range(3, 25, 3)]

    run_example("async_with_faults", uri, tmp_path)
    output = capsys.readouterr().out
    assert "starting at epoch 24" in output
    assert "failed" not in output


@on_s3
def test_the_stateful_example_resumes(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model, an optimizer and an object of one's own would not come back whole; or the example would refuse to run a
    second time, although it asks for the overwrite.
    """
    cloudckpt.save({"of": "an earlier run"}, f"{uri}/stateful/live")
    run_example("stateful", uri, tmp_path)
    assert "they train on as the original did" in capsys.readouterr().out
    assert [info.name for info in cloudckpt.list_checkpoints(f"{uri}/stateful")] == ["live"]


def test_fsdp_optimizer_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP1's optimizer state, loaded apart from the model's, would not come back whole."""
    run_example("fsdp_optimizer_apart", str(tmp_path), tmp_path)
    assert "train on as the original did" in capsys.readouterr().out


def shapes_of(notebook: Path) -> list[tuple[str, str, str]]:
    """The outputs of all cells, without what differs from run to run: paths, numbers and times."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all("".join(cell["source"]) for cell in cells)
    shapes = []
    for number, cell in enumerate(cells):
        for output in cell["outputs"]:
            for kind, content in output.get("data", {output["output_type"]: output.get("text", "")}).items():
                text = re.sub(r' style="[^"]*"', "", "".join(content))  # it depends on the length of a path
                text = re.sub(r"[^'\s<>]*first-hour-\w+", "ROOT", text)
                shapes.append(
                    (str(number), kind, re.sub(r"\d[\w.,:+-]*( (m?s|min|h|B|[KMGT]i?B|[kMG]B/s)\b)?", "0", text))
                )
    return shapes


def test_first_hour(tmp_path: Path) -> None:
    """A user who runs the notebook would meet an error, or see another answer than the site and the repository show."""
    fresh = tmp_path / "fresh.ipynb"
    command = [sys.executable, "-m", "tests.examples.notebook", "examples/first_hour.ipynb", str(fresh)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    stored = shapes_of(Path("examples/first_hour.ipynb"))
    assert len(stored) > 10
    assert shapes_of(fresh) == stored  # python -m tests.examples.notebook examples/first_hour.ipynb renews them


def test_prometheus_metrics(tmp_path: Path) -> None:
    """The metrics that its alerts are about would be missing, count wrongly, or come from no endpoint."""
    command = [sys.executable, "examples/prometheus_metrics.py", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line and not line.startswith("#"))
    assert float(found['cloudckpt_operation_seconds_count{operation="save",outcome="done"}']) == 3
    assert float(found['cloudckpt_operation_seconds_count{operation="load",outcome="done"}']) == 1
    assert float(found['cloudckpt_bytes_total{direction="sent"}']) > 3 * 2**20
    assert float(found['cloudckpt_in_flight{operation="save"}']) == 0
    text = Path("docs/telemetry.md").read_text().partition("## Prometheus")[2]
    unused = {"cloudckpt_retries_total", "cloudckpt_removals_total"}  # which have no series before the first
    kinds = {name.partition("{")[0] for name in found} | unused
    assert set(re.findall(r"cloudckpt_\w+", text)) <= kinds
