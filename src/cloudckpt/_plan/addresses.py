"""Which pieces of memory meet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def meeting_another(begins: Sequence[int], ends: Sequence[int]) -> set[int]:
    """The positions of those address ranges ``[begin, end)`` that share a byte with another."""
    lows, highs = np.array(begins, dtype=np.uint64), np.array(ends, dtype=np.uint64)
    order = np.argsort(lows, kind="stable")
    if not (lows[order][1:] < np.maximum.accumulate(highs[order])[:-1]).any():
        return set()  # nearly always
    found: set[int] = set()
    reached, holder = 0, -1
    for position in order.tolist():
        if begins[position] == ends[position]:
            continue
        if begins[position] < reached:
            found |= {holder, position}
        if ends[position] > reached:
            reached, holder = ends[position], position
    return found
