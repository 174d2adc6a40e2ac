"""``cloudckpt cp``, ``export`` and ``import``."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.cli.conftest import Run, save, state_of
from tests.cli.test_documented import members_of
from tests.e2e.places import LocalPlace, Place

import cloudckpt


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
