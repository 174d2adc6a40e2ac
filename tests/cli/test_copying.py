"""``cloudckpt cp``, ``export`` and ``import``."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.cli.conftest import Run, save, state_of
from tests.cli.test_documented import members_of
from tests.e2e.places import LocalPlace, Place

import cloudckpt
from cloudckpt.convert import copying
from cloudckpt.options import Options
from cloudckpt.testing.faults import Denied, Faults, Rule


def test_a_checkpoint_is_copied(place: Place, run: Run, tmp_path: Path) -> None:
    """If this fails, the command copies something else than the library does, or scripts cannot tell what it did."""
    save(place.uri("run/step-1"))
    ended = run("cp", place.uri("run/step-1"), place.uri("run/copy"), "--json")
    assert ended.code == 0, ended.err
    report = cloudckpt.verify(place.uri("run/copy"))
    assert ended.document["num_bytes"] == report.num_bytes
    assert ended.document["attempts"] == list(report.attempts)
    away = run("cp", place.uri("run/step-1"), str(tmp_path / "away"))
    assert (away.code, "in 1 object" in away.out) == (0, True)
    assert run("cp", place.uri("run/step-1"), place.uri("run/copy")).code == 6
    assert run("cp", place.uri("run/step-1"), place.uri("run/copy"), "--overwrite").code == 0
    assert run("cp", place.uri("run/none"), place.uri("run/other")).code == 3
    assert run("cp", place.uri("run/step-1"), place.uri("run/step-1")).code == 2


def test_all_of_a_folder_is_copied_and_what_is_there_is_not_again(place: Place, run: Run) -> None:
    """If this fails, a folder of checkpoints cannot be moved, or a second try fails at what the first has done."""
    for number in (1, 2):
        save(place.uri(f"run/step-{number}"), state_of(float(number)))
    assert run("cp", place.uri("run/step-1"), place.uri("there/step-1")).code == 0
    before = place.contents()
    ended = run("cp", "--all", place.uri("run"), place.uri("there"), "--json")
    assert ended.code == 0, ended.err
    assert [one["copied"] for one in ended.document] == [False, True]
    assert [one.name for one in cloudckpt.list_checkpoints(place.uri("there"))] == ["step-1", "step-2"]
    assert {key: place.contents()[key] for key in before} == before
    assert run("cp", "--all", place.uri("nothing"), place.uri("there")).code == 3


def test_what_cannot_be_copied_does_not_keep_the_others_back(place: Place, run: Run) -> None:
    """If this fails, one damaged checkpoint keeps all younger ones from being mirrored, and nothing tells which."""
    for number in (1, 2, 3, 4):
        save(place.uri(f"run/step-{number}"), state_of(float(number)))
    (key,) = (key for key in place.contents() if key.startswith("run/step-1/data/"))
    place.write(key, bytes(len(place.read(key))))
    place.write("run/step-3/manifest.json", b"{}")
    ended = run("cp", "--all", place.uri("run"), place.uri("there"), "--json")
    assert ended.code == 1
    told = {one["source"].rpartition("/")[2]: (one["copied"], "problem" in one) for one in ended.document}
    good, bad = (True, False), (False, True)
    assert told == {"step-1": bad, "step-2": good, "step-3": bad, "step-4": good}
    assert [one.name for one in cloudckpt.list_checkpoints(place.uri("there"))] == ["step-2", "step-4"]
    # A manifest that cannot be read has the time of the store, which may be cut to seconds: no order is promised.
    assert {line.partition("step-")[2][:1] for line in ended.err.splitlines() if "Error" in line} == {"1", "3"}


def test_a_copy_that_broke_off_goes_on(local: LocalPlace, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the same command again begins anew; or a failed one without the option leaves what it wrote."""
    save(local.uri("run/step-1"))
    copy = copying.copy
    refused = Faults(Rule(fault=Denied(), operations={"put"}, key="manifest", times=None))

    def failing(*arguments: Any, target_options: Options, **more: Any) -> Any:
        return copy(*arguments, target_options=dataclasses.replace(target_options, wrap_store=refused), **more)

    for option in ("", "--resume"):
        there = local.uri(f"there{option}/step-1")
        with monkeypatch.context() as patch:
            patch.setattr(copying, "copy", failing)
            assert run("cp", local.uri("run/step-1"), there, *filter(None, [option])).code == 4
        assert len([key for key in local.contents() if key.startswith(f"there{option}/")]) == bool(option)
        ended = run("cp", local.uri("run/step-1"), there, "--resume", "--json")
        assert ended.code == 0, ended.err
        assert ended.document["num_reused_bytes"] == (ended.document["num_bytes"] if option else 0)
    shown = run("cp", "--all", local.uri("run"), local.uri("there"), "--resume")
    assert (shown.code, "exists already" in shown.err) == (0, True)


