"""gc and delete when calls fail, and the saves that they come across."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.commit.gc.leftovers import LONG_AGO, at, put, save
from tests.kit.in_memory import Memory, assert_holds, loaded, state_of, written
from tests.kit.wrapped import permanent

import cloudckpt
from cloudckpt.commit.garbage_removal import _remove
from cloudckpt.errors import AccessDeniedError, ObjectNotFoundError, UnsupportedOperationError
from cloudckpt.io.client import StoreClient


@pytest.fixture
def uri(memory: Memory) -> str:
    """A checkpoint, beside which lie two objects of a dead save."""
    cloudckpt.save(state_of(1.0), memory.uri(), no_dist=True)
    for number in range(2):
        put(memory.at().inner, f"data/{LONG_AGO}/0-{number}.safetensors")
    return memory.uri()


def denied() -> AccessDeniedError:
    return AccessDeniedError("no", key="memory://tests/key", operation="delete")


def test_gc_names_denied_keys_and_removes_the_rest(memory: Memory, uri: str) -> None:
    """If this fails, a denied key is passed over in silence, or keeps the rest from being removed."""
    memory.at().fail("delete", key_part="0-0", error=denied, times=9)
    with pytest.raises(cloudckpt.errors.GarbageLeftError, match=r"0-0\.safetensors") as caught:
        cloudckpt.gc(uri, older_than=0, dry_run=False)
    assert [spared.uri for spared in caught.value.report.failed] == [f"{uri}/data/{LONG_AGO}/0-0.safetensors"]
    assert f"data/{LONG_AGO}/0-1.safetensors" not in memory.all_keys()
    assert_holds(loaded(uri), 1.0)


def test_a_manifest_that_cannot_be_removed_keeps_its_data(memory: Memory, uri: str) -> None:
    """If this fails, gc leaves a manifest without its data, which counts again when the newer one is removed."""
    memory.at().fail("delete", key_part="manifest.json", error=denied, times=99)
    cloudckpt.save(state_of(2.0), uri, overwrite=True, no_dist=True)  # it cannot remove what it replaces
    before = memory.data_keys()
    with pytest.raises(cloudckpt.errors.GarbageLeftError, match=r"manifest\.json"):
        cloudckpt.gc(uri, older_than=0, dry_run=False)
    assert memory.data_keys() == before


def test_gc_removes_nothing_without_a_fence(memory: Memory, uri: str) -> None:
    """If this fails, gc removes data that a save can still commit."""
    before = memory.all_keys()
    memory.at().fail("put", error=denied)
    with pytest.raises(cloudckpt.errors.GarbageLeftError):
        cloudckpt.gc(uri, older_than=0, dry_run=False)
    assert memory.all_keys() == before
    memory.at().fail("put", times=99)
    with pytest.raises(cloudckpt.CommitUnknownError):
        cloudckpt.delete(uri)
    assert memory.all_keys() == before


def test_a_manifest_that_is_listed_is_not_taken_for_gone(memory: Memory, uri: str) -> None:
    """If this fails, a store that answers 404 in passing makes gc remove a whole checkpoint that counts."""
    cloudckpt.gc(uri, older_than=0, dry_run=False)  # lays a fence, which keeps the checkpoint
    put(memory.at().inner, f"data/{LONG_AGO}/0-0.safetensors")
    before = memory.all_keys()
    gone = ObjectNotFoundError("no", key="manifest.json", operation="read")
    memory.at().fail("read", key_part="manifest.json", error=lambda: gone, times=99)
    report = cloudckpt.gc(uri, older_than=0, dry_run=False)
    assert "lists an entry that it does not find" in report.skipped[0].reason
    assert memory.all_keys() == before


@pytest.mark.parametrize("is_first", [True, False])
def test_another_manifest_in_one_answer_removes_nothing(memory: Memory, uri: str, *, is_first: bool) -> None:
    """If this fails, one answer that a proxy gives to the wrong request makes gc remove a checkpoint's data."""
    cloudckpt.save(state_of(2.0), memory.uri("other"), no_dist=True)
    inner = memory.at().inner
    own, other = (store.read("manifest.json", max_bytes=10**6) for store in (inner, memory.at("other").inner))
    before = memory.data_keys()

    def answer_with(manifest: bytes) -> None:
        put(inner, "manifest.json", manifest)

    # The fence is put between the two reads.
    memory.at().once_before("read", "manifest.json", lambda: answer_with(other if is_first else own))
    memory.at().once_before("put", "manifest.1.json", lambda: answer_with(own if is_first else other))
    cloudckpt.gc(uri, older_than=0, dry_run=False)
    answer_with(own)
    kept = [key for key in before if LONG_AGO not in key]
    assert kept
    assert set(kept) <= set(memory.data_keys())
    assert_holds(loaded(uri), 1.0)


def test_gc_works_on_a_store_without_uploads(memory: Memory, uri: str) -> None:
    """If this fails, gc works on no file system of fsspec's."""
    refusal = UnsupportedOperationError("no", key="k", operation="list_uploads")
    memory.at().fail("list_uploads", error=lambda: refusal, times=9)
    assert cloudckpt.gc(uri, older_than=0, dry_run=False).num_objects == 2


