"""Fences as ``docs/format.md`` has them, to cloudckpt and to the independent reader."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.docs.independent_reader import Checkpoint, FormatError, crc32c

import cloudckpt

FORMAT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
(EXAMPLE,) = re.findall(r'^\{"format":"cloudckpt-fence".*\}$', FORMAT, re.MULTILINE)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def sealed(members: dict[str, object]) -> bytes:
    body = json.dumps({name: value for name, value in members.items() if name != "crc32c"}, separators=(",", ":"))[:-1]
    return f'{body},"crc32c":"{crc32c(body.encode()):08x}"}}'.encode()


def fence(**changes: object) -> bytes:
    """The document's example, changed and sealed anew."""
    return sealed({**json.loads(EXAMPLE), **changes})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint with the number 0."""
    cloudckpt.save({"weight": torch.arange(3.0)}, tmp_path / "c")
    return tmp_path / "c"


def loads(directory: Path) -> bool:
    state = {"weight": torch.zeros(3)}
    cloudckpt.load(state, directory)
    return state["weight"].tolist() == [0, 1, 2]


def test_the_documents_fence_is_one(directory: Path) -> None:
    """If this fails, the fence in the document is not one, or too long, or has another checksum."""
    assert sealed(json.loads(EXAMPLE)) == EXAMPLE.encode()
    assert len(fence(keeps=10**18 - 1)) <= 128
    assert (directory / "manifest.json").stat().st_size > 128
    (directory / "manifest.json").rename(directory / "manifest.3.json")
    (directory / "manifest.4.json").write_text(EXAMPLE)
    assert loads(directory)
    assert len(Checkpoint(directory).tensor("weight")) == 12


@pytest.mark.parametrize("number", [1, 7])
def test_a_fence_keeps_a_checkpoint_or_ends_it(directory: Path, number: int) -> None:
    """If this fails, what gc fenced off is lost, or what was deleted is read."""
    path = directory / f"manifest.{number}.json"
    path.write_bytes(fence(keeps=0))
    assert loads(directory)
    assert Checkpoint(directory).manifest["world_size"] == 1
    (info,) = cloudckpt.list_checkpoints(directory.parent)
    committed_at_ns = Checkpoint(directory).manifest["committed_at_ns"]
    assert info.committed_at.timestamp() == pytest.approx(committed_at_ns / 1e9, abs=1e-5)
    path.write_bytes(fence(keeps=None))
    with pytest.raises(FormatError, match="deleted"):
        Checkpoint(directory)
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        loads(directory)
    assert cloudckpt.latest(directory.parent) is None


def test_what_gc_and_delete_leave_is_what_the_document_says(directory: Path) -> None:
    """If this fails, the independent reader, and so the document, does not understand what cloudckpt writes."""
    stray = directory / "data" / "20200101T000000000Z-000000000000" / "0-0.safetensors"
    stray.parent.mkdir()
    stray.write_bytes(b"x")
    cloudckpt.gc(directory, older_than=0, dry_run=False)
    assert not stray.exists()
    document = (directory / "manifest.1.json").read_bytes()
    assert list(json.loads(document)) == ["format", "version", "id", "keeps", "crc32c"]
    assert sealed(json.loads(document)) == document
    assert len(Checkpoint(directory).tensor("weight")) == 12
    cloudckpt.delete(directory)
    with pytest.raises(FormatError, match="deleted"):
        Checkpoint(directory)
    assert [path.name for path in directory.iterdir()] == ["manifest.2.json"]
