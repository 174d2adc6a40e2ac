"""Checkpoints of every version of the format that was ever released, read for ever; some went through extensions."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from tests.docs.independent_reader import ELEMENT_BYTES, Checkpoint, positions
from tests.golden.make import PLAIN
from tests.golden.make_transformed import Cipher, flipped
from tests.scaled import ALLOWED, assert_same_scaled, make_blank, make_scaled
from tests.tensors.test_values import described, neutral

import cloudckpt

HERE = Path(__file__).resolve().parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if (path / "SHA256SUMS").exists())
UNDO = {
    "stream.zstd/1": lambda stored: zstandard.ZstdDecompressor().decompressobj().decompress(stored),
    "golden.cipher/1": flipped,
}
"""By code that is not cloudckpt's."""
CHAINS = {"compressed": ["stream.zstd/1"], "encrypted": ["golden.cipher/1", "stream.zstd/1"]}


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Path:
    """The folder of one version."""
    return HERE / request.param


@pytest.fixture(params=sorted(path.parent.name for path in HERE.glob("transformed/*/SHA256SUMS")))
def transformed(request: pytest.FixtureRequest) -> Path:
    """The folder of one version's checkpoints that went through stream extensions."""
    return HERE / "transformed" / request.param


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


def load_to_the_bit(golden: Path, name: str, options: cloudckpt.Options | None = None) -> cloudckpt.LoadReport:
    expected = expected_of(golden)
    state: dict[str, Any] = {name: blank(entry) for name, entry in expected["tensors"].items()}
    state |= dict.fromkeys(expected["values"])
    report = cloudckpt.load(state, golden / name, options=options)
    for fqn, entry in expected["tensors"].items():
        assert str(state[fqn].dtype) == f"torch.{entry['dtype']}", fqn
        assert list(state[fqn].shape) == entry["shape"], fqn
        assert hex_of(state[fqn]) == entry["hex"], fqn
    assert {name: state[name] for name in expected["values"]} == expected["values"]
    assert report is not None
    return report


def test_flat_names_load_to_the_bit(golden: Path) -> None:
    """If this fails, checkpoints of this version load wrongly, or no longer at all."""
    report = load_to_the_bit(golden, "once")
    assert report.num_bytes_read >= sum(len(entry["hex"]) // 2 for entry in expected_of(golden)["tensors"].values())


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
    with torch.serialization.safe_globals(ALLOWED):
        cloudckpt.export_checkpoint(golden / "once", tmp_path / "state.pt", format="torch")
        exported = torch.load(tmp_path / "state.pt", weights_only=False)
    state = exported["optimizer"]["state"]
    assert [*state] == [0] if isinstance(state, dict) else golden.name == "1.0"
    assert exported.get("callbacks") == (None if golden.name == "1.0" else {})


@pytest.mark.parametrize("version", [version for version in VERSIONS if version not in ("1.0", "1.1")])
def test_tensors_that_consist_of_others_are_kept(version: str) -> None:
    """If this fails, quantized weights of this version come back as other tensors, or not at all."""
    into = make_blank(make_scaled(6, 4))
    cloudckpt.load({"model": {"scaled": into}}, HERE / version / "once", strict=False)
    assert_same_scaled(into, make_scaled(6, 4))
    with torch.serialization.safe_globals(ALLOWED):
        read = cloudckpt.read(HERE / version / "once", include="model.scaled")
    assert_same_scaled(read["model"]["scaled"], make_scaled(6, 4))


@pytest.mark.parametrize("version", [version for version in VERSIONS if version not in ("1.0", "1.1", "1.2")])
def test_tuples_are_kept(version: str) -> None:
    """If this fails, the moments of a functional optimizer of this version come back as a list, or not at all."""
    read = cloudckpt.read(HERE / version / "once", include="optimizer.moments")["optimizer"]["moments"]
    target = {"optimizer": {"moments": (torch.zeros(8, 3), 0)}}
    cloudckpt.load(target, HERE / version / "once")
    for moments in (read, target["optimizer"]["moments"]):
        assert type(moments) is tuple
        assert hex_of(moments[0]) == expected_of(HERE / version)["tensors"]["optimizer.moments.0"]["hex"]
        assert moments[1] == 7


@pytest.mark.parametrize("version", [version for version in VERSIONS if version not in ("1.0", "1.1", "1.2", "1.3")])
def test_plain_values_are_kept_without_consent(version: str) -> None:
    """If this fails, values of this version come back as others, or programs without Python read them wrongly."""
    state = {"plain": dict.fromkeys(PLAIN)}
    cloudckpt.load(state, HERE / version / "once")
    assert described(state["plain"]) == described(PLAIN)
    assert state["plain"]["pickled"][0] is state["plain"]["pickled"][1]
    checkpoint = Checkpoint(HERE / version / "once")
    assert checkpoint.value("epoch") == 3
    for name in PLAIN.keys() - {"pickled", "tensors"}:
        assert described(checkpoint.value(f"plain.{name}")) == described(neutral(PLAIN[name])), name


def test_the_manifest_with_the_highest_number_is_current(golden: Path) -> None:
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


def test_compressed_ones_load_to_the_bit_without_options(transformed: Path) -> None:
    """If this fails, compressed checkpoints of this version load wrongly, or no longer at all."""
    load_to_the_bit(transformed, "compressed")


def test_encrypted_ones_load_to_the_bit(transformed: Path) -> None:
    """If this fails, what users' own extensions wrote in this version is lost with it: descriptors or their order."""
    load_to_the_bit(transformed, "encrypted", cloudckpt.Options(extensions=[Cipher()]))


@pytest.mark.parametrize("name", CHAINS)
def test_the_document_suffices_to_read_them(transformed: Path, name: str) -> None:
    """If this fails, the format's document does not say how to undo transforms, or what is stored is something else."""
    checkpoint = Checkpoint(transformed / name)
    for fqn, expected in expected_of(transformed)["tensors"].items():
        entry = checkpoint.tensors[fqn]
        assert entry["transforms"] == CHAINS[name]
        size_bytes = ELEMENT_BYTES[entry["dtype"]]
        whole = bytearray(math.prod(entry["shape"]) * size_bytes)
        for offsets, lengths, object_index, begin, end, *_ in entry["chunks"]:
            content = checkpoint.object_bytes(object_index)[begin:end]
            for descriptor in entry["transforms"]:
                content = UNDO[descriptor](content)
            assert len(content) == math.prod(lengths) * size_bytes
            for number, position in enumerate(positions(entry["shape"], offsets, lengths)):
                element = content[number * size_bytes : (number + 1) * size_bytes]
                whole[position * size_bytes : (position + 1) * size_bytes] = element
        assert whole.hex() == expected["hex"], fqn


def test_they_are_verified_without_the_extension(transformed: Path) -> None:
    """If this fails, nobody without the key can tell whether an encrypted checkpoint is damaged."""
    report = cloudckpt.verify(transformed / "encrypted")
    assert report.num_tensors == len(expected_of(transformed)["tensors"])
