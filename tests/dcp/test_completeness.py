"""Loads that would leave a part of a checkpoint behind: which of them are refused, without any store."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt.dcp.completeness import check_completeness, check_empty, find_left_of_objects
from cloudckpt.dcp.load_items import LoadItems, whole_item
from cloudckpt.errors import StateDictMismatchError

NOTHING: tuple[str, ...] = ()


def metadata_of(names: Collection[str]) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """Return torch's metadata of what was saved: a tensor, one without elements (``e-``), or a value (``v-``)."""
    return {
        name: BytesStorageMetadata()
        if "v-" in name
        else TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2, 0] if "e-" in name else [2]), [])
        for name in names
    }


def plan_of(names: Sequence[str], empty: Sequence[str] = ()) -> LoadPlan:
    """Return the plan of a rank that asks for `names`, some of them as whole tensors, and has `empty` dicts."""
    sizes = [torch.Size([2])] * (len(names) // 2)
    items = LoadItems([*names[: len(sizes)]], sizes, [whole_item(name, [2]) for name in names[len(sizes) :]])
    return LoadPlan(items, planner_data=list(empty) or None)  # type: ignore[arg-type]  # read as a sequence


ADAM = ["optim.param_groups.0.v-lr", "optim.state.a.exp", "optim.state.a.sq", "optim.state.up.a.exp"]


@pytest.mark.parametrize(
    ("saved", "asked", "whole", "left"),
    [
        (["a", "b"], [["a"]], None, ["b"]),
        (["a", "b"], [["a"], ["b"]], None, NOTHING),
        (["a", "b"], [["a"]], (), NOTHING),
        (["m.a", "m.v-b", "other.c", "m2.a"], [["m.a"]], ["m"], ["m.v-b"]),
        (["m.a", "e-mpty"], [["m.a"]], None, NOTHING),
        (["m.a", "m.v-random_state.x", "random_state.rank-0"], [["m.a"]], None, ["m.v-random_state.x"]),
        (["loader.rank-0.at", "loader.rank-12.at"], [["loader.rank-0.at"]], None, NOTHING),
        (["loader.rank-0.at", "loader.rank-1.more"], [["loader.rank-0.at"]], None, ["loader.rank-1.more"]),
        # An optimizer by itself.
        (ADAM, [[ADAM[0]]], (), ADAM[1:]),
        (ADAM, [ADAM[:2], [*ADAM[:1], *ADAM[2:]]], (), NOTHING),
        (ADAM, [ADAM[:3]], (), ADAM[3:]),
        (ADAM, [["other"]], (), NOTHING),
        ([*ADAM[:1], "optim.state.a.e-xp"], [ADAM[:1]], (), NOTHING),
        (["param_groups.v-0", "state.0.exp"], [["param_groups.v-0"]], (), ["state.0.exp"]),
        (
            ["x.optim.param_groups.v-0", "x.optim.state.0.exp"],
            [["x.optim.param_groups.v-0"]],
            (),
            ["x.optim.state.0.exp"],
        ),
        # Beside some of its parameters, such as those of one stage of a pipeline.
        ([*ADAM, "m.a", "m.up.a"], [[*ADAM[:3], "m.a"]], (), NOTHING),
        ([*ADAM, "m.a", "m.up.a"], [[*ADAM[:2], "m.a"]], (), ADAM[2:3]),
        ([*ADAM, "m.a", "m.up.a"], [[*ADAM[:2], "m.up.a"]], (), ADAM[2:]),
        ([*ADAM, "m.a", "m.up.a"], [[*ADAM[:3], "m.a"], ["m.up.a"]], (), ADAM[3:]),
        ([*ADAM, "m.a", "m.up.a"], [[*ADAM[:1], "m.other"]], (), ADAM[1:]),
        ([*ADAM, "optim.state.b.exp"], [[*ADAM[:2], "m.b"]], (), [ADAM[2], "optim.state.b.exp"]),
    ],
)
def test_load_that_asks_for_too_little_is_refused(
    saved: Sequence[str], asked: Sequence[Sequence[str]], whole: Collection[str] | None, left: Sequence[str]
) -> None:
    """If this fails, a resume loses a part of its state without a word, or a part cannot be loaded by itself."""
    plans = [plan_of(names) for names in asked]
    if not left:
        check_completeness(plans, metadata_of(saved), whole=whole, uri="memory://here")
        return
    with pytest.raises(StateDictMismatchError, match="strict=False") as caught:
        check_completeness(plans, metadata_of(saved), whole=whole, uri="memory://here")
    assert caught.value.uri == "memory://here"
    assert set(re.findall(r"'([^']*)'", str(caught.value))) == set(left)


@pytest.mark.parametrize(
    ("saved", "plans", "left"),
    [
        (["tracker.a", "tracker.b"], [plan_of([], ["tracker"])], ["tracker.a", "tracker.b"]),
        (["tracker.a", "tracker.b"], [plan_of([], ["tracker"]), plan_of(["tracker.b"])], NOTHING),
        (["tracker2.a"], [plan_of([], ["tracker"])], NOTHING),
        (["x.a", "y.a"], [plan_of(["x.a"], ["x"]), plan_of([], ["y"])], ["y.a"]),
        (["tracker.a"], [plan_of(["w"])], NOTHING),
    ],
)
def test_empty_place_that_nobody_fills_is_refused(
    saved: Sequence[str], plans: Sequence[LoadPlan], left: Sequence[str]
) -> None:
    """If this fails, torch's load leaves a fresh object empty and reports success, or ranks cannot share an object."""
    if not left:
        check_empty(plans, metadata_of(saved), uri="memory://here")
        return
    with pytest.raises(StateDictMismatchError) as caught:
        check_empty(plans, metadata_of(saved), uri="memory://here")
    assert set(re.findall(r"'([a-z]+\.[^']*)'", str(caught.value))) == set(left)


@pytest.mark.parametrize(
    ("saved", "asked", "keys", "left"),
    [
        (["t.a", "t.b", "u.c"], [["t.a"]], ["t"], ["t.b"]),
        (["t.a", "t.b", "u.c"], [["t.a"], ["t.b"]], ["t", "u"], ["u.c"]),
        (["t.a", "tt.b"], [["t.a"]], ["t"], NOTHING),
        (["t.rank-0.a", "t.rank-1.a", "t.rank-1.b"], [["t.rank-0.a"]], ["t"], ["t.rank-1.b"]),
        (["t.e-mpty", "t.v-alue"], [["w"]], ["t"], ["t.v-alue"]),
        (["t.param_groups.v-0", "t.state.a.exp", "t.x"], [["t.param_groups.v-0"]], ["t"], ["t.x"]),
        (["t.param_groups.v-0", "t.state.a.exp", "t.x"], [["t.x"]], ["t"], ["t.param_groups.v-0", "t.state.a.exp"]),
    ],
)
def test_objects_are_given_entries_beside_those_they_ask_for(
    saved: Sequence[str], asked: Sequence[Sequence[str]], keys: Sequence[str], left: Sequence[str]
) -> None:
    """If this fails, an object that fills its state lazily gets less than was saved, or another object's state."""
    assert find_left_of_objects([plan_of(names) for names in asked], metadata_of(saved), keys) == list(left)
