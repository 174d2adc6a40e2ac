"""State dicts are made flat as torch makes them, and nested again as they were."""

from __future__ import annotations

import enum
import pickle
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.nesting import Nesting, flatten, path_from_json, path_to_json, unflatten

URI = "memory://flat"
PLAIN = torch.zeros(2)


class Listed(list[Any]):
    """A list of somebody's own."""


class Moments(NamedTuple):
    """A tuple as functional optimizers have it."""

    mean: Any
    count: Any


class Color(enum.Enum):
    RED = 1


class Named(str, enum.Enum):
    RED = "red"


keys: st.SearchStrategy[Any] = st.sampled_from(["a", "b", "a.b", "", "0", 0, 1, -1, True, None, 1.5, (0, "a")])
leaves = st.sampled_from(
    [PLAIN, torch.nn.Parameter(PLAIN), 1, 2.5, True, None, "text", b"raw", (1, 2), (PLAIN, {"x": 1}), torch.Size([2])]
)
nestings = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(Listed)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=2).map(UserDict)
        | st.dictionaries(keys, inner, max_size=2).map(lambda made: defaultdict(int, made))
        | st.tuples(inner)
        | st.builds(Moments, inner, inner)
    ),
    max_leaves=8,
)
states = st.dictionaries(keys, nestings, max_size=4)


@given(state=states)
@example(state={"a": {"b": PLAIN}, "a.b": PLAIN})
@example(state={"v": {0: PLAIN, "0": PLAIN}})
@example(state={"optim": {"state": {0: {"step": PLAIN, "m": PLAIN}}, "groups": [{"lr": 1.0, "p": [0, 1]}]}})
@example(state={"a": [[{}], [PLAIN, []], [[1]]], "b": [(PLAIN,)], "c": Counter({30: 1})})
def test_the_names_of_a_flat_state_dict_are_torchs(state: dict[Any, Any]) -> None:
    """If this fails, what torch's planners saved is not found, or theirs do not find what was saved here."""
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(listed(state), is_coordinator=True)
    except ValueError:  # which it raises for nothing else
        with pytest.raises(UnsupportedValueError, match="two entries"):
            flatten(state, uri=URI)
        return
    flat = flatten(state, uri=URI)
    assert list(flat.entries) == list(planner.state_dict)
    assert all(flat.entries[name] is value for name, value in planner.state_dict.items())
    assert as_text(Nesting.of(flat, uri=URI)) == as_text(planner.mappings)


def as_text(paths: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(map(str, path)) for name, path in paths.items()}


def listed(value: Any) -> Any:
    """With lists in place of tuples with entries, and dicts in place of named ones, which torch saves as values."""
    if not has_entries(value) or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Moments):
        return {str(at): listed(each) for at, each in enumerate(value)}
    if isinstance(value, Mapping):
        return {key: listed(each) for key, each in value.items()}
    return [listed(each) for each in value]


