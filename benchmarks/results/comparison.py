"""Two runs side by side: what has changed, and what may be noise. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.results.model import (
    Quantity,
    Results,
    Row,
    Spread,
    blocking_s,
    cpu_s_per_gb,
    gb_per_s,
    parsed,
    peak_mib,
    read_mib,
)
from benchmarks.results.report import NOTHING, Table, markdown, provenance_lines

_QUANTITIES: tuple[tuple[str, Quantity, Literal["more", "less"], int], ...] = (
    ("GB/s", gb_per_s, "more", 2),
    ("CPU s/GB", cpu_s_per_gb, "less", 2),
    ("read MiB", read_mib, "less", 1),
    ("blocks s", blocking_s, "less", 3),
    ("peak MiB", peak_mib, "less", 0),
)
"""Compared quantities, and the better direction of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One quantity of one row in both runs."""

    row: str
    system: str
    quantity: str
    better: Literal["more", "less"]
    before: Spread
    after: Spread
    digits: int

    @property
    def relative(self) -> float:
        """Change of the medians; 0.1 is a tenth more."""
        return self.after.median / self.before.median - 1 if self.before.median else 0.0

    @property
    def is_noise(self) -> bool:
        """True if either median lies in the other's range, so the runs do not tell them apart."""
        before, after = self.before, self.after
        return before.low <= after.median <= before.high or after.low <= before.median <= after.high

    @property
    def verdict(self) -> str:
        if self.is_noise:
            return "within noise"
        return "better" if (self.relative > 0) == (self.better == "more") else "WORSE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All changes, and what keeps the runs from being comparable."""

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differences: tuple[tuple[str, str, str], ...]
    """Differences of the machines and versions of the two runs."""


def compared(before: Results, after: Results) -> Comparison:
    """Compare each row that both runs have."""
    olds, news = _rows(before), _rows(after)
    changes = [change for name in olds if name in news for change in _changes(name, olds[name], news[name])]
    about, about_after = dict(provenance_lines(before)), dict(provenance_lines(after))
    return Comparison(
        changes=tuple(changes),
        only_before=tuple(" ".join(name) for name in olds if name not in news),
        only_after=tuple(" ".join(name) for name in news if name not in olds),
        differences=tuple(
            (name, about.get(name, NOTHING), about_after.get(name, NOTHING))
            for name in dict.fromkeys([*about, *about_after])
            if about.get(name) != about_after.get(name)
        ),
    )


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The comparison of two runs' documents as text. Raises `MalformedResultsError`."""
    return comparison_text(compared(parsed(before), parsed(after)))


def comparison_text(comparison: Comparison) -> str:
    """The tables in Markdown, and a line that counts."""
    parts = []
    if comparison.differences:
        table = Table(title="", header=("", "before", "after"), rows=comparison.differences)
        parts.append("The runs differ in\n\n" + markdown(table))
    rows = tuple(
        (
            change.row,
            change.system,
            change.quantity,
            change.before.text(change.digits),
            change.after.text(change.digits),
            f"{change.relative:+.1%}",
            change.verdict,
        )
        for change in comparison.changes
    )
    if rows:
        header = ("cell", "system", "", "before", "after", "change", "")
        parts.append("Medians (and ranges)\n\n" + markdown(Table(title="", header=header, rows=rows)))
    for what, names in (("Only before", comparison.only_before), ("Only after", comparison.only_after)):
        if names:
            parts.append(f"{what}:\n\n" + "\n".join(f"- {name}" for name in names))
    verdicts = [change.verdict for change in comparison.changes]
    parts.append(
        f"{verdicts.count('better')} better, {verdicts.count('WORSE')} worse, {verdicts.count('within noise')} within "
        "noise: either median lies in the other's range."
    )
    return "\n\n".join(parts) + "\n"


def _rows(results: Results) -> dict[tuple[str, str], Row]:
    return {(f"{row.verb}, {row.place}:", row.system): row for row in results.rows if row.counted}


def _changes(name: tuple[str, str], before: Row, after: Row) -> list[Change]:
    found = []
    for quantity, measure, better, digits in _QUANTITIES:
        values = [list(row.by_repetition(measure).values()) for row in (before, after)]
        if all(values):
            old, new = (Spread.of(of_run) for of_run in values)
            found.append(
                Change(
                    row=name[0].rstrip(":"),
                    system=name[1],
                    quantity=quantity,
                    better=better,
                    before=old,
                    after=new,
                    digits=digits,
                )
            )
    return found
