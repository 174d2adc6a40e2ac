"""Experiment trackers that keep a reference to a checkpoint, as docs/frameworks.md says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import wandb

import cloudckpt
from cloudckpt.testing.servers import moto_server

DOCUMENT = Path(__file__).parents[2] / "docs/frameworks.md"


def snippets() -> list[str]:
    """Return the snippets of the section, one for each tracker."""
    section = DOCUMENT.read_text().partition("## Experiment trackers")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The bucket of a run with a checkpoint, while the trackers work offline in a folder."""
    monkeypatch.chdir(tmp_path)
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    with moto_server() as server:
        for name, value in {**offline, **server.environment}.items():
            monkeypatch.setenv(name, value)
        server.create_bucket("trackers")
        with cloudckpt.CheckpointManager("s3://trackers/run", async_=False) as manager:
            manager.save(100, {"weight": torch.ones(3)})
        yield "s3://trackers"
        cloudckpt.close()
    wandb.teardown()  # or its process outlives the tests


def run_snippet(text: str, root: str, **given: Any) -> dict[str, Any]:
    variables = {"cloudckpt": cloudckpt, **given}
    exec(compile(text.replace("s3://bucket", root), "docs/frameworks.md", "exec"), variables)  # noqa: S102  # ours
    return variables


def attempt_at(root: str) -> str:
    return cloudckpt.describe(f"{root}/run/step-100").attempt


def test_wandb_keeps_a_reference_and_the_save_that_it_is_of(root: str) -> None:
    """If this fails, an artifact of Weights & Biases copies the checkpoint, or does not say which save it was."""
    with wandb.init(project="tests") as run:
        artifact = run_snippet(snippets()[0], root, wandb=wandb, run=run)["artifact"]
    assert artifact.metadata["attempt"] == attempt_at(root)
    assert [entry.ref for entry in artifact.manifest.entries.values()] == [f"{root}/run/step-100"]


def test_mlflow_keeps_a_reference_and_the_save_that_it_is_of(root: str, tmp_path: Path) -> None:
    """If this fails, a run of MLflow does not lead to its checkpoint, or takes a later save at the URI for it."""
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    with mlflow.start_run() as run:
        run_snippet(snippets()[1], root, mlflow=mlflow)
    logged = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/checkpoint.json")
    assert logged == {"uri": logged["uri"], "attempt": attempt_at(root)}
    state = {"weight": torch.zeros(3)}
    cloudckpt.load(state, logged["uri"])
    assert state["weight"].tolist() == [1.0] * 3
    cloudckpt.save({"weight": torch.zeros(3)}, logged["uri"], overwrite=True)
    assert attempt_at(root) != logged["attempt"]
