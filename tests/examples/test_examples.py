"""Each example program runs as its first lines say, and its own check of what it shows holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from examples.demo.launch import torchrun

import cloudckpt

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

TIMEOUT_S = 200.0


def run_example(name: str, uri: str, tmp_path: Path) -> None:
    """Run it on two ranks; fail with what they said."""
    log = tmp_path / f"{name}.log"
    status = torchrun([f"examples/{name}.py", uri], num_ranks=2, log=log, timeout_s=TIMEOUT_S)
    assert status == 0, log.read_text(errors="replace")


def test_async_with_faults(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loop that saves in the background and reloads after each fault would end with other weights, or not at all."""
    run_example("async_with_faults", uri, tmp_path)
    said = capsys.readouterr().out
    assert said.count("failed") >= 4
    assert re.search(r"after 24 epochs and [4-9]\d* faults the weights are those of a run without faults", said)
    names = [info.name for info in cloudckpt.list_checkpoints(f"{uri}/async-with-faults")]
    assert names == [f"epoch-{epoch}" for epoch in range(3, 25, 3)]

    run_example("async_with_faults", uri, tmp_path)
    said = capsys.readouterr().out
    assert "starting at epoch 24" in said
    assert "failed" not in said


def test_stateful(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model and an optimizer, put into the state dict as they are or in one object, would not come back whole."""
    run_example("stateful", uri, tmp_path)
    assert "both train on as the original did" in capsys.readouterr().out
    names = {info.name for info in cloudckpt.list_checkpoints(f"{uri}/stateful")}
    assert names == {"app", "as-they-are"}


def test_stateful_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example would refuse to run a second time, although it asks for the overwrite."""
    for _ in range(2):
        run_example("stateful", str(tmp_path / "checkpoints"), tmp_path)
        assert "both train on as the original did" in capsys.readouterr().out


def test_fsdp_optimizer_apart(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP1's optimizer state, loaded apart from the model's, would not come back whole."""
    run_example("fsdp_optimizer_apart", uri, tmp_path)
    assert "train on as the original did" in capsys.readouterr().out
    assert [info.name for info in cloudckpt.list_checkpoints(uri)] == ["fsdp-optimizer-apart"]
