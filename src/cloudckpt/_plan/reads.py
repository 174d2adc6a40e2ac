"""From the byte ranges that are wanted to the ranged reads that fetch them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Bytes ``[begin, end)`` of an object that one consumer wants."""

    consumer: int
    object_index: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One ranged read, and the part of each want that it brings (the wants' own ranges may reach further)."""

    object_index: int
    begin: int
    end: int
    wants: tuple[Want, ...]
    overlapping: bool
    """Some byte is wanted twice."""


def plan_requests(
    wants: Sequence[Want],
    *,
    object_sizes_bytes: Mapping[int, int],
    tile_bytes: int,
    request_bytes: int,
    max_gap_bytes: int,
) -> list[Request]:
    """Reads of whole tiles that bring all `wants`, each byte once.

    Ranges up to `max_gap_bytes` apart are read as one; none is longer than `request_bytes` (in whole tiles, at least
    one). Empty wants need no read.
    """
    by_object: defaultdict[int, list[Want]] = defaultdict(list)
    for want in wants:
        if want.begin < want.end:
            by_object[want.object_index].append(want)
    step_bytes = max(request_bytes // tile_bytes, 1) * tile_bytes
    requests: list[Request] = []
    for object_index, members in sorted(by_object.items()):
        members.sort(key=lambda want: (want.begin, want.end))
        size_bytes = object_sizes_bytes[object_index]
        first = 0
        for begin, end in _merged(members, tile_bytes, max_gap_bytes):
            for low in range(begin, min(end, size_bytes), step_bytes):
                high = min(low + step_bytes, end, size_bytes)
                while first < len(members) and members[first].end <= low:
                    first += 1
                inside = tuple(_inside(members, first, low, high))
                if inside:
                    requests.append(_request(object_index, low, high, inside))
    return requests


def _merged(wants: Sequence[Want], tile_bytes: int, max_gap_bytes: int) -> Iterator[tuple[int, int]]:
    begin = end = -1
    for want in wants:
        low = want.begin // tile_bytes * tile_bytes
        high = -(-want.end // tile_bytes) * tile_bytes
        if end < 0:
            begin, end = low, high
        elif low - end <= max_gap_bytes:
            end = max(end, high)
        else:
            yield begin, end
            begin, end = low, high
    if end >= 0:
        yield begin, end


def _inside(wants: Sequence[Want], first: int, low: int, high: int) -> Iterator[Want]:
    for index in range(first, len(wants)):
        want = wants[index]
        if want.begin >= high:
            return
        if want.end > low:
            yield want


def _request(object_index: int, low: int, high: int, wants: tuple[Want, ...]) -> Request:
    # Only the wanted stretch: a read of a merged run starts and ends with bytes that somebody wants, to whole tiles.
    reached, overlapping = low, False
    for want in wants:
        overlapping = overlapping or max(want.begin, low) < reached
        reached = max(reached, min(want.end, high))
    return Request(object_index=object_index, begin=low, end=high, wants=wants, overlapping=overlapping)
