"""State dicts made flat and nested again: forms that are rare, and checkpoints that contradict this program."""

from __future__ import annotations

import collections
import logging
from typing import Any, NamedTuple

import pytest
import torch

from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.nesting import Nesting, flatten, unflatten

ONE = torch.ones(1)


class Pair(NamedTuple):
    """A named tuple that this process has imported."""

    a: Any
    b: Any


class Noted(collections.namedtuple("Noted", ["a"])):  # noqa: PYI024, SLOT002  # with attributes of its own
    """A named tuple that can hold more than its entries."""


def test_tuples_with_tensors_are_taken_apart_at_any_place() -> None:
    """If this fails, one rank stores its own shards for all ranks, where a list holds tuples of sharded tensors."""
    state = {"l": [(ONE, 1), [(2, ONE)]], "d": {"x": Pair(ONE, (ONE,))}, "v": [(1, 2)], "e": ()}
    flat = flatten(state, uri="u")
    assert [*flat.entries] == ["l.0.0", "l.0.1", "l.1.0.0", "l.1.0.1", "d.x.0", "d.x.1.0", "v", "e"]
    assert unflatten(flat.entries, flat.paths, flat.empty, flat.tuples) == state


def test_named_tuple_with_attributes_stays_one_value() -> None:
    """If this fails, what such an object holds beside its entries is lost by a save, without a word."""
    noted = Noted(ONE)
    assert [*flatten({"x": noted}, uri="u").entries] == ["x.0"]
    noted.note = "kept"  # type: ignore[attr-defined]
    flat = flatten({"x": noted}, uri="u")
    assert (flat.entries["x"], flat.tuples) == (noted, {})


@pytest.mark.parametrize("kind", [f"{__name__}.Pair", "torch.Size", "builtins.tuple", "os.system", "absent.Name", "x"])
def test_class_that_does_not_fit_becomes_a_tuple(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, a field that a class has gained since makes a checkpoint unreadable, or any class can be named."""
    paths = {f"t.{at}": ("t", at) for at in range(3)}
    with caplog.at_level(logging.WARNING, logger="cloudckpt"):
        found = unflatten(dict(zip(paths, (1, 2, 3), strict=True)), paths, (), {("t",): kind})["t"]
    assert type(found) is tuple
    assert found == (1, 2, 3)
    assert f"'{kind}'" in caplog.text


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ({"a": {"b\ud800": {}}}, "surrogate"),
        ({"a": {"b\ud800": (ONE,)}}, "surrogate"),
        ({2**63: ONE}, "9223372036854775808"),
        ({"a": {-(2**63) - 1: {}}}, "-9223372036854775809"),
        ({(1, 2**70): ONE}, "int"),
        ({float("nan"): ONE}, "nan"),
        ({(1, float("inf")): {}}, "float"),
        ({((1,),): ONE}, "tuple"),
        ({b"bytes": ONE}, "bytes"),
    ],
)
def test_key_that_cannot_be_stored_is_refused(state: dict[Any, Any], word: str) -> None:
    """If this fails, a save succeeds whose manifest no program reads, or a key comes back as another one."""
    with pytest.raises(UnsupportedValueError, match=word):
        Nesting.of(flatten(state, uri="u"), uri="u")


@pytest.mark.parametrize(
    "key", [True, False, None, 0, -1, 2**63 - 1, -(2**63), 1.5, -0.0, (1, "a"), (True, None), (), ("",)], ids=repr
)
def test_key_comes_back_with_its_type(key: Any) -> None:
    """If this fails, a state that is kept by numbers, flags or pairs comes back under other keys."""
    nesting = Nesting.of(flatten({"d": {key: ONE}, "e": {key: {}}}, uri="u"), uri="u")
    found = unflatten(dict.fromkeys(nesting, 7), {**nesting, **nesting.typed}, nesting.empty, nesting.tuples)
    assert repr(found) == repr({"d": {key: 7}, "e": {key: {}}})
