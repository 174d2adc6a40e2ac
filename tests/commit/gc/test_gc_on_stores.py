"""gc and delete where users have their checkpoints: what goes, and all that stays."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from tests.commit.gc.leftovers import FOREIGN, LONG_AGO, at, begin_upload, holds, keys_in, put, save, uploads_in

import cloudckpt
from cloudckpt.commit.attempts import new_attempt_id

DEAD = f"step-1/data/{LONG_AGO}/0-0.safetensors"


def littered(root: str) -> set[str]:
    """Two checkpoints, the litter of dead saves beside them, and things that are nobody's business; the litter."""
    save(f"{root}/step-1", 1)
    save(f"{root}/step-2", 2)
    store = at(root)
    litter = {DEAD, f"step-9/data/{LONG_AGO}/3-1.safetensors", f"step-1/rank-0/data/{LONG_AGO}/0-0.safetensors"}
    litter |= {".cloudckpt-probe-0123456789abcdef"}
    for key in [*litter, *FOREIGN]:
        put(store, key)
    begin_upload(store, f"step-2/data/{LONG_AGO}/1-0.safetensors")
    return litter


def test_a_dry_run_lists_the_garbage_and_removes_nothing(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, looking before removing removes, or what is shown is not what goes."""
    litter = littered(root)
    before = keys_in(root)
    report = cloudckpt.gc(root, older_than=0)
    assert set(report.keys) == litter
    uploads_bytes = sum(upload.size_bytes for upload in at(root).list_uploads())
    assert report.num_bytes == len(litter) * len(b"left over") + uploads_bytes
    assert report.uploads == (f"step-2/data/{LONG_AGO}/1-0.safetensors",)
    assert report.dry_run
    assert keys_in(root) == before
    assert len(uploads_in(root)) == 1
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    assert "4 objects and 1 unfinished upload of " in printed
    assert cloudckpt.gc(root, older_than=0, quiet=True) == report
    assert capsys.readouterr().out == ""


def test_gc_removes_exactly_the_garbage(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, gc costs a checkpoint, or something that is not cloudckpt's, or leaves what it is for."""
    litter = littered(root)
    before = keys_in(root)
    shown = cloudckpt.gc(root, older_than=0)
    report = cloudckpt.gc(root, older_than=0, dry_run=False)
    assert (report.keys, report.uploads, report.num_bytes) == (shown.keys, shown.uploads, shown.num_bytes)
    left = keys_in(root)
    assert before - left == litter
    fences = {f"step-{name}" for name in ("1/manifest.1.json", "9/manifest.json", "1/rank-0/manifest.json")}
    assert left - before == fences
    assert uploads_in(root) == set()
    assert holds(f"{root}/step-1", 1)
    assert holds(f"{root}/step-2", 2)
    assert [info.name for info in cloudckpt.list_checkpoints(root)] == ["step-1", "step-2"]
    # Again: only the fences that are all there is go now; and then nothing at all.
    assert set(cloudckpt.gc(root, older_than=0, dry_run=False).keys) == fences - {"step-1/manifest.1.json"}
    assert cloudckpt.gc(root, older_than=0, dry_run=False).locations == ()


def test_gc_keeps_young_data_and_names_it(root: str) -> None:
    """If this fails, gc takes the data of a save that is still running, or hides what a save that died has left."""
    littered(root)
    save(f"{root}/step-3", 3)
    put(at(f"{root}/step-8"), f"data/{new_attempt_id()}/0-0.safetensors", b"left over")
    before = keys_in(root)
    for age in (3600, timedelta(hours=1), timedelta(days=10)):
        report = cloudckpt.gc(root, older_than=age, dry_run=False)
        assert report.num_objects == 0
        kept = {kept.uri: kept.reason for kept in report.skipped}
        assert kept.keys() >= {f"{root}/step-{step}" for step in (1, 8, 9)}  # moto dates uploads in the past
        assert f"{root}/step-3" not in kept
        assert "that no checkpoint needs, of saves that were alive after" in kept[f"{root}/step-1"]
    assert keys_in(root) == before


def test_gc_removes_data_that_an_overwrite_left(root: str) -> None:
    """If this fails, an overwriter that died while it tidied up leaves a whole checkpoint to be paid for."""
    uri = f"{root}/step-1"
    save(uri, 1)
    store = at(uri)
    old = {info.key: store.read(info.key, max_bytes=1 << 20) for info in store.list()}
    save(uri, 2, overwrite=True)
    for key, body in old.items():
        put(store, key, body)
    report = cloudckpt.gc(uri, older_than=0, dry_run=False)
    assert set(report.keys) == set(old)
    assert holds(uri, 2)


def test_a_checkpoint_that_cannot_be_judged_is_left_alone(root: str) -> None:
    """If this fails, gc removes the data of a checkpoint whose manifest could be restored from a backup."""
    save(f"{root}/step-1", 1)
    store = at(f"{root}/step-1")
    put(store, "manifest.1.json", store.read("manifest.json", max_bytes=1 << 20)[:-3])
    before = keys_in(root)
    report = cloudckpt.gc(root, older_than=0, dry_run=False)
    assert report.num_objects == 0
    assert "truncated" in report.skipped[0].reason
    assert "left alone" in str(report)
    assert keys_in(root) == before


def test_a_deleted_checkpoint_is_gone_and_the_next_save_is_not(root: str) -> None:
    """If this fails, a deletion leaves data, takes what is not its own, or stands in the next save's way."""
    littered(root)
    uri = f"{root}/step-1"
    cloudckpt.delete(uri)
    ours = {"step-1/manifest.1.json", f"step-1/rank-0/data/{LONG_AGO}/0-0.safetensors"}
    assert {key for key in keys_in(root) if key.startswith("step-1/")} - set(FOREIGN) == ours
    with pytest.raises(cloudckpt.CheckpointNotFoundError):
        holds(uri, 1)
    put(at(root), DEAD)
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match="Saves left data there"):
        cloudckpt.delete(uri)
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match="Check the URI"):
        cloudckpt.delete(f"{root}/nothing")
    with pytest.raises(cloudckpt.CheckpointNotFoundError, match=r"It has the folders .*step-2.*: name the one"):
        cloudckpt.delete(root)
    assert [info.name for info in cloudckpt.list_checkpoints(root)] == ["step-2"]
    save(uri, 3)
    assert holds(uri, 3)


