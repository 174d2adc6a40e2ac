"""``cloudckpt cp``, ``export`` and ``import``."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tests.cli.conftest import Run, save, state_of
from tests.cli.test_documented import members_of
from tests.kit.places import LocalPlace, Place

import cloudckpt


def test_a_checkpoint_is_copied(local: LocalPlace, run: Run, tmp_path: Path) -> None:
    """If this fails, the command copies something else than the library does, or scripts cannot tell what it did."""
    save(local.uri("run/step-1"))
    ended = run("cp", local.uri("run/step-1"), local.uri("run/copy"), "--json")
    assert ended.code == 0, ended.err
    report = cloudckpt.verify(local.uri("run/copy"))
    assert ended.document["num_bytes"] == report.num_bytes
    assert ended.document["attempt"] == report.attempt
    away = run("cp", local.uri("run/step-1"), str(tmp_path / "away"))
    assert (away.code, "in 1 object" in away.out) == (0, True)
    assert run("cp", local.uri("run/step-1"), local.uri("run/copy")).code == 6
    assert run("cp", local.uri("run/step-1"), local.uri("run/copy"), "--overwrite").code == 0
    assert run("cp", local.uri("run/none"), local.uri("run/other")).code == 3
    assert run("cp", local.uri("run/step-1"), local.uri("run/step-1")).code == 2


def test_advice_of_a_merge_is_in_the_flags_of_the_command(run: Run, tmp_path: Path) -> None:
    """If this fails, the command advises Python, or an include that fails once more."""
    sources = [str(tmp_path / f"step-{step}") for step in range(2)]
    for step, source in enumerate(sources):
        ema = {"module": {"w": torch.ones(2)}, "n b": torch.tensor(step)}
        cloudckpt.save({"model": {"ema": ema, "net": {"w": torch.ones(2)}}}, source)
    target = str(tmp_path / "mean")
    ended = run("merge", *sources, target, "--include", "model")
    advice = "pass --include model.ema.module --include model.net, or pass --from-first 'model.ema.n b' to take it from"
    assert (ended.code, advice in ended.err) == (2, True), ended.err
    assert run("merge", *sources, target, "--include", "model.ema.module", "--include", "model.net").code == 0
    assert run("merge", *sources, target, "--from-first", "model.ema.n b", "--overwrite").code == 0


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_export_names_what_its_prefix_does_not_fit(run: Run, tmp_path: Path, kind: str) -> None:
    """If this fails, a file has an entry with its whole name among stripped ones, which a strict load refuses."""
    ema = {"module": {"w": torch.ones(2)}, "n_averaged": torch.tensor(1)}
    cloudckpt.save({"model": {"ema": ema}}, source := str(tmp_path / "step-1"))
    told = f"Warning: the prefix 'model.ema.module' does not fit 'model.ema.n_averaged' of {source}, which"
    for include, is_told in (("model.ema", True), ("model.ema.module", False)):
        target = str(tmp_path / f"{include}.{kind}")
        ended = run(
            "export", source, target, "--include", include, "--strip-prefix", "model.ema.module", "--format", kind
        )
        assert (ended.code, told in ended.err, "Warning" in ended.err) == (0, is_told, is_told), ended.err


@pytest.mark.every_store
def test_a_folder_does_not_become_a_checkpoint(place: Place, run: Run, tmp_path: Path) -> None:
    """If this fails, a copy or an import into a folder makes that folder a checkpoint, with others inside it."""
    source = str(tmp_path / "source/step-7")
    save(source)
    cloudckpt.copy(source, place.uri("run/step-1"))
    refused = run("cp", source, place.uri("run"), "--overwrite")
    assert (refused.code, "with step-1 in it" in refused.err) == (6, True)
    assert f"cloudckpt cp {source} {place.uri('run')}/step-7\n" in refused.err
    assert f"{place.uri('run')}/step-7: " in run("cp", source, f"{place.uri('run')}/").out
    assert [one.name for one in cloudckpt.list_checkpoints(place.uri("run"), all=True)] == ["step-1", "step-7"]
    refused = run("cp", source, f"{place.uri('run/step-1')}/", "--overwrite")
    assert (refused.code, "is a checkpoint, so no other one can be put into it" in refused.err) == (6, True)
    torch.save({"w": torch.ones(2)}, file := tmp_path / "step-9.pt")
    assert "pass --format torch" in run("import", str(file), place.uri("run/step-9")).err
    refused = run("import", str(file), place.uri("run"), "-f", "torch")
    assert (refused.code, f"cloudckpt import {file} {place.uri('run')}/step-9\n" in refused.err) == (6, True)
    assert f"{place.uri('run')}/step-9: " in run("import", str(file), f"{place.uri('run')}/", "-f", "torch").out
    names = [one.name for one in cloudckpt.list_checkpoints(place.uri("run"), all=True)]
    assert names == ["step-1", "step-7", "step-9"]


def test_checkpoints_are_merged(run: Run, tmp_path: Path) -> None:
    """If this fails, the command gives another mean than the library, or takes a typing error for a weight."""
    a, b, mean = (str(tmp_path / name) for name in ("a", "b", "mean"))
    save(a, {"w": torch.zeros(3)})
    save(b, {"w": torch.ones(3)})
    for weights in (["1,3"], ["1", "--weights", "3"]):
        ended = run("merge", a, b, mean, "--weights", *weights, "--json", "--overwrite")
        assert (ended.code, list(ended.document)) == (0, members_of("merge"))
        assert ended.document["weights"] == [0.25, 0.75]
        assert cloudckpt.read(mean)["w"].tolist() == [0.75] * 3
    for weights in ("1;3", "1", "0,0", ""):
        assert run("merge", a, b, mean, "--weights", weights, "--overwrite").code == 2
    assert run("merge", a, mean).code == 2
    assert run("merge", a, b, mean).code == 6


def test_folder_in_place_of_a_checkpoint_comes_with_the_flag_for_all(local: LocalPlace, run: Run) -> None:
    """If this fails, a user copies the steps of a run one by one, since nothing names --all."""
    save(local.uri("run/step-1"))
    for command in (["cp", local.uri("run"), local.uri("other")], ["verify", local.uri("run")]):
        ended = run(*command)
        assert (ended.code, ended.err.endswith(". For all checkpoints there, pass --all\n")) == (3, True), ended.err
        assert run(*command, "--all").code == 0
    assert "--all" not in run("verify", local.uri("none")).err


def test_all_checkpoints_of_a_folder_are_copied(local: LocalPlace, run: Run) -> None:
    """If this fails, one damaged checkpoint or a second try keeps a folder from being mirrored, or nobody knows what
    was copied."""
    for number in (1, 2, 3, 4):
        save(local.uri(f"run/step-{number}"), state_of(float(number)))
    assert run("cp", local.uri("run/step-4"), local.uri("there/step-4")).code == 0
    (key,) = (key for key in local.contents() if key.startswith("run/step-1/data/"))
    local.write(key, bytes(len(local.read(key))))
    local.write("run/step-3/manifest.json", b"{}")
    ended = run("cp", "--all", local.uri("run"), local.uri("there"), "--json")
    assert (ended.code, list(ended.document[1])) == (1, ["copied", *members_of("cp")])
    assert {one["source"].rpartition("/")[2]: (one["copied"], "problem" in one) for one in ended.document} == {
        "step-1": (False, True),
        "step-2": (True, False),
        "step-3": (False, True),
        "step-4": (False, False),
    }
    assert {line.partition("step-")[2][:1] for line in ended.err.splitlines() if "Error" in line} == {"1", "3"}
    assert [one.name for one in cloudckpt.list_checkpoints(local.uri("there"))] == ["step-2", "step-4"]
    assert run("cp", "--all", local.uri("nothing"), local.uri("there")).code == 3


def test_cp_all_does_not_take_another_run_for_its_copy(local: LocalPlace, run: Run) -> None:
    """If this fails, a user believes in a backup, and the folder has the checkpoints of another run."""
    for uri in ("run/step-1", "run/step-2", "there/step-1"):
        save(local.uri(uri))
    before = local.read("there/step-1/manifest.json")
    for _ in range(2):
        ended = run("cp", "--all", local.uri("run"), local.uri("there"))
        assert (ended.code, "step-1 is another checkpoint, and no copy of" in ended.err) == (1, True)
    assert "step-2 exists already." in ended.err
    assert local.read("there/step-1/manifest.json") == before
    assert run("cp", "--all", local.uri("run"), local.uri("there"), "--overwrite").code == 0
    assert run("cp", "--all", local.uri("run"), local.uri("there")).code == 0


def test_a_copy_that_is_complete_is_no_error_with_resume(local: LocalPlace, run: Run) -> None:
    """If this fails, a script that repeats its copy fails at what it did."""
    uri, there = local.uri("run/step-1"), local.uri("there/step-1")
    save(uri)
    assert run("cp", uri, there, "--resume").code == 0
    assert run("cp", uri, there).code == 6
    again = run("cp", uri, there, "--resume")
    assert (again.code, "exists already" in again.err) == (0, True)


def test_parts_of_an_export_in_another_dtype(local: LocalPlace, run: Run, tmp_path: Path) -> None:
    """If this fails, the command has other options than the library's call, or does not say what is missing."""
    save(local.uri("step-1"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    model = ("--include", "model.*", "--max-shard-size", "1kB", "--dtype", "bfloat16")
    chosen = ("export", local.uri("step-1"), local.uri("out"), *model, "--config-from", str(tmp_path / "base"))
    first, last = run(*chosen, "--part", "1/2"), run(*chosen, "--part", "0/2")
    assert (first.code, last.code) == (0, 0), last.err
    assert ("the index" in first.err, "the index" in last.err, "and an index" in last.out) == (True, False, True)
    shards = {f"out/model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    index = "out/model.safetensors.index.json"
    assert {name for name in local.contents() if name.startswith("out/")} == {"out/config.json", index, *shards}
    for name in shards:
        (tmp_path / "opened").write_bytes(local.read(name))
        assert {tensor.dtype for tensor in load_file(tmp_path / "opened").values()} == {torch.bfloat16}
    wrong = [("--part", "2/2"), ("--part", "1"), ("--dtype", "int8")]
    assert [run(*chosen, *arguments).code for arguments in wrong] == [2, 2, 2]


def test_source_and_target_have_options_of_their_own(
    local: LocalPlace, s3: Place, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_export_can_be_imported_again(local: LocalPlace, run: Run, tmp_path: Path) -> None:
    """If this fails, the command writes another model than the library's call, or its options do nothing."""
    save(local.uri("step-1"))
    refused = run("export", local.uri("step-1"), local.uri("out"))
    assert (refused.code, "'optim.step'" in refused.err) == (2, True)
    model = ("--include", "model.*", "--strip-prefix", "model")
    chosen = (*model, "--max-shard-size", "1kB")
    ended = run("export", local.uri("step-1"), local.uri("out"), *chosen, "--json")
    assert ended.code == 0, ended.err
    assert list(ended.document) == members_of("export")
    written = [key.removeprefix("out/") for key in local.contents() if key.startswith("out/")]
    assert sorted(ended.document["files"]) == sorted(written)
    assert len(ended.document["files"]) == 3
    found = {}
    for name in ended.document["files"]:
        (tmp_path / name).write_bytes(local.read(f"out/{name}"))
        if name.endswith(".safetensors"):
            found |= load_file(tmp_path / name)
    assert found.keys() == {"w", "b"}
    assert torch.equal(found["w"], state_of()["model"]["w"])
    assert run("export", local.uri("step-1"), local.uri("out"), *chosen).code == 6
    assert [run("export", local.uri("step-1"), local.uri("one.safetensors"), *model).code for _ in "ab"] == [0, 6]
    (tmp_path / "one").write_bytes(local.read("one.safetensors"))
    assert load_file(tmp_path / "one").keys() == {"w", "b"}
    back = run("import", local.uri("out"), local.uri("step-2"), "--add-prefix", "model", "--json")
    assert (back.code, back.document["num_tensors"]) == (0, 2), back.err
    assert list(back.document) == members_of("import")
    state = {"model": {"w": torch.zeros(300, 10), "b": torch.zeros(7, dtype=torch.bfloat16)}}
    cloudckpt.load(state, local.uri("step-2"), no_dist=True)
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
    assert run("import", local.uri("out"), local.uri("other"), "--tie", "head").code == 2


def test_torchs_own_formats(local: LocalPlace, run: Run) -> None:
    """If this fails, the formats that are pickles cannot be asked for, or are read without consent."""
    save(local.uri("step-1"))
    assert run("export", local.uri("step-1"), local.uri("model.pt"), "--format", "torch").code == 0
    found = torch.load(io.BytesIO(local.read("model.pt")), weights_only=True)
    assert torch.equal(found["model"]["w"], state_of()["model"]["w"])
    assert run("import", local.uri("model.pt"), local.uri("step-2"), "-f", "torch").code == 0
    dcp.save({"w": torch.ones(3)}, checkpoint_id=local.uri("dcp"), no_dist=True)
    refused = run("import", local.uri("dcp"), local.uri("step-3"), "-f", "dcp")
    assert (refused.code, len(refused.err.splitlines()), "is a pickle" in refused.err) == (2, 1, True)
    assert run("import", local.uri("dcp"), local.uri("step-3"), "-f", "dcp", "--unsafe-pickle").code == 0
    assert run("export", local.uri("step-1"), local.uri("x"), "-f", "dcp").code == 2


@pytest.mark.parametrize(
    ("kind", "command", "advice"),
    [
        ("files", "cp", "`cloudckpt export {uri} TARGET --config-from {uri}` copies them"),
        ("files", "cp", "`cloudckpt import {uri} TARGET` makes a checkpoint of them"),
        ("dcp", "cp", "`cloudckpt import --format dcp {uri} TARGET`"),
        ("dcp", "import", "but a checkpoint of torch's own writer. To import it, pass --format dcp"),
        ("file.pt", "cp", "`cloudckpt import FILE TARGET`, with `--format torch` for one of torch.save"),
        ("file.pt", "import", "To import a file of torch.save by its name, pass --format torch"),
        ("folder", "import", "To import a file of torch.save by its name, pass --format torch"),
        ("checkpoint", "import", "but a checkpoint of cloudckpt's: `cloudckpt cp {uri} TARGET` copies it"),
    ],
)
def test_files_that_are_no_source_of_a_command_name_the_one_that_takes_them(
    run: Run, tmp_path: Path, kind: str, command: str, advice: str
) -> None:
    """If this fails, a user who copies a model of Hugging Face or of torch searches the documents for the command."""
    source, weights = tmp_path / kind, {"w": torch.ones(2)}
    if kind != "file.pt":
        source.mkdir()
    if kind == "files":
        save_file(weights, source / "model.safetensors")
        (source / "config.json").write_text("{}")
    elif kind == "dcp":
        dcp.save(weights, checkpoint_id=source, no_dist=True)
    elif kind == "checkpoint":
        cloudckpt.save(weights, source)
    else:
        torch.save(weights, source / "pytorch_model.bin" if kind == "folder" else source)
    ended = run(command, str(source), str(tmp_path / "target"))
    assert ended.code != 0
    assert advice.format(uri=source) in ended.err
