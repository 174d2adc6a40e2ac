"""``rm`` and ``gc``: what they remove, what they ask first, and what they do where the store denies them something."""

from __future__ import annotations

import _strptime  # noqa: F401  # nobody but root may be able to import it later
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from tests.cli.conftest import OLD_ATTEMPT, Run, leave_unfinished, save
from tests.cli.test_drain import make_debt
from tests.kit.places import LocalPlace
from tests.kit.rights import NOBODY, without_roots_rights

import cloudckpt
from cloudckpt.cli._console import Console
from cloudckpt.commit.attempts import new_attempt_id
from cloudckpt.stores.local import LocalStore

_GC = ("--older-than", "0s")


def _save_and_leave_garbage(local: LocalPlace) -> None:
    save(local.uri("step-1"))
    leave_unfinished(local, "step-1", attempt=OLD_ATTEMPT)


def test_rm_deletes_what_is_named_and_nothing_else(local: LocalPlace, run: Run) -> None:
    """If this fails, a checkpoint that was not named is gone, or one that was is still there."""
    for step in (1, 2, 3):
        save(local.uri(f"step-{step}"))
    ended = run("rm", local.uri("step-1"), local.uri("step-3"), "--yes", "--json")
    assert (ended.code, [one["deleted"] for one in ended.document]) == (0, [True, True])
    assert [one.name for one in cloudckpt.list_checkpoints(local.root)] == ["step-2"]
    assert "it has the folder step-2. " in run("show", local.root).err  # the others hold fences alone
    assert run("gc", local.root, *_GC, "--yes").code == 0
    assert [path.name for path in Path(local.root).iterdir()] == ["step-2"]


def test_rm_shows_what_a_dry_run_would_delete(local: LocalPlace, run: Run) -> None:
    """If this fails, a dry run deletes, or a user is told less than would go."""
    _save_and_leave_garbage(local)
    before = local.contents()
    (document,) = run("rm", local.uri("step-1"), "--dry-run", "--json").document
    assert document["deleted"] is False
    assert {one["state"] for one in document["found"]} == {"committed", "garbage"}
    assert local.contents() == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run/step-1"], 2, "--yes"),
        (["run/step-1", "nothing", "--yes"], 3, "Nothing is there"),
        (["run", "--yes"], 3, "and 2 more"),
        (["unfinished", "--yes"], 3, "cloudckpt gc "),
        (["torchs", "--yes"], 3, "torch's own writer"),
    ],
    ids=["no terminal", "a typing error", "a folder", "unfinished", "torch's"],
)
def test_rm_deletes_nothing_but_checkpoints(
    local: LocalPlace, run: Run, arguments: list[str], code: int, message: str
) -> None:
    """If this fails, a mistaken rm deletes a run, a save that is under way, or another program's checkpoint."""
    for step in range(7):
        save(local.uri(f"run/step-{step}"), {"step": step})
    leave_unfinished(local, "unfinished", attempt=OLD_ATTEMPT)
    local.write("torchs/.metadata", b"a pickle, which nobody opens here")
    local.write("torchs/0000000000/__0_0.distcp", b"where s3torchconnector's prefix strategies put it")
    before = local.contents()
    ended = run("rm", *(one if one.startswith("--") else local.uri(one) for one in arguments))
    assert (ended.code, message in ended.err) == (code, True), ended.err
    assert local.contents() == before


def test_rm_keeps_the_last_steps_as_a_manager_does(local: LocalPlace, run: Run, tmp_path: Path) -> None:
    """If this fails, rm deletes a step that is kept, overwritten, or owed to a bucket, or another checkpoint."""
    with cloudckpt.CheckpointManager(local.root, async_=False) as manager:
        for step in range(6):
            manager.save(step, {"step": torch.tensor(step)})
    save(local.uri("an-import"))
    leave_unfinished(local, "step-1", attempt=new_attempt_id())  # a save that overwrites it
    leave_unfinished(local, "step-9", attempt=OLD_ATTEMPT)
    local.write("step-3/manifest.json", local.read("step-3/manifest.json")[:100])
    before = local.contents()
    dry = run("rm", local.root, "--keep-last", "2", "--dry-run")
    assert (dry.code, local.contents() == before, run("rm", local.root, "--keep-last", "2").code) == (0, True, 2)
    ended = run("rm", local.root, "--keep-last", "2", "--yes")
    assert ended.code == 1
    assert re.findall(r"Deleted .*/step-(\d)\.", ended.out) == ["0", "2"]
    assert "step-1: left alone: another save writes there, or was killed: gc removes its data" in ended.err
    assert "step-3: left alone: " in ended.err
    left = {one.name for one in cloudckpt.list_checkpoints(local.root, all=True)}
    assert left == {"an-import", "step-1", "step-3", "step-4", "step-5", "step-9"}
    assert "Besides, 2 folders of removed checkpoints: a fence of " in run("ls", "-l", local.root).err, "steps 0 and 2"
    found = run("gc", local.root, *_GC, "--dry-run").out
    assert found.count(": the fence of a removed checkpoint (") == 2
    assert run("rm", local.root, "--keep-last", "9", "--yes").code == 0
    assert run("rm", local.uri("nothing"), "--keep-last", "1", "--yes").code == 3


