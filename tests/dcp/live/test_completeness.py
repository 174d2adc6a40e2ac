"""Loads that would leave a part of a checkpoint behind, and what they add to objects that ask for less; no store."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from cloudckpt.dcp.live.completeness import (
    check_completeness,
    check_empty,
    fill_placeholders,
    find_unasked_entries,
    refuse_unloaded,
)
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
def test_empty_object_that_no_rank_fills_is_refused(
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
    assert find_unasked_entries([plan_of(names) for names in asked], metadata_of(saved), keys) == list(left)


Left = Sequence[tuple[tuple[Any, ...], int, int]]
"""The path, the number of elements and that of the chunks of each tensor that was saved and that nothing asks for."""


def handed(state: Any, left: Left, *, num_ranks: int = 1, is_strict: bool = True) -> Any:
    """Return the state of an object under ``t`` after it was given what is `left`."""
    paths: dict[str, Any] = {".".join(map(str, ("t", *path))): ("t", *path) for path, *_ in left}
    saved: dict[str, Any] = {}
    for name, (_, length, num_chunks) in zip(paths, left, strict=True):
        size = torch.Size([length])
        chunk = ChunkStorageMetadata(torch.Size([0]), size)
        saved[name] = TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk] * num_chunks)
    entries = {"t": state, "other": 1}
    metadata = Metadata(saved, planner_data=paths)
    fill_placeholders(entries, {"t": object()}, list(paths), metadata, is_strict=is_strict, num_ranks=num_ranks)
    assert entries["other"] == 1
    return entries["t"]


def shapes(values: Sequence[Any]) -> list[Any]:
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values]


def test_rest_is_added_only_with_strictness() -> None:
    """If this fails, strict=False gives an object more than it asks for, or a load leaves state behind silently."""
    left = [(("b",), 2, 1), (("d", "x"), 3, 1)]
    assert handed({"a": 1, "d": {"y": 2}}, left).keys() == {"a", "b", "d"}
    assert handed({"a": 1, "d": {"y": 2}}, left)["d"].keys() == {"x", "y"}
    assert handed({"a": 1, "d": {"y": 2}}, left, is_strict=False) == {"a": 1, "d": {"y": 2}}
    assert handed({}, left, is_strict=False).keys() == {"b", "d"}, "a fresh object gets all"


def test_members_of_a_list_keep_their_places() -> None:
    """If this fails, members of a list are lost, or one comes back in the place of another."""
    state = handed({"l": [{"a": 1}, "second", "third"]}, [(("l", 0, "b"), 2, 1)])
    assert (state["l"][0].keys(), state["l"][1:]) == ({"a", "b"}, ["second", "third"])
    left = [(("l", 1), 3, 1), (("l", 2), 4, 1)]
    assert shapes(handed({"l": ["first"]}, left)["l"]) == ["first", (3,), (4,)]
    assert handed({"l": ["first"]}, left, is_strict=False)["l"] == ["first"]
    left = [(("l", 1), 3, 2), (("l", 2), 4, 1)]  # nobody knows the layout of the second
    assert handed({"l": ["first"]}, left, num_ranks=2)["l"] == ["first"]


def test_parts_of_several_ranks_are_added_on_one_rank_alone() -> None:
    """If this fails, each rank gets a whole tensor where it had a shard; or one rank cannot read what several saved."""
    left = [(("b",), 2, 2)]
    assert shapes([*handed({}, left).values()]) == [(2,)]
    assert handed({"a": 1}, left).keys() == {"a", "b"}
    assert handed({"a": 1}, left, num_ranks=2) == {"a": 1}
    assert handed({}, left, num_ranks=2) == {}


def test_left_entries_of_objects_are_refused_or_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, state stays behind without a word, or each rank says it, or another object is blamed for it."""
    names, objects = ["t.a", "tt.b", "other.c"], {"t": object(), "u": torch.nn.Linear(1, 1)}
    with pytest.raises(StateDictMismatchError, match=r"leaves behind 't\.a' of memory://here: .* of object does"):
        refuse_unloaded(names, objects, is_strict=True, rank=1, uri="memory://here")
    refuse_unloaded(names[1:], objects, is_strict=True, rank=0, uri="memory://here")
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        for rank in (0, 1):
            refuse_unloaded(names, objects, is_strict=False, rank=rank, uri="memory://here")
    (message,) = caplog.messages
    assert message.startswith("memory://here holds 't.a', for which")
