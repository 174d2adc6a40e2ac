"""Findings for single bars, and their verdicts. Pure."""

# ruff: noqa: RUF001  # the signs are meant

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.results.report import NOTHING, Table, markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One bar, and every value that was found for it."""

    name: str
    formula: str
    sense: Literal["≥", "≤"]
    bar: float | None
    """None: it stands beside ours."""
    values: tuple[float, ...]
    failed: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        if self.failed is not None:
            return f"not measured: {self.failed}"
        if self.bar is None:
            return ""
        is_met = self.median >= self.bar if self.sense == "≥" else self.median <= self.bar
        return "met" if is_met else f"MISSED by {abs(self.median - self.bar) / self.bar:.0%}"


def text(figures: Sequence[Figure], gb_per_s: Mapping[str, Sequence[float]]) -> str:
    """The bars and the rates behind them."""
    bars = Table(
        title="",
        header=("bar", "what is taken", "found", "asked", "verdict"),
        rows=tuple(
            (
                one.name,
                one.formula,
                _spread(one.values),
                NOTHING if one.bar is None else f"{one.sense} {one.bar:g}",
                one.verdict,
            )
            for one in figures
        ),
    )
    rates = Table(
        title="",
        header=("rate", "GB/s"),
        rows=tuple((name, _spread(values)) for name, values in gb_per_s.items()),
    )
    return f"{markdown(bars)}\n\n{markdown(rates)}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return NOTHING
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"
