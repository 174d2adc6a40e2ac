"""Removals that the store refuses, on each kind of store: nothing is hidden, and nothing grows."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from typing import Literal

import pytest
import torch
from tests.commit.gc.leftovers import LONG_AGO, at, holds, keys_in, put, save
from tests.kit.rights import without_roots_rights

import cloudckpt
from cloudckpt import AdvancedOptions, CheckpointManager, Options
from cloudckpt.errors import AccessDeniedError, CheckpointNotFoundError, GarbageLeftError, StoreError
from cloudckpt.events import Event
from cloudckpt.testing.faults import Fails, Faults, Rule

ALL = ""
BUT_ABSENT_KEYS = r"manifest|safetensors"
"""The refusals of a retention policy of GCS, and of a directory that may not be changed."""
KINDS = [ALL, BUT_ABSENT_KEYS, r"manifest", r"safetensors"]


def refusing(key: str, error: type[StoreError] = AccessDeniedError, *, skip: int = 0) -> Options:
    rule = Rule(fault=Fails(error), operations={"delete"}, key=key, times=None, skip=skip)
    return Options(retries=0, advanced=AdvancedOptions(wrap_store=Faults(rule, seed=1)))


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize(
    ("error", "commit"),
    [(AccessDeniedError, "conditional"), (StoreError, "conditional"), (AccessDeniedError, "unconditional")],
)
def test_a_refused_deletion_leaves_the_checkpoint_as_it_was(
    root: str, key: str, error: type[StoreError], commit: Literal["conditional", "unconditional"]
) -> None:
    """If this fails, an error that says "denied" has hidden the checkpoint, or each try leaves one more object."""
    uri = f"{root}/step-1"
    save(uri, 1)
    num_keys = []
    for _ in range(4):
        with pytest.raises(error, match="Nothing was deleted, and the checkpoint can be loaded as before"):
            cloudckpt.delete(uri, options=dataclasses.replace(refusing(key, error), commit=commit))
        assert holds(uri, 1)
        num_keys.append(len(keys_in(root)))
    assert num_keys[-1] == num_keys[-2] <= 4
    save(uri, 2, overwrite=True)
    assert holds(uri, 2)
    cloudckpt.delete(uri, options=Options(commit=commit))
    with pytest.raises(CheckpointNotFoundError):
        cloudckpt.delete(uri)
    save(uri, 3)
    assert holds(uri, 3)


def test_a_deletion_that_ends_half_way_says_what_it_has_hidden(root: str) -> None:
    """If this fails, a checkpoint without some of its data is put back, or nobody learns that it is hidden."""
    uri = f"{root}/step-1"
    small_objects = Options(advanced=AdvancedOptions(object_bytes=1024))
    cloudckpt.save({f"{i}": torch.ones(400) for i in range(4)}, uri, no_dist=True, options=small_objects)
    with pytest.raises(AccessDeniedError, match=r"can no longer be loaded: .*manifest\.1\.json hides it"):
        cloudckpt.delete(uri, options=refusing("safetensors", skip=1))
    with pytest.raises(CheckpointNotFoundError):
        cloudckpt.load({}, uri, no_dist=True)


def test_a_hidden_step_is_no_fresh_start(root: str) -> None:
    """If this fails, a job whose only steps are half deleted starts afresh without a word."""
    save(f"{root}/step-3", 3)
    save(f"{root}/step-4", 4)
    for step in (3, 4):
        with pytest.raises(cloudckpt.errors.StoreTimeoutError, match="hides it"):
            cloudckpt.delete(f"{root}/step-{step}", options=refusing("manifest", cloudckpt.errors.StoreTimeoutError))
    with pytest.raises(CheckpointNotFoundError, match=r"the deletion of steps 3, 4 has begun"):
        CheckpointManager(root, no_dist=True).restore({"w": torch.zeros(300)})
    for step in (3, 4):
        cloudckpt.delete(f"{root}/step-{step}")
    assert CheckpointManager(root, no_dist=True).restore({"w": torch.zeros(300)}) is None


@pytest.mark.parametrize("key", KINDS)
def test_steps_that_retention_may_not_remove_stay(root: str, key: str) -> None:
    """If this fails, keep_last hides steps that it may not remove, or the report and its events name some of them."""
    events: list[tuple[str, str]] = []

    def note(event: Event) -> None:
        events.append((event.name, event.uri))

    options = dataclasses.replace(refusing(key), on_event=note)
    with CheckpointManager(root, keep_last=1, async_=False, no_dist=True, options=options) as manager:
        for step in range(3):
            manager.save(step, {"w": torch.full((3,), float(step))})
            manager.wait()
        assert [info.step for info in manager.steps()] == [0, 1, 2]
        report = manager.retention
    assert report is not None
    uris = [f"{root}/step-{step}" for step in range(3)]
    assert report.removed == ()
    assert sorted(one.uri for one in report.failed) == uris[:2]
    assert all("can be loaded as before" in one.reason for one in report.failed)
    assert report.kept == (uris[2],)
    assert {uri for name, uri in events if name == "retention.failed"} == set(uris[:2])
    for step in range(3):
        restored = CheckpointManager(root, no_dist=True).restore({"w": torch.zeros(3)}, step=step)
        assert restored is not None


def test_steps_that_were_not_tried_are_in_the_report(root: str) -> None:
    """If this fails, the report names the first of many steps that stay, and nobody learns of the others."""
    for step in range(12):
        save(f"{root}/step-{step}", step)
    for error, num_tried in ((AccessDeniedError, 8), (StoreError, 1)):
        with CheckpointManager(root, keep_last=1, async_=False, no_dist=True, options=refusing("", error)) as manager:
            manager.restore({"w": torch.zeros(300)})
            manager.save(100, {"w": torch.ones(300)}, overwrite=True)
        assert manager.retention is not None
        failed = [one.uri for one in manager.retention.failed]
        assert failed == [f"{root}/step-{step}" for step in range(12)]
        assert sum("not tried" in one.reason for one in manager.retention.failed) == 12 - num_tried


@pytest.mark.parametrize("key", [ALL, BUT_ABSENT_KEYS, r"safetensors"])
def test_a_refused_gc_removes_nothing_and_says_so(root: str, key: str) -> None:
    """If this fails, gc reports what it could not remove as removed, or each of its runs leaves one more fence."""
    uri = f"{root}/step-1"
    save(uri, 1)
    for number in range(30):
        put(at(uri), f"data/{LONG_AGO}/0-{number}.safetensors")
    num_keys = []
    for _ in range(4):
        with pytest.raises(GarbageLeftError) as caught:
            cloudckpt.gc(uri, older_than=0, dry_run=False, options=refusing(key))
        report = caught.value.report
        num_keys.append(len(keys_in(root)))
        assert all("manifest" in found for found in report.keys), "a spent fence can go; the data cannot"
        assert f"{len(report.keys)} object" in str(report)
        assert report.failed
        assert any("not tried" in one.reason for one in report.failed)
        assert holds(uri, 1)
    assert num_keys[-1] == num_keys[-2] <= num_keys[0] + 1
    report = cloudckpt.gc(uri, older_than=0, dry_run=False)
    assert sum("safetensors" in found for found in report.keys) == 30
    assert holds(uri, 1)


def test_gc_reports_what_it_has_removed(root: str) -> None:
    """If this fails, the report of a gc that met an error counts too much or too little."""
    uri = f"{root}/step-1"
    save(uri, 1)
    for number in range(9):
        put(at(uri), f"data/{LONG_AGO}/0-{number}.safetensors")
    with pytest.raises(GarbageLeftError) as caught:
        cloudckpt.gc(uri, older_than=0, dry_run=False, options=refusing(r"0-[345]\."))
    report = caught.value.report
    assert set(report.keys) == {f"data/{LONG_AGO}/0-{number}.safetensors" for number in (0, 1, 2, 6, 7, 8)}
    assert len(report.failed) == 3
    assert report.num_bytes == 6 * len(b"left over")


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    """A checkpoint of another user, in directories where everybody may add files and remove the own ones."""
    uri = tmp_path / "step-1"
    save(str(uri), 1)
    for folder in (uri, *(path for path in uri.rglob("*") if path.is_dir())):
        folder.chmod(0o777 | stat.S_ISVTX)
    for folder in (*tmp_path.parents, tmp_path):
        if folder.owner() == tmp_path.owner() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    return uri


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_the_files_of_another_user_stay_in_sight(sticky: Path) -> None:
    """If this fails, a user who may add files beside another's checkpoint, and not remove it, hides it by trying."""
    for _ in range(3):
        with without_roots_rights(), pytest.raises(AccessDeniedError, match="can be loaded as before"):
            cloudckpt.delete(sticky)
        assert holds(str(sticky), 1)
    assert len(list(sticky.glob("manifest*.json"))) <= 4
