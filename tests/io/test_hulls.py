"""Which memory a snapshot copies, against a set of bytes."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.io.addresses import plan_address_ranges

Views = list[tuple[int, int, int]]


@st.composite
def some_views(draw: st.DrawFn) -> Views:
    """Views ``(begin, end, own bytes)`` of a small memory; some hollow, some of repeated elements."""
    views = []
    for _ in range(draw(st.integers(0, 12))):
        begin = draw(st.integers(0, 60))
        length = draw(st.integers(1, 20))
        views.append((begin, begin + length, draw(st.integers(1, 30))))
    return views


def components(views: Views) -> list[set[int]]:
    """The views that are joined by shared bytes, found pair by pair."""
    groups: list[set[int]] = []
    for number, (begin, end, _) in enumerate(views):
        touched = [group for group in groups if any(views[o][0] < end and begin < views[o][1] for o in group)]
        groups = [group for group in groups if group not in touched] + [{number}.union(*touched)]
    return groups


@settings(max_examples=500)
@given(some_views())
def test_each_shared_byte_is_copied_once_and_all_are_copied(views: Views) -> None:
    """If this fails, tied weights take their memory twice, or a view is missing bytes."""
    hulls = (
        plan_address_ranges(*(list(column) for column in zip(*views, strict=True)))
        if views
        else plan_address_ranges([], [], [])
    )
    dense = [number for number, (begin, end, own) in enumerate(views) if end - begin <= 2 * own]
    groups = components([views[number] for number in dense])
    expected = {
        (min(views[dense[n]][0] for n in group), max(views[dense[n]][1] for n in group)): min(dense[n] for n in group)
        for group in groups
    }
    assert list(zip(hulls.begins, hulls.ends, strict=True)) == sorted(expected, key=lambda item: expected[item])
    assert len(hulls.segment_of) == len(views)
    for number, (begin, end, _) in enumerate(views):
        around = [at for at, (low, high) in enumerate(expected_in(hulls)) if low <= begin and end <= high]
        assert hulls.segment_of[number] == (around[0] if around else -1)
        assert around or number not in dense


def expected_in(hulls: object) -> list[tuple[int, int]]:
    """The segments."""
    return list(zip(hulls.begins, hulls.ends, strict=True))  # type: ignore[attr-defined]


@given(some_views())
def test_copies_take_at_most_twice_the_bytes_of_the_tensors(views: Views) -> None:
    """If this fails, a thin slice of a huge tensor makes a snapshot huge."""
    hulls = plan_address_ranges([v[0] for v in views], [v[1] for v in views], [v[2] for v in views])
    for number, (begin, end) in enumerate(expected_in(hulls)):
        own = sum(view[2] for view, at in zip(views, hulls.segment_of, strict=True) if at == number)
        assert end - begin <= 2 * own


def test_a_hollow_view_of_what_is_copied_anyway_lies_in_it() -> None:
    """If this fails, a slice of a parameter beside the parameter itself is copied twice, and no longer tied."""
    assert plan_address_ranges([0, 100, 1000], [4000, 3900, 1800], [4000, 40, 8]).segment_of == [0, 0, 0]
    assert plan_address_ranges([100, 0], [3900, 200], [40, 200]).segment_of == [-1, 0]


def test_addresses_of_the_upper_half_are_not_negative() -> None:
    """If this fails, memory that a system gives out at its upper end is sorted before all other."""
    high = 2**64 - 4096
    hulls = plan_address_ranges([high, 4096, high + 10], [high + 100, 8192, high + 200], [100, 4096, 190])
    assert expected_in(hulls) == [(high, high + 200), (4096, 8192)]
    assert hulls.segment_of == [0, 1, 0]


def test_many_tensors_take_little_time_each() -> None:
    """If this fails, planning a snapshot of many small tensors grows with the square of their number."""

    def seconds_for(count: int) -> float:
        best = 1e9
        for _ in range(3):
            started = time.process_time()
            plan_address_ranges(
                [number * 64 for number in range(count)], [number * 64 + 60 for number in range(count)], [60] * count
            )
            best = min(best, time.process_time() - started)
        return best

    assert seconds_for(80_000) < 60 * max(seconds_for(4_000), 0.001)
