"""``cloudckpt diff``, and the comparison that it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Run, save
from tests.kit.places import LocalPlace

import cloudckpt
from cloudckpt.inspect import comparison

GOLDEN = Path(__file__).parents[1] / "golden" / "1.0" / "once"


def differences(run: Run, *arguments: str) -> dict[str, dict[str, Any]]:
    ended = run("diff", *arguments, "--json")
    document = ended.document
    assert ended.code == (0 if document["is_same"] else 1)
    return {one["name"]: one for one in document["differences"]}


def test_a_pattern_that_fits_no_entry_is_an_error_of_diff(tmp_path: Path, run: Run) -> None:
    """If this fails, a script with a mistyped pattern is told for ever that nothing has changed."""
    save(f"{tmp_path}/a")
    ended = run("diff", f"{tmp_path}/a", f"{tmp_path}/a", "--name", "modle.*")
    assert (ended.code, "modle.*" in ended.err) == (3, True)
    assert "did you mean 'model'?" in ended.err
    assert run("diff", f"{tmp_path}/a", f"{tmp_path}/a", "--name", "model").code == 0


def test_place_of_the_first_difference_in_a_value_is_named(tmp_path: Path, run: Run) -> None:
    """If this fails, a user with two random states that differ sees two rows of numbers, and not which generator."""
    before = ((3, (*range(1000, 1624),), None), {"a": [1.0, float("nan")]}, 5)
    for name, after, where in (
        ("b", ((3, (*range(1000, 1600), *range(24)), None), before[1], 5), "[0][1][600]"),
        ("c", (before[0], {"a": [2.0, float("nan")]}, 5), "[1]['a'][0]"),
        ("d", (before[0], {"b": 1}, 5), "[1]"),
    ):
        save(f"{tmp_path}/a{name}", {"random": before})
        save(f"{tmp_path}/{name}", {"random": after})
        assert f"values at {where} " in run("diff", f"{tmp_path}/a{name}", f"{tmp_path}/{name}").out
        assert differences(run, f"{tmp_path}/a{name}", f"{tmp_path}/{name}")["random"]["where"] == where


def test_every_kind_of_difference_is_reported(local: LocalPlace, run: Run) -> None:
    """If this fails, a change between two checkpoints goes unseen, or is told as another one."""
    before: dict[str, Any] = {
        "same": torch.arange(10.0),
        "changed": torch.tensor([1.0, 2.0, 0.0, -4.0]),
        "whole": torch.tensor([1, 2**60], dtype=torch.int64),
        "cast": torch.ones(3),
        "reshaped": torch.ones(2, 3),
        "gone": torch.ones(1),
        "kind": torch.ones(1),
        "value": {"lr": 0.1, "list": [*range(9000)]},
        "nan": torch.tensor([1.0, float("inf"), float("nan")]),
    }
    after = before | {
        "changed": torch.tensor([1.0, 3.0, 0.5, -4.0]),
        "whole": torch.tensor([1, 2**60 + 1], dtype=torch.int64),
        "cast": torch.ones(3, dtype=torch.bfloat16),
        "reshaped": torch.ones(3, 2),
        "kind": "text",
        "value": {"lr": 0.2, "list": [*range(8000), -1]},
        "new": torch.ones(1),
        "nan": torch.tensor([float("nan"), float("inf"), 2.0]),
    }
    del after["gone"]
    save(local.uri("a"), before)
    save(local.uri("b"), after)
    found = differences(run, local.uri("a"), local.uri("b"))
    assert {name: one["kind"] for name, one in found.items()} == {
        "changed": "values",
        "whole": "values",
        "cast": "dtype",
        "reshaped": "shape",
        "gone": "removed",
        "kind": "type",
        "value.list": "values",
        "value.lr": "values",
        "new": "added",
        "nan": "values",
    }
    assert (found["changed"]["num_different"], found["changed"]["num_elements"]) == (2, 4)
    assert (found["changed"]["max_absolute"], found["changed"]["max_relative"]) == (1.0, 1.0)
    assert found["whole"]["num_different"] == 1
    assert (found["nan"]["num_different"], found["nan"]["max_absolute"]) == (2, "infinity")
    assert (found["cast"]["before"], found["cast"]["after"]) == ("float32 [3]", "bfloat16 [3]")
    assert len(found["value.list"]["before"]) < 5000 > len(found["value.list"]["after"]) > 2000
    assert found["value.list"]["after"].endswith("7999, -1]")
    table = run("diff", local.uri("a"), local.uri("b"))
    assert table.code == 1
    assert "2 of 4" in table.out
    assert differences(run, local.uri("a"), local.uri("b"), "--name", "same") == {}


def test_differences_within_the_tolerances_are_ignored(local: LocalPlace, run: Run) -> None:
    """If this fails, two runs that differ in the last bit cannot be told from two that differ; or what is far apart
    passes for noise."""
    before = torch.tensor([1.0, 100.0, float("inf")], dtype=torch.float64)
    save(local.uri("a"), {"w": before})
    save(local.uri("b"), {"w": torch.tensor([1.001, 100.1, float("inf")], dtype=torch.float64)})
    save(local.uri("c"), {"w": torch.tensor([1.0, 100.0, 5.0], dtype=torch.float64)})
    a, b, c = (local.uri(name) for name in "abc")
    assert differences(run, a, b)["w"]["num_different"] == 2
    assert differences(run, a, b, "--atol", "0.01")["w"]["num_different"] == 1
    assert differences(run, a, b, "--rtol", "0.002") == {}
    assert differences(run, a, c, "--rtol", "0.002")["w"]["num_different"] == 1
    assert run("diff", a, b, "--rtol", "nan").code == 2
    assert run("diff", a, local.uri("nothing")).code == 3


def test_sharding_makes_no_difference(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a checkpoint of four ranks seems to differ from the same one saved by one rank; or some element is
    compared with another than its own, or with none."""
    monkeypatch.setattr(comparison, "BATCH_BYTES", 64)
    state = {
        one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in cloudckpt.describe(GOLDEN).tensors
    }
    cloudckpt.load(state, GOLDEN, no_dist=True)
    whole, changed = str(tmp_path / "whole"), str(tmp_path / "changed")
    save(whole, state)
    only = ["--name", "model.*", "--name", "optimizer.state*"]
    assert differences(run, str(GOLDEN), whole, *only) == {}
    assert differences(run, whole, str(GOLDEN), *only) == {}
    state["model.blocks"] = state["model.blocks"].clone()
    state["model.blocks"][5, 9] += 1
    old = state["model.many_tiles"]
    state["model.many_tiles"] = old + 1
    num_changed = int((state["model.many_tiles"] != old).sum())
    assert num_changed > 100
    save(changed, state)
    found = differences(run, str(GOLDEN), changed, *only)
    assert {name: one["num_different"] for name, one in found.items()} == {
        "model.blocks": 1,
        "model.many_tiles": num_changed,
    }


