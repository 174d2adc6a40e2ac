"""``cloudckpt drain``: copy what a bucket is owed, without the job that owes it."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.kit.hosts import hosts_of
from tests.kit.in_memory import loaded, state_of
from tests.kit.moto import locked_s3_server
from tests.kit.options import make_options
from tests.kit.two_places import damage
from tests.kit.wire import CutRequest, Wire, WireRule
from tests.kit.wrapped import FaultyStore

import cloudckpt
from cloudckpt import CheckpointManager
from cloudckpt.errors import StoreError
from cloudckpt.manager.drain import drain


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
    assert f"saved in a fast place of {root}, which is owed no copy of it." in run("show", f"{fast}/step-2").out
    for place in (fast, root):
        assert "is_owed" not in run("show", f"{place}/step-2").out + run("ls", place, "--long").out
        assert run("show", f"{place}/step-2", "--json").document["metadata"]["fast"]["root"] == root
    assert "fast" not in run("show", f"{root}/step-2").out.partition("\n")[2]
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


def test_verify_tells_what_one_of_several_hosts_lacks(tmp_path: Path, run: Run) -> None:
    """If this fails, a step of which each host has a part looks damaged on each, or damage looks like such a part."""
    host, _ = hosts_of(tmp_path, tmp_path / "bucket")
    step, words = f"{host}/step-5", "lacks 3 of its 5 objects, and the others are whole"
    ended = run("verify", step)
    assert (ended.code, f"{step} {words}" in ended.err) == (1, True)
    assert words in run("verify", step, "--json").document["note"]
    damage(next((host / "step-5/data").rglob("*.safetensors")))
    ended = run("verify", step)
    assert (ended.code, f"{step} is damaged: 4 problems" in ended.err) == (1, True)


def test_verify_names_the_copy_of_a_damaged_step(tmp_path: Path, run: Run) -> None:
    """If this fails, a user deletes a step of which the root has a copy, or goes back to an older one."""
    fast, root = make_debt(tmp_path)
    damage(next(Path(fast, "step-2/data").rglob("*.safetensors")))
    advice = f"restore reads the rest from the copy: verify that, too (cloudckpt verify {root}/step-2)"
    assert "Load an older checkpoint" in run("verify", f"{fast}/step-2").err
    shutil.copytree(f"{fast}/step-2", f"{root}/step-2", dirs_exist_ok=True)
    ended = run("verify", f"{fast}/step-2")
    assert (ended.code, f"{fast}/step-2 is damaged: 1 problem. {advice}" in ended.err) == (1, True)
    assert "Load an older checkpoint" in run("verify", f"{root}/step-2").err


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
    assert "check the path" not in run("ls", root, "--fast", fast).err
    for other in (tmp_path / "nowhere", tmp_path / "other"):
        ended = run("ls", root, "--fast", str(other))
        assert (ended.code, f"No step of this run is in {other}: check the path.\n" in ended.err) == (0, True)
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
    page = tmp_path / "report.html"
    assert run("report", root, "--fast", fast, "-o", str(page)).code == 0
    cells = [re.findall("<td[^>]*>(?:<div>)?([^<]*)", row) for row in page.read_text().split("<tr>")]
    assert {row[0]: row[-1] for row in cells if row} == places | {"step-2": "both"}


def test_nothing_is_sent_after_the_deadline(tmp_path: Path) -> None:
    """If this fails, a host is given back in the middle of a copy."""
    fast, root = make_debt(tmp_path)
    report = drain(fast, root, deadline_s=0.0)
    assert report.drained == ()
    assert [Path(one.uri).name for one in report.failed] == ["step-2", "step-1"]
    assert "deadline" in report.failed[0].reason
    assert not Path(root).exists() or cloudckpt.list_checkpoints(root) == []


def test_bucket_that_stops_answering_does_not_outlast_the_deadline(tmp_path: Path) -> None:
    """If this fails, a shutdown hook waits for a bucket for minutes, and the host is taken away in the middle."""
    root, deadline_s = "s3://drained/run", 2.0
    host, _ = hosts_of(tmp_path, root)
    with locked_s3_server() as server:
        server.create_bucket("drained")
        stall = WireRule(action=CutRequest(stalls=True), method="PUT", path="/data/", times=None)
        with Wire(server.endpoint_url, stall) as wire:
            storage_options = {**server.storage_options, "endpoint_url": wire.url}
            begun_s = time.monotonic()
            report = drain(host, root, deadline_s=deadline_s, options=make_options(storage_options=storage_options))
            elapsed_s = time.monotonic() - begun_s
            assert wire.num_acted > 0
    assert len(report.failed) == 1
    assert elapsed_s < 10 * deadline_s  # less than one wait of a request without a deadline


def test_steps_of_another_root_are_not_sent(tmp_path: Path, run: Run) -> None:
    """If this fails, a slip in ROOT mixes the steps of two runs."""
    fast, root = make_debt(tmp_path)
    assert run("drain", fast, f"{root}-2").code == 3
    assert not Path(f"{root}-2").exists()
