"""A run as text: its cells, its ratios and the bars. Pure."""

# ruff: noqa: RUF001  # the signs are meant

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.results.bars import BARS_OF, Verdict, verdicts
from benchmarks.results.model import (
    Place,
    Quantity,
    Results,
    Row,
    Spread,
    blocking_copies,
    blocking_s,
    cpu_ms,
    cpu_s_per_gb,
    gb_per_s,
    num_requests,
    pace,
    parsed,
    ratios,
    read_mib,
    round_trips,
    verb_of,
    waiting_share,
)

NOTHING = "–"
OURS = ("cloudckpt", "cloudckpt-process", "cloudckpt-path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Table, shown as text here and as HTML on the page."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def text(document: Mapping[str, Any]) -> str:
    """All that a run's document says. Raises `MalformedResultsError`."""
    return text_of(parsed(document))


def text_of(results: Results) -> str:
    """Every table in Markdown, which is read well as plain text too."""
    parts = [provenance_text(results)]
    parts += [f"{table.title}\n\n{markdown(table)}" for table in tables(results)]
    failed = failures(results)
    if failed:
        parts.append("Not complete:\n\n" + "\n".join(f"- {line}" for line in failed))
    if results.sweep in BARS_OF:
        parts.append(summary(verdicts(results)))
    return "\n\n".join(parts) + "\n"


def tables(results: Results) -> list[Table]:
    """A table for each place, one of the ratios, one of the bars; none that would be empty."""
    found = [*(_place_table(results, place) for place in results.places()), ratios_table(results), bars_table(results)]
    return [table for table in found if table.rows]


def _place_table(results: Results, place: Place) -> Table:
    rows = [row for row in results.rows if row.place == place and row.counted]
    header = ("verb", "system", "GB/s", "CPU s/GB", "peak MiB", "blocks s", "read MiB", *_background_header(rows))
    cells = tuple((*_cells(row), *(_background_cells(row) if _background_header(rows) else ())) for row in rows)
    if place.wire == "far":
        header = ("verb", "system", "first s", "round trips", "requests", "CPU ms")
        cells = tuple(map(_far_cells, rows))
    return Table(title=f"{place}: medians (and ranges)", header=header, rows=cells)


def _far_cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a small checkpoint, whose seconds depend on how many answers are waited for."""
    return (
        row.verb,
        row.system,
        NOTHING if row.first is None else f"{row.first.wall_s:.2f}",
        spread_text(row, round_trips, 1),
        spread_text(row, num_requests, 0),
        spread_text(row, cpu_ms, 0),
    )


def _background_header(rows: Sequence[Row]) -> tuple[str, ...]:
    """Columns that only a table of saves in the background has."""
    is_about_it = any(sample.blocking_s is not None for row in rows for sample in row.counted)
    return ("first blocks s", "blocks copies", "training's pace", "waits for the GIL") if is_about_it else ()


def _background_cells(row: Row) -> tuple[str, ...]:
    first_s = row.first.blocking_s if row.first is not None else None
    return (
        NOTHING if first_s is None else f"{first_s:.3f}",
        spread_text(row, blocking_copies, 2),
        spread_text(row, pace, 3),
        spread_text(row, waiting_share, 3),
    )


def _cells(row: Row) -> tuple[str, ...]:
    peak = row.peak_mib
    return (
        row.verb,
        row.system,
        spread_text(row, gb_per_s, 2),
        spread_text(row, cpu_s_per_gb, 2),
        NOTHING if peak is None else f"{peak:.0f}",
        spread_text(row, blocking_s, 3),
        spread_text(row, read_mib, 1),
    )


def spread_text(row: Row, quantity: Quantity, digits: int) -> str:
    """Median and range, or that there is nothing."""
    values = list(row.by_repetition(quantity).values())
    return Spread.of(values).text(digits) if values else NOTHING


def ratios_table(results: Results) -> Table:
    """Compare cloudckpt with every other system, repetition by repetition."""
    rows = []
    for row in results.rows:
        if row.system not in OURS:
            continue
        for rival in results.rows:
            called = verb_of(rival.system, row.verb, row.place)
            if rival.system in OURS or (rival.place, rival.verb) != (row.place, called):
                continue
            speed, cpu = ratios(row, rival, gb_per_s), ratios(row, rival, cpu_s_per_gb)
            if speed:
                shown = [Spread.of(values).text(2) if values else NOTHING for values in (speed, cpu)]
                rows.append((str(row.place), row.verb, f"{row.system} ÷ {rival.system}", *shown))
    header = ("cell", "verb", "systems", "times as fast", "times the CPU")
    return Table(title="Ratios within a repetition: medians (and ranges)", header=header, rows=tuple(rows))


def bars_table(results: Results) -> Table:
    """Every bar of the run's sweep, and how the run stands to it."""
    header = ("target", "measure", "found", "required", "stretch", "verdict")
    rows = tuple(_verdict_cells(verdict) for verdict in verdicts(results))
    return Table(title="Bars", header=header, rows=rows)


def _verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    bar, found = verdict.bar, verdict.found
    asked = tuple(NOTHING if limit is None else f"{bar.sense} {limit:g}{bar.unit}" for limit in (bar.bar, bar.stretch))
    if found is None:
        return (bar.name, bar.formula, NOTHING, *asked, verdict.text)
    spread = Spread(median=found.value, low=found.low, high=found.high).text(bar.digits)
    return (bar.name, bar.formula, spread + (f": {found.of}" if found.of else ""), *asked, verdict.text)


def summary(found: Sequence[Verdict]) -> str:
    """All bars in a line."""
    asked = [verdict for verdict in found if verdict.bar.bar is not None]
    met, missed = (sum(verdict.is_met is wanted for verdict in asked) for wanted in (True, False))
    stretched = sum(verdict.is_stretched is True for verdict in found)
    stretches = sum(verdict.bar.stretch is not None for verdict in found)
    return (
        f"{met} of {len(asked)} bars are met, {missed} missed and {len(asked) - met - missed} not measured; "
        f"{stretched} of {stretches} stretches are met."
    )


def failures(results: Results) -> list[str]:
    """List the rows that are incomplete, each with its reason."""
    return [
        f"{row.system}, {row.verb}, {row.place}: {' '.join(row.failed.split())}"
        for row in results.rows
        if row.failed is not None
    ]


def provenance_text(results: Results) -> str:
    """Return the machine and the versions behind the figures."""
    return "\n".join(f"- {name}: {value}" for name, value in provenance_lines(results))


def provenance_lines(results: Results) -> list[tuple[str, str]]:
    about = results.provenance
    machine = about.get("machine") or {}
    memory = machine.get("memory_bytes")
    lines = [
        ("sweep", results.sweep),
        ("measured", str(about.get("time", "unknown"))),
        ("commit", f"{about.get('git_commit') or 'unknown'}{' and changes' if about.get('git_dirty') else ''}"),
        ("processor", f"{machine.get('cpu_model') or 'unknown'}, {machine.get('num_cores') or '?'} cores"),
        ("memory", f"{memory / 2**30:.0f} GiB" if memory else "unknown"),
        ("kernel", str(machine.get("kernel") or "unknown")),
    ]
    for system, versions in sorted((about.get("versions") or {}).items()):
        lines.append((system, ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))))
    return lines


def markdown(table: Table) -> str:
    """A table whose columns line up in plain text too."""
    lines = [table.header, *table.rows]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(table.header))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "| " + " | ".join(cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (table.header, rule, *table.rows)
    )


def _width(cell: str) -> int:
    return sum(not unicodedata.combining(character) for character in cell)