def test_a_copy_that_was_done_is_success_and_nothing_else_that_is_there(local: LocalPlace, run: Run) -> None:
    """If this fails, a script that repeats its ``cp --resume`` fails at what it did, or believes another to be it."""
    uri, there = local.uri("run/step-1"), local.uri("there/step-1")
    save(uri)
    assert run("cp", uri, there, "--resume", "--json").document["was_there"] is False
    before = local.contents()
    for more in ((), ("--overwrite",)):
        ended = run("cp", uri, there, "--resume", "--json", *more)
        assert (ended.code, ended.document["was_there"]) == (0, True), ended.err
        assert "exists already" in run("cp", uri, there, "--resume", *more).err
    assert run("cp", uri, there).code == 6
    assert local.contents() == before
    save(local.uri("run/step-2"))
    assert run("cp", local.uri("run/step-2"), there, "--resume").code == 6
    # Of all of a folder, nothing is read to pass over what is there: damage is for `verify`.
    (key,) = (key for key in local.contents() if key.startswith("there/step-1/data/"))
    local.write(key, b"")
    ended = run("cp", "--all", local.uri("run"), local.uri("there"), "--resume", "--json")
    assert (ended.code, [one["copied"] for one in ended.document]) == (0, [False, True])
    assert run("cp", uri, there, "--resume").code == 1
    assert run("cp", uri, there, "--resume", "--overwrite").code == 0
    assert run("verify", there).code == 0


