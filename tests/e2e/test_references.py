"""Checkpoints whose manifest names objects of another one beside them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

import cloudckpt
from cloudckpt.commit.log import resolve
from cloudckpt.commit.references import claim_key, put_claims
from cloudckpt.errors import CorruptCheckpointError, InvalidManifestError
from cloudckpt.format.codec import encode
from cloudckpt.format.model import REFERENCES_VERSION
from cloudckpt.io.client import StoreClient, open_client
from cloudckpt.options import Options

STATE = {"base": torch.arange(100.0), "adapter": torch.ones(3)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints "a", and "b", which has no data of its own."""
    root = tmp_path / "run"
    cloudckpt.save(STATE, root / "a")
    cloudckpt.save(STATE, root / "b")
    refer(root)
    return root


def refer(root: Path, *, version: tuple[int, int] = REFERENCES_VERSION) -> None:
    """Let the manifest of b name the objects of a, and remove those of b."""

    def client_of(folder: str) -> StoreClient:
        return open_client(root / folder, Options())

    held = msgspec.structs.replace(resolve(client_of("a")).manifest, is_referable=True)
    (root / "a" / "manifest.json").write_bytes(encode(held))
    own = resolve(client_of("b")).manifest
    uses = [msgspec.structs.replace(stored, folder="a") for stored in held.objects]
    put_claims(client_of, {"a": {stored.key for stored in held.objects}}, attempt=own.attempt, folder="b")
    (root / "b" / "manifest.json").write_bytes(
        encode(msgspec.structs.replace(held, version=version, attempt=own.attempt, objects=uses))
    )
    for stored in own.objects:
        (root / "b" / stored.key).unlink()


def loaded(uri: Path) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    cloudckpt.load(state, uri)
    return state


def is_whole(uri: Path) -> bool:
    return all(torch.equal(tensor, STATE[name]) for name, tensor in loaded(uri).items())


def test_objects_are_read_where_they_are(root: Path) -> None:
    """If this fails, a checkpoint that refers to another cannot be loaded, or not after its root has moved."""
    assert is_whole(root / "b")
    moved = root.rename(root.parent / "moved")
    assert is_whole(moved / "b")
    cloudckpt.verify(moved / "b")


def test_ls_does_not_take_a_claim_for_a_save(root: Path) -> None:
    """If this fails, `ls --all` shows a second save at a checkpoint that others refer to."""
    assert [(info.name, info.state) for info in cloudckpt.list_checkpoints(root, all=True)] == [
        ("a", "committed"),
        ("b", "committed"),
    ]


def test_a_copy_has_data_of_its_own(root: Path, tmp_path: Path) -> None:
    """If this fails, a copy of a checkpoint needs the folder that its source referred to."""
    cloudckpt.copy(root / "b", tmp_path / "elsewhere" / "b")
    cloudckpt.delete(root / "a")
    assert is_whole(tmp_path / "elsewhere" / "b")
    found = resolve(open_client(tmp_path / "elsewhere" / "b", Options())).manifest
    assert not any(stored.folder for stored in found.objects)
    assert found.version < REFERENCES_VERSION


def test_a_deleted_checkpoint_leaves_what_others_use(root: Path) -> None:
    """If this fails, deleting one checkpoint damages another, or its data stays after the last one that uses it."""
    cloudckpt.delete(root / "a")
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        loaded(root / "a")
    assert [info.name for info in cloudckpt.list_checkpoints(root)] == ["b"]
    cloudckpt.gc(root, older_than=0, dry_run=False)
    assert is_whole(root / "b")
    cloudckpt.delete(root / "b")
    for _ in range(3):
        cloudckpt.gc(root, older_than=0, dry_run=False)
    assert not [path for path in root.rglob("*") if path.is_file() and "data" in path.parts]


def test_an_overwritten_checkpoint_leaves_what_others_use(root: Path) -> None:
    """If this fails, overwriting one checkpoint damages another."""
    cloudckpt.save({"base": torch.zeros(2)}, root / "a", overwrite=True)
    cloudckpt.gc(root, older_than=0, dry_run=False)
    assert is_whole(root / "b")


def test_gc_of_one_checkpoint_keeps_every_claim(root: Path) -> None:
    """If this fails, gc of a checkpoint alone, which does not see the others, removes their data."""
    cloudckpt.delete(root / "a")
    cloudckpt.gc(root / "a", older_than=0, dry_run=False)
    assert is_whole(root / "b")


def test_gc_leaves_a_place_with_a_damaged_claim_alone(root: Path) -> None:
    """If this fails, a claim that cannot be read counts as none, and its data is removed."""
    attempt = resolve(open_client(root / "b", Options())).manifest.attempt
    claim = root / "a" / claim_key(attempt, "b")
    claim.write_bytes(claim.read_bytes().replace(b"data/", b"date/", 1))
    cloudckpt.delete(root / "a")
    report = cloudckpt.gc(root, older_than=0, dry_run=False)
    assert any("claim" in kept.reason for kept in report.skipped)
    assert is_whole(root / "b")


def test_a_missing_object_is_named_where_it_was(root: Path) -> None:
    """If this fails, the message of damage sends the reader to the wrong folder."""
    (data,) = (root / "a" / "data").rglob("*.safetensors")
    data.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{root}/a/data/.* is missing") as caught:
        loaded(root / "b")
    assert caught.value.uri == str(root / "b")
    with pytest.raises(CorruptCheckpointError, match=f"{root}/a/data/.* is missing"):
        cloudckpt.verify(root / "b")


def test_a_manifest_of_an_old_version_cannot_refer_to_others(root: Path, tmp_path: Path) -> None:
    """If this fails, a manifest that an older reader would take for another checkpoint passes here."""
    cloudckpt.save(STATE, tmp_path / "other" / "a")
    cloudckpt.save(STATE, tmp_path / "other" / "b")
    refer(tmp_path / "other", version=(1, 4))
    with pytest.raises(InvalidManifestError, match="folder"):
        loaded(tmp_path / "other" / "b")


@pytest.mark.parametrize("folder", ["..", ".", "a/b", "a\\b", "c:"])
def test_a_folder_that_leads_elsewhere_is_refused(root: Path, folder: str) -> None:
    """If this fails, a manifest can name files outside of its root."""
    client = open_client(root / "b", Options())
    manifest = resolve(client).manifest
    hostile = [msgspec.structs.replace(stored, folder=folder) for stored in manifest.objects]
    (root / "b" / "manifest.json").write_bytes(encode(msgspec.structs.replace(manifest, objects=hostile)))
    with pytest.raises(InvalidManifestError, match="folder"):
        loaded(root / "b")
