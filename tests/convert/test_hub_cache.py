"""Imports from Hugging Face's cache, where a snapshot is a folder of symbolic links to blobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import cloudckpt

REVISION = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"
INDEX = "model.safetensors.index.json"


def _hub(root: Path, *, is_absolute: bool = False) -> Path:
    """Return a snapshot of a model with two files and their index, as `huggingface_hub` lays it out."""
    model = root / "hub" / "models--org--name"
    snapshot, blobs = model / "snapshots" / REVISION, model / "blobs"
    for folder in (snapshot, blobs, model / "refs", model / ".no_exist" / REVISION):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    (model / ".no_exist" / REVISION / "model.safetensors").touch()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for number, (tensor, name) in enumerate(names.items()):
        save_file({tensor: torch.full((4,), float(number))}, blobs / f"sha-{tensor}")
        (snapshot / name).symlink_to(blobs / f"sha-{tensor}" if is_absolute else f"../../blobs/sha-{tensor}")
    (blobs / "sha-index").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (snapshot / INDEX).symlink_to(blobs / "sha-index" if is_absolute else "../../blobs/sha-index")
    torch.save({"a": torch.zeros(4)}, blobs / "sha-bin")
    (snapshot / "pytorch_model.bin").symlink_to("../../blobs/sha-bin")
    return snapshot


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_snapshot_is_imported(tmp_path: Path, *, is_absolute: bool) -> None:
    """If this fails, a model that `from_pretrained` has downloaded cannot be imported from where it is."""
    snapshot = _hub(tmp_path, is_absolute=is_absolute)
    (tmp_path / "elsewhere").symlink_to(snapshot)
    one = snapshot / "model-00001-of-00002.safetensors"
    for number, (source, names) in enumerate(
        [(snapshot, "ab"), (snapshot / INDEX, "ab"), (one, "a"), (tmp_path / "elsewhere", "ab")]
    ):
        cloudckpt.import_checkpoint(source, tmp_path / str(number))
        found = {name: torch.full((4,), 9.0) for name in names}
        cloudckpt.load(found, tmp_path / str(number), no_dist=True)
        assert {name: value.tolist() for name, value in found.items()} == {
            name: [float(position)] * 4 for position, name in enumerate(names)
        }
    cloudckpt.import_checkpoint(snapshot / "pytorch_model.bin", tmp_path / "bin", format="torch")


def _to_another_model(snapshot: Path) -> str:
    other = snapshot.parents[2] / "models--other" / "blobs"
    other.mkdir(parents=True)
    save_file({"c": torch.ones(1)}, other / "x")
    return str(other / "x")


def _to_blobs_elsewhere(snapshot: Path) -> str:
    outside = snapshot.parents[3] / "secrets"
    outside.mkdir()
    save_file({"c": torch.ones(1)}, outside / "x")
    blobs = snapshot.parents[1] / "blobs"
    for blob in blobs.iterdir():
        blob.rename(outside / blob.name)
    blobs.rmdir()
    blobs.symlink_to(outside)
    return "../../blobs/x"


def _to_the_layout_itself(snapshot: Path) -> str:
    save_file({"c": torch.ones(1)}, snapshot.parents[1] / "refs" / "x")
    return "../../refs/x"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (_to_another_model, "leads out of .*models--other"),
        (_to_blobs_elsewhere, "leads out of .*secrets"),
        (_to_the_layout_itself, "leads out of .*refs"),
        (lambda _: "../../blobs/gone", "symbolic link leads to .*blobs/gone, which does not exist"),
        (lambda _: "model-00003.safetensors", "symbolic links"),
    ],
    ids=["other model", "blobs are a link", "refs", "dangling", "loop"],
)
def test_other_links_are_refused_and_said(tmp_path: Path, target: Callable[[Path], str], reason: str) -> None:
    """If this fails, a hub cache can lead to any file, or a model is imported without the tensors behind a link."""
    snapshot = _hub(tmp_path)
    link = snapshot / "model-00003.safetensors"
    link.symlink_to(target(snapshot))
    (snapshot / INDEX).unlink()
    for source in (link, snapshot):
        with pytest.raises(cloudckpt.CloudckptError, match=reason):
            cloudckpt.import_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