def test_uploads_that_may_not_be_listed_are_said_to_be_there(memory: Memory, uri: str) -> None:
    """If this fails, a missing permission hides uploads that are paid for, or stops gc before it has begun."""
    memory.at().fail("list_uploads", error=lambda: permanent("list_uploads"), times=9)
    with pytest.raises(cloudckpt.errors.GarbageLeftError, match="unfinished uploads"):
        cloudckpt.gc(uri, older_than=0, dry_run=False)
    assert len(memory.data_keys()) == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_gc_took_for_dead_fails_and_says_why(memory: Memory, uri: str, *, overwrite: bool) -> None:
    """If this fails, a slow save commits a checkpoint without its data."""
    target = uri if overwrite else memory.uri("other")
    writer = cloudckpt.ObjectStoreWriter(target, overwrite=overwrite)
    metadata, results = written(writer, state_of(2.0))
    cloudckpt.gc(memory.root, older_than=0, dry_run=False)
    with pytest.raises(cloudckpt.errors.IncompleteSaveError, match="is gone"):
        writer.finish(metadata, [results])
    assert [info.name for info in cloudckpt.list_checkpoints(memory.root)] == ["checkpoint"]
    assert_holds(loaded(uri), 1.0)


def test_a_save_whose_object_was_cut_is_not_committed(memory: Memory, uri: str) -> None:
    """If this fails, a save commits an object that is shorter than what it wrote."""
    writer = cloudckpt.ObjectStoreWriter(memory.uri("other"))
    metadata, results = written(writer, state_of(2.0))
    (key,) = memory.data_keys("other")
    put(memory.at("other").inner, key)
    with pytest.raises(cloudckpt.errors.IncompleteSaveError, match=r"has [0-9]+ bytes, not [0-9]+"):
        writer.finish(metadata, [results])
    assert [info.name for info in cloudckpt.list_checkpoints(memory.root)] == ["checkpoint"]


def test_a_save_whose_data_is_removed_last_cannot_be_committed(memory: Memory, uri: str) -> None:
    """If this fails, only luck lies between the last look at the data and the commit."""
    writer = cloudckpt.ObjectStoreWriter(uri, overwrite=True)
    metadata, results = written(writer, state_of(2.0))
    memory.at().once_before("put", "manifest", lambda: cloudckpt.gc(uri, older_than=0, dry_run=False) and None)
    with pytest.raises(cloudckpt.CheckpointExistsError, match="gc or a deletion came between"):
        writer.finish(metadata, [results])
    assert_holds(loaded(uri), 1.0)


def test_a_deletion_that_a_save_overtakes_leaves_the_save_alone(memory: Memory, uri: str) -> None:
    """If this fails, a deletion takes a checkpoint that it has never seen."""
    memory.at().once_before(
        "put", "manifest.1", lambda: cloudckpt.save(state_of(2.0), uri, overwrite=True, no_dist=True) and None
    )
    with pytest.raises(cloudckpt.errors.CheckpointChangedError, match="was overwritten while it was being deleted"):
        cloudckpt.delete(uri)
    assert_holds(loaded(uri), 2.0)


def test_checkpoints_with_names_like_ranks_are_left_alone(root: str) -> None:
    """If this fails, deleting one checkpoint takes its neighbours with it, or nothing can be saved beside them."""
    save(f"{root}/lora/rank-0", 0)
    save(f"{root}/lora/rank-16", 16)
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.delete(f"{root}/lora")
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        cloudckpt.verify(f"{root}/lora")
    save(f"{root}/lora", 1)
    cloudckpt.delete(f"{root}/lora")
    assert [info.name for info in cloudckpt.list_checkpoints(f"{root}/lora")] == ["rank-0", "rank-16"]
    cloudckpt.verify(f"{root}/lora/rank-0")


def test_another_programs_manifest_is_not_overwritten(root: str) -> None:
    """If this fails, overwrite=True removes a file that has nothing to do with checkpoints."""
    put(at(root), "web/manifest.json")
    with pytest.raises(cloudckpt.errors.InvalidManifestError, match="another program wrote it"):
        cloudckpt.save({"step": 1}, f"{root}/web", overwrite=True)
    assert at(root).read("web/manifest.json", max_bytes=100)


def test_gc_spares_a_copy_under_way(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("refused", "num_tried"),
    [(range(9), 30), ([*range(9), *range(10, 19), *range(20, 29)], 30), (range(10), 10), (range(3, 30), 13)],
    ids=["nine", "nine_and_nine_and_nine", "ten", "ten_after_some"],
)
def test_a_removal_ends_after_ten_refusals_in_a_row(memory: Memory, refused: Sequence[int], num_tried: int) -> None:
    """If this fails, a few protected objects keep all others, or thousands of requests are refused one by one."""
    keys = [f"data/{number:02d}" for number in range(30)]
    store = memory.at()
    for key in keys:
        put(store.inner, key)
    store.fail("delete", error=denied, key_part=keys[0])  # the request for all of them
    for number in refused:
        store.fail("delete", error=denied, key_part=keys[number])
    left, gone = _remove(StoreClient(store, retries=0, timeout_s=10.0), keys)
    assert list(left) == [keys[number] for number in refused if number < num_tried]
    assert gone == [keys[number] for number in range(num_tried) if number not in refused]
    assert store.count("delete") == 1 + num_tried
