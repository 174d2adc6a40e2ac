"""Checkpoints of every version of the format that was ever released, read for ever."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt

HERE = Path(__file__).resolve().parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if (path / "SHA256SUMS").exists())

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Path:
    """The folder of one version."""
    return HERE / request.param


def expected_of(golden: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((golden / "expected.json").read_text())
    return expected


def blank(entry: dict[str, Any]) -> torch.Tensor:
    """A tensor of this dtype and shape in which every byte is wrong."""
    raw = torch.tensor(list(bytes.fromhex(entry["hex"])), dtype=torch.uint8) ^ 0xFF
    if entry["dtype"] == "bool":
        raw &= 1
    return raw.view(getattr(torch, entry["dtype"])).reshape(entry["shape"])


def hex_of(tensor: torch.Tensor) -> str:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()).hex()


@pytest.mark.parametrize("kind", [".", "transformed"])
def test_every_released_format_has_a_golden_checkpoint(kind: str) -> None:
    """If this fails, the tests here test nothing, or the version this code writes has no golden checkpoint."""
    from cloudckpt.format.model import FORMAT_MAJOR, FORMAT_MINOR  # noqa: PLC0415  # an internal, for this alone

    assert (HERE / kind / f"{FORMAT_MAJOR}.{FORMAT_MINOR}" / "SHA256SUMS").exists()


@pytest.mark.parametrize("sums", [path.relative_to(HERE).as_posix() for path in sorted(HERE.rglob("SHA256SUMS"))])
def test_the_files_are_those_that_were_committed(sums: str) -> None:
    """If this fails, somebody made golden files anew: what then loads proves nothing about old checkpoints."""
    golden = (HERE / sums).parent
    listed = dict(reversed(line.split("  ", 1)) for line in (golden / "SHA256SUMS").read_text().splitlines())
    found = {
        path.relative_to(golden).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in golden.rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"
    }
    assert found == listed


def test_flat_names_load_to_the_bit(golden: Path) -> None:
    """If this fails, checkpoints of this version load wrongly, or no longer at all."""
    expected = expected_of(golden)
    state: dict[str, Any] = {name: blank(entry) for name, entry in expected["tensors"].items()}
    state |= dict.fromkeys(expected["values"])
    report = cloudckpt.load(state, golden / "once")
    for name, entry in expected["tensors"].items():
        assert str(state[name].dtype) == f"torch.{entry['dtype']}", name
        assert list(state[name].shape) == entry["shape"], name
        assert hex_of(state[name]) == entry["hex"], name
    assert {name: state[name] for name in expected["values"]} == expected["values"]
    assert report is not None
    assert report.num_bytes_read >= sum(len(entry["hex"]) // 2 for entry in expected["tensors"].values())


def test_the_nesting_is_kept(golden: Path) -> None:
    """If this fails, a nested state dict of this version comes back flat, or under other names."""
    expected = expected_of(golden)
    state: dict[str, Any] = {
        "model": {"rows": blank(expected["tensors"]["model.rows"])},
        "optimizer": {"state": [{"step": torch.tensor(-1.0)}], "betas": [0.0, 0.0], "nothing": 1},
        "epoch": 0,
    }
    cloudckpt.load(state, golden / "once")
    assert hex_of(state["model"]["rows"]) == expected["tensors"]["model.rows"]["hex"]
    assert state["optimizer"]["state"][0]["step"].item() == 12.0
    assert state["optimizer"]["betas"] == [0.9, 0.999]
    assert state["optimizer"]["nothing"] is None
    assert state["epoch"] == 3


def test_the_types_of_keys_are_kept(golden: Path, tmp_path: Path) -> None:
    """If this fails, an exported optimizer of this version restores nothing, because its keys are others."""
    cloudckpt.export_checkpoint(golden / "once", tmp_path / "state.pt", format="torch")
    exported = torch.load(tmp_path / "state.pt", weights_only=True)
    state = exported["optimizer"]["state"]
    assert [*state] == [0] if isinstance(state, dict) else golden.name == "1.0"
    assert exported.get("callbacks") == (None if golden.name == "1.0" else {})


def test_the_highest_number_counts(golden: Path) -> None:
    """If this fails, an overwritten checkpoint of this version loads what it had replaced."""
    assert {path.name for path in (golden / "overwritten").glob("manifest*")} == {"manifest.json", "manifest.1.json"}
    state: dict[str, Any] = {"weight": torch.zeros(4), "epoch": 0}
    cloudckpt.load(state, golden / "overwritten")
    assert state["weight"].tolist() == [2.0] * 4
    assert state["epoch"] == 2


def test_golden_checkpoints_are_listed(golden: Path) -> None:
    """If this fails, checkpoints of this version can no longer be found."""
    names = {info.name for info in cloudckpt.list_checkpoints(golden)}
    assert names == {"once", "overwritten"}
