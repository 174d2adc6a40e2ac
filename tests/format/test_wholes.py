"""The quick check of tensors in one piece says what the check of each chunk says."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.format.samples import as_json, tiles_text

from cloudckpt.format import validation
from cloudckpt.format.model import Manifest
from cloudckpt.format.validation import list_unchecked

SIZES_BYTES = (4096, 96)
OBJECTS = [
    {"key": f"data/a/{index}-0.safetensors", "size": size_bytes, "crc32c": tiles_text([1])}
    for index, size_bytes in enumerate(SIZES_BYTES)
]

small = st.integers(-1, 5)
edges = st.sampled_from([-8, -1, 0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 97, 4096, 4100, 2**63 - 1, 2**63, 2**64, 2**70])
lengths = st.lists(small | st.sampled_from([2**31, 2**32, 2**63]), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    """Some sound, most nearly so, stored as one chunk or two."""
    shape = draw(lengths)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "uint8", "float7"]))
    begin = draw(edges)
    num_bytes = {"float32": 4, "bfloat16": 2}.get(dtype, 1)
    for length in shape:
        num_bytes *= length
    chunk = [
        draw(st.just([0] * len(shape)) | lengths),
        draw(st.just(shape) | lengths),
        draw(st.integers(-3, 3)),
        begin,
        draw(st.just(begin + num_bytes) | edges),
    ]
    transforms = draw(st.sampled_from([[], [], ["zlib"]]))
    return {"dtype": dtype, "shape": shape, "chunks": [chunk] * draw(st.integers(0, 2)), "transforms": transforms}


def manifest_of(stored: dict[str, dict[str, Any]]) -> Manifest:
    changes = {"objects": OBJECTS, "tensors": stored, "values": {}, "nesting": None}
    return msgspec.convert(as_json() | changes, Manifest, strict=False)


def sound(**changes: Any) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [2, 3], "chunks": [[[0, 0], [2, 3], 1, 8, 32]]} | changes


@given(drawn=st.lists(tensors(), max_size=4))
@example(drawn=[sound(), sound(chunks=[[[0, 0], [2, 3], 1, 8, 36]])])
@example(drawn=[sound(shape=[], chunks=[[[], [], 0, 0, 4]]), sound(shape=[0], chunks=[[[0], [0], 0, 96, 96]])])
def test_the_same_problems_are_found(drawn: list[dict[str, Any]]) -> None:
    """If this fails, a manifest by somebody hostile is trusted, or a sound one refused (G4, G6)."""
    # 64 bits hold what msgspec reads as an integer; what lies beyond is refused before.
    try:
        manifest = manifest_of({f"t{number}": tensor for number, tensor in enumerate(drawn)})
    except msgspec.ValidationError:
        return
    found = validation.find_problems(manifest)
    with mock.patch.object(validation, "list_unchecked", lambda whole: iter(whole.tensors.items())):
        assert found == validation.find_problems(manifest)


def test_what_is_whole_is_not_looked_at_twice() -> None:
    """If this fails, a load of 20,000 small tensors takes the time of several checks for each."""
    many = manifest_of({f"t{number}": sound() for number in range(3)} | {"other": sound(shape=[3, 2])})
    assert [fqn for fqn, _ in list_unchecked(many)] == ["other"]


@pytest.mark.parametrize(
    "chunk",
    [
        [[0, 0], [2, 3], 2, 8, 32],
        [[0, 0], [2, 3], -1, 8, 32],
        [[0, 0], [2, 3], 1, -8, 16],
        [[0, 0], [2, 3], 1, 6, 30],
        [[0, 0], [2, 3], 1, 80, 104],
        [[0, 0], [2, 3], 1, 8, 28],
        [[1, 0], [2, 3], 1, 8, 32],
        [[0, 0], [3, 2], 1, 8, 32],
    ],
)
def test_one_wrong_number_is_enough(chunk: list[Any]) -> None:
    """If this fails, a load reads outside of an object, out of step with its elements, or leaves some unfilled."""
    assert list(list_unchecked(manifest_of({"good": sound(), "bad": sound(chunks=[chunk])})))
    assert validation.find_problems(manifest_of({"good": sound(), "bad": sound(chunks=[chunk])}))