def test_rm_keeps_steps_that_a_bucket_is_owed(tmp_path: Path, run: Run) -> None:
    """If this fails, a clean-up of a fast place deletes the only copy of a step, or keeps steps that the bucket has."""
    fast, root = make_debt(tmp_path)
    remedy = f"{root} is owed it, and has no copy: run 'cloudckpt drain {fast} {root}' first"
    ended = run("rm", fast, "--keep-last", "1", "--yes")
    assert (ended.code, ended.out, ended.err.count(f"step-1: left alone: {remedy}")) == (0, "", 1)
    assert f"step-1: {remedy}" in run("rm", f"{fast}/step-1", "--dry-run").err
    for words in (["--yes"], ["--yes", "--json"]):
        ended = run("rm", f"{fast}/step-1", f"{fast}/step-2", *words)
        assert (ended.code, f"step-1: {remedy}" in ended.err, "pass --force" in ended.err) == (1, True, True)
    assert [one.name for one in cloudckpt.list_checkpoints(fast)] == ["step-1", "step-2"]
    assert run("drain", fast, root).code == 0
    ended = run("rm", fast, "--keep-last", "1", "--yes")
    assert (ended.code, ended.err, ended.out.count("Deleted")) == (0, "", 1)
    assert [one.name for one in cloudckpt.list_checkpoints(fast)] == ["step-2"]


def test_rm_asks_the_root_of_a_fast_place(tmp_path: Path, run: Run) -> None:
    """If this fails, a step whose bucket does not answer is deleted as if the bucket had it."""
    fast, root = make_debt(tmp_path)
    Path(root).write_text("no folder")
    ended = run("rm", fast, "--keep-last", "1", "--yes")
    assert (ended.code, ended.out, "owed it, and cannot be asked for its copy: " in ended.err) == (0, "", True)
    assert run("rm", f"{fast}/step-1", "--yes").code == 1
    assert "Deleted" in run("rm", f"{fast}/step-1", "--yes", "--force").out


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_rm_does_not_count_steps_without_their_data(damage: str, local: LocalPlace, run: Run) -> None:
    """If this fails, rm deletes the last step that can be loaded, and keeps one that cannot."""
    with cloudckpt.CheckpointManager(local.root, async_=False) as manager:
        for step in range(4):
            manager.save(step, {"w": torch.arange(9)})
    for key in [one for one in local.contents() if one.startswith(("step-3/data/", "step-1/data/"))]:
        data = local.read(key)
        local.remove(key)
        if damage == "short":
            local.write(key, data[:-1])
    ended = run("rm", local.root, "--keep-last", "2", "--yes")
    lacks = "left alone: the listing lacks 1 of its 1 data objects, or has them with another size: data/"
    assert (ended.code, [f"step-{at}: {lacks}" in ended.err for at in range(4)]) == (0, [False, True, False, True])
    assert [one.name for one in cloudckpt.list_checkpoints(local.root)] == ["step-0", "step-1", "step-2", "step-3"]
    assert re.findall(r"Deleted .*/step-(\d)\.", run("rm", local.root, "--keep-last", "1", "--yes").out) == ["0", "1"]


def test_rm_counts_the_steps_of_each_run_apart(tmp_path: Path, run: Run) -> None:
    """If this fails, a clean-up of a fast place that two runs use deletes all steps of one of them."""
    fast = tmp_path / "fast"
    for root, step in (("a", 7), ("a", 8), ("b", 3)):
        with cloudckpt.CheckpointManager(tmp_path / root, save_every=100, fast=fast, fast_every=1) as manager:
            manager.save(step, {"step": torch.tensor(step)})
    ended = run("rm", str(fast), "--keep-last", "1", "--yes")
    assert (ended.code, [one.name for one in cloudckpt.list_checkpoints(fast)]) == (0, ["step-8", "step-3"])


