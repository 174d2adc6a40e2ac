"""``cloudckpt show`` and ``cloudckpt verify``, and manifests that they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from awscrt.checksums import crc32c
from safetensors.torch import load_file
from tests.cli.conftest import OLD_ATTEMPT, Run, leave_unfinished, save, state_of
from tests.kit.options import make_options
from tests.kit.places import LocalPlace
from tests.scaled import make_scaled

import cloudckpt


def test_everything_that_was_saved_is_shown(local: LocalPlace, run: Run) -> None:
    """If this fails, who looks into a checkpoint sees another one than a load would give."""
    save(local.uri(), options=cloudckpt.Options(metadata={"loss": 0.5}))
    document = run("show", local.uri(), "--json", "--values").document
    assert (document["world_size"], document["metadata"]) == (1, {"loss": 0.5})
    assert {one["name"]: (one["dtype"], one["shape"], one["num_bytes"]) for one in document["tensors"]} == {
        "model.w": ("float32", [300, 10], 12_000),
        "model.b": ("bfloat16", [7], 14),
    }
    assert {one["name"]: one["value"] for one in document["values"]} == {"optim.step": "17", "optim.lr": "[0.5, nan]"}
    assert document["num_bytes"] == sum(len(local.read(key)) for key in local.data_keys())
    text = run("show", local.uri(), "--objects")
    assert all(name in text.out for name in ["model.w", "model.b", "optim.step", ".safetensors", "[300, 10]"])
    chosen = run("show", local.uri(), "--json", "--name", "*.w", "--name", "optim.s*").document
    assert [one["name"] for one in [*chosen["tensors"], *chosen["values"]]] == ["model.w", "optim.step"]
    below = run("show", local.uri(), "--name", "model").out
    assert ("shown: 2 tensors, 0 values; 11.7 KiB" in below, "optim.step" in below) == (True, False)
    assert run("show", local.uri(), "--name", "nothing*").code == 3
    tensor = run("cat", local.uri(), "model.b", "--json").document
    assert [tensor[key] for key in ("dtype", "shape", "min", "max", "mean", "num_nan")] == ["bfloat16", [7], 0, 6, 3, 0]
    assert run("cat", local.uri(), "optim.lr").out == "[0.5, nan]\n"
    ended = run("cat", local.uri(), "optim.lt")
    assert (ended.code, "'optim.lr'" in ended.err) == (3, True)


def test_modules_are_summed_up_to_a_depth(local: LocalPlace, run: Run) -> None:
    """If this fails, who asks which module takes the space gets a wrong size, or an entry that counts twice."""
    state = {
        "model": {"a": {"w": torch.ones(10), "b": torch.ones(3), "extra": 1}, "ab": torch.ones(2, 2)},
        "step": 3,
        "optim": {"lr": 0.5, "state": {"a": {"w": torch.ones(10), "step": 7}}},
        "scheduler": {"last_epoch": 1, "schedulers": {"0": {"gamma": 0.1}, "1": {"gamma": 0.2}}},
    }
    save(local.uri(), state)
    document = run("show", local.uri(), "--json", "--depth", "2").document
    modules = {one["name"]: one for one in document["modules"]}
    assert {name: (one["num_tensors"], one["num_elements"], one["num_values"]) for name, one in modules.items()} == {
        "model.a": (2, 13, 1),
        "model (rest)": (1, 4, 0),
        "step": (0, 0, 1),
        "optim.state": (1, 10, 1),
        "optim (rest)": (0, 0, 1),
        "scheduler": (0, 0, 3),
    }
    assert modules["model (rest)"]["num_bytes"] == 16
    entries = [*document["tensors"], *document["values"]]
    assert sum(one["num_bytes"] for one in modules.values()) == sum(one["num_bytes"] for one in entries)
    lines = run("show", local.uri(), "--depth", "1", "--name", "model").out.splitlines()
    assert lines[-1].split() == ["model", "3", "17", "1", "69", "B"]
    assert not any("model.a" in line for line in lines)


def test_a_name_with_entries_below_it_shows_them(local: LocalPlace, run: Run) -> None:
    """If this fails, the state of a scaler has to be asked for value by value, or a large tensor is read unasked."""
    moments = {"step": torch.tensor(17.0), "exp_avg": torch.ones(3, 3)}
    scaler = {"scale": 65536.0, "x": {"n": [1, 2]}, "off": {}}
    save(local.uri(), {"scaler": scaler, "optim": {"0": moments}, "scalers": 1})
    lines = ["scaler.scale  65536.0", "scaler.x.n    [1, 2]", "scaler.off    {}"]
    assert run("cat", local.uri(), "scaler").out.splitlines() == lines
    assert run("cat", local.uri(), "scaler.off").out == "{}\n"
    (shown,) = run("show", local.uri(), "--json", "--values", "--name", "scaler.off").document["values"]
    assert shown == {"name": "scaler.off", "num_bytes": 0, "value": "{}"}
    below = run("cat", local.uri(), "optim")
    assert below.out == "optim.0.step     tensor(17.)\noptim.0.exp_avg  float32 [3, 3]\n"
    entries = run("cat", local.uri(), "optim.0", "--json").document["entries"]
    assert [[one[key] for key in ("name", "value", "dtype", "shape")] for one in entries] == [
        ["optim.0.step", "tensor(17.)", "float32", []],
        ["optim.0.exp_avg", None, "float32", [3, 3]],
    ]
    assert run("cat", local.uri(), "scal").code == 3


def test_slip_in_a_name_comes_with_the_name_that_is_meant(local: LocalPlace, run: Run) -> None:
    """If this fails, a user has to find the right name among all that the checkpoint has."""
    cloudckpt.save({"model": {"layer": {"weight": torch.ones(1)}}}, local.uri("step-1"))
    for command in (["cat", "model.layr"], ["cat", "layer.weight"], ["show", "--name", "modle.layer.*"]):
        ended = run(command[0], local.uri("step-1"), *command[1:])
        assert ended.code == 3
        assert "(did you mean 'model.layer" in ended.err, command


def test_tensors_that_consist_of_others_are_shown_and_exported(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, nobody sees which tensors are quantized, or their values cannot be had from the command line."""
    uri, whole = str(tmp_path / "step-1"), make_scaled(8, 6, recipe=1)
    cloudckpt.save({"model": {"w": whole, "plain": torch.ones(2)}}, uri, no_dist=True)
    (shown,) = run("show", uri, "--json").document["wrappers"]
    assert (shown["name"], shown["kind"], shown["shape"]) == ("model.w", "tests.scaled.Scaled", [8, 6])
    assert shown["parts"] == ["model.w.data_", "model.w.scale"]
    text = " ".join(run("show", uri, "--name", "model.w").out.split())
    assert "model.w tests.scaled.Scaled [8, 6] data_, scale" in text
    assert run("export", uri, str(tmp_path / "parts")).code == 0
    parts = load_file(tmp_path / "parts" / "model.safetensors")
    assert torch.equal(parts["model.w.data_"], whole.data_)
    ended = run("export", uri, str(tmp_path / "values"), "--dequantize")
    assert ended.code != 0
    assert "does not allow tests.scaled.Scaled" in ended.err
    (tmp_path / "allows_scaled.py").write_text(
        "import torch, tests.scaled\ntorch.serialization.add_safe_globals(tests.scaled.ALLOWED)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        command = ["export", uri, str(tmp_path / "values"), "--dequantize", "--module", "allows_scaled"]
        assert run(*command, "--strip-prefix", "model").code == 0
    finally:
        torch.serialization.clear_safe_globals()
    values = load_file(tmp_path / "values" / "model.safetensors")
    assert values.keys() == {"w", "plain"}
    assert torch.equal(values["w"], whole.dequantize())


def test_names_do_not_command_the_terminal(tmp_path: Path, run: Run) -> None:
    """If this fails, a tensor's name controls the terminal, or shows tensors that are not there."""
    save(str(tmp_path / "c"), {"\x1b[31mred\x07[bold]x\nmodel.fake  float32  [3]": torch.ones(2)})
    shown = run("show", str(tmp_path / "c")).out
    assert "\x1b" not in shown
    assert r"\x1b[31mred\x07[bold]x\nmodel.fake" in shown


def test_verify_names_every_damaged_object(local: LocalPlace, run: Run) -> None:
    """If this fails, damage goes unseen, or who sees it does not know where it is."""
    state = {f"t{number}": tensor for number, tensor in enumerate(state_of()["model"].values())}
    save(local.uri(), state, options=make_options(object_bytes=1))
    damaged, missing = local.data_keys()
    content = bytearray(local.read(damaged))
    content[-1] ^= 1
    local.write(damaged, bytes(content))
    local.remove(missing)
    ended = run("verify", local.uri())
    assert (ended.code, len(ended.out.splitlines())) == (1, 2)
    assert all(key.rpartition("/")[2] in ended.out for key in (damaged, missing))
    document = run("verify", local.uri(), "--json").document
    assert (document["is_whole"], len(document["problems"])) == (False, 2)


def test_all_checkpoints_of_a_run_are_verified(local: LocalPlace, run: Run) -> None:
    """If this fails, a damaged step of a run is not found, or keeps the others from being looked at."""
    for step in (1, 2, 3, 4):
        save(local.uri(f"step-{step}"))
    _rewrite(local, _make_newer)
    local.remove(next(key for key in local.data_keys() if key.startswith("step-2/")))
    local.write("step-4/manifest.json", local.read("step-4/manifest.json")[:100])
    ended = run("verify", local.root, "--all")
    verdicts = ["could not be verified", "is damaged", "is whole", "is damaged"]
    begins = [f"{local.root}/step-{step} {verdict}: " for step, verdict in enumerate(verdicts, start=1)]
    lines = sorted(ended.out.splitlines())  # the order is that of the commits, and one manifest was replaced
    assert ended.code == 1
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True)), lines
    assert "1 of 4 checkpoints verified" in ended.err
    documents = run("verify", local.root, "--all", "--json").document
    assert [document["is_whole"] for document in documents] == [False, True, None, False]
    assert run("verify", local.uri("nothing"), "--all").code == 3


