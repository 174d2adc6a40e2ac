"""Which tensors share an object, and how an object is cut into parts."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.io.upload import plan_parts
from cloudckpt.stores.base import Limits, Part
from cloudckpt.tensors.data_objects import pack


@given(st.lists(st.integers(0, 100)), st.integers(1, 120))
def test_pack_keeps_order_and_bound(sizes_bytes: list[int], object_bytes: int) -> None:
    """If this fails, tensors are left out or written twice, or objects outgrow what was asked for."""
    groups = pack(sizes_bytes, object_bytes=object_bytes)
    assert [index for group in groups for index in group] == list(range(len(sizes_bytes)))
    for group in groups:
        assert len(group) > 0
        assert len(group) == 1 or sum(sizes_bytes[index] for index in group) <= object_bytes
    for group, following in itertools.pairwise(groups):  # greedy: no group could have taken one more
        assert sum(sizes_bytes[index] for index in group) + sizes_bytes[following[0]] > object_bytes


def assert_accepted(parts: list[Part], size_bytes: int, tile_bytes: int, limits: Limits) -> None:
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    position = 0
    for part in parts:
        assert part.offset_bytes == position
        assert 0 < part.size_bytes <= limits.max_part_bytes
        position += part.size_bytes
    assert position == size_bytes
    assert len(parts) <= limits.max_parts
    for part in parts[:-1]:
        assert part.size_bytes % tile_bytes == 0
        assert part.size_bytes >= limits.min_part_bytes


@settings(max_examples=1000)
@given(
    size_bytes=st.integers(0, 60),
    part_bytes=st.integers(1, 20),
    tile_bytes=st.integers(1, 6),
    limits=st.builds(
        lambda min_part_bytes, more_bytes, max_parts: Limits(
            min_part_bytes=min_part_bytes,
            max_part_bytes=min_part_bytes + more_bytes,
            max_parts=max_parts,
            max_put_bytes=100,
        ),
        st.integers(1, 8),
        st.integers(0, 12),
        st.integers(1, 6),
    ),
)
def test_an_object_is_refused_only_if_no_parts_of_it_fit_the_store(
    size_bytes: int, part_bytes: int, tile_bytes: int, limits: Limits
) -> None:
    """If this fails, an object is refused that fits, or cut into parts that the store refuses."""
    possible_steps = [
        step
        for step in range(tile_bytes, limits.max_part_bytes + 1, tile_bytes)
        if -(-size_bytes // step) <= limits.max_parts and (step >= limits.min_part_bytes or size_bytes <= step)
    ]
    try:
        parts = plan_parts(size_bytes, part_bytes=part_bytes, tile_bytes=tile_bytes, limits=limits)
    except ValueError:
        assert not possible_steps
    else:
        assert_accepted(parts, size_bytes, tile_bytes, limits)
