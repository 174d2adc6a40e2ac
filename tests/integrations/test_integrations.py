"""Messages of the framework modules without the frameworks. tests/frameworks has the real packages."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.in_memory import Memory, state_of
from tests.scaled import ALLOWED, assert_same_scaled, make_scaled

import cloudckpt
from cloudckpt.errors import AccessDeniedError
from cloudckpt.integrations._nested_state import deserialize, from_state_dict, serialize, to_state_dict
from cloudckpt.integrations._requirements import TESTED_VERSIONS
from cloudckpt.manager.steps import find_steps_on_all_ranks

_DENIED = AccessDeniedError("not for you", key="memory://tests/key", operation="list")
_MODULES = {re.split(r"[\[-]", name)[0]: name for name in TESTED_VERSIONS}


@pytest.mark.parametrize("module", _MODULES)
def test_a_missing_framework_is_named_with_its_tested_version(module: str) -> None:
    """A user would see that a module is missing, and not which package in which version to install."""
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    wanted = _MODULES[module]
    # transformers' module builds on accelerate's, and says so first.
    named = "accelerate" if module == "transformers" else wanted
    with pytest.raises(cloudckpt.errors.MissingDependencyError) as caught:
        importlib.import_module(f"cloudckpt.integrations.{module}")
    assert isinstance(caught.value, ImportError)
    assert f"pip install '{named}=={TESTED_VERSIONS[named]}'" in str(caught.value)


def test_only_steps_are_in_the_way_of_training(memory: Memory) -> None:
    """Training would not begin where a folder that has nothing to do with it may not be looked at."""
    for name in ("step-10", "step-9", "step-09", "somebodys"):
        cloudckpt.save(state_of(), memory.uri(name))
    memory.at("").fail("list", key_part="somebodys", error=lambda: _DENIED, times=100)
    assert find_steps_on_all_ranks(memory.root, cloudckpt.Options()) == [9, 10]
    memory.at("step-9").fail("list", error=lambda: _DENIED, times=100)
    with pytest.raises(AccessDeniedError):  # it might be in the way
        find_steps_on_all_ranks(memory.root, cloudckpt.Options())


def test_steps_of_torchs_own_writer_are_in_the_way_too(tmp_path: Path) -> None:
    """If this fails, training that goes on from step 1 comes hours later to a step that no save may replace."""
    cloudckpt.save(state_of(), tmp_path / "step-1")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert find_steps_on_all_ranks(str(tmp_path), cloudckpt.Options()) == [1, 2]


def test_pickle_that_could_run_code_is_refused() -> None:
    """State that a framework keeps would be refused without a word of which checkpoint, why, and what to do."""
    with pytest.warns(UserWarning, match=r"state\.ratio.* is of class fractions\.Fraction"):
        data = serialize({"ratio": Fraction(1, 3), "step": 3})
    with pytest.raises(
        cloudckpt.errors.UnsafePickleError, match=r"add_safe_globals, or give weights_only=False"
    ) as caught:
        deserialize(data, uri="s3://bucket/run/last.ckpt")
    assert caught.value.uri == "s3://bucket/run/last.ckpt"
    assert "fractions.Fraction" in str(caught.value)
    assert deserialize(data, allow_pickle=True) == {"ratio": Fraction(1, 3), "step": 3}
    assert deserialize(serialize({"step": 3})) == {"step": 3}


def test_quantized_weights_of_a_framework_come_back(tmp_path: Path) -> None:
    """If this fails, Lightning on one device or DDP refuses a model with quantized weights, or gets other ones back."""
    tree = {"state_dict": {"layer.weight": make_scaled()}, "epoch": 3}
    cloudckpt.save(to_state_dict(tree, uri="u"), tmp_path / "1", no_dist=True)
    with torch.serialization.safe_globals(ALLOWED):
        found = from_state_dict(cloudckpt.read(tmp_path / "1"))
    assert found["epoch"] == 3
    assert_same_scaled(found["state_dict"]["layer.weight"], make_scaled())


_KEYS = st.sampled_from(["a", "b", "a.b", "b.a", "a_", "a.b_", "skeleton", "skeleton_", "0", 0, 1, "1"])
_TREES = st.recursive(
    st.integers(0, 3) | st.just("tensor"),
    lambda inner: st.dictionaries(_KEYS, inner) | st.lists(inner) | st.tuples(inner, inner),
)


def _with_tensors(value: object, numbers: Iterator[int]) -> object:
    """Return the tree with a tensor of its own number for each "tensor"."""
    if isinstance(value, dict):
        return {key: _with_tensors(each, numbers) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(each, numbers) for each in value)
    return torch.tensor(next(numbers)) if value == "tensor" else value


def _without_tensors(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_tensors(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without_tensors(each) for each in value)
    return ("tensor", value.item()) if isinstance(value, torch.Tensor) else value


@given(tree=st.dictionaries(_KEYS, _TREES))
def test_nested_state_whose_paths_are_equal_comes_back(tree: dict[object, object]) -> None:
    """If this fails, keys with dots, or 1 beside "1", make one tensor of a framework's state another one."""
    given_tree = _with_tensors(tree, itertools.count())
    flat = to_state_dict(given_tree, uri="u")
    assert all(isinstance(name, str) for name in flat)
    assert _without_tensors(from_state_dict(flat)) == _without_tensors(given_tree)


def test_state_that_looks_like_a_placeholder_is_refused() -> None:
    """If this fails, a dict of the user's comes back as a tensor."""
    with pytest.raises(cloudckpt.errors.UnsupportedValueError, match=r"^note\.it is a dict whose only key"):
        to_state_dict({"w": torch.ones(1), "note": {"it": {"cloudckpt.tensor": "w"}}}, uri="u")
