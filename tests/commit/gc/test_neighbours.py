"""What lies beside a checkpoint, or looks like one, and is none of its business."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.commit.gc.leftovers import at, put, save

import cloudckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def test_checkpoints_with_names_like_ranks_are_left_alone(root: str) -> None:
    """If this fails, deleting one checkpoint takes its neighbours with it, or nothing can be saved beside them."""
    save(f"{root}/lora/rank-8", 8)
    save(f"{root}/lora/rank-16", 16)
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.delete(f"{root}/lora")
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.verify(f"{root}/lora")
    save(f"{root}/lora", 1)
    cloudckpt.delete(f"{root}/lora")
    assert [info.name for info in cloudckpt.list_checkpoints(f"{root}/lora")] == ["rank-8", "rank-16"]


def test_another_programs_manifest_is_not_overwritten(root: str) -> None:
    """If this fails, overwrite=True removes a file that has nothing to do with checkpoints."""
    put(at(root), "web/manifest.json")
    with pytest.raises(cloudckpt.errors.InvalidManifestError, match="another program wrote it"):
        cloudckpt.save({"step": 1}, f"{root}/web", overwrite=True)
    assert at(root).read("web/manifest.json", max_bytes=100)


def test_a_copy_that_is_being_made_is_young(tmp_path: Path) -> None:
    """If this fails, gc takes the data of an old checkpoint that somebody is just copying, with its times."""
    source, target = tmp_path / "run" / "step-1", tmp_path / "copies" / "step-1"
    save(str(source), 1)
    (data,) = source.glob("data/*/*")
    for path in (data, source / "manifest.json"):
        os.utime(path, (1.0, 1.0))
    attempt = target / "data" / "20200101T000000000Z-0123456789ab"
    attempt.mkdir(parents=True)
    shutil.copy2(data, attempt / data.name)
    assert cloudckpt.gc(str(tmp_path / "copies"), older_than=3600.0).num_objects == 0
    assert cloudckpt.gc(str(tmp_path / "copies"), older_than=0.0).num_objects == 1


def test_names_cannot_forge_what_is_printed(tmp_path: Path) -> None:
    """If this fails, an object's name writes lines of its own into gc's report, or moves the terminal's cursor."""
    root = f"memory://forged-{tmp_path.name}/run"
    put(at(root), "step\n\x1b[2K-1/data/20200101T000000000Z-0123456789ab/0-0.safetensors")
    lines = str(cloudckpt.gc(root, older_than=0)).splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert "step\\n\\x1b[2K-1" in lines[0]
