"""``cloudckpt ls``, and `list_checkpoints(all=True)`, which it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from awscrt.checksums import crc32c
from tests.cli.conftest import OLD_ATTEMPT, Run, leave_unfinished, save, state_of
from tests.kit.in_memory import Memory
from tests.kit.places import LocalPlace
from tests.kit.wrapped import permanent, transient

import cloudckpt
from cloudckpt.commit.attempts import new_attempt_id
from cloudckpt.commit.entries import encode_fence, new_fence
from cloudckpt.stores import open_store
from cloudckpt.stores.base import Part, crc32c_of
from cloudckpt.uri import parse_location


def test_ls_tells_an_anchor_from_a_difference(local: LocalPlace, run: Run) -> None:
    """If this fails, a user cannot see which version `load` and `export` take, or the checksums of all tensors."""
    model, publisher = torch.nn.Linear(64, 64), cloudckpt.Publisher(local.root)
    for version in (1, 2):
        publisher.publish(model=model, version=version)
    lines = run("ls", local.root, "--columns", "name,state", "--long").out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["version-1", "committed", "(anchor)"],
        ["version-2", "committed", "(difference)"],
    ]


def test_ls_lists_checkpoints_in_each_state(local: LocalPlace, run: Run) -> None:
    """If this fails, a user takes for a checkpoint what is none, or misses one, or garbage."""
    save(local.uri("step-1"), options=cloudckpt.Options(metadata={"loss": 0.5}))
    save(local.uri("step-2"))
    save(local.uri("step-2"), state_of(2.0), overwrite=True)
    leave_unfinished(local, "step-3", attempt=new_attempt_id())
    leave_unfinished(local, "step-1", attempt=OLD_ATTEMPT)
    leave_unfinished(local, "half-removed", attempt=new_attempt_id())
    local.write("half-removed/manifest.1.json", encode_fence(new_fence(keeps=None)))
    (manifest,) = (key for key in local.manifest_keys() if key.startswith("step-1/"))
    save(local.uri("step-4"))
    local.write("step-4/manifest.json", local.read(manifest)[:-300])
    local.write("other/notes.txt", b"not a checkpoint")
    local.write("torchs/.metadata", b"a pickle, which nobody opens here")
    local.write("torchs/0000000000/__0_0.distcp", b"where s3torchconnector's prefix strategies put it")
    save(local.uri("step-1²"))
    ended = run("ls", local.root, "--json")
    assert ended.code == 0
    found = {(one["name"], one["state"]): one for one in ended.document}
    assert found.keys() == {
        ("step-1", "committed"),
        ("step-1", "garbage"),
        ("step-2", "committed"),
        ("step-3", "in progress"),
        ("half-removed", "garbage"),  # no earlier save can be committed after the fence
        ("step-4", "damaged"),
        ("torchs", "torch"),
        ("step-1²", "committed"),
    }
    committed = found["step-1", "committed"]
    assert (committed["world_size"], committed["num_tensors"], committed["metadata"]) == (1, 2, {"loss": 0.5})
    assert committed["num_bytes"] == sum(
        len(local.read(key)) for key in local.data_keys() if key.startswith("step-1/") and "20200101" not in key
    )
    assert found["step-2", "committed"]["manifest_number"] == 1
    unfinished = found["step-3", "in progress"]
    assert (unfinished["num_bytes"], unfinished["num_objects"], unfinished["world_size"]) == (1500, 2, 2)
    assert "truncated" in found["step-4", "damaged"]["problem"]
    names = [
        [one["name"] for one in run("ls", local.root, "--json", "--sort", "name", *r).document] for r in ([], ["-r"])
    ]
    assert names == [sorted(names[0]), sorted(names[0], reverse=True)]
    total = run("du", local.root, "--json").document
    assert total["num_bytes"] == sum(one["num_bytes"] or 0 for one in ended.document)
    table = run("ls", local.root, "--long")
    assert table.code == 0
    lines = table.out.splitlines()
    assert lines[0].split()[:5] == ["NAME", "AGE", "SIZE", "RANKS", "STATE"]
    assert sum("committed" in line for line in lines) == 3
    assert '{"loss": 0.5}' in table.out
    chosen = run("ls", local.root, "--columns", "committed_at,name").out.splitlines()
    assert (chosen[0].split(), len(chosen)) == (["COMMITTED_AT", "NAME"], 9)
    assert run("ls", local.root, "--alive-within", "0s").out.count("garbage") == 3


def _save_measured(local: LocalPlace, name: str, metrics: dict[str, float | None], **settings: Any) -> None:
    save(local.uri(name), options=cloudckpt.Options(metadata={"metrics": metrics}), **settings)


def test_metrics_have_columns_and_a_mark_at_the_best(local: LocalPlace, run: Run) -> None:
    """If this fails, a user loads another checkpoint than the best one, or reads every manifest to find it."""
    _save_measured(local, "step-1", {"val_loss": 0.5, "top1/acc": 0.9, "kl": 2.0})
    _save_measured(local, "step-2", {"val_loss": 0.25, "top1/acc": 0.9, "kl": 1.0})
    _save_measured(local, "step-3", {"val_loss": None, "top1/acc": 0.25})
    _save_measured(local, "step-3-again-1", {"val_loss": 0.75})
    _save_measured(local, "step-0", {"val_loss": 0.01})
    _save_measured(local, "step-0-again-1", {"val_loss": 0.99})
    leave_unfinished(local, "step-2", attempt=OLD_ATTEMPT)
    ended = run("ls", local.root, "--metrics", "--columns", "name", "--sort", "name")
    assert [line.split() for line in ended.out.splitlines()] == [
        ["NAME", "val_loss", "top1/acc", "kl"],
        ["step-0", "0.01"],  # saved again since
        ["step-0-again-1", "0.99"],
        ["step-1", "0.5", "0.9", "2"],
        ["step-2", "*", "0.25", "*", "0.9", "1"],  # of equal values the newer one is the best, as for a manager
        ["step-2"],
        ["step-3", "nan", "0.25"],
        ["step-3-again-1", "0.75"],
    ]
    assert "lowest val_loss, highest top1/acc" in ended.err
    chosen = run("ls", local.root, "--best", "max:kl", "--best", "max:val_loss", "--json").document
    best = {one["name"]: one["best"] for one in chosen if one["state"] == "committed"}
    assert best == {"step-1": ["kl"], "step-2": ["top1/acc"], "step-3": [], "step-3-again-1": []} | {
        "step-0": [],
        "step-0-again-1": ["val_loss"],
    }
    assert next(one["metrics"] for one in chosen if one["name"] == "step-3") == {"val_loss": None, "top1/acc": 0.25}
    assert all(one["save_s"] > 0 for one in chosen if one["state"] == "committed")
    unsorted = run("ls", local.root, "--sort", "val_loss")
    told = "Invalid value for '--sort': 'val_loss' is not one of 'date', 'name', 'size'."
    assert (unsorted.code, told in unsorted.err) == (2, True)
    undirected, unknown = run("ls", local.root, "--best", "kl"), run("ls", local.root, "--best", "min:val_los")
    assert (undirected.code, "min:kl or max:kl" in undirected.err) == (2, True)
    assert (unknown.code, "did you mean 'val_loss'?" in unknown.err) == (3, True)


def test_a_metric_with_the_name_of_a_control_character_is_one_line(local: LocalPlace, run: Run) -> None:
    """If this fails, the name of a metric controls the terminal, or fakes a checkpoint."""
    _save_measured(local, "step-1", {"loss\x1b[31m\nstep-9": 0.5})
    ended = run("ls", local.root, "--metrics")
    assert (len(ended.out.splitlines()), "\x1b" in ended.out + ended.err) == (2, False)


def test_a_checkpoint_without_a_name_has_a_word_for_it(memory: Memory, run: Run) -> None:
    """If this fails, the checkpoint at a bucket itself is a row without a name."""
    cloudckpt.save(state_of(1.0), memory.root)
    assert run("ls", memory.root, "--columns", "name,state").out.splitlines()[1].split() == ["(whole)", "committed"]
    assert "(whole)" in run("du", memory.root).out


def test_a_folder_with_nothing_but_uploads_is_listed(memory: Memory) -> None:
    """If this fails, what a killed save left is paid for, and no listing of the run shows it."""
    memory.at("step-1").create_multipart(f"data/{new_attempt_id()}/0-0.safetensors")
    (found,) = cloudckpt.list_checkpoints(memory.root, all=True)
    assert (found.name, found.state, found.num_uploads) == ("step-1", "in progress", 1)


@pytest.mark.parametrize("key", [f"data/{OLD_ATTEMPT}/0-0.safetensors", "manifest.json"])
def test_a_save_that_died_in_its_first_file_is_listed_on_a_path(tmp_path: Path, run: Run, key: str) -> None:
    """If this fails, the hidden folder of a killed save fills the disk, and neither its size nor the remedy is told."""
    root = str(tmp_path)
    dead = open_store(parse_location(f"{root}/step-1"), cloudckpt.Options())
    part = Part(number=1, offset_bytes=0, size_bytes=4096)
    dead.upload_part(key, dead.create_multipart(key), part, [memoryview(bytes(4096))], crc32c=crc32c_of([bytes(4096)]))
    listed, summed = run("ls", root, "--alive-within", "0s"), run("du", root)
    assert re.search(r"\nstep-1 +\d+ s +4.0 KiB +1 +garbage \(1 upload\)\n", listed.out), listed.out
    assert re.search(r"\n4.0 KiB +0 +step-1\n", summed.out), summed.out
    assert all(f"`cloudckpt gc {root}`" in ended.err for ended in (listed, summed))
    assert "0 objects and 1 unfinished upload of 4.0 KiB removed" in run("gc", root, "--older-than", "0s", "-y").out


def test_watch_follows_a_run(tmp_path: Path) -> None:
    """If this fails, who watches a run misses a checkpoint, or a script that waits for a step waits for ever."""
    root, lines = str(tmp_path), []
    command = [
        sys.executable,
        "-m",
        "cloudckpt",
        "watch",
        root,
        "--interval",
        "1s",
        "--until-step",
        "2",
    ]  # not the 1 of again-1
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            waits_for = f"Listing {root} every 1 s until step 2 or a later one is committed.\n"
            assert running.stderr.readline() == waits_for
            assert "Nothing is at" in running.stderr.readline()
            save(f"{root}/step-1")
            lines.append(running.stdout.readline())
            cloudckpt.delete(f"{root}/step-1")
            save(f"{root}/step-2-again-1")
            lines += running.communicate(timeout=120)[0].splitlines()
        finally:
            running.kill()
    rows = [line.split()[2:4] for line in lines if "in progress" not in line]  # only if a listing finds it so
    assert (running.returncode, rows) == (
        0,
        [["step-1", "committed"], ["step-1", "gone"], ["step-2-again-1", "committed"]],
    )


def test_a_step_that_is_there_is_seen_after_an_outage_and_beside_leftovers(memory: Memory, run: Run) -> None:
    """If this fails, a short outage ends who waits for a step, or one object more than the manifest names hides it."""
    save(memory.uri("step-5"))
    (key,) = memory.data_keys("step-5")
    memory.at("step-5").put(key.replace("0-0", "0-9"), [memoryview(b"x")], crc32c=crc32c(b"x"))
    root = memory.open(memory.root.removeprefix("memory://"), "")
    root.fail("list_directories", error=lambda: transient("list"), times=cloudckpt.Options().retries + 1)
    ended = run("watch", memory.root, "--interval", "1s", "--until-step", "5")
    assert (ended.code, ended.out.count("committed"), "next try" in ended.err) == (0, 1, True)


def test_requests_are_few_and_known(memory: Memory) -> None:
    """If this fails, listing a run of a thousand steps takes requests by the number of objects, or more than told."""
    num_checkpoints = 20
    for step in range(num_checkpoints):
        save(memory.uri(f"step-{step}"))
    for store in memory.stores.values():
        store.calls.clear()
    found = cloudckpt.list_checkpoints(memory.root, all=True)
    assert [one.name for one in found] == [f"step-{step}" for step in range(num_checkpoints)]
    counts = {
        operation: sum(store.count(operation) for store in memory.stores.values())
        for operation in ("list_directories", "list_uploads", "list", "read", "head", "read_into", "put", "delete")
    }
    assert counts == {
        "list_directories": 2,  # one listing may lack a folder
        "list_uploads": 2,
        "list": 2 * num_checkpoints + 6,  # and at the root, in two looks, for data, a log and what torch has saved
        "read": num_checkpoints,
        "head": 0,
        "read_into": 0,
        "put": 0,
        "delete": 0,
    }


def test_uploads_that_may_not_be_listed_hide_nothing_else(memory: Memory) -> None:
    """If this fails, a reader's role that lacks one permission sees no checkpoint at all."""
    save(memory.uri("step-1"))
    root = memory.open(memory.root.removeprefix("memory://"), "")
    root.fail("list_uploads", error=lambda: permanent("list_uploads"), times=100)
    assert [one.state for one in cloudckpt.list_checkpoints(memory.root, all=True)] == ["committed"]


