"""The metadata of tensors that consist of others, as JSON and back."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.scaled import ALLOWED, Limits, Recipe, Rounding, Scaled, make_scaled

from cloudckpt.errors import UnsupportedValueError
from cloudckpt.format.model import StoredWrapper
from cloudckpt.format.wrappers import Registry, describe_difference, encode_context, take_apart

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(),
    st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.Size([2, 3]), Rounding.DOWN, Limits(), Recipe, len]),
    st.builds(Limits, st.floats(allow_nan=False)),
    st.builds(Recipe, st.sampled_from(Rounding)),
)
METADATA = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(0, 9)), inner, max_size=3),
    ),
    max_leaves=8,
)


def stored(context: Any) -> StoredWrapper:
    """A wrapper with this metadata."""
    return StoredWrapper(kind="tests.scaled.Scaled", tensors=["data_"], context=context, shape=(1,), stride=(1,))


@given(METADATA)
def test_metadata_comes_back_as_it_was(value: Any) -> None:
    """If this fails, a wrapper is made anew with other metadata, and so with other values."""
    encoded = msgspec.json.decode(msgspec.json.encode(encode_context(value, "it")))
    with torch.serialization.safe_globals([*ALLOWED, len]):
        _, decoded = Registry(uri="u").find("w", stored(encoded))
    assert decoded == value
    assert repr(decoded) == repr(value)  # also the types within


def test_nan_in_metadata_comes_back() -> None:
    """If this fails, NaN in the metadata is null in the manifest."""
    with torch.serialization.safe_globals([Scaled]):
        _, decoded = Registry(uri="u").find("w", stored(encode_context(math.nan, "it")))
    assert math.isnan(decoded)


def test_a_part_without_a_valid_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, parts have names that are those of other entries."""
    for names in ([], ["a.b"], [""], [3]):
        monkeypatch.setattr(Scaled, "__tensor_flatten__", lambda _, names=names: (names, None))
        with pytest.raises(UnsupportedValueError, match="'w'"):
            take_apart(make_scaled(), "w", uri="u")


def test_the_first_difference_is_named() -> None:
    """If this fails, an error shows all metadata, and nobody sees which of it differs."""
    one, other = ({"a": [1, 2], "recipe": Recipe(Rounding(number))} for number in (1, 2))
    found = describe_difference(stored(encode_context(one, "it")), stored(encode_context(other, "it")))
    assert found is not None
    assert found.startswith("metadata.recipe.")
    assert found.endswith("'DOWN']")
