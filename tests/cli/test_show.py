"""``cloudckpt show``, and the description that it prints."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from tests.cli.conftest import Run, save, state_of
from tests.e2e.places import Place

import cloudckpt

GOLDEN = Path(__file__).parents[1] / "golden" / "1.0" / "once"


def test_everything_that_was_saved_is_shown(place: Place, run: Run) -> None:
    """If this fails, who looks into a checkpoint sees another one than he would load."""
    save(place.uri(), options=cloudckpt.Options(metadata={"loss": 0.5}))
    ended = run("show", place.uri(), "--json")
    assert ended.code == 0
    document = ended.document
    assert (document["world_size"], document["metadata"]) == (1, {"loss": 0.5})
    tensors = {one["name"]: one for one in document["tensors"]}
    flat = state_of()["model"]
    assert {name: (one["dtype"], one["shape"], one["num_bytes"]) for name, one in tensors.items()} == {
        f"model.{name}": (
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            tensor.numel() * tensor.element_size(),
        )
        for name, tensor in flat.items()
    }
    assert {one["name"] for one in document["values"]} == {"optim.step", "optim.lr"}
    assert document["num_bytes"] == sum(len(place.read(key)) for key in place.data_keys())
    text = run("show", place.uri(), "--objects")
    assert text.code == 0
    assert all(name in text.out for name in [*tensors, "optim.step", ".safetensors", "[300, 10]"])


def test_names_can_be_picked(place: Place, run: Run) -> None:
    """If this fails, a checkpoint of ten thousand tensors can only be looked at as a whole."""
    save(place.uri())
    document = run("show", place.uri(), "--json", "--name", "*.w", "--name", "optim.s*").document
    assert [one["name"] for one in document["tensors"]] == ["model.w"]
    assert [one["name"] for one in document["values"]] == ["optim.step"]
    assert run("show", place.uri(), "--name", "nothing*").code == 3


def test_values_can_be_read(place: Place, run: Run) -> None:
    """If this fails, the step or the learning rate of a checkpoint can only be seen by loading it."""
    save(place.uri())
    document = run("show", place.uri(), "--values", "--json").document
    assert {one["name"]: one["value"] for one in document["values"]} == {
        "optim.step": "17",
        "optim.lr": "[0.5, nan]",
    }
    assert "[0.5, nan]" in run("show", place.uri(), "--values").out


def test_what_lies_there_instead_is_told(tmp_path: Path, run: Run) -> None:
    """If this fails, "nothing lies there" is said of what ``ls`` lists."""
    for rank in (0, 1):
        save(f"{tmp_path}/alone/rank-{rank}")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    alone = run("show", f"{tmp_path}/alone")
    assert (alone.code, "alone/rank-0" in alone.err) == (3, True)
    torchs = run("show", f"{tmp_path}/torchs")
    assert (torchs.code, "torch's own writer" in torchs.err) == (3, True)


def test_sharding_is_told(run: Run) -> None:
    """If this fails, it cannot be seen how a tensor is spread over ranks and objects."""
    tensors = {one["name"]: one for one in run("show", str(GOLDEN), "--json").document["tensors"]}
    assert {name: tensors[f"model.{name}"]["grid"] for name in ("rows", "columns", "blocks", "scalar")} == {
        "rows": [4, 1],
        "columns": [1, 4],
        "blocks": [2, 2],
        "scalar": [],
    }
    assert tensors["model.blocks"]["num_chunks"] == 4
    assert tensors["model.blocks"]["objects"] == [0, 1, 2, 3]


def test_names_do_not_command_the_terminal(tmp_path: Path, run: Run) -> None:
    """If this fails, a tensor's name controls the terminal, or shows tensors that are not there."""
    save(str(tmp_path / "c"), {"\x1b[31mred\x07[bold]x\nmodel.fake  float32  [3]": torch.ones(2)})
    ended = run("show", str(tmp_path / "c"))
    assert ended.code == 0
    assert "\x1b" not in ended.out
    assert r"\x1b[31mred\x07[bold]x\nmodel.fake" in ended.out


def test_what_cannot_be_shown_is_an_error_of_its_kind(place: Place, run: Run) -> None:
    """If this fails, a script cannot tell a missing checkpoint from a damaged one."""
    assert run("show", place.uri("nothing")).code == 3
    save(place.uri())
    place.write("checkpoint/manifest.json", place.read("checkpoint/manifest.json")[:-9])
    ended = run("show", place.uri())
    assert (ended.code, ended.out) == (1, "")
    assert "truncated" in ended.err


def test_a_folder_of_checkpoints_says_what_is_in_it(place: Place, run: Run) -> None:
    """If this fails, who names the folder and not the checkpoint, or the reverse of it, hears that nothing is there."""
    for number in range(7):
        save(place.uri(f"run/step-{number}"), {"a": 1})
    shown = run("show", place.uri("run"))
    assert shown.code == 3
    assert "it has the folders step-0, step-1, step-2, step-3, step-4 and more. Name the checkpoint itself" in shown.err
    listed = run("ls", place.root)
    assert (listed.code, listed.out) == (0, "")
    assert "It has the folder run: name the one that the checkpoints lie in." in listed.err
    place.write("exported/model.safetensors", b"")
    assert "what lies there is no cloudckpt's" in run("show", place.uri("exported")).err
    assert "nothing lies there" in run("show", place.uri("nothing")).err