def test_damage_is_damage_and_no_difference(local: LocalPlace, run: Run) -> None:
    """If this fails, flipped bits on the store pass for a change that training made."""
    save(local.uri("a"))
    save(local.uri("b"))
    (key,) = (key for key in local.data_keys() if key.startswith("b/"))
    content = bytearray(local.read(key))
    content[-1] ^= 1
    local.write(key, bytes(content))
    ended = run("diff", local.uri("a"), local.uri("b"))
    assert (ended.code, ended.out) == (1, "")
    assert "damaged" in ended.err


@pytest.mark.filterwarnings("ignore:.* unpickling it could run any code, so a load refuses it")
def test_values_that_would_run_code_are_compared_by_their_bytes(tmp_path: Path, run: Run) -> None:
    """If this fails, comparing two checkpoints from a bucket runs code from that bucket."""
    save(str(tmp_path / "a"), {"v": Loud(1)})
    save(str(tmp_path / "b"), {"v": Loud(2)})
    Loud.num_loaded = 0
    assert differences(run, str(tmp_path / "a"), str(tmp_path / "b"))["v"]["kind"] == "values"
    assert differences(run, str(tmp_path / "a"), str(tmp_path / "a")) == {}
    assert Loud.num_loaded == 0


class Loud:
    """Notices when it is unpickled."""

    num_loaded = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return _loaded, (self.value,)


def _loaded(value: int) -> Loud:
    Loud.num_loaded += 1
    return Loud(value)
