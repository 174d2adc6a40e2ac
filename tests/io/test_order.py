"""The order in which a load's reads go out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.io.reads import spread


@dataclass(frozen=True)
class Read:
    object_index: int
    num_bytes: int
    continues: bool = False
    place: int = 0


def reads_of(*sizes_bytes: list[int]) -> list[Read]:
    """Reads of objects 0, 1, …, of the sizes given for each."""
    return [Read(index, size, place=place) for index, of in enumerate(sizes_bytes) for place, size in enumerate(of)]


def test_a_chain_stays_together_and_counts_as_one() -> None:
    """If this fails, memory that is held for a large value waits for reads that are about something else."""
    chain = [Read(1, 20), Read(1, 20, continues=True), Read(1, 5, continues=True)]
    ordered = spread([*reads_of([30, 30]), *chain, Read(2, 32)])
    assert ordered[:3] == chain
    assert [read.object_index for read in ordered[3:]] == [0, 2, 0]


@given(
    st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=6),
    st.integers(1, 8),
)
def test_all_go_out_and_no_tail_is_long(sizes_bytes: list[list[int]], num_connections: int) -> None:
    """If this fails, reads are lost, or the last connection to end works longer than twice the largest read alone."""
    given_reads = reads_of(*sizes_bytes)
    ordered = spread(given_reads)
    assert Counter(ordered) == Counter(given_reads)
    busy_until = [0] * num_connections
    for read in ordered:  # whichever connection is free first takes the next
        first = min(range(num_connections), key=busy_until.__getitem__)
        busy_until[first] += read.num_bytes
    total = sum(read.num_bytes for read in given_reads)
    largest = max((read.num_bytes for read in given_reads), default=0)
    # The longest-first rule ends within 4/3 of the best; by powers of two it loses a little of that.
    assert max(busy_until) <= max(total / num_connections + largest, largest)
    assert max(busy_until) - min(busy_until) <= largest
