"""Commands around folders that this user may not look into."""

from __future__ import annotations

import _strptime  # noqa: F401  # nobody but root may be able to import it later
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import OLD_ATTEMPT, Run, leave_unfinished, save
from tests.e2e.places import LocalPlace
from tests.rights import NOBODY, without_roots_rights

from cloudckpt.stores.local import LocalStore


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