def test_what_ends_a_copy_of_all_leaves_what_was_done_told(
    local: LocalPlace, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a script does not know which checkpoints were mirrored before its credentials ran out."""
    for number in (1, 2, 3):
        save(local.uri(f"run/step-{number}"))
    copy = copying.copy

    def copied(source: str, *arguments: Any, **more: Any) -> Any:
        if source.endswith("step-2"):
            raise cloudckpt.errors.CredentialsError("they have expired", key=source, operation="list")
        return copy(source, *arguments, **more)

    monkeypatch.setattr(copying, "copy", copied)
    ended = run("cp", "--all", local.uri("run"), local.uri("there"), "--json")
    assert (ended.code, [one["copied"] for one in ended.document]) == (4, [True])


def test_options_of_two_sides(local: LocalPlace, s3: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a bucket that needs an endpoint cannot be copied from or to a path, or from another bucket."""
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    save(local.uri("step-1"))
    there = ("--endpoint-url", endpoint)
    assert run("cp", local.uri("step-1"), s3.uri("step-1"), *there).code == 0
    assert run("cp", s3.uri("step-1"), local.uri("back"), *there).code == 0
    assert run("cp", s3.uri("step-1"), s3.uri("step-2"), *there).code == 0
    both = (*there, "--target-endpoint-url", endpoint)
    assert run("cp", s3.uri("step-1"), s3.uri("step-3"), *both).code == 0
    assert run("cp", local.uri("step-1"), s3.uri("step-4"), "--target-endpoint-url", endpoint).code == 0
    assert run("cp", local.uri("step-1"), local.uri("step-5"), *there).code == 2


def test_an_export_and_its_way_back(place: Place, run: Run, tmp_path: Path) -> None:
    """If this fails, the command writes another model than the library's call, or its options do nothing."""
    save(place.uri("step-1"))
    refused = run("export", place.uri("step-1"), place.uri("out"))
    assert (refused.code, "'optim.step'" in refused.err) == (2, True)
    chosen = ("--include", "model.*", "--strip-prefix", "model.", "--max-shard-size", "1kB")
    ended = run("export", place.uri("step-1"), place.uri("out"), *chosen, "--json")
    assert ended.code == 0, ended.err
    written = [key.removeprefix("out/") for key in place.contents() if key.startswith("out/")]
    assert sorted(ended.document["files"]) == sorted(written)
    assert len(ended.document["files"]) == 3
    found = {}
    for name in ended.document["files"]:
        (tmp_path / name).write_bytes(place.read(f"out/{name}"))
        if name.endswith(".safetensors"):
            found |= load_file(tmp_path / name)
    assert found.keys() == {"w", "b"}
    assert torch.equal(found["w"], state_of()["model"]["w"])
    assert run("export", place.uri("step-1"), place.uri("out"), *chosen).code == 6
    back = run("import", place.uri("out"), place.uri("step-2"), "--add-prefix", "model.", "--json")
    assert (back.code, back.document["num_tensors"]) == (0, 2), back.err
    state = {"model": {"w": torch.zeros(300, 10), "b": torch.zeros(7, dtype=torch.bfloat16)}}
    cloudckpt.load(state, place.uri("step-2"), no_dist=True)
    assert torch.equal(state["model"]["w"], found["w"])


def test_tied_tensors_are_named(local: LocalPlace, run: Run) -> None:
    """If this fails, what a file has once cannot be given its other name by the command."""
    save(local.uri("step-1"))
    assert run("export", local.uri("step-1"), local.uri("out"), "--include", "model.*").code == 0
    ended = run("import", local.uri("out"), local.uri("back"), "--tie", "head=model.w", "--tie", "h2=model.w", "--json")
    assert (ended.code, ended.document["num_tensors"]) == (0, 4), ended.err
    state = {"head": torch.zeros(300, 10)}
    cloudckpt.load(state, local.uri("back"), no_dist=True)
    assert torch.equal(state["head"], state_of()["model"]["w"])
    for wrong in ("head", "=model.w", "head=none"):
        assert run("import", local.uri("out"), local.uri("other"), "--tie", wrong).code == 2
    ended = run("import", local.uri("out"), local.uri("other"), "--tie", "head=model.w", "--tie", "head=model.x")
    assert (ended.code, "given twice" in ended.err) == (2, True)


def test_torchs_own_formats(local: LocalPlace, run: Run) -> None:
    """If this fails, the formats that are pickles cannot be asked for, or are read without consent."""
    save(local.uri("step-1"))
    assert run("export", local.uri("step-1"), local.uri("model.pt"), "--format", "torch").code == 0
    found = torch.load(io.BytesIO(local.read("model.pt")), weights_only=True)
    assert torch.equal(found["model"]["w"], state_of()["model"]["w"])
    assert run("import", local.uri("model.pt"), local.uri("step-2"), "-f", "torch").code == 0
    assert run("export", local.uri("step-1"), local.uri("dcp"), "-f", "dcp").code == 0
    refused = run("import", local.uri("dcp"), local.uri("step-3"), "-f", "dcp")
    assert refused.code == 2, refused.err
    assert run("import", local.uri("dcp"), local.uri("step-3"), "-f", "dcp", "--unsafe-pickle").code == 0
    assert run("export", local.uri("step-1"), local.uri("x"), "-f", "onnx").code == 2


def test_the_documents_are_as_documented(local: LocalPlace, run: Run) -> None:
    """If this fails, a script asks for a member that is not there, or that may go unannounced."""
    save(local.uri("run/step-1"))
    uri, out = local.uri("run/step-1"), local.uri("out")
    for name, arguments in (
        ("cp", [uri, local.uri("copy")]),
        ("export", [uri, out, "--skip-non-tensors"]),
        ("import", [out, local.uri("back")]),
    ):
        assert list(run(name, *arguments, "--json").document) == members_of(name)
    (copied,) = run("cp", "--all", local.uri("run"), local.uri("there"), "--json").document
    assert list(copied) == ["copied", *members_of("cp")]
    (left,) = run("cp", "--all", local.uri("run"), local.uri("there"), "--json").document
    assert list(left) == ["copied", "source", "target"]


def test_what_a_load_says_is_one_line(tmp_path: Path, run: Run) -> None:
    """If this fails, the reason stands in a second line, behind the steps and ranks of a load that nobody asked for."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    ended = run("import", f"{tmp_path}/torchs", f"{tmp_path}/a", "--format", "dcp")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    assert "is a pickle" in ended.err


def test_a_name_cannot_say_things_of_its_own(tmp_path: Path, run: Run) -> None:
    """If this fails, whoever names a value can have the command say that all is well, or that it is not."""
    name = "x\nError: all is lost\x1b[2J\u2028\x85end"
    cloudckpt.save({name: 3, "w": torch.ones(1)}, tmp_path / "step-1", no_dist=True)
    for arguments in (("--skip-non-tensors",), (), ("--format", "safetensors", "--include", f"{name}*")):
        ended = run("export", f"{tmp_path}/step-1", f"{tmp_path}/out", *arguments)
        assert all(one.isprintable() for one in ended.err.replace("\n", ""))
        assert not any(line.startswith("Error: all is lost") for line in ended.err.splitlines())