def test_a_manifest_removed_by_hand_is_damage(tmp_path: Path) -> None:
    """If this fails, the listing waits for what will not come back, or calls it a save that goes on."""
    save(f"{tmp_path}/step-1")
    (tmp_path / "step-1" / "manifest.1.json").write_bytes(encode_fence(new_fence(keeps=0)))
    assert [one.state for one in cloudckpt.list_checkpoints(tmp_path, all=True)] == ["committed"]
    (tmp_path / "step-1" / "manifest.json").unlink()
    (found,) = cloudckpt.list_checkpoints(tmp_path, all=True)
    assert (found.state, "by other means" in found.problem) == ("damaged", True)


def test_bytes_that_steps_share_are_counted_once(tmp_path: Path, run: Run) -> None:
    """If this fails, `du` counts shared data with each step, or calls data garbage that a checkpoint refers to."""
    options = cloudckpt.Options(unchanged="reference")
    state = {"frozen": torch.ones(1000)}
    cloudckpt.save({**state, "step": 0}, tmp_path / "step-0", options=options)
    cloudckpt.save({**state, "step": 1}, tmp_path / "step-1", base=tmp_path / "step-0", options=options)
    cloudckpt.delete(tmp_path / "step-0")
    held, user = cloudckpt.list_checkpoints(tmp_path, all=True)
    assert (held.name, held.state, held.num_objects) == ("step-0", "referenced", 1)
    assert (user.name, user.state, user.num_objects, user.num_objects_elsewhere) == ("step-1", "committed", 2, 1)
    stored_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert run("du", str(tmp_path), "--json").document["num_bytes"] == stored_bytes
    ended = run("du", str(tmp_path))
    assert "gc" not in ended.out + ended.err