def test_a_damaged_checkpoint_can_be_deleted(root: str) -> None:
    """If this fails, what cannot be read cannot be got rid of either."""
    uri = f"{root}/step-1"
    save(uri, 1)
    put(at(uri), "manifest.json", b"not a manifest" * 20)
    cloudckpt.delete(uri)
    assert keys_in(uri) == {"manifest.1.json"}


@pytest.mark.parametrize("older_than", [-1, float("nan"), float("inf"), timedelta(-1), "1 day", True, 1e300, 1e12])
def test_an_invalid_age_is_refused(older_than: object) -> None:
    """If this fails, a typing error makes gc take everything, or nothing."""
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match="older_than"):
        cloudckpt.gc("memory://never", older_than=older_than)  # type: ignore[arg-type]


@pytest.mark.parametrize("dry_run", [None, 0, "", "no"])
def test_a_dry_run_other_than_true_or_false_is_refused(dry_run: object) -> None:
    """If this fails, an unset variable that is passed on makes gc remove."""
    with pytest.raises(cloudckpt.errors.InvalidOptionError, match="dry_run"):
        cloudckpt.gc("memory://never", dry_run=dry_run)  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [b'{"name":"small"}', b'{"name":"' + b"x" * 300 + b'"}'])
def test_another_programs_manifest_is_not_deleted(root: str, body: bytes) -> None:
    """If this fails, a mistyped URI costs a file that cloudckpt never wrote."""
    put(at(root), "manifest.json", body)
    with pytest.raises(cloudckpt.errors.InvalidManifestError, match="another program wrote"):
        cloudckpt.delete(root)
    assert keys_in(root) == {"manifest.json"}


def test_hidden_upload_of_any_name_is_removed(tmp_path: Path) -> None:
    """If this fails, parts that a killed export has left stay in a local folder for ever."""
    store = at(str(tmp_path))
    store.create_multipart("model.pt")
    cloudckpt.gc(tmp_path, older_than=0, dry_run=False)
    assert list(store.list_uploads()) == []
