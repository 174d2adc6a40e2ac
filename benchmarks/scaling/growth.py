"""The growth of costs with the number of chunks, and its bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scaling.simulate import BUILD, DECODE, ENCODE, MANIFEST_BYTES

_MILLION = 1_000_000
_MAX_COMMIT_S = 10.0
_MAX_DECODE_S = 5.0
_MAX_MANIFEST_BYTES = 100_000_000
_MAX_EXPONENT = 1.1
_MIN_CHUNKS = 50_000
"""Below, what a phase costs apart from the chunks hides how it grows."""


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of a line through the logarithms of (chunks, cost): 1 is linear. None for fewer than two points."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len(logs) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread if spread else None


def growth_of(sizes: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The exponent of each phase's CPU seconds, over the jobs large enough to tell."""
    large = [size for size in sizes if size["num_chunks"] >= _MIN_CHUNKS]
    names = dict.fromkeys(name for size in large for name in size["phases"])
    return {
        name: exponent(
            [(size["num_chunks"], size["phases"][name]["cpu_s"]) for size in large if name in size["phases"]]
        )
        for name in names
    }


def verdicts(sizes: Sequence[Mapping[str, Any]]) -> list[tuple[bool, str]]:
    """A line for each bar.

    A million chunks cost, a million times, what one costs in the smallest job that has so many, else in the largest.
    """
    in_order = sorted(sizes, key=lambda size: size["num_chunks"])
    nearest = next((size for size in in_order if size["num_chunks"] >= _MILLION), in_order[-1])
    scale = _MILLION / nearest["num_chunks"]
    seconds = {name: phase["cpu_s"] * scale for name, phase in nearest["phases"].items()}
    commit_s, decode_s = seconds[BUILD] + seconds[ENCODE], seconds[DECODE]
    manifest_bytes = nearest["sizes_bytes"][MANIFEST_BYTES] * scale
    lines = [
        (commit_s < _MAX_COMMIT_S, f"1 M chunks: build and encode {commit_s:.2f} s of one core (bar: {_MAX_COMMIT_S})"),
        (
            decode_s < _MAX_DECODE_S,
            f"1 M chunks: decode and validate {decode_s:.2f} s of one core (bar: {_MAX_DECODE_S})",
        ),
        (
            manifest_bytes < _MAX_MANIFEST_BYTES,
            f"1 M chunks: {manifest_bytes / 1e6:.1f} MB on the store (bar: {_MAX_MANIFEST_BYTES / 1e6:.0f})",
        ),
    ]
    growth = growth_of(sizes)
    for name in (BUILD, ENCODE, DECODE):
        value = growth.get(name)
        if value is not None:
            lines.append((value <= _MAX_EXPONENT, f"{name}: grows as chunks^{value:.2f} (bar: {_MAX_EXPONENT})"))
    return lines