def test_rm_spares_a_step_that_was_saved_while_it_asked(
    local: LocalPlace, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a run that went back and saved step 1 again loses its newest step."""
    with cloudckpt.CheckpointManager(local.root, async_=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"step": torch.tensor(step)})

        def confirm(*_: object, **__: object) -> bool:
            manager.save(1, {"step": torch.tensor(-1)}, overwrite=True)
            return True

        monkeypatch.setattr(Console, "is_interactive", True)
        monkeypatch.setattr(typer, "confirm", confirm)
        ended = run("rm", local.root, "--keep-last", "1")
    assert (ended.code, "step-1: left alone: the run has changed meanwhile" in ended.err) == (1, True)
    assert [one.name for one in cloudckpt.list_checkpoints(local.root)] == ["step-3", "step-1"]


def test_gc_removes_only_with_yes(local: LocalPlace, run: Run) -> None:
    """If this fails, garbage is removed unasked, or stays although it was asked for."""
    _save_and_leave_garbage(local)
    before = local.contents()
    for arguments in (_GC, (*_GC, "--yes", "--dry-run"), ("--yes",)):  # the last: what is young stays
        shown = run("gc", local.root, *arguments)
        assert shown.code == 0
        assert local.contents() == before
    assert "2 data objects of 1 save" in run("gc", local.root, *_GC).out
    removed = run("gc", local.root, *_GC, "--yes", "--json")
    assert (removed.code, removed.document["num_objects"], removed.document["dry_run"]) == (0, 2, False)
    assert not any(OLD_ATTEMPT in key for key in local.contents())
    assert run("verify", local.uri("step-1")).code == 0


@pytest.mark.parametrize("agrees", [True, False])
def test_rm_and_gc_ask_before_they_remove(
    local: LocalPlace, run: Run, monkeypatch: pytest.MonkeyPatch, *, agrees: bool
) -> None:
    """If this fails, a checkpoint or garbage goes although the user said no, or stays although the user said yes."""
    monkeypatch.setattr(Console, "is_interactive", True)
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: agrees)
    _save_and_leave_garbage(local)
    before = local.contents()
    assert run("gc", local.root, *_GC).code == 0
    assert (local.contents() == before) is not agrees
    assert run("rm", local.uri("step-1")).code == (0 if agrees else 1)
    assert len(cloudckpt.list_checkpoints(local.root)) == (0 if agrees else 1)


@pytest.fixture
def root(run: Run) -> Iterator[Path]:
    """A folder that everybody can reach, with three checkpoints."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        for name in ("ls", "gc", "rm", "verify"):  # so that all modules are imported
            run(name, f"{folder}/nothing", *(["--yes"] if name in ("gc", "rm") else []))
        for step in (1, 2, 3):
            save(f"{folder}/step-{step}")
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def without_rights(root: Path, *closed: str) -> Iterator[None]:
    """Give all of `root` to another user, run this process as that user, and close the folders `closed` to it."""
    if os.geteuid() == 0:
        for folder, _, names in os.walk(root):
            for path in (folder, *(f"{folder}/{name}" for name in names)):
                os.chown(path, NOBODY, -1)
    for name in closed:
        (root / name).chmod(0)
    try:
        with without_roots_rights():
            yield
    finally:
        for name in closed:
            (root / name).chmod(0o755)


def test_gc_names_what_it_cannot_see_and_removes_nothing(root: Path, run: Run) -> None:
    """If this fails, gc passes over a folder of another user in silence."""
    for name in ("step-1", "step-2", "step-3"):
        leave_unfinished(LocalPlace(root), name, attempt=OLD_ATTEMPT)
    with without_rights(root, "step-2"):
        dry = run("gc", str(root), "--older-than", "0s", "--json")
        done = run("gc", str(root), "--older-than", "0s", "--yes")
    assert (dry.code, done.code) == (4, 4)
    assert f"{root}/step-2" in done.err
    left = {path.relative_to(root).parts[0] for path in root.rglob(f"data/{OLD_ATTEMPT}/*.safetensors")}
    assert left == {"step-1", "step-2", "step-3"}
    assert all(run("verify", f"{root}/step-{step}").code == 0 for step in (1, 2, 3))


@pytest.mark.parametrize("closed", ["data", f"data/{OLD_ATTEMPT}", "data/closed", "upload"])
def test_gc_removes_nothing_that_it_cannot_judge(root: Path, run: Run, closed: str) -> None:
    """If this fails, gc removes the data of a save of which it has seen only the part that looks dead."""
    leave_unfinished(LocalPlace(root), "step-1", attempt=OLD_ATTEMPT)
    leave_unfinished(LocalPlace(root), "step-1", attempt=OLD_ATTEMPT.replace("2020", "2021"))
    (root / "step-1/data/closed").mkdir()
    if closed == "upload":
        upload_id = LocalStore(root / "step-1").create_multipart(f"data/{OLD_ATTEMPT}/1-0.safetensors")
        closed = f"data/{OLD_ATTEMPT}/.cloudckpt-tmp.{upload_id}"
    before = LocalPlace(root).contents()
    with without_rights(root, f"step-1/{closed}"):
        ended = run("gc", str(root), "--older-than", "0s", "--yes")
    assert ended.code == 4
    assert LocalPlace(root).contents() == before


@pytest.mark.parametrize("closed", ["step-1", "step-1/data"])
def test_rm_deletes_nothing_of_what_it_cannot_see(root: Path, run: Run, closed: str) -> None:
    """If this fails, a checkpoint is half deleted."""
    before = LocalPlace(root).contents()
    with without_rights(root, closed):
        ended = run("rm", f"{root}/step-2", f"{root}/step-1", "--yes")
    assert (ended.code, ended.out) == (4, ""), ended.err
    assert LocalPlace(root).contents() == before
