"""What commands do around folders that this user may not look into."""

from __future__ import annotations

import _strptime  # noqa: F401  # what could not be imported by somebody else
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Run, leave_unfinished, save
from tests.e2e.places import LocalPlace
from tests.rights import NOBODY, without_roots_rights

import cloudckpt
from cloudckpt.errors import AccessDeniedError
from cloudckpt.stores.local import LocalStore

_OLD = "20200101T000000000Z-0123456789ab"


@pytest.fixture
def root(run: Run) -> Iterator[Path]:
    """A folder of which all belongs to whom `without_rights` makes of this process, and that everybody can reach."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        for name in ("ls", "gc", "rm", "verify"):  # once, so that all is imported
            run(name, f"{folder}/nothing", *(["--yes"] if name in ("gc", "rm") else []))
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def without_rights(root: Path, *closed: str, mode: int = 0) -> Iterator[None]:
    """Meanwhile this process may not look into the folders `closed`. Root may do anything: it becomes somebody else."""
    if os.geteuid() == 0:
        for folder, _, names in os.walk(root):
            for path in (folder, *(f"{folder}/{name}" for name in names)):
                os.chown(path, NOBODY, -1)
    for name in closed:
        (root / name).chmod(mode)
    try:
        with without_roots_rights():
            yield
    finally:
        for name in closed:
            (root / name).chmod(0o755)


def _garbage(root: Path) -> set[str]:
    return {path.relative_to(root).parts[0] for path in root.rglob(f"data/{_OLD}/*.safetensors")}


@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_gc_goes_on_and_says_where_it_could_not(root: Path, run: Run, mode: int) -> None:
    """If this fails, one folder of another user keeps all others from being cleaned, or is passed over in silence."""
    for name in ("step-1", "step-2", "step-3"):
        save(f"{root}/{name}")
        leave_unfinished(LocalPlace(root), name, attempt=_OLD)
    with without_rights(root, "step-2", mode=mode):
        dry = run("gc", str(root), "--older-than", "0s", "--json")
        done = run("gc", str(root), "--older-than", "0s", "--yes")
    assert dry.code == 1
    assert dry.document["failed"][0]["uri"] == f"{root}/step-2"
    assert all("step-2" in one["uri"] for one in dry.document["failed"])
    assert dry.document["num_objects"] == 4
    assert done.code == 1
    assert f"{root}/step-2: failed: permission denied" in done.err
    assert _garbage(root) == {"step-2"}
    for name in ("step-1", "step-2", "step-3"):
        assert run("verify", f"{root}/{name}").code == 0


@pytest.mark.parametrize("closed", ["data", f"data/{_OLD}", "data/closed"])
def test_nothing_goes_that_cannot_be_judged(root: Path, run: Run, closed: str) -> None:
    """If this fails, gc removes the data of a save of which it has seen only the part that looks dead."""
    save(f"{root}/step-1")
    leave_unfinished(LocalPlace(root), "step-1", attempt=_OLD)
    leave_unfinished(LocalPlace(root), "step-1", attempt=_OLD.replace("2020", "2021"))
    (root / "step-1/data/closed").mkdir()
    before = LocalPlace(root).contents()
    with without_rights(root, f"step-1/{closed}"):
        ended = run("gc", str(root), "--older-than", "0s", "--yes")
    assert ended.code == 1
    assert f"{root}/step-1/{closed}: failed" in ended.err
    assert LocalPlace(root).contents() == before


def test_what_is_hidden_from_the_listing_of_uploads_counts_too(root: Path, run: Run) -> None:
    """If this fails, gc takes for dead a save of which only an upload is young, in a folder that it cannot open."""
    save(f"{root}/step-1")
    leave_unfinished(LocalPlace(root), "step-1", attempt=_OLD)
    key = f"data/{_OLD}/1-0.safetensors"
    LocalStore(root / "step-1").create_multipart(key)
    (hidden,) = (path for path in (root / f"step-1/data/{_OLD}").iterdir() if path.is_dir())
    before = LocalPlace(root).contents()
    with without_rights(root, str(hidden.relative_to(root))):
        ended = run("gc", str(root), "--older-than", "0s", "--yes")
    assert ended.code == 1
    assert LocalPlace(root).contents() == before


def test_ls_lists_the_others(root: Path, run: Run) -> None:
    """If this fails, one folder of another user hides all checkpoints; or nobody hears that it hides what is in it."""
    for name in ("step-1", "step-2", "step-3"):
        save(f"{root}/{name}")
    leave_unfinished(LocalPlace(root), "step-3", attempt=_OLD)
    (root / "else/closed").mkdir(parents=True)
    with without_rights(root, "step-2", f"step-3/data/{_OLD}", "else/closed"):
        listed, told = run("ls", str(root), "--json"), run("ls", str(root))
        alone = run("ls", f"{root}/step-2")
        names = [one.name for one in cloudckpt.list_checkpoints(root, all=True) if one.state == "committed"]
        with pytest.raises(AccessDeniedError, match="step-2"):  # a newer one must not be passed over in silence
            cloudckpt.latest(root)
    assert {(one["name"], one["state"]) for one in listed.document} == {
        ("step-1", "committed"),
        ("step-2", "denied"),
        ("step-3", "committed"),
        ("step-3", "denied"),
    }
    assert names == ["step-1", "step-3"]
    assert (listed.code, told.code) == (4, 4)
    assert {one["time"] for one in listed.document if one["state"] == "denied"} == {None}
    assert f"{root}/step-2/" in told.err
    assert f"{root}/step-3/data/{_OLD}" in told.err
    assert (alone.code, alone.out) == (4, "")


def test_checkpoints_beside_a_closed_folder_are_found(root: Path) -> None:
    """If this fails, a job cannot find its checkpoints because somebody else has put a folder of his beside them."""
    save(f"{root}/step-1")
    (root / "else/closed").mkdir(parents=True)
    with without_rights(root, "else/closed"):
        found = cloudckpt.latest(root)
    assert found is not None
    assert found.name == "step-1"


@pytest.mark.parametrize("closed", ["step-1", "step-1/data"])
def test_rm_deletes_nothing_of_what_it_cannot_see(root: Path, run: Run, closed: str) -> None:
    """If this fails, a checkpoint is half deleted, or one of which nobody knows whether it is one."""
    for name in ("step-1", "step-2"):
        save(f"{root}/{name}")
    before = LocalPlace(root).contents()
    with without_rights(root, closed):
        ended = run("rm", f"{root}/step-2", f"{root}/step-1", "--yes")
    assert (ended.code, ended.out) == (4, ""), ended.err
    assert LocalPlace(root).contents() == before
