"""What `verify` makes of the names in an object's header."""

from __future__ import annotations

import pytest

from cloudckpt.format.safetensors import HeaderEntry, ObjectContents, PlacedEntry, find_header_problems, lay_out


def entry(fqn: str, dtype: str = "float32", shape: tuple[int, ...] = (4,)) -> HeaderEntry:
    return HeaderEntry(fqn=fqn, dtype=dtype, shape=shape, offsets=None, num_bytes=4 * shape[0])


def problems(in_header: list[HeaderEntry], in_manifest: list[tuple[HeaderEntry, int]]) -> list[str]:
    """Of a header of `in_header`, where the manifest has each entry as the header's one of that position."""
    layout = lay_out(in_header)
    ends = [begin + one.num_bytes for begin, one in zip(layout.begins, in_header, strict=True)]
    placed = [PlacedEntry(entry=one, begin=layout.begins[at], end=ends[at]) for one, at in in_manifest]
    return list(find_header_problems(layout.header, ObjectContents(placed), size_bytes=layout.size_bytes))


def test_several_names_of_the_same_bytes_stand_under_one() -> None:
    """If this fails, `verify` calls every checkpoint of a tied model damaged."""
    assert problems([entry("a"), entry("c")], [(entry("a"), 0), (entry("b"), 0), (entry("c"), 1)]) == []
    assert problems([entry("b"), entry("c")], [(entry("a"), 0), (entry("b"), 0), (entry("c"), 1)]) == []


@pytest.mark.parametrize(
    "other",
    [entry("b", "int32"), entry("b", shape=(2,)), entry("b", shape=(0,))],
    ids=["dtype", "shape", "empty"],
)
def test_a_name_of_other_bytes_has_to_be_there(other: HeaderEntry) -> None:
    """If this fails, a header that lacks tensors of the manifest is not found out."""
    (problem,) = problems([entry("a"), entry("c")], [(entry("a"), 0), (other, 0), (entry("c"), 1)])
    assert "its header lacks 'b'" in problem


def test_names_that_the_manifest_lacks_are_told() -> None:
    """If this fails, a header can say that an object holds what it does not."""
    (problem,) = problems([entry("a"), entry("x")], [(entry("a"), 0), (entry("a"), 0)])
    assert "its header has 'x'" in problem
