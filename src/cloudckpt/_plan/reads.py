"""From the byte ranges that are wanted to the ranged reads that fetch them."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cloudckpt._plan.gaps import Run, merged_within_budget
from cloudckpt._plan.order import spread


class Want(NamedTuple):
    """Bytes ``[begin, end)`` of an object that one consumer wants. A tuple, since a load has one for each tensor."""

    consumer: int
    object_index: int
    begin: int
    end: int
    is_held: bool = False
    """Memory for all of it is taken with its first byte, and given back with its last."""


_RANGE = operator.itemgetter(Want._fields.index("begin"), Want._fields.index("end"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One ranged read, and the part of each want that it brings (the wants' own ranges may reach further)."""

    object_index: int
    begin: int
    end: int
    wants: tuple[Want, ...]
    overlapping: bool
    """Some byte is wanted twice."""
    continues: bool
    """It brings more of a want that is held, and that the read before it has begun."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def plan_requests(
    wants: Sequence[Want],
    *,
    object_sizes_bytes: Mapping[int, int],
    tile_bytes: int,
    request_bytes: int,
    max_gap_bytes: int,
    max_over_read: float,
) -> list[Request]:
    """Reads of whole tiles that bring all `wants`, each byte once, in the order in which to send them.

    Ranges up to `max_gap_bytes` apart are read as one. So are others where that saves requests, the nearest first,
    while the gaps between them come to at most `max_over_read` of the bytes wanted. No read is longer than
    `request_bytes` (in whole tiles, at least one). Empty wants need no read.
    """
    by_object: defaultdict[int, list[Want]] = defaultdict(list)
    for want in wants:
        if want.begin < want.end:
            by_object[want.object_index].append(want)
    step_bytes = max(request_bytes // tile_bytes, 1) * tile_bytes
    runs: list[Run] = []
    num_wanted_bytes = 0
    for object_index, members in sorted(by_object.items()):
        members.sort(key=_RANGE)
        for begin, end, num_bytes in _touching(members, tile_bytes, max_gap_bytes):
            runs.append(Run(object_index, begin, min(end, object_sizes_bytes[object_index])))
            num_wanted_bytes += num_bytes
    budget_bytes = int(max_over_read * num_wanted_bytes)
    requests: list[Request] = []
    merged = merged_within_budget(runs, step_bytes=step_bytes, budget_bytes=budget_bytes)
    for object_index, of_object in itertools.groupby(merged, key=operator.attrgetter("object_index")):
        cuts = (cut for run in of_object for cut in _cut(run, tile_bytes, step_bytes))
        requests += _requests_of(object_index, by_object[object_index], cuts, tile_bytes)
    return spread(requests)


def _touching(wants: Sequence[Want], tile_bytes: int, max_gap_bytes: int) -> Iterator[tuple[int, int, int]]:
    """The stretches of whole tiles that hold `wants`, which are sorted, and how many bytes of each are wanted."""
    begin = end = reached = -1
    num_wanted_bytes = 0
    for want in wants:
        low = want.begin // tile_bytes * tile_bytes
        high = -(-want.end // tile_bytes) * tile_bytes
        if end >= 0 and low - end > max_gap_bytes:
            yield begin, end, num_wanted_bytes
            end, num_wanted_bytes = -1, 0
        if end < 0:
            begin, end = low, high
        elif high > end:
            end = high
        if want.end > reached:
            num_wanted_bytes += want.end - max(want.begin, reached)
            reached = want.end
    if end >= 0:
        yield begin, end, num_wanted_bytes


def _cut(run: Run, tile_bytes: int, step_bytes: int) -> Iterator[tuple[int, int]]:
    """Pieces of whole tiles, at most `step_bytes` each, as few as can be and about as large as each other."""
    num_bytes = run.end - run.begin
    share_bytes = -(-num_bytes // -(-num_bytes // step_bytes))
    piece_bytes = -(-share_bytes // tile_bytes) * tile_bytes
    for low in range(run.begin, run.end, piece_bytes):
        yield low, min(low + piece_bytes, run.end)


def _requests_of(
    object_index: int, wants: Sequence[Want], cuts: Iterable[tuple[int, int]], tile_bytes: int
) -> Iterator[Request]:
    """One read for each of the rising `cuts` that holds any of `wants`, which are sorted."""
    begun: list[Want] = []  # before this cut, and reaching into it
    index = 0
    for low, high in cuts:
        inside = begun
        while index < len(wants) and wants[index].begin < high:
            inside.append(wants[index])
            index += 1
        if not inside:
            continue
        overlapping, reached = False, low
        for want in inside:
            overlapping = overlapping or max(want.begin, low) < reached
            reached = max(reached, min(want.end, high))
        yield Request(
            object_index=object_index,
            # A cut can fall into a gap, of which nothing has to be read then.
            begin=max(low, inside[0].begin // tile_bytes * tile_bytes),
            end=min(high, -(-reached // tile_bytes) * tile_bytes),
            wants=tuple(inside),
            overlapping=overlapping,
            continues=any(want.is_held and want.begin < low for want in inside),
        )
        begun = [want for want in inside if want.end > high]
