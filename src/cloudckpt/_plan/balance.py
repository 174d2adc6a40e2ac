"""Which rank saves what several of them hold: as much on each, as far as that goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SLACK_OF_LEVEL = 32  # a cut costs every reader a request or a seam, so it is not made for less


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Something that any of `ranks` can save, whole or in runs of its rows."""

    ranks: tuple[int, ...]
    num_bytes: int
    num_rows: int = 1
    """All of them equally long; 1 where it is not to be cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Rows ``[begin_row, end_row)`` of something, saved by `rank`."""

    rank: int
    begin_row: int
    end_row: int


def spread(items: Sequence[Held], *, own_bytes: Sequence[int], min_piece_bytes: int) -> list[list[Share]]:
    """Of each item the shares that make it up, in the order of their rows; `own_bytes` is what only one rank can save.

    The largest go first, each to the rank with the least so far. What would not fit there under the mean of all ranks
    is cut, and goes on with the rank that has the least then, so that there are hardly more cuts than ranks (the
    wrap-around rule: McNaughton, Scheduling with Deadlines and Loss Functions, 1959). Where every rank holds every
    item, no rank comes to have more than the mean, or than its own, by over 1/32 of it and two pieces of
    `min_piece_bytes`, or what cannot be cut.
    """
    loads_bytes = list(own_bytes)
    level_bytes = _level(own_bytes, sum(item.num_bytes for item in items))
    slack_bytes = max(level_bytes // _SLACK_OF_LEVEL, min_piece_bytes)
    shares: list[list[Share]] = [[] for _ in items]
    for index in sorted(range(len(items)), key=lambda index: -items[index].num_bytes):
        item = items[index]
        row_bytes = item.num_bytes / item.num_rows
        begin_row = 0
        while begin_row < item.num_rows:
            rank = min(item.ranks, key=loads_bytes.__getitem__)
            num_rows_left = item.num_rows - begin_row
            left_bytes = num_rows_left * row_bytes
            # A level that these ranks cannot keep to would have them cut it ever smaller.
            piece_bytes = max(level_bytes - loads_bytes[rank], min_piece_bytes, left_bytes / len(item.ranks))
            num_rows = num_rows_left
            if left_bytes > piece_bytes + slack_bytes:
                num_rows = min(math.ceil(piece_bytes / row_bytes), num_rows_left)
            shares[index].append(Share(rank=rank, begin_row=begin_row, end_row=begin_row + num_rows))
            loads_bytes[rank] += round(num_rows * row_bytes)
            begin_row += num_rows
    return shares


def _level(own_bytes: Sequence[int], num_bytes: int) -> int:
    """What each rank has if `num_bytes` are poured over all of them, to fill up those with the least first."""
    filled_bytes = 0
    ordered = sorted(own_bytes)
    for num_filled, bound_bytes in enumerate([*ordered[1:], None], start=1):
        filled_bytes += ordered[num_filled - 1]
        level_bytes = -(-(filled_bytes + num_bytes) // num_filled)
        if bound_bytes is None or level_bytes <= bound_bytes:
            return level_bytes
    return 0
