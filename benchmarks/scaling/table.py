"""The results for a person to read: a text table, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scaling.growth import growth_of
from benchmarks.scaling.simulate import (
    BUILD,
    DECODE,
    ENCODE,
    LOAD_PHASES,
    MANIFEST_BYTES,
    METADATA,
    PLAN_SAME,
    PLAN_TORCH,
)

_PLOTTED = (BUILD, ENCODE, DECODE, METADATA, PLAN_SAME, PLAN_TORCH)


def table(sizes: Sequence[Mapping[str, Any]]) -> str:
    """Rows are phases and sizes, columns are jobs; the last column is the exponent of the growth in chunks."""
    growth = growth_of(sizes)
    rows = [
        ["ranks", *(f"{size['num_ranks']:,}" for size in sizes), ""],
        ["chunks", *(f"{size['num_chunks']:,}" for size in sizes), "growth"],
    ]
    for name in dict.fromkeys(name for size in sizes for name in size["phases"]):
        costs = [size["phases"].get(name) for size in sizes]
        slope = growth.get(name)
        rows.append([f"{name}, s", *(_seconds(cost) for cost in costs), "" if slope is None else f"{slope:.2f}"])
    for name in dict.fromkeys(name for size in sizes for name in size["sizes_bytes"]):
        values = [size["sizes_bytes"].get(name) for size in sizes]
        rows.append([f"{name}, MB", *("" if value is None else f"{value / 1e6:.2f}" for value in values), ""])
    for label, values in _peaks_mb(sizes).items():
        rows.append([f"{label}, MB", *(f"{value:.0f}" for value in values), ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_line(row, widths) for row in rows)


def plot(sizes: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Needs matplotlib: `pip install cloudckpt[bench]`."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # optional

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    seconds, megabytes = figure.subplots(1, 2)
    for name in _PLOTTED:
        points = [(size["num_chunks"], size["phases"][name]["cpu_s"]) for size in sizes if name in size["phases"]]
        seconds.plot(*zip(*points, strict=True), marker="o", label=name)
    megabytes.plot(
        [size["num_chunks"] for size in sizes],
        [size["sizes_bytes"][MANIFEST_BYTES] / 1e6 for size in sizes],
        marker="o",
        label=MANIFEST_BYTES,
    )
    for label, values in _peaks_mb(sizes).items():
        megabytes.plot([size["num_chunks"] for size in sizes], values, marker="o", label=label)
    for axes, title in ((seconds, "CPU seconds on one core"), (megabytes, "MB")):
        axes.set(xscale="log", yscale="log", xlabel="chunks (300 per rank)", title=title)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _peaks_mb(sizes: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Resident memory at its highest, with all that the simulation itself holds."""
    peaks: dict[str, list[float]] = {"peak memory of the coordinator's save": [], "peak memory of a rank's load": []}
    for size in sizes:
        for label, values in peaks.items():
            of_label = [
                phase["peak_bytes"] or 0
                for name, phase in size["phases"].items()
                if (name in LOAD_PHASES) == label.endswith("load")
            ]
            values.append(max(of_label, default=0) / 1e6)
    return peaks


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *cells = row
    padded = [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
    return "  ".join(padded).rstrip()


def _seconds(cost: Mapping[str, Any] | None) -> str:
    return "" if cost is None else f"{cost['cpu_s']:.3f}"