def _rewrite(local: LocalPlace, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of ``step-1``, and give it the right checksum."""
    document = json.loads(local.read("step-1/manifest.json"))
    del document["crc32c"]
    change(document)
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    local.write("step-1/manifest.json", body + b',"crc32c":"%08x"}' % crc32c(body))


def _make_newer(document: dict[str, Any]) -> None:
    document["version"] = [9, 3]
    document["software"]["cloudckpt"] = "31.4"
    document["tensors"] = "in some other form"


def test_a_newer_format_says_to_upgrade(local: LocalPlace, run: Run) -> None:
    """If this fails, a user of an older cloudckpt takes a newer checkpoint for damaged, or gc removes its data."""
    save(local.uri("step-1"))
    _rewrite(local, _make_newer)
    leave_unfinished(local, "step-1", attempt=OLD_ATTEMPT)
    uri = local.uri("step-1")
    for command in (["show", uri], ["verify", uri], ["diff", uri, uri], ["cp", uri, local.uri("step-2")]):
        ended = run(*command)
        assert (ended.code, ended.out) == (7, ""), command
        assert "written by cloudckpt 31.4 in version 9.3 of the format" in ended.err
    listed = run("ls", local.root, "--json")
    assert (listed.code, [one["state"] for one in listed.document]) == (0, ["newer"])
    before = local.contents()
    assert "left alone" in run("gc", local.root, "--older-than", "0s", "--yes").out
    assert local.contents() == before
    assert run("rm", uri, "--yes").code == 0
    assert not local.data_keys()


def test_ls_with_check_calls_damaged_what_show_refuses(local: LocalPlace, run: Run) -> None:
    """If this fails, ls promises a checkpoint that nothing can load."""
    save(local.uri("step-1"))
    _rewrite(local, lambda document: document["tensors"]["model.w"]["chunks"][0].__setitem__(4, 10**9))
    assert run("show", local.uri("step-1")).code == 1
    (checked,) = run("ls", local.root, "--json", "--check").document
    assert (checked["state"], "contradicts itself" in checked["problem"]) == ("damaged", True)