def has_entries(value: Any) -> bool:
    """Return True if there is a tensor or a named tuple at any depth."""
    if isinstance(value, Moments):
        return True
    if isinstance(value, (list, tuple, Mapping)):
        return any(map(has_entries, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor)


def form(value: Any) -> Any:
    """Return the form that a rebuilt state dict has: dicts and lists as deep as torch looks, and typed keys."""
    if isinstance(value, Mapping):
        return {repr(key): form(each) for key, each in value.items()}
    if isinstance(value, list) and looks_into(value):
        return [form(each) for each in value]
    if isinstance(value, tuple) and has_entries(value):
        return type(value), [form(each) for each in value]
    return repr(value)


def looks_into(values: list[Any]) -> bool:
    """Return True if a tensor or a dict is in the list, or in a list in it, or a tensor or a named tuple in a tuple."""
    return any(
        isinstance(one, (torch.Tensor, Mapping))
        or (isinstance(one, list) and looks_into(one))
        or (isinstance(one, tuple) and has_entries(one))
        for one in values
    )


@given(state=states)
@example(state={"callbacks": [{}, {"best": PLAIN}], "state": {}, "deep": [[{}, [{}]], PLAIN]})
def test_flattened_state_is_nested_again(state: dict[Any, Any]) -> None:
    """If this fails, an exported state dict has other keys or another form than the one that was saved."""
    try:
        flat = flatten(state, uri=URI)
    except UnsupportedValueError:
        return
    nesting = Nesting.of(flat, uri=URI)
    paths = {**nesting, **{name: path_from_json(path_to_json(path)) for name, path in nesting.typed.items()}}
    empty, tuples = ([path_from_json(path_to_json(path)) for path in of] for of in (nesting.empty, nesting.tuples))
    rebuilt = unflatten(flat.entries, paths, empty, dict(zip(tuples, nesting.tuples.values(), strict=True)))
    assert form(rebuilt) == form(state)


@pytest.mark.parametrize(
    ("key", "restored"),
    [
        (0, 0),
        (-(2**63), -(2**63)),
        (True, True),
        (None, None),
        (1e22, 1e22),
        ((0, "a", None), (0, "a", None)),
        ((), ()),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (np.str_("a"), "a"),
        (Named.RED, "red"),
    ],
    ids=repr,
)
def test_keys_are_restored(key: Any, restored: Any) -> None:
    """If this fails, a key that can be saved comes back as another one."""
    flat = flatten({"v": {key: PLAIN}}, uri=URI)
    nesting = pickle.loads(pickle.dumps(Nesting.of(flat, uri=URI)))  # as it goes from rank to rank
    ((name, path),) = nesting.items()
    (found,) = unflatten({name: 1}, {name: nesting.typed.get(name, path)})["v"]
    assert (type(found), found) == (type(restored), restored)
    assert found == key
    assert hash(found) == hash(key)


@pytest.mark.parametrize(
    "key", [Color.RED, b"a", torch.float32, 2**63, float("nan"), float("inf"), ((1, 2), 3), (Color.RED,), PLAIN]
)
def test_a_key_that_cannot_be_restored_is_refused_by_name(key: Any) -> None:
    """If this fails, a state dict is saved that no export can rebuild, or that no other process can load."""
    for state in ({"v": {key: PLAIN}}, {"v": {key: {}}}):
        flat = flatten(state, uri=URI)
        inner = key[0] if key == (Color.RED,) else key
        with pytest.raises(UnsupportedValueError, match=rf"(?s)v has the key .* of class {type(inner).__name__}"):
            Nesting.of(flat, uri=URI)


@pytest.mark.parametrize("state", [{"\ud800": {}}, {"v": {("\udfff",): PLAIN}}], ids=["of nothing", "in a tuple"])
def test_keys_that_are_not_text_are_refused(state: dict[str, Any]) -> None:
    """If this fails, all data is uploaded, and then the manifest cannot be written."""
    with pytest.raises(UnsupportedValueError, match=r"\\ud"):
        Nesting.of(flatten(state, uri=URI), uri=URI)


def test_a_named_tuple_of_a_class_that_is_not_found_is_refused_or_becomes_a_tuple(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If this fails, a load makes an object of a class that the checkpoint names, or no other process can load it."""
    local = namedtuple("local", "mean")  # noqa: PYI024  # within a function
    with pytest.raises(UnsupportedValueError, match=r"\['v'\] .* its class .*local is not found"):
        flatten({"v": local(PLAIN)}, uri=URI)
    for name in ("absent.Moments", "builtins.tuple", "os.system", f"{__name__}.Color", f"{__name__}.Moments"):
        caplog.clear()
        rebuilt = unflatten({"v.0": 1}, {"v.0": ("v", 0)}, tuples={("v",): name})  # the last has two fields
        assert type(rebuilt["v"]) is tuple
        assert name in caplog.text


def test_the_nestings_of_all_ranks_are_merged() -> None:
    """If this fails, what other ranks than the first saved cannot be nested again."""
    one, two = (
        Nesting.of(flatten(state, uri=URI), uri=URI)
        for state in ({"a": {0: 1}, "e": {}, "x": [{}]}, {"a": {1: 1}, "e": {}, "x": [{}, {"y": 2}]})
    )
    both = Nesting.merge([one, two])
    rebuilt = unflatten({"a.0": 1, "a.1": 1, "x.1.y": 2}, {**both, **both.typed}, both.empty)
    assert rebuilt == {"a": {0: 1, 1: 1}, "e": {}, "x": [{}, {"y": 2}]}
    assert len(both.empty) == 2
