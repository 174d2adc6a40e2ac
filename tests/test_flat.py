"""State dicts are made flat as torch makes them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from cloudckpt._flat import flattened

PLAIN = torch.zeros(2)
keys: st.SearchStrategy[Any] = st.sampled_from(["a", "b", "a.b", "", "0"])
leaves = st.sampled_from([PLAIN, torch.nn.Parameter(PLAIN), 1, 2.5, True, None, "text", b"raw", (1, 2), (0.9, "x")])
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.tuples(inner)
        | st.dictionaries(keys | st.integers(0, 1), inner, max_size=2)
    ),
    max_leaves=8,
)


def as_torch(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state_dict, None, is_coordinator=True)
    return planner.state_dict, planner.mappings


@given(state_dict=st.dictionaries(keys, nested, max_size=4))
@example(state_dict={"a": {"b": PLAIN}, "a.b": PLAIN})
@example(state_dict={"optim": {"state": {"w": {"step": PLAIN, "m": PLAIN}}, "groups": [{"lr": 1.0, "p": [0, 1]}]}})
def test_flat_is_what_torch_makes_of_it(state_dict: dict[str, Any]) -> None:
    """If this fails, tensors are looked for under other names than they were saved under, or values put elsewhere."""
    flat = flattened(state_dict)
    if flat is None:
        return
    entries, paths = as_torch(state_dict)
    assert list(flat.entries) == list(entries)
    assert all(flat.entries[name] is entries[name] or flat.entries[name] == entries[name] for name in entries)
    assert flat.paths == paths


@given(state_dict=st.dictionaries(keys, nested, max_size=4))
@example(state_dict={"a": {"b": {"lr": 1}}, "b": [1, 2], "0": [PLAIN, {"a": {"a": 1}}]})
def test_older_names_are_names_of_containers(state_dict: dict[str, Any]) -> None:
    """If this fails, entries that torch before 2.4 saved under other names are not found in a checkpoint."""
    flat = flattened(state_dict)
    if flat is None:
        return
    _version._derived_version = "2_3"
    try:
        older = flatten_state_dict(state_dict)[0]
    except ValueError:  # two of one name
        return
    finally:
        _version._derived_version = None
    assert older.keys() <= flat.entries.keys() | flat.containers


@pytest.mark.parametrize(
    "state_dict",
    [
        {"w": torch.empty(2, device="meta")},
        {"inner": [torch.empty(2, device="meta")]},
        {"inner": {"model": torch.nn.Linear(1, 1)}},
        {"inner": {1: PLAIN}},
        {"a": {"b": PLAIN}, "a.b": PLAIN},
        {"deep": [[PLAIN]]},
        {"pair": (PLAIN, 1)},
    ],
)
def test_what_is_not_plain_is_left_to_torch(state_dict: dict[str, Any]) -> None:
    """If this fails, tensors without memory, shards and objects are flattened as something that they are not."""
    assert flattened(state_dict) is None


def test_a_model_and_its_optimizer_are_plain() -> None:
    """If this fails, the state of an ordinary training takes torch three walks through it at each load."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state_dict = {"model": model.state_dict(), "names": ["a", "b"], "step": 5}
    assert flattened(state_dict) is not None
    assert flattened({"groups": optimizer.state_dict()["param_groups"]}) is not None
