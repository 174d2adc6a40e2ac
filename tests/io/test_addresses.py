"""Which pieces of memory meet, against a look at every pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.io.addresses import find_overlapping

HIGH = 2**47

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


@given(drawn=ranges, offset=st.sampled_from([0, HIGH, 2**63]))
def test_exactly_those_that_share_a_byte_are_found(drawn: list[tuple[int, int]], offset: int) -> None:
    """If this fails, two reads fill one piece of memory at once, or tensors are copied for no reason."""
    spans = [set(range(begin, begin + length)) for begin, length in drawn]
    expected = {
        index
        for index, span in enumerate(spans)
        if any(span & other for position, other in enumerate(spans) if position != index)
    }
    begins = [offset + begin for begin, _ in drawn]
    assert find_overlapping(begins, [offset + begin + length for begin, length in drawn]) == expected
