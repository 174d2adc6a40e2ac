"""``cloudckpt drain``: copy what a bucket is owed, without the job that owes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.kit.in_memory import loaded, state_of
from tests.kit.options import make_options
from tests.kit.wrapped import FaultyStore

import cloudckpt
from cloudckpt import CheckpointManager
from cloudckpt.errors import StoreError
from cloudckpt.manager.debts import drain


def make_debt(directory: Path) -> tuple[str, str]:
    """A job that ends while its bucket takes nothing."""
    root = directory / "bucket"

    def wrap(inner: object) -> FaultyStore:
        store = FaultyStore(inner)  # type: ignore[arg-type]
        if store.uri.startswith(str(root)):
            for operation in ("put", "create_multipart"):
                store.fail(operation, error=lambda: StoreError("nothing", key="", operation="put"), times=1000)
        return store

    manager = CheckpointManager(root, fast=directory / "fast", options=make_options(wrap_store=wrap), async_=False)
    for step in (1, 2):
        manager.save(step, state_of(float(step)))
    with pytest.raises(cloudckpt.errors.CheckpointError):
        manager.close()
    return str(directory / "fast"), str(root)


def test_debts_are_paid_newest_first_and_once(tmp_path: Path, run: Run) -> None:
    """If this fails, a host that goes away takes along the checkpoints that were saved for the bucket."""
    fast, root = make_debt(tmp_path)
    assert f"{root} is owed it, and has no copy" in run("show", f"{fast}/step-2").out
    ended = run("drain", fast, root)
    assert ended.code == 0
    assert "is owed" not in run("show", f"{fast}/step-2").out
    assert ended.out.splitlines() == [f"{root}/step-2: copied", f"{root}/step-1: copied"]
    assert loaded(f"{root}/step-2", no_dist=True)["step"] == 2
    assert run("drain", fast, root, "--json").document == {"drained": [], "failed": []}


def test_a_step_that_stays_owed_is_named_and_fails(tmp_path: Path, run: Run) -> None:
    """If this fails, a hook believes that all is safe, and the host is given back."""
    fast, root = make_debt(tmp_path)
    data = next(path for path in Path(fast, "step-1/data").rglob("*") if path.is_file())
    data.unlink()
    ended = run("drain", fast, root)
    assert ended.code == 1
    assert f"{fast}/step-1: failed" in ended.err
    assert [info.name for info in cloudckpt.list_checkpoints(root)] == ["step-2"]


def test_ls_says_in_which_places_a_step_is(tmp_path: Path, run: Run) -> None:
    """If this fails, a user gives a host back that has the only copy of a step."""
    fast, root = make_debt(tmp_path)
    with CheckpointManager(root, save_every=10, fast=fast, fast_every=1, fast_keep=9) as manager:
        assert [(one.step, one.place) for one in manager.steps()] == [(1, "owed"), (2, "owed")]
        manager.save(3, state_of(3.0))  # its end copies what is owed
    with CheckpointManager(tmp_path / "other", fast=fast, fast_keep=9) as other:
        other.save(9, state_of(9.0))
    cloudckpt.delete(f"{fast}/step-1")
    with CheckpointManager(root, fast=fast, save_every=10, fast_every=1, fast_keep=9) as manager:
        assert [(one.step, one.place) for one in manager.steps()] == [(1, "root"), (2, "both"), (3, "fast")]
    cloudckpt.delete(f"{root}/step-2")
    places = {one["name"]: one["place"] for one in run("ls", root, "--fast", fast, "--json").document}
    assert places == {"step-1": "root", "step-2": "owed", "step-3": "fast", "step-9": f"fast, of {tmp_path / 'other'}"}
    assert run("drain", fast, root).code == 0
    left = Path(fast, "step-5", "data", "20260101T000000000Z-0123456789ab", "0-0.safetensors")
    left.parent.mkdir(parents=True)
    left.write_bytes(b"left by a save that was killed")
    advice = run("ls", root, "--fast", fast, "--alive-within", "0s").err
    assert f"`cloudckpt gc {fast}`" in advice, advice
    assert f"gc {root}`" not in advice
    shutil.rmtree(Path(fast, "step-5"))
    lines = run("ls", root, "--fast", fast, "--columns", "name,place").out.splitlines()
    assert lines[0].split() == ["NAME", "PLACE"]
    assert "step-2 both" in [" ".join(line.split()) for line in lines]
    assert "place" not in run("ls", root, "--json").document[0]


def test_nothing_is_sent_after_the_deadline(tmp_path: Path) -> None:
    """If this fails, a host is given back in the middle of a copy."""
    fast, root = make_debt(tmp_path)
    report = drain(fast, root, deadline_s=0.0)
    assert report.drained == ()
    assert [Path(one.uri).name for one in report.failed] == ["step-2", "step-1"]
    assert "deadline" in report.failed[0].reason
    assert not Path(root).exists() or cloudckpt.list_checkpoints(root) == []


def test_steps_of_another_root_are_not_sent(tmp_path: Path, run: Run) -> None:
    """If this fails, a slip in ROOT mixes the steps of two runs."""
    fast, root = make_debt(tmp_path)
    assert run("drain", fast, f"{root}-2").code == 3
    assert not Path(f"{root}-2").exists()
