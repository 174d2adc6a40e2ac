"""Which machines want the same bytes, and which of them reads each: pure, and the same wherever it is planned."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cloudckpt._share.plan import Range, Segment, merged, num_bytes_in, plan_segments

_LEAST_ALIKE = 0.8
"""Of all that the ranks of two machines want, as much has to be the same."""
_MOST_MACHINES = 64
"""Of a league. A rank has a connection to, and one from, each other machine, and a process often 1024 files."""
_MOST_TRIED = 64
"""Leagues that a machine is held against: each costs the coordinator a look at all that its ranks want."""


@dataclass(frozen=True, slots=True, kw_only=True)
class League:
    """Machines with as many ranks each, of which those at the same place want mostly the same."""

    machines: tuple[int, ...]
    common: tuple[list[Range], ...] = field(repr=False)
    """What the ranks at each place want on all of these machines: merged ranges."""


def common_ranges(left: Sequence[Range], right: Sequence[Range]) -> list[Range]:
    """What is in both. All are `merged` ranges."""
    found: list[Range] = []
    at_left = at_right = 0
    while at_left < len(left) and at_right < len(right):
        one, other = left[at_left], right[at_right]
        if one[0] == other[0] and max(one[1], other[1]) < min(one[2], other[2]):
            found.append((one[0], max(one[1], other[1]), min(one[2], other[2])))
        if (one[0], one[2]) <= (other[0], other[2]):
            at_left += 1
        else:
            at_right += 1
    return found


def ranges_without(ranges: Sequence[Range], taken: Sequence[Range]) -> list[Range]:
    """What is in `ranges` and not in `taken`. All are `merged` ranges."""
    found: list[Range] = []
    at = 0
    for object_index, begin, end in ranges:
        while at < len(taken) and (taken[at][0], taken[at][2]) <= (object_index, begin):
            at += 1
        reached, look = begin, at
        while look < len(taken) and (taken[look][0], taken[look][1]) < (object_index, end):
            if reached < taken[look][1]:
                found.append((object_index, reached, taken[look][1]))
            reached = max(reached, taken[look][2])
            look += 1
        if reached < end:
            found.append((object_index, reached, end))
    return found


def leagues_of(machines: Sequence[Sequence[Sequence[Range]]]) -> list[League]:
    """Machines that are alike enough to read for each other, each in one league at most; none is alone.

    More than a league may have are in several, of about as many machines each. `machines` holds, for each of them, what
    each of its ranks wants, in the order of their places: merged ranges.
    """
    found: list[tuple[list[int], list[list[Range]], int]] = []
    for number, wanted in enumerate(machines):
        num_bytes = sum(map(num_bytes_in, wanted))
        for members, common, first_bytes in found[-_MOST_TRIED:]:
            if len(common) != len(wanted):
                continue
            least_bytes = _LEAST_ALIKE * max(num_bytes, first_bytes)
            both = list(map(common_ranges, common, wanted))
            if num_bytes and sum(map(num_bytes_in, both)) >= least_bytes:
                members.append(number)
                common[:] = both
                break
        else:
            found.append(([number], [list(ranges) for ranges in wanted], num_bytes))
    return [
        League(machines=tuple(some), common=tuple(common))
        for members, common, _ in found
        if len(members) > 1
        for some in _parted(members)
    ]


def _parted(members: Sequence[int]) -> list[Sequence[int]]:
    num_parts = -(-len(members) // _MOST_MACHINES)
    bounds = [len(members) * part // num_parts for part in range(num_parts + 1)]
    return [members[low:high] for low, high in itertools.pairwise(bounds)]


def plan_between(
    common: Mapping[int, Sequence[Range]],
    *,
    num_machines: int,
    segment_bytes: int,
    min_bytes: int,
    num_segments: int,
) -> list[Segment]:
    """`common`, by rank, in segments of which one machine reads each from the store, for all of them.

    Each machine of a league gets the same bounds and machines, and readers at the same places among its ranks. Of the
    ranks at one place, each reads about as many bytes, and so does each machine.
    """
    segments = plan_segments(
        common, segment_bytes=segment_bytes, min_bytes=min_bytes, min_ranks=1, num_segments=num_segments
    )
    places = {rank: place for place, rank in enumerate(sorted(common))}
    loads = {rank: [(0, turn) for turn in range(num_machines)] for rank in common}
    found: list[Segment] = []
    for segment in segments:
        load = loads[segment.reader]
        num_bytes, turn = load[0]
        heapq.heapreplace(load, (num_bytes + segment.end - segment.begin, turn))
        # Not all begin with the first machine, which would read more where there is little.
        found.append(dataclasses.replace(segment, machine=(turn + places[segment.reader]) % num_machines))
    return found


def together(between: Sequence[Segment], within: Sequence[Segment], *, num_segments: int) -> list[Segment]:
    """Both, in the order of the objects and their bytes, numbered anew; what is beyond the bound is left out."""
    every = sorted([*between, *within], key=lambda one: (one.object_index, one.begin, one.end, one.reader))
    return [dataclasses.replace(segment, number=number) for number, segment in enumerate(every[:num_segments])]


def rest_of(wanted: Mapping[int, Sequence[Range]], between: Sequence[Segment]) -> dict[int, list[Range]]:
    """What no segment of `between` brings to each rank."""
    brought: dict[int, list[Range]] = {rank: [] for rank in wanted}
    for segment in between:
        for rank in (segment.reader, *segment.takers):
            brought[rank].append((segment.object_index, segment.begin, segment.end))
    return {rank: ranges_without(ranges, merged(brought[rank])) for rank, ranges in wanted.items()}
